"""One parameter server, without its sockets: messages in, messages out, and updates in between.

A server keeps its shard of the weights in memory that outlives it, and commits every update there together with what
it has applied. The successor of a dead server finds all of it, and continues. The first server also keeps the lease
table, the buffers, and the journal of updates. Start reading at `ParameterServerCore.work`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.checkpoint.tensor_names import plain_name
from manyhands.comm.host_memory import Memory, all_bytes, free_bytes
from manyhands.embedding.row_layer import Sparse
from manyhands.errors import EnvironmentProblem
from manyhands.parallel.model.step_buffers import ForeignState, StepBuffers, changing_state
from manyhands.parallel.weights.local_update import runs_fused
from manyhands.parameter_server.log.write_ahead_log import WriteAheadLog
from manyhands.parameter_server.memory.compatibility import check_room, misfit
from manyhands.parameter_server.memory.optimizer_states import load_settings
from manyhands.parameter_server.memory.server_streams import ServerStreams
from manyhands.parameter_server.memory.versioned_memory import StateTorn, VersionedMemory, open_register
from manyhands.parameter_server.protocol.chunk_placement import Chunk, divide, pinned
from manyhands.parameter_server.protocol.messages import (
    Bring,
    Filled,
    FromWorker,
    GradientPart,
    Lookup,
    Number,
    Of,
    Open,
    Opened,
    Refused,
    RowGradients,
    Want,
    Watermark,
    WorkRequest,
)
from manyhands.parameter_server.protocol.variable_listing import ServedVariable, listing
from manyhands.parameter_server.server.interval_state import CommittedState, IntervalState
from manyhands.parameter_server.server.lease_service import Outbox
from manyhands.parameter_server.server.quorum_rounds import RoundInterval
from manyhands.parameter_server.server.remote_worker_service import IntervalUpload, RemoteWorkerService
from manyhands.parameter_server.server.shard_optimizer import FusedShardOptimizer, ShardOptimizer, WholeShardOptimizer
from manyhands.parameter_server.server.update_replay import UpdateReplay
from manyhands.parameter_server.tables.server_tables import ServerTables, parts_of, seeded

__all__ = ["ParameterServerCore", "open_memory"]


def open_memory(model: nn.Module, memory: Memory, opened: Open, foreign: ForeignState) -> VersionedMemory:
    """The memory of an interval, as every process that has its `Open` sees it."""
    by_name = dict(model.named_parameters())
    trained = [by_name[name] for name in opened.trained]
    return VersionedMemory(
        trained,
        changing_state(model, trained),
        memory,
        opened.layout,
        copies=opened.copies,
        num_rows=opened.rows,
        statistics_numel=StepBuffers(model, foreign).most_numel,
        slices_per_row=opened.interval.slices if opened.interval.whole else 1,
        state_copies=1 if opened.in_place else 2,
    )


class ParameterServerCore:
    """Number `number` of a run's servers. Its model and optimizer are created in the same way as the workers'."""

    def __init__(
        self,
        number: int,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: Any,
        memory: Memory,
        *,
        clip_norm: float | None,
        place: Mapping[str, int],
        foreign: ForeignState,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        log: WriteAheadLog | None = None,
    ) -> None:
        """`seed`: of the run, for new embedding rows. `clock`: for the deadlines of rounds. With a `log`, no message
        that reports an update is sent before the update is safe there.
        """
        sparse = Sparse(model)
        sparse.set_seed(seed)
        self._specs = [layer.spec for layer in sparse.layers.values()]
        self._number, self._model, self._optimizer, self._scheduler = number, model, optimizer, scheduler
        self._memory, self._clip_norm, self._place, self._foreign = memory, clip_norm, place, foreign
        self._register, self._clock = open_register(memory, number), clock
        self._log, self._unsent = log, list[tuple[bytes, Any]]()
        """Messages to send once the log is on disk."""
        self._interval: IntervalState | None = None
        self._upload: IntervalUpload | None = None
        self.refused: Counter[str] = Counter()
        """Messages without effect, because they were "broken", "late" or "repeated", or an interval's "misfit"."""
        self._live_workers: frozenset[int] | None = None
        self.num_made = 0
        """Updates that this process has applied."""
        if encoded := self._register.value:
            self._begin(msgspec.msgpack.decode(encoded, type=Open))

    def is_released(self) -> bool:
        """Whether a later interval runs without this server."""
        encoded, interval = open_register(self._memory, 0).value, self._interval
        if not encoded:
            return interval is None
        newest = msgspec.msgpack.decode(encoded, type=Open)
        return newest.servers <= self._number and (interval is None or newest.number > interval.opened.number)

    @property
    def is_first(self) -> bool:
        return self._number == 0

    @property
    def version(self) -> int:
        """How many updates its shard of the weights has seen."""
        return self._interval.shard.num_applied if self._interval is not None else 0

    @property
    def interval_number(self) -> Number | None:
        return self._interval.opened.number if self._interval is not None else None

    def variables(self) -> list[ServedVariable]:
        """What all servers of this interval store."""
        if self._interval is None:
            return []
        opened, by_name = self._interval.opened, dict(self._model.named_parameters())
        params = [by_name[name] for name in opened.trained]
        return listing([plain_name(name) for name in opened.trained], params, self._divide(params, opened))

    def take(self, sender: bytes, message: FromWorker) -> Outbox:
        """Handle one message. None can do harm: what does not fit is counted and ignored."""
        match message:
            case Open():
                return self._open(sender, message)
            case Bring():
                return self._take_upload(sender, message)
        interval = self._interval
        if isinstance(message, Want) and message.of in ("course", "standing") and interval is not None:
            part = interval.remote_workers.give_bytes(message, self._stored_bytes(interval, message.of))
            return [(sender, part)] if part is not None else []
        if interval is None or message.number != interval.opened.number:
            self.refused["late"] += 1
            return []
        match message:
            case Filled():
                self._unsent += interval.fill(sender, message)
                return self._take_unsent()
            case RowGradients():
                interval.tables.keep(message)
            case Lookup():
                rows = interval.tables.look_up(message, interval.shard.num_applied)
                return [(sender, rows)] if rows is not None else []
            case GradientPart():
                return interval.take(sender, message)
            case Want():
                return interval.give(sender, message)
            case WorkRequest() if interval.lease_service is not None:
                interval.lease_service.requests[message.worker] = sender, message
            case Watermark() if interval.lease_service is not None:
                interval.lease_service.take_progress(message)
        return []

    def _stored_bytes(self, interval: IntervalState, of: Of) -> bytes:
        """The `Open` that this server received last, or what it has committed last."""
        return self._register.value if of == "course" else interval.committed

    def work(self) -> Outbox:
        """Apply one update that is due, if there is one, and send the replies that are possible now."""
        interval = self._interval
        if interval is None:
            return []
        before = interval.shard.num_applied
        self._unsent += interval.apply_one()
        self.num_made += interval.shard.num_applied - before
        if self._log is not None and not self._log.settle(more=self.has_work):
            return []
        return [*self._take_unsent(), *(interval.lease_service.answer() if interval.lease_service is not None else ())]

    def _take_unsent(self) -> Outbox:
        """Messages that may be sent now."""
        if self._log is not None and not self._log.is_settled:
            return []
        outbox, self._unsent = self._unsent, []
        return outbox

    def close(self) -> None:
        """The run ends."""
        interval = self._interval
        if self._log is not None:
            self._log.close(interval.replay.begin(interval.shard) if interval is not None and interval.replay else None)

    @property
    def has_work(self) -> bool:
        return self._interval is not None and self._interval.has_due

    def set_living_workers(self, workers: Collection[int]) -> None:
        """Only these workers are alive."""
        living = frozenset(workers)
        if living != self._live_workers:
            self._live_workers = living
            if self._interval is not None and self._interval.lease_service is not None:
                self._interval.lease_service.set_living_workers(living)

    def standing(self) -> Watermark | None:
        """This server's progress, for the first server."""
        interval = self._interval
        if interval is None or self.is_first or not (self._log is None or self._log.is_settled):
            return None
        now = interval.shard.standing()
        return Watermark(
            number=interval.opened.number,
            server=self._number,
            low=now.low,
            seen=sorted(now.seen),
            has=sorted(now.has),
            save=interval.wants_checkpoint,
        )

    def _open(self, sender: bytes, message: Open) -> Outbox:
        before = self._interval
        if before is not None and message.number < before.opened.number:
            return []
        if before is not None and message.number == before.opened.number:
            return [(sender, Opened(number=message.number, server=self._number))]
        if why := misfit(message, self._number, self._model, self._optimizer):
            return self._refuse(sender, message, why)
        if self._upload is None or self._upload.opened.number != message.number:
            try:
                self._upload = self._make_upload(message)
            except EnvironmentProblem as problem:
                return self._refuse(sender, message, problem.what.rstrip("."), problem.fix)
        if self._upload is not None and not self._upload.is_done:
            return [(sender, self._upload.got())]
        return self._begin_new(sender, message)

    def _refuse(self, sender: bytes, opened: Open, why: str, fix: Sequence[str] = ()) -> Outbox:
        self.refused["misfit"] += 1
        return [(sender, Refused(number=opened.number, server=self._number, why=why, fix=list(fix)))]

    def _make_upload(self, opened: Open) -> IntervalUpload | None:
        """Memory for what a chief on another host uploads; `EnvironmentProblem` if the interval needs too much.

        A chief that shares this memory has allocated it already.
        """
        served = open_memory(self._model, self._memory, opened, self._foreign)
        own_rows = opened.rows if opened.away else 0
        if self._interval is None or _measures(self._interval.opened) != _measures(opened):
            needed = served.num_bytes(opened.states, own_rows)
            check_room(needed, free_bytes() if opened.brings else all_bytes())
        if not opened.brings:
            return None
        served.allot_all(opened.states)
        return IntervalUpload(self._number, opened, self._streams(served, opened), self.refused)

    def _take_upload(self, sender: bytes, message: Bring) -> Outbox:
        upload = self._upload
        if upload is None or upload.opened.number != message.number:
            self.refused["late"] += 1
            return []
        upload.take(message)
        return self._begin_new(sender, upload.opened) if upload.is_done else [(sender, upload.got())]

    def _begin_new(self, sender: bytes, opened: Open) -> Outbox:
        upload, self._upload = self._upload, None
        if upload is not None and upload.opened.number == opened.number and upload.tables is not None:
            try:
                self._tables(opened).unpack(upload.tables.buffer[:])
            except EnvironmentProblem as problem:
                return self._refuse(sender, opened, problem.what.rstrip("."), problem.fix)
        if opened.fresh and self._log is not None:
            self._log.clear()
        self._register.write(msgspec.msgpack.encode(opened))
        self._begin(opened)
        return [(sender, Opened(number=opened.number, server=self._number))]

    def _begin(self, opened: Open) -> None:
        if self._interval is not None:
            self._interval.part.close()
        served = open_memory(self._model, self._memory, opened, self._foreign)
        found = served.standing(self._number).value
        saved = msgspec.msgpack.decode(found, type=CommittedState) if found else None
        if saved is None or saved.number != opened.number:  # no update of this interval is applied
            saved = CommittedState(
                number=opened.number,
                low=opened.version,
                seen=[],
                counts=opened.counts,
                more=opened.more,
                groups=opened.groups,
                scheduler=opened.scheduler,
            )
        if opened.in_place and served.update_begun(self._number) > saved.version:
            raise StateTorn(self._number, saved.version)
        self._restore_schedule(saved)
        part = self._make_part(served, opened)
        part.resume(saved.version, saved.counts, saved.more)
        clips = self._clip_norm is not None
        remote_workers = RemoteWorkerService(
            self._number, opened, served, self._streams(served, opened), self.refused, clips=clips
        )
        kind = IntervalState if opened.quorum is None else partial(RoundInterval, clock=self._clock)
        self._interval = kind(
            self._number,
            self._model,
            self._scheduler,
            opened,
            saved,
            served,
            part,
            remote_workers,
            self._tables(opened),
            self._foreign,
            self._make_replay(served, opened),
        )
        self._unsent = []
        self._interval.catch_up()
        served.set_version(self._number, self._interval.shard.num_applied)
        if self._live_workers is not None and self._interval.lease_service is not None:
            self._interval.lease_service.set_living_workers(self._live_workers)

    def _make_replay(self, served: VersionedMemory, opened: Open) -> UpdateReplay | None:
        if self._log is None:
            return None
        self._log.end_segment()
        chunks, clips = self._divide(served.params, opened)[self._number], self._clip_norm is not None
        return UpdateReplay(self._log, self._number, opened, served, chunks, clips=clips)

    def _tables(self, opened: Open) -> ServerTables:
        specs = seeded(self._specs, opened.seeds)
        return ServerTables(specs, self._memory, parts_of(self._number, opened.servers))

    def _restore_schedule(self, saved: CommittedState) -> None:
        if self._scheduler is not None and saved.scheduler is not None:
            self._scheduler.load_state_dict(saved.scheduler)
        load_settings(self._optimizer, saved.groups)

    def _make_part(self, served: VersionedMemory, opened: Open) -> ShardOptimizer:
        chunks = self._divide(served.params, opened)[self._number]
        kind = FusedShardOptimizer if runs_fused(self._optimizer) else WholeShardOptimizer
        return kind(served, self._optimizer, chunks, self._clip_norm)

    def _streams(self, served: VersionedMemory, opened: Open) -> ServerStreams:
        chunks, clips = self._divide(served.params, opened)[self._number], self._clip_norm is not None
        return ServerStreams(served, chunks, self._number, opened.states, clips=clips)

    def _divide(self, params: Sequence[Tensor], opened: Open) -> list[list[Chunk]]:
        pins = pinned(opened.trained, self._place, opened.servers)
        whole = not runs_fused(self._optimizer)
        return divide([param.numel() for param in params], opened.servers, pins, whole=whole)


def _measures(opened: Open) -> tuple[Any, ...]:
    """The values that the size of its memory depends on."""
    return opened.layout, opened.copies, opened.rows, opened.states, opened.in_place, bool(opened.away)
