"""Weights on parameter servers: workers lease slices, push their gradients and read the updated weights.

`sync` and `ssp` sum a step's slices along the same tree as every other strategy, and update once; `async` applies each
step as it arrives. Training is a sequence of intervals. All workers open an interval together with the chief's state,
which servers keep until it is gathered for a checkpoint. Within an interval, until its sync point, a worker requests
work, computes it and pushes the result, without waiting for other workers, dead or alive.
`parameter_server/protocol/leases.py` decides what is leased to which worker, `parameter_server/server/server.py` what
is applied. Start reading at `LeasedEngine.open`, then `LeasedEngine.compute`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.comm.axis import Axis
from manyhands.comm.handed_over import count_handed_over
from manyhands.comm.transport import MAX_MESSAGE_BYTES
from manyhands.embedding.row_layer import TableGradient, merge
from manyhands.errors import PeerTimeout, SpecError, TrainingFailed
from manyhands.parallel.model.step_buffers import StepBuffers, changing_state
from manyhands.parallel.replicas.phase_timer import Phases
from manyhands.parallel.weights.fused_update import state_names
from manyhands.parallel.weights.local_update import runs_fused
from manyhands.parallel.weights.replica_backend import ServerBackend
from manyhands.parameter_server.memory.compatibility import check_length, check_servable
from manyhands.parameter_server.memory.optimizer_states import (
    load_states,
    merge_states,
    plain_schedule,
    settings_of,
    store_states,
)
from manyhands.parameter_server.memory.versioned_memory import VersionedMemory, layout_name
from manyhands.parameter_server.protocol.chunk_placement import Chunk, divide, pinned
from manyhands.parameter_server.protocol.leases import Interval, Lease
from manyhands.parameter_server.protocol.messages import Filled, Number, Open, Reply, Values, WorkRequest
from manyhands.parameter_server.server.interval_state import CommittedState, more_of
from manyhands.parameter_server.worker.gradient_writer import GradientWriter
from manyhands.parameter_server.worker.row_lookup import ServedRows
from manyhands.parameter_server.worker.server_access import ServerAccess
from manyhands.parameter_server.worker.server_connection import PushedGradient, ServerConnection
from manyhands.strategies.base import SliceLike, StepLike
from manyhands.strategies.choices import ParameterServer
from manyhands.strategies.engine_parts import ModelSide, Ranks, StepSettings
from manyhands.strategies.loss_computation import LossComputation

__all__ = ["LeaseHolder", "LeasedEngine", "Servers", "has_backups"]

# A port drops longer messages, and the worker would then repeat the push for ever.
MOST_CHANGES_BYTES = MAX_MESSAGE_BYTES // 2
# How long a worker that leaves its loop waits for servers to confirm it; one of them may just be being replaced.
LEAVE_S = 10.0
# In async a worker reads a version of the weights while servers write others, about one per worker. Where servers are
# faster, workers copy the weights, for which a version has to stay until two more are written.
ASYNC_COPIES, MOST_ASYNC_COPIES = 3, 8

_Result = tuple[float, float, Tensor, list[TableGradient]]
"""Of a slice: its loss and weight, batch statistics, and gradients of embedding rows."""


class Servers(NamedTuple):
    """How a worker reaches the parameter servers."""

    link: ServerConnection
    access: ServerAccess
    num_wanted: Callable[[], int]
    """How many servers there should be; fewer or more may be running."""


class LeaseHolder(NamedTuple):
    """The worker that requests leases."""

    number: int
    """The number of its process, which is never reused."""
    most_workers: int
    """How many workers the run may have."""
    training: int
    """Which of the script's trainings this is, counted from 1."""
    wait_for_chief: Callable[[str], None]


