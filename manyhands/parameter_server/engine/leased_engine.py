"""What a worker and the servers have between them: courses, the memory they take place in, weights and states.

A course is opened by all workers together, with what the chief has; servers keep it from then on, until it is gathered
for a checkpoint. What happens between two meetings of a course is `served`'s business. Start reading at
`InCourses.open`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.comm.axis import Axis
from manyhands.comm.transport import MAX_MESSAGE_BYTES
from manyhands.errors import SpecError
from manyhands.parallel.model.precision import Precision
from manyhands.parallel.model.step_buffers import ForeignState, StepBuffers, changing_state
from manyhands.parallel.replicas.phase_timer import Phases
from manyhands.parallel.weights.fused_update import state_names
from manyhands.parallel.weights.local_update import runs_fused
from manyhands.parallel.weights.replica_backend import HeldByServers
from manyhands.parameter_server.memory.compatibility import check_servable, check_told
from manyhands.parameter_server.memory.optimizer_states import (
    load_states,
    merge_states,
    plain_schedule,
    settings_of,
    store_states,
)
from manyhands.parameter_server.memory.versioned_memory import ServedMemory, layout_name
from manyhands.parameter_server.protocol.chunk_placement import Chunk, divide, pinned
from manyhands.parameter_server.protocol.interval import Course
from manyhands.parameter_server.protocol.messages import Number, Open, Values
from manyhands.parameter_server.server.interval_state import Saved, more_of
from manyhands.parameter_server.worker.gradient_writer import RowFiller
from manyhands.parameter_server.worker.row_lookup import ServedRows
from manyhands.parameter_server.worker.server_access import Reach
from manyhands.parameter_server.worker.server_connection import Link, Pushed
from manyhands.strategies.base import LossFn
from manyhands.strategies.choices import ParameterServer
from manyhands.strategies.loss_computation import Computing

__all__ = ["InCourses"]

# In async a worker reads a version while servers go on, by about one update of each worker. Where servers are quicker,
# workers make copies, for which a version has to be there until two more are made.
ASYNC_COPIES, MOST_ASYNC_COPIES = 3, 8


class InCourses(Computing):
    """One worker among several, where servers have weights, states and rows."""

    def __init__(
        self,
        axis: Axis,
        loss_fn: LossFn | None,
        precision: Precision,
        choice: ParameterServer,
        link: Link,
        reach: Reach,
        *,
        seed: int,
        clip_norm: float | None,
        num_servers: Callable[[], int],
        worker: int,
        most_workers: int,
        foreign: ForeignState,
        wait_for_chief: Callable[[str], None],
    ) -> None:
        """`num_servers` says how many there should be. `worker` is this process's number, which no other ever has."""
        super().__init__(loss_fn, precision)
        self._axis, self._choice, self._link, self._reach = axis, choice, link, reach
        self._num_servers, self._worker, self._most_workers = num_servers, worker, most_workers
        self._foreign, self._wait_for_chief = foreign, wait_for_chief
        self._seed, self._clip_norm = seed, clip_norm
        self._held: dict[int, Pushed] = {}
        """By filling: gradients that are pushed, and not known to be applied by all servers."""
        self._opened: Open | None = None
        self._served: ServedMemory | None = None
        self._are_states_new = True
        """Those of the optimizer, in this process, are what a course begins with; else those in memory are."""
        self._is_fresh = True
        """The run begins here, and goes on from nothing."""
        self._is_gathered = False
        self._version = 0
        """Of the weights that this worker looks at, and of states in memory when all have met."""
        self.training = 1
        """Its number among those of the script."""
        self._reads_in_place = False
        """In async, the weights that a slice is computed with are not this worker's own."""
        self.phases = Phases()
        self.held = HeldByServers()
        self.values: Values = []
        """What this worker tells the others of itself; below, what each of them has told last."""
        self.others: list[Values] = []
        self.soon = 0
        """How many leases ahead it wants to know of."""

    # ---- the verbs of every strategy ----

    def setup(self, model: nn.Module, optimizer: Optimizer, *, joining: bool = False) -> None:
        """With `joining`, the other workers are training already, and their state comes next."""
        self._model, self._optimizer = model, optimizer
        check_servable(self._precision, optimizer, model)
        self._buffers = StepBuffers(model, self._foreign)
        self._rows = ServedRows(model, self._seed, self._link, self._reach.memory, shares=not self._reach.is_away)
        if self._rows and self._clip_norm is not None:
            raise SpecError(
                "clip_norm needs the norm of the whole gradient, but no server has all gradients of an embedding.",
                where="clip_norm",
                fix=["no clip_norm", 'strategy="mirrored"'],
            )
        self._filler: RowFiller | None = None
        if joining:
            self._are_states_new = self._is_fresh = False
        else:
            self.synchronise()

    def synchronise(self) -> None:
        """Give every worker the chief's weights and buffers. Servers get them when the next course is opened."""
        self._leave_memory()
        for param in self._model.parameters():
            param.grad = None
        self._axis.broadcast_([*self._model.parameters(), *self._model.buffers()], "weights of rank 0")
        self._axis.barrier("weights of rank 0")

    @contextmanager
    def editing(self) -> Iterator[nn.Module]:
        """Change weights by hand, or which of them are trained. On leaving, every worker has the chief's."""
        self._leave_memory()
        self._gather()
        with torch.no_grad():
            yield self._model
        self._are_states_new = True
        self.synchronise()

    def put_down(self) -> Callable[[], None]:
        """The next course of this training is opened with what this worker has."""
        self._leave_memory()
        self._gather()
        self._rows.leave()
        self._are_states_new = True
        self._link.reach(0)
        return lambda: None

    def take_up(self) -> None:
        self._rows.adopt()

    def gather_state(self) -> None:
        """Have what servers keep where `state` finds it. Between courses; it is the chief's that is asked for."""
        if self._axis.rank == 0 or not self._reach.is_away:
            self._gather()

    def _gather(self) -> None:
        """Have rows and the optimizer's states, as the servers left them, in this process."""
        if self._are_states_new or self._served is None:
            return
        self._rows.tells = True
        opened = self._opened or self._reach.last_course()
        standings = self._reach.standings(opened)
        if self._rows and not self._rows.is_new:
            self._reach.fetch_rows(self._rows.everything())
        counts, more = _merged(opened, standings)
        self._reach.fetch_states(opened, self._version, [more_of(one, opened) for one in standings])
        places = range(len(self._served.params))
        whole = not runs_fused(self._optimizer)
        load_states(self._served, self._optimizer, self._version, counts, more, places, whole=whole)
        self._is_gathered = True

    def state(self) -> dict[str, Any]:
        """Without `gather_state` the optimizer's states are not part of what is told: they are in memory."""
        if self._are_states_new or self._is_gathered:
            return {"in_memory": False}
        return {"in_memory": True, "version": self._version}

    def restore(self, state: dict[str, Any]) -> None:
        """After weights and states themselves."""
        self._are_states_new, self._is_fresh = not state.get("in_memory", False), False
        self._version = state.get("version", 0)
        self._buffers = StepBuffers(self._model, self._foreign)

    def regroup(self, axis: Axis, sharing: Any) -> None:
        self._axis = axis

    def abandon(self) -> None:
        """Leave the model alone: there will be another engine."""
        self._close_filler()

    def close(self) -> None:
        self._close_filler()
        self._reach.close()
        self._axis.close()

    has_residuals = True
    """A save needs all workers: it happens between courses."""
    compares_copies = False
    served_rows = None
    """Apart from the weights, that is."""
    averaging = "none"
    round_closed, goes_back = True, False
    """Workers may come and go between courses, and a loss takes nothing back."""

    def round_closes_with(self, step: int) -> bool:
        return True

    # ---- courses ----

    @property
    def is_async(self) -> bool:
        return self._choice.mode == "async"

    @property
    def keeps_log(self) -> bool:
        """Servers write down what they apply."""
        return self._choice.keeps_log

    @property
    def ahead(self) -> int | None:
        """How many steps the weights of a slice may lack."""
        return {"sync": 0, "ssp": self._choice.staleness, "async": None}[self._choice.mode]

    def open(self, number: Number, course: Course, scheduler: Any, *, scheduled: bool) -> None:
        """Have servers begin with the chief's state, after step `course.first - 1`. By all workers, together."""
        is_chief = self._axis.rank == 0
        me = msgspec.msgpack.encode((self._worker, self._reach.is_away))
        found = [msgspec.msgpack.decode(one) for one in self._axis.all_gather_bytes("workers", me)]
        workers: dict[int, bool] = dict(found)
        told = msgspec.msgpack.encode(self._install(number, course, workers, scheduler, scheduled)) if is_chief else b""
        told = self._axis.all_gather_bytes("course", told)[0]
        check_told(len(told), MAX_MESSAGE_BYTES, "What servers are told of a course")
        opened = msgspec.msgpack.decode(told, type=Open)
        if is_chief:
            self._have_opened(opened)
        self._wait_for_chief(f"course {number}")
        if not is_chief:
            self._enter_memory(opened)
            self._link.follow(opened)
        self._opened, self._told = opened, opened.version
        self._held, self._are_states_new, self._is_gathered, self._is_fresh = {}, False, False, False
        self._optimizer.state.clear()  # servers have them from now on
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # by them: a scheduler would warn
        self._rows.enter(number, opened.servers)
        self._met, self._book = course.first - 1, 0
        self._look(opened.version)

    def _have_opened(self, opened: Open) -> None:
        """By all of its servers; if fewer are wanted meanwhile, who leaves before it hears of it never answers."""
        least = min(self._num_servers(), opened.servers)  # with a log there are as many as began it
        self._reach.open(opened, lambda: self._num_servers() >= least or self._reach.are_up(opened.servers))

    def _install(
        self, number: Number, course: Course, workers: dict[int, bool], scheduler: Any, scheduled: bool
    ) -> Open:
        """Put what the chief has into the memory. `workers`: who takes part, and whether it is away from the memory."""
        version, trained = course.first - 1, self._trained()
        names = [name for name, param in self._model.named_parameters() if param.requires_grad]
        opened = Open(
            number=number,
            course=course,
            version=version,
            layout=layout_name(names, trained),
            trained=names,
            copies=self._num_copies(),
            rows=self._num_rows(course),
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
        served = self._enter_memory(opened)
        with torch.no_grad():
            _copy(served.weights(version).views, served.params)
            _copy(served.buffers(version), changing_state(self._model, served.params))
        tables = self._reach.put_rows(self._rows.install(version), opened.servers)
        counts, more = self._put_states(served, version)
        return msgspec.structs.replace(opened, counts=counts, more=more, tables=tables)

    def _put_states(self, served: ServedMemory, version: int) -> tuple[list[int], bytes]:
        if not self._are_states_new:
            return self._told_states()
        places = range(len(served.params))
        return store_states(served, self._optimizer, version, places, whole=not runs_fused(self._optimizer))

    def _told_states(self) -> tuple[list[int], bytes]:
        """What servers have committed beside states that lie in memory."""
        opened = self._opened or self._reach.last_course()
        return _merged(opened, self._reach.standings(opened))

    def _num_copies(self) -> int:
        if self.ahead is None:
            return min(ASYNC_COPIES + self._most_workers, MOST_ASYNC_COPIES)
        return 2 * (1 + self.ahead)

    def _num_rows(self, course: Course) -> int:
        if course.whole:
            return self._most_workers
        steps_ahead = min(self.ahead or 0, 1) * 2 * self._most_workers
        return min(course.slices * ((self.ahead or 0) + 1), course.slices + steps_ahead)

    def _enter_memory(self, opened: Open) -> ServedMemory:
        before = self._served
        self._served = served = self._reach.enter(self._model, opened, self._divided(opened), self._foreign)
        if served is not before and self._axis.rank == 0:
            served.allot_all(opened.states)
        if self._filler is None:
            self._filler = RowFiller(self._trained())
        return served

    def _leave_memory(self) -> None:
        """Have weights of this worker's own."""
        for param in self._trained():
            param.data = param.data.clone()
        self._close_filler()

    def _close_filler(self) -> None:
        if self._filler is not None:
            self._filler.close()
            self._filler = None

    def _trained(self) -> list[nn.Parameter]:
        return [param for param in self._model.parameters() if param.requires_grad]

    @property
    def wants_other_servers(self) -> bool:
        """Whether there should be more or fewer servers, and all that there should be are up."""
        wanted = self._next_servers()
        return wanted != self._course_now.servers and self._reach.are_up(wanted)

    def _next_servers(self) -> int:
        """How many the next course has. A log is that of as many as began it."""
        if not self.keeps_log or (self._opened is None and self._are_states_new):
            return self._num_servers()
        return (self._opened or self._reach.last_course()).servers

    @property
    def keeps_servers(self) -> int:
        """How many there are, though there should be more or fewer; 0: as many as there should be."""
        return self._course_now.servers if self._next_servers() != self._num_servers() else 0

    @property
    def _course_now(self) -> Open:
        assert self._opened is not None, "open comes first"
        return self._opened

    def _memory_now(self) -> tuple[ServedMemory, RowFiller]:
        assert self._served is not None and self._filler is not None, "open comes first"
        return self._served, self._filler

    # ---- weights ----

    def _look(self, version: int) -> int | None:
        """At a version in memory; None if it is not there any more."""
        served, _ = self._memory_now()
        if not self._reach.look(version):
            return None
        for param, view in zip(served.params, served.weights(version).views, strict=True):
            param.data = view
        self._take_buffers(version)
        self._version = version
        return version

    def _take_buffers(self, version: int) -> None:
        assert self._served is not None
        live = changing_state(self._model, self._served.params)
        if live:
            with torch.no_grad():
                _copy(live, self._served.buffers(version))
            self._buffers.refresh()

    def _pull(self, *, in_place: bool = True) -> int:
        """Have the newest weights of every server, if possible where they are: the oldest version among them."""
        served, _ = self._memory_now()
        found = self._reach.read() if in_place else None
        self._reads_in_place = found is not None
        weights, versions = self._reach.pull() if found is None else (found[0], [found[1]])
        for param, own in zip(served.params, weights, strict=True):
            param.data = own
        self._take_buffers(versions[0])
        return min(versions)

    def _divided(self, opened: Open) -> list[list[Chunk]]:
        numels = [param.numel() for param in self._trained()]
        pins = pinned(opened.trained, self._choice.place or {}, opened.servers)
        return divide(numels, opened.servers, pins, whole=not runs_fused(self._optimizer))


def _merged(opened: Open, standings: Sequence[bytes]) -> tuple[list[int], bytes]:
    """What servers have said of states, or the chief when no step of the course was taken."""
    saved = [msgspec.msgpack.decode(one, type=Saved) for one in standings if one]
    of_course = [one for one in saved if one.number == opened.number]
    if not of_course:
        return opened.counts, opened.more
    return merge_states([(one.counts, one.more) for one in of_course])


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)
