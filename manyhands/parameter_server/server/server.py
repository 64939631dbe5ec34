"""One parameter server, without its sockets: messages in, messages out, and updates in between.

A server keeps its part of the weights in memory that outlives it, and commits every update there together with what it
has applied. One that takes the place of a dead one finds all of it, and goes on. The first server also keeps the book
of leases, the buffers, and the journal of updates. Start reading at `PartServer.work`.
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
from manyhands.comm.host_memory import all_bytes, free_bytes
from manyhands.embedding.row_layer import Sparse
from manyhands.errors import EnvironmentProblem
from manyhands.parallel.model.step_buffers import ForeignState, StepBuffers, changing_state
from manyhands.parallel.weights.local_update import runs_fused
from manyhands.parameter_server.log.write_ahead_log import ServedLog
from manyhands.parameter_server.memory.compatibility import check_room, misfit
from manyhands.parameter_server.memory.optimizer_states import load_settings
from manyhands.parameter_server.memory.server_streams import Streams
from manyhands.parameter_server.memory.versioned_memory import Memory, ServedMemory, StateTorn, course_register
from manyhands.parameter_server.protocol.chunk_placement import Chunk, divide, pinned
from manyhands.parameter_server.protocol.messages import (
    Ask,
    Bring,
    Filled,
    FromWorker,
    Lookup,
    Number,
    Of,
    Open,
    Opened,
    Piece,
    Refused,
    RowGradients,
    Stand,
    Want,
)
from manyhands.parameter_server.protocol.variable_listing import ServedVariable, listing
from manyhands.parameter_server.server.interval_state import Ongoing, Saved
from manyhands.parameter_server.server.lease_service import Outbox
from manyhands.parameter_server.server.quorum_rounds import RoundCourse
from manyhands.parameter_server.server.remote_worker_service import Hatch, Intake
from manyhands.parameter_server.server.shard_optimizer import FusedPart, ServedPart, WholePart
from manyhands.parameter_server.server.update_replay import Keeper
from manyhands.parameter_server.tables.server_tables import Tables, parts_of, seeded

__all__ = ["PartServer", "open_memory"]


def open_memory(model: nn.Module, memory: Memory, opened: Open, foreign: ForeignState) -> ServedMemory:
    """The memory that a course takes place in, as every process that knows of the course sees it."""
    by_name = dict(model.named_parameters())
    trained = [by_name[name] for name in opened.trained]
    return ServedMemory(
        trained,
        changing_state(model, trained),
        memory,
        opened.layout,
        copies=opened.copies,
        num_rows=opened.rows,
        statistics_numel=StepBuffers(model, foreign).most_numel,
        slices_per_row=opened.course.slices if opened.course.whole else 1,
        state_copies=1 if opened.in_place else 2,
    )


class PartServer:
    """Number `number` of a run's servers. Its model and optimizer are made as the workers' are."""

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
        log: ServedLog | None = None,
    ) -> None:
        """`seed` is the run's, which rows of embeddings begin with. `clock` tells when a round's deadline is. With a
        `log`, nobody hears of an update before it is safe there.
        """
        sparse = Sparse(model)
        sparse.set_seed(seed)
        self._specs = [layer.spec for layer in sparse.layers.values()]
        self._number, self._model, self._optimizer, self._scheduler = number, model, optimizer, scheduler
        self._memory, self._clip_norm, self._place, self._foreign = memory, clip_norm, place, foreign
        self._register, self._clock = course_register(memory, number), clock
        self._log, self._held = log, list[tuple[bytes, Any]]()
        """What is said once the log is settled."""
        self._course: Ongoing | None = None
        self._intake: Intake | None = None
        self.refused: Counter[str] = Counter()
        """Messages that changed nothing, because they were "broken", "late" or "repeated", or of a "misfit"."""
        self._living: frozenset[int] | None = None
        self.num_made = 0
        """Updates that this process has made."""
        if told := self._register.value:
            self._begin(msgspec.msgpack.decode(told, type=Open))

    def is_released(self) -> bool:
        """Whether a later course is under way without this server."""
        told, course = course_register(self._memory, 0).value, self._course
        if not told:
            return course is None
        newest = msgspec.msgpack.decode(told, type=Open)
        return newest.servers <= self._number and (course is None or newest.number > course.opened.number)

    @property
    def is_first(self) -> bool:
        return self._number == 0

    @property
    def version(self) -> int:
        """How many updates its part of the weights has seen."""
        return self._course.shard.num_applied if self._course is not None else 0

    @property
    def course_number(self) -> Number | None:
        return self._course.opened.number if self._course is not None else None

    def variables(self) -> list[ServedVariable]:
        """What all servers of this course keep."""
        if self._course is None:
            return []
        opened, by_name = self._course.opened, dict(self._model.named_parameters())
        params = [by_name[name] for name in opened.trained]
        return listing([plain_name(name) for name in opened.trained], params, self._divide(params, opened))

    def take(self, sender: bytes, message: FromWorker) -> Outbox:
        """Whatever it says, it does no harm: what does not fit is counted."""
        match message:
            case Open():
                return self._open(sender, message)
            case Bring():
                return self._take_in(sender, message)
        course = self._course
        if isinstance(message, Want) and message.of in ("course", "standing") and course is not None:
            part = course.hatch.give_bytes(message, self._told(course, message.of))
            return [(sender, part)] if part is not None else []
        if course is None or message.number != course.opened.number:
            self.refused["late"] += 1
            return []
        match message:
            case Filled():
                self._held += course.fill(sender, message)
                return self._settled()
            case RowGradients():
                course.tables.keep(message)
            case Lookup():
                rows = course.tables.look_up(message, course.shard.num_applied)
                return [(sender, rows)] if rows is not None else []
            case Piece():
                return course.take(sender, message)
            case Want():
                return course.give(sender, message)
            case Ask() if course.reception is not None:
                course.reception.asks[message.worker] = sender, message
            case Stand() if course.reception is not None:
                course.reception.stands(message)
        return []

    def _told(self, course: Ongoing, of: Of) -> bytes:
        """What this server was told to do, or what it has committed last."""
        return self._register.value if of == "course" else course.committed

    def work(self) -> Outbox:
        """Apply one update that is due, if there is one, and answer who can be answered."""
        course = self._course
        if course is None:
            return []
        before = course.shard.num_applied
        self._held += course.apply_one()
        self.num_made += course.shard.num_applied - before
        if self._log is not None and not self._log.settle(more=self.has_work):
            return []
        return [*self._settled(), *(course.reception.answer() if course.reception is not None else ())]

    def _settled(self) -> Outbox:
        """What may be said now."""
        if self._log is not None and not self._log.is_settled:
            return []
        outbox, self._held = self._held, []
        return outbox

    def close(self) -> None:
        """The run ends."""
        course = self._course
        if self._log is not None:
            self._log.close(course.keeper.begin(course.shard) if course is not None and course.keeper else None)

    @property
    def has_work(self) -> bool:
        return self._course is not None and self._course.has_due

    def hear_living(self, workers: Collection[int]) -> None:
        """Only these workers are still there."""
        living = frozenset(workers)
        if living != self._living:
            self._living = living
            if self._course is not None and self._course.reception is not None:
                self._course.reception.hear_living(living)

    def standing(self) -> Stand | None:
        """For the first server."""
        course = self._course
        if course is None or self.is_first or not (self._log is None or self._log.is_settled):
            return None
        now = course.shard.standing()
        return Stand(
            number=course.opened.number,
            server=self._number,
            low=now.low,
            seen=sorted(now.seen),
            has=sorted(now.has),
            save=course.wants_checkpoint,
        )

    def _open(self, sender: bytes, message: Open) -> Outbox:
        before = self._course
        if before is not None and message.number < before.opened.number:
            return []
        if before is not None and message.number == before.opened.number:
            return [(sender, Opened(number=message.number, server=self._number))]
        if why := misfit(message, self._number, self._model, self._optimizer):
            return self._refuse(sender, message, why)
        if self._intake is None or self._intake.opened.number != message.number:
            try:
                self._intake = self._make_room(message)
            except EnvironmentProblem as problem:
                return self._refuse(sender, message, problem.what.rstrip("."), problem.fix)
        if self._intake is not None and not self._intake.is_done:
            return [(sender, self._intake.got())]
        return self._begin_new(sender, message)

    def _refuse(self, sender: bytes, opened: Open, why: str, fix: Sequence[str] = ()) -> Outbox:
        self.refused["misfit"] += 1
        return [(sender, Refused(number=opened.number, server=self._number, why=why, fix=list(fix)))]

    def _make_room(self, opened: Open) -> Intake | None:
        """For what a chief on another host brings; `EnvironmentProblem` if all that belongs to it is too much.

        A chief that shares this memory has made room for itself.
        """
        served = open_memory(self._model, self._memory, opened, self._foreign)
        own_rows = opened.rows if opened.away else 0
        if self._course is None or _measures(self._course.opened) != _measures(opened):
            needed = served.num_bytes(opened.states, own_rows)
            check_room(needed, free_bytes() if opened.brings else all_bytes())
        if not opened.brings:
            return None
        served.allot_all(opened.states)
        return Intake(self._number, opened, self._streams(served, opened), self.refused)

    def _take_in(self, sender: bytes, message: Bring) -> Outbox:
        intake = self._intake
        if intake is None or intake.opened.number != message.number:
            self.refused["late"] += 1
            return []
        intake.take(message)
        return self._begin_new(sender, intake.opened) if intake.is_done else [(sender, intake.got())]

    def _begin_new(self, sender: bytes, opened: Open) -> Outbox:
        intake, self._intake = self._intake, None
        if intake is not None and intake.opened.number == opened.number and intake.tables is not None:
            try:
                self._tables(opened).unpack(intake.tables.buffer[:])
            except EnvironmentProblem as problem:
                return self._refuse(sender, opened, problem.what.rstrip("."), problem.fix)
        if opened.fresh and self._log is not None:
            self._log.clear()
        self._register.write(msgspec.msgpack.encode(opened))
        self._begin(opened)
        return [(sender, Opened(number=opened.number, server=self._number))]

    def _begin(self, opened: Open) -> None:
        if self._course is not None:
            self._course.part.close()
        served = open_memory(self._model, self._memory, opened, self._foreign)
        found = served.standing(self._number).value
        saved = msgspec.msgpack.decode(found, type=Saved) if found else None
        if saved is None or saved.number != opened.number:  # nothing of this course is applied
            saved = Saved(
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
        hatch = Hatch(self._number, opened, served, self._streams(served, opened), self.refused, clips=clips)
        kind = Ongoing if opened.quorum is None else partial(RoundCourse, clock=self._clock)
        self._course = kind(
            self._number,
            self._model,
            self._scheduler,
            opened,
            saved,
            served,
            part,
            hatch,
            self._tables(opened),
            self._foreign,
            self._keep(served, opened),
        )
        self._held = []
        self._course.catch_up()
        served.set_version(self._number, self._course.shard.num_applied)
        if self._living is not None and self._course.reception is not None:
            self._course.reception.hear_living(self._living)

    def _keep(self, served: ServedMemory, opened: Open) -> Keeper | None:
        if self._log is None:
            return None
        self._log.end_segment()
        chunks, clips = self._divide(served.params, opened)[self._number], self._clip_norm is not None
        return Keeper(self._log, self._number, opened, served, chunks, clips=clips)

    def _tables(self, opened: Open) -> Tables:
        specs = seeded(self._specs, opened.seeds)
        return Tables(specs, self._memory, parts_of(self._number, opened.servers))

    def _restore_schedule(self, saved: Saved) -> None:
        if self._scheduler is not None and saved.scheduler is not None:
            self._scheduler.load_state_dict(saved.scheduler)
        load_settings(self._optimizer, saved.groups)

    def _make_part(self, served: ServedMemory, opened: Open) -> ServedPart:
        chunks = self._divide(served.params, opened)[self._number]
        kind = FusedPart if runs_fused(self._optimizer) else WholePart
        return kind(served, self._optimizer, chunks, self._clip_norm)

    def _streams(self, served: ServedMemory, opened: Open) -> Streams:
        chunks, clips = self._divide(served.params, opened)[self._number], self._clip_norm is not None
        return Streams(served, chunks, self._number, opened.states, clips=clips)

    def _divide(self, params: Sequence[Tensor], opened: Open) -> list[list[Chunk]]:
        pins = pinned(opened.trained, self._place, opened.servers)
        whole = not runs_fused(self._optimizer)
        return divide([param.numel() for param in params], opened.servers, pins, whole=whole)


def _measures(opened: Open) -> tuple[Any, ...]:
    """What its memory depends on."""
    return opened.layout, opened.copies, opened.rows, opened.states, opened.in_place, bool(opened.away)