class LeasedEngine(LossComputation):
    """One worker among several whose weights are on servers.

    Promises: every slice of every step counts exactly once, even if workers or servers die. With `mode="sync"` the
    result is bitwise equal to that of `Replicated`; with "ssp" a gradient lacks at most the last `staleness` steps;
    with "async" any number.
    Costs: a gradient is written once and read once by servers. In async, if servers overwrite the weights that a worker
    is reading, it computes once more with a copy of the weights; after that, it copies until servers are slow enough.
    """

    def __init__(
        self,
        ranks: Ranks,
        side: ModelSide,
        settings: StepSettings,
        choice: ParameterServer,
        servers: Servers,
        holder: LeaseHolder,
    ) -> None:
        super().__init__(side)
        self._axis, self._choice, self._settings = ranks.axis, choice, settings
        self._link, self._reach, self._num_servers = servers
        self._worker, self._most_workers, self.training, self._wait_for_chief = holder
        self._unapplied: dict[int, PushedGradient] = {}
        """By fill id: gradients that are pushed, and not known to be applied by all servers."""
        self._opened: Open | None = None
        self._memory: VersionedMemory | None = None
        self._are_states_new = True
        """The next interval begins with the optimizer state of this process; else with the one in shared memory."""
        self._is_fresh = True
        """The run begins here, without earlier state."""
        self._is_gathered = False
        self._version = 0
        """Version of the weights that this worker reads, and at a sync point of the optimizer state in memory."""
        self._reads_in_place = False
        """In async: a slice is computed with the servers' weights, not with a copy of this worker."""
        self.phases = Phases()
        self.held = ServerBackend()
        self.values: Values = []
        """The values that this worker sends to the others; below, the newest values of each of them."""
        self.others: list[Values] = []
        self.soon = 0
        """How many leases ahead this worker wants to know."""

    # ---- the methods of every strategy ----

    def setup(self, model: nn.Module, optimizer: Optimizer, *, joining: bool = False) -> None:
        """With `joining`, the other workers are training already, and their state is restored next."""
        self._model, self._optimizer = model, optimizer
        check_servable(self._precision, optimizer, model)
        self._buffers = StepBuffers(model, self._foreign)
        self._rows = ServedRows(
            model, self._settings.seed, self._link, self._reach.memory, shares=not self._reach.is_away
        )
        if self._rows and self._settings.clip_norm is not None:
            raise SpecError(
                "clip_norm needs the norm of the whole gradient, but no server has all gradients of an embedding.",
                where="clip_norm",
                fix=["no clip_norm", 'strategy="mirrored"'],
            )
        self._writer: GradientWriter | None = None
        if joining:
            self._are_states_new = self._is_fresh = False
        else:
            self.synchronise()

    def synchronise(self) -> None:
        """Give every worker the chief's weights and buffers. Servers get them when the next interval is opened."""
        self._leave_memory()
        for param in self._model.parameters():
            param.grad = None
        self._axis.broadcast_([*self._model.parameters(), *self._model.buffers()], "weights of rank 0")
        self._axis.barrier("weights of rank 0")

    @contextmanager
    def editing(self) -> Iterator[nn.Module]:
        """Change weights by hand, or which of them are trained. On exit every worker has the chief's weights."""
        self._leave_memory()
        self._gather()
        with torch.no_grad():
            yield self._model
        self._are_states_new = True
        self.synchronise()

    def put_down(self) -> Callable[[], None]:
        """The next interval of this training is opened with the state in this process."""
        self._leave_memory()
        self._gather()
        self._rows.leave()
        self._are_states_new = True
        self._link.reach(0)
        return lambda: None

    def take_up(self) -> None:
        self.adopt_rows()

    def adopt_rows(self) -> None:
        self._rows.adopt()

    def gather_state(self) -> None:
        """Fetch the servers' state for `state`. Call it between intervals; only the chief's state is saved."""
        if self._axis.rank == 0 or not self._reach.is_away:
            self._gather()

    def _gather(self) -> None:
        """Fetch embedding rows and optimizer state from the servers into this process."""
        if self._are_states_new or self._memory is None:
            return
        self._rows.tells = True
        opened = self._opened or self._reach.last_interval()
        committed = self._reach.standings(opened)
        if self._rows and not self._rows.is_new:
            self._reach.fetch_rows(self._rows.everything())
        counts, more = _merged(opened, committed)
        self._reach.fetch_states(opened, self._version, [more_of(one, opened) for one in committed])
        indices = range(len(self._memory.params))
        whole = not runs_fused(self._optimizer)
        load_states(self._memory, self._optimizer, self._version, counts, more, indices, whole=whole)
        self._is_gathered = True

    def state(self) -> dict[str, Any]:
        """Without `gather_state` the optimizer state is not part of it, but stays in shared memory."""
        if self._are_states_new or self._is_gathered:
            return {"in_memory": False}
        return {"in_memory": True, "version": self._version}

    def restore(self, state: dict[str, Any]) -> None:
        """Call after weights and optimizer state were restored."""
        self._are_states_new, self._is_fresh = not state.get("in_memory", False), False
        self._version = state.get("version", 0)
        self._buffers = StepBuffers(self._model, self._foreign)

    def regroup(self, axis: Axis, sharing: Any) -> None:
        self._axis = axis

    def abandon(self) -> None:
        """Detach from the model: another engine will be made."""
        self._close_writer()

    def close(self) -> None:
        self._close_writer()
        self._reach.close()
        self._axis.close()

    has_residuals = True
    """All workers call `gather_state` for a checkpoint, between intervals."""
    compares_copies = False
    served_rows = None
    """None: the weights are on servers as well."""
    averaging = "none"
    round_closed, rolls_back = True, False
    """Workers may join and leave between intervals, and losing a worker rolls nothing back."""

    def round_closes_with(self, step: int) -> bool:
        return True

    # ---- intervals ----

    @property
    def is_async(self) -> bool:
        return self._choice.mode == "async"

    @property
    def keeps_log(self) -> bool:
        """Whether servers log the updates that they apply."""
        return self._choice.keeps_log

    @property
    def ahead(self) -> int | None:
        """How many steps the weights of a slice may lack."""
        return {"sync": 0, "ssp": self._choice.staleness, "async": None}[self._choice.mode]

    def open(self, number: Number, interval: Interval, scheduler: Any, *, scheduled: bool) -> None:
        """Have servers begin with the chief's state, after step `interval.first - 1`. All workers call it together."""
        is_chief = self._axis.rank == 0
        me = msgspec.msgpack.encode((self._worker, self._reach.is_away))
        found = [msgspec.msgpack.decode(one) for one in self._axis.all_gather_bytes("workers", me)]
        workers: dict[int, bool] = dict(found)
        message = (
            msgspec.msgpack.encode(self._install(number, interval, workers, scheduler, scheduled)) if is_chief else b""
        )
        message = self._axis.all_gather_bytes("interval", message)[0]
        check_length(len(message), MAX_MESSAGE_BYTES, "The description of an interval for servers")
        opened = msgspec.msgpack.decode(message, type=Open)
        if is_chief:
            self._open_on_servers(opened)
        self._wait_for_chief(f"interval {number}")
        if not is_chief:
            self._enter_memory(opened)
            self._link.follow(opened)
        self._opened, self._reported = opened, opened.version
        self._unapplied, self._are_states_new, self._is_gathered, self._is_fresh = {}, False, False, False
        self._optimizer.state.clear()  # servers have it from now on
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # servers call it: a scheduler would warn
        self._rows.enter(number, opened.servers)
        self._sync_point, self._table_number = interval.first - 1, 0
        self._use_version(opened.version)

    def _open_on_servers(self, opened: Open) -> None:
        """Open the interval on all of its servers; stop waiting if fewer are wanted meanwhile, as one may have left."""
        least = min(self._num_servers(), opened.servers)  # with a log, the number of servers cannot change
        self._reach.open(opened, lambda: self._num_servers() >= least or self._reach.are_up(opened.servers))

    def _install(
        self, number: Number, interval: Interval, workers: dict[int, bool], scheduler: Any, scheduled: bool
    ) -> Open:
        """Write the chief's state to shared memory. `workers`: their numbers, and whether each is on another host."""
        version, trained = interval.first - 1, self._trained()
        names = [name for name, param in self._model.named_parameters() if param.requires_grad]
        opened = Open(
            number=number,
            interval=interval,
            version=version,
            layout=layout_name(names, trained),
            trained=names,
            copies=self._num_copies(),
            rows=self._num_buffers(interval),
            workers=list(workers),
            away=[worker for worker, is_away in workers.items() if is_away],
            servers=self._next_servers(),
            ahead=self.ahead,
            backups=self._choice.backup_workers,
            damping=self._choice.damping,
            alone=self._choice.warm_steps,
            groups=settings_of(self._optimizer),
            counts=[],
            more=b"",
            scheduler=plain_schedule(scheduler),
            scheduled=scheduled and scheduler is not None,
            states=state_names(self._optimizer) if runs_fused(self._optimizer) else [],
            brings=self._reach.brings(states=self._are_states_new),
            fresh=self._is_fresh,
            in_place=self._choice.durability == "snapshot",
            training=self.training,
            seeds=self._rows.sparse.seeds,
        )
        memory = self._enter_memory(opened)
        with torch.no_grad():
            _copy(memory.weights(version).views, memory.params)
            _copy(memory.buffers(version), changing_state(self._model, memory.params))
        tables = self._reach.put_rows(self._rows.install(version), opened.servers)
        counts, more = self._put_states(memory, version)
        for group in opened.groups:
            if "iterations" in group:  # servers have counted updates since this process did
                group["iterations"] = max(group["iterations"], *counts)
        return msgspec.structs.replace(opened, counts=counts, more=more, tables=tables)

    def _put_states(self, memory: VersionedMemory, version: int) -> tuple[list[int], bytes]:
        if not self._are_states_new:
            return self._committed_states()
        indices = range(len(memory.params))
        return store_states(memory, self._optimizer, version, indices, whole=not runs_fused(self._optimizer))

    def _committed_states(self) -> tuple[list[int], bytes]:
        """What servers have committed in addition to the optimizer state in memory."""
        opened = self._opened or self._reach.last_interval()
        return _merged(opened, self._reach.standings(opened))

    def _num_copies(self) -> int:
        if self.ahead is None:
            return min(ASYNC_COPIES + self._most_workers, MOST_ASYNC_COPIES)
        return 2 * (1 + self.ahead)

    def _num_buffers(self, interval: Interval) -> int:
        if interval.whole:
            return self._most_workers
        steps_ahead = min(self.ahead or 0, 1) * 2 * self._most_workers
        return min(interval.slices * ((self.ahead or 0) + 1), interval.slices + steps_ahead)

    def _enter_memory(self, opened: Open) -> VersionedMemory:
        before = self._memory
        self._memory = memory = self._reach.enter(self._model, opened, self._divided(opened), self._foreign)
        if memory is not before and self._axis.rank == 0:
            memory.allot_all(opened.states)
        if self._writer is None:
            self._writer = GradientWriter(self._trained())
        return memory

    def leave_memory(self) -> None:
        """Between intervals: give the model a private copy of its weights, which the user's code may change.

        The chief's weights are those with which the next interval begins.
        """
        self._leave_memory()

    def _leave_memory(self) -> None:
        """Give the model a private copy of its weights."""
        for param in self._trained():
            param.data = param.data.clone()
        self._close_writer()

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _trained(self) -> list[nn.Parameter]:
        return [param for param in self._model.parameters() if param.requires_grad]

    @property
    def wants_other_servers(self) -> bool:
        """Whether there should be more or fewer servers, and all wanted ones are running."""
        wanted = self._next_servers()
        return wanted != self._current.servers and self._reach.are_up(wanted)

    def _next_servers(self) -> int:
        """How many servers the next interval has. With a log, as many as began it."""
        if not self.keeps_log or (self._opened is None and self._are_states_new):
            return self._num_servers()
        return (self._opened or self._reach.last_interval()).servers

    @property
    def keeps_servers(self) -> int:
        """How many servers there are, if there should be more or fewer; 0: as many as there should be."""
        return self._current.servers if self._next_servers() != self._num_servers() else 0

    @property
    def _current(self) -> Open:
        assert self._opened is not None, "open comes first"
        return self._opened

    def _memory_now(self) -> tuple[VersionedMemory, GradientWriter]:
        assert self._memory is not None and self._writer is not None, "open comes first"
        return self._memory, self._writer

    # ---- weights ----

    def _use_version(self, version: int) -> int | None:
        """Compute with a version of the weights in memory; None if it is no longer there."""
        memory, _ = self._memory_now()
        if not self._reach.look(version):
            return None
        for param, view in zip(memory.params, memory.weights(version).views, strict=True):
            param.data = view
        self._take_buffers(version)
        self._version = version
        return version

    def _take_buffers(self, version: int) -> None:
        assert self._memory is not None
        live = changing_state(self._model, self._memory.params)
        if live:
            with torch.no_grad():
                _copy(live, self._memory.buffers(version))
            self._buffers.refresh()

    def _pull(self, *, in_place: bool = True) -> int:
        """Use the newest weights of every server, without a copy if possible; returns the oldest version of them."""
        memory, _ = self._memory_now()
        found = self._reach.read() if in_place else None
        self._reads_in_place = found is not None
        weights, versions = self._reach.pull() if found is None else (found[0], [found[1]])
        for param, own in zip(memory.params, weights, strict=True):
            param.data = own
        self._take_buffers(versions[0])
        return min(versions)

    def _divided(self, opened: Open) -> list[list[Chunk]]:
        numels = [param.numel() for param in self._trained()]
        pins = pinned(opened.trained, self._choice.place or {}, opened.servers)
        return divide(numels, opened.servers, pins, whole=not runs_fused(self._optimizer))

    # ---- between two sync points ----

    def ask(self, request: Callable[[], int]) -> Reply:
        """Ask servers for work. The reply has a lease, finished updates, or the sync point."""
        self.phases.mark("update")
        reply = self._link.ask(lambda ticket: self._work_request(ticket, request()), self._unapplied.values)
        if self.is_async:
            self._await_applied()
        else:
            self._unapplied = {key: one for key, one in self._unapplied.items() if one.filled.held.step > reply.version}
            self._link.forget(reply.version)
        self.phases.mark("reduce")
        self._reported = max([self._reported, *(done.update for done in reply.done)])
        self._table_number, self.others = reply.book, reply.values
        if reply.meet is not None:
            self._sync_point = reply.meet
            self._use_version(reply.meet)
        return reply

    def leave(self) -> None:
        """Leave this interval: servers lease this worker's slices to others.

        Servers that do not receive this message do so when this process ends.
        """
        self._unapplied = {}
        with contextlib.suppress(PeerTimeout):
            self._link.ask(
                lambda ticket: msgspec.structs.replace(self._work_request(ticket, 0), leaves=True), patience_s=LEAVE_S
            )

    def take_times(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        self.phases.mark("update")
        seconds = self.phases.seconds
        self.phases.begin([self._link.waiting])
        return seconds

    def _work_request(self, ticket: int, request: int) -> WorkRequest:
        return WorkRequest(
            number=self._current.number,
            worker=self._worker,
            book=self._table_number,
            ticket=ticket,
            met=self._sync_point,
            told=self._reported,
            wish=request,
            holding=[one.filled.held for one in self._unapplied.values()],
            values=self.values,
            soon=self.soon,
        )

    def compute(self, step: StepLike, work: Lease, version: int) -> None:
        """Compute a lease, and push the result; unless another worker has done so, and the weights are gone."""
        assert self._loss_fn is not None
        slices = self.computing(step, work, version, may_repeat=True)
        for piece in slices:
            if piece is not None:
                slices.send(self.loss_of(step, piece))

    def computing(
        self, step: StepLike, work: Lease, version: int, *, may_repeat: bool = False
    ) -> Generator[SliceLike | None, Any, None]:
        """Like `compute`, for a caller that computes the loss. For each slice, yields None; then the slice; then None.

        The caller sends the loss in reply to the slice. Randomness and precision are the slice's from when it is
        yielded until its loss is sent. The push follows the last None; at each None the caller may run any other code.
        With `may_repeat`, all slices may be yielded a second time.
        """
        memory, _ = self._memory_now()
        based_on = self._pull(in_place=may_repeat) if self.is_async else self._use_version(version)
        buffer = self._reach.row(work)
        if based_on is None:
            return
        memory.begin_filling(buffer, work.filling)
        pieces = [step.slice(v) for v in (range(step.num_slices) if self._current.interval.whole else [work.place])]
        results, absent = yield from self._fill(step, pieces, work, based_on)
        if self.is_async and not self._reach.stayed(based_on) and self._reads_in_place:
            based_on = self._pull(in_place=False)
            results, absent = yield from self._fill(step, pieces, work, based_on)
        memory.write_statistics(buffer, [statistics for _, _, statistics, _ in results])
        filled = Filled(
            number=self._current.number,
            worker=self._worker,
            held=work,
            based_on=based_on if self._rows.oldest is None else min(based_on, self._rows.oldest),
            total=sum(total for total, _, _, _ in results),
            weight=sum(weight for _, weight, _, _ in results),
            absent=absent,
            changes=self._changes() if work.place == 0 else b"",
        )
        rows = merge(one for _, _, _, contributions in results for one in contributions)
        self.phases.mark("backward")
        yield None
        handed = self._rows.hand_over(buffer, rows)
        sent = self._rows.messages(work.filling, rows) if rows and not handed else ()
        tables = [one.table for one in rows]
        self._push(PushedGradient(msgspec.structs.replace(filled, handed=handed, tables=tables), sent))
        self.phases.mark("reduce")

    def _fill(
        self, step: StepLike, pieces: Sequence[SliceLike], work: Lease, based_on: int
    ) -> Generator[SliceLike | None, Any, tuple[list[_Result], list[int]]]:
        """Compute slices into a gradient buffer: the result of each, and which parameters have no gradient."""
        memory, writer = self._memory_now()
        writer.begin(memory.row(self._reach.row(work)).views, len(pieces), straight=self.is_async)
        self._buffers.begin(len(pieces), 2)
        results: list[_Result] = []
        newest, is_sync = self._newest(work, based_on), self.ahead == 0
        lacks = 0 if is_sync else self._choice.staleness
        # A step may be computed again because a worker died while it pushed to servers: some of them have it already.
        with self._rows.lacking_at_most(lacks, newest, at_most=newest if is_sync else None):
            for piece in pieces:
                if results:
                    yield None
                yield None
                self.phases.mark("load")
                results.append((yield from self._slice(piece, step)))
        return results, writer.finish()

    def _newest(self, work: Lease, based_on: int) -> int:
        """The newest update that the weights of this slice could contain."""
        return based_on if self.is_async else work.step - 1

    def _changes(self) -> bytes:
        """The first slice's changes to buffers other than batch statistics; they are sent in a message."""
        changes = self._buffers.first_changes()
        if len(changes) > MOST_CHANGES_BYTES:
            raise TrainingFailed(
                f"A forward pass changed {len(changes) / 1e6:.1f} MB of buffers, but a worker can send servers at most "
                f"{MOST_CHANGES_BYTES / 1e6:.1f} MB with each slice.",
                fix=["keep large state out of buffers that forward changes", 'strategy="mirrored"'],
            )
        return changes

    def _push(self, push: PushedGradient) -> None:
        count_handed_over(self._memory_now()[0].flat.num_bytes)
        self._reach.send(push.filled.held)
        self._link.tell(push)
        self._unapplied[push.filled.held.filling] = push
        if self._current.quorum is not None:  # with a new lease, the round and this worker would wait for each other
            self._await_applied()

    def _await_applied(self) -> None:
        """Wait until servers have applied all pushed gradients, so that the next weights contain them."""
        for push in self._unapplied.values():
            self._link.await_applied(push)
        self._unapplied = {}

    def _slice(self, piece: SliceLike, step: StepLike) -> Generator[SliceLike, Any, _Result]:
        assert self._writer is not None
        index = piece.index
        self._buffers.enter(index)
        with (
            piece.randomness(),
            self._precision.autocast(),
            self._foreign.in_slice(),
            self._writer.in_forward(),
        ):
            result = yield piece
        self.phases.mark("forward")
        total, weight, scaled = self.weigh(piece, result, step.rows)
        if not math.isfinite(total):
            self.raise_non_finite(f"The loss of slice {index} of step {step.number} is {total}")
        statistics = self._buffers.leave(index)
        if self.ahead != 0:  # other slices may be applied before it
            statistics = self._buffers.apart(statistics)
        try:
            self._writer.backward(scaled, index)
        finally:
            self._buffers.put_back()
        self.phases.mark("backward")
        return total, weight, statistics, self._rows.sparse.take()


def _merged(opened: Open, committed: Sequence[bytes]) -> tuple[list[int], bytes]:
    """The optimizer state that servers have committed, or the chief's if no step of the interval was applied."""
    states = [msgspec.msgpack.decode(one, type=CommittedState) for one in committed if one]
    of_interval = [one for one in states if one.number == opened.number]
    if not of_interval:
        return opened.counts, opened.more
    return merge_states([(one.counts, one.more) for one in of_interval])


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)


def has_backups(strategy: object) -> bool:
    """Whether hosts store copies of the logs of other hosts' servers."""
    return isinstance(strategy, ParameterServer) and strategy.durability == "replica"
