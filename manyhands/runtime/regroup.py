"""What a worker of an elastic run does when its group changes: go over to the newer one, and agree on where all stand.

The protocol is docs/protocols/elastic.md. A group changes in the middle of a collective, because a member is gone, or
at a step's end, because members come or leave. Either way all members of the newer group tell each other where they
stand, and whoever is behind gets the state of one who is not. `Regrouping.go_over` does that; `agreed` wraps work that
all workers do together outside of steps. In a static run nothing here has anything to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor

from manyhands.comm.axis import Axis
from manyhands.control.session import Session
from manyhands.errors import PeerLost
from manyhands.events import RoundRestarted
from manyhands.parallel.holding import Mapped
from manyhands.runtime.worker import Worker
from manyhands.spec.seat import Group
from manyhands.strategies.base import StepStats

if TYPE_CHECKING:
    from manyhands.runtime.training import Training

__all__ = ["Arrival", "Dismissed", "Regrouping", "Standing", "decide", "take_shared"]

# While there is no coordinator, changes wait, and so does a worker that has lost its group.
NEXT_GROUP_S = 600.0
# A call may take its hours; beyond that, something is wrong with the run.
CALL_S = 24 * 3600.0

T = TypeVar("T")


class Dismissed(SystemExit):
    """This worker is not needed any more; its script ends here, and well."""

    def __init__(self) -> None:
        super().__init__(0)


class Standing(msgspec.Struct, frozen=True):
    """Where a worker stands, as it tells those it goes over with."""

    call: int
    step: int
    """Committed steps."""
    operation: int
    """How many things all workers did together since that step."""
    done: bool
    """It has the result of the last of those."""
    has_state: bool
    division: str = ""
    """The group that divided the step it is in the middle of; empty: it is in none."""
    mapped: Mapped | None = None

    @property
    def place(self) -> tuple[int, int, int]:
        return self.call, self.step, self.operation


class Arrival(NamedTuple):
    """How it stands once the worker has gone over."""

    received: bool
    """This worker was behind: it has another's state now."""
    same_step: bool
    """All are in the middle of the same step, as the same group divided it."""
    all_done: bool
    """Everybody has the result of what this worker is in the middle of."""


class _Shape(msgspec.Struct):
    name: str
    dtype: str
    shape: list[int]
    stride: list[int]
    at: tuple[str, int] | None = None
    """Where it lies in shared memory; None: it is sent."""


class _State(msgspec.Struct):
    parts: dict[str, Any]
    tensors: list[_Shape]
    slices: int
    stats: dict[str, Any]
    """Of the last committed step."""


def decide(standings: Sequence[Standing], rank: int) -> tuple[int | None, bool, Arrival]:
    """Whose state the others get (None: nobody has one), whether anybody needs it, and what it means for `rank`."""
    mine = standings[rank]
    steps = [standing.step for standing in standings if standing.has_state]
    if not steps:
        return None, False, Arrival(received=False, same_step=False, all_done=False)
    newest = max(steps)
    source = next(i for i, one in enumerate(standings) if one.has_state and one.step == newest)
    behind = [not one.has_state or one.step < newest for one in standings]
    same = mine.division != "" and not any(behind) and all(one.division == mine.division for one in standings)
    all_done = all(one.place > mine.place or (one.place == mine.place and one.done) for one in standings)
    return source, any(behind), Arrival(received=behind[rank], same_step=same, all_done=all_done)


class Regrouping:
    """`training` is set once there is something to train; until then this worker has no state to give."""

    def __init__(self, worker: Worker, regrouped: Callable[[], None]) -> None:
        self._worker, self._regrouped = worker, regrouped
        self.training: Training | None = None
        self._has_state = False
        self._operation = 0
        self.division = ""
        self._listeners: list[Callable[[], None]] = []

    # ---- what callers use ----

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Inside, `listener` is called after every change: for whatever depends on this worker's rank."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def settled(self) -> None:
        """This worker has a state of its own now."""
        self._has_state = True

    def step_done(self) -> None:
        self._operation, self.division = 0, ""
        self._name_place()

    @property
    def change_is_due(self) -> bool:
        """Whether the chief should have all members go over at the end of the next step."""
        newest, worker = self._worker.session.newest, self._worker
        if newest is None:  # with too few, they wait for others
            return bool(worker.world_size < worker.session.seat.least_workers)
        return newest.call in (0, worker.call)

    def change(self) -> None:
        """All members go over, between two steps."""
        worker, step = self._worker, self.training.progress.step if self.training is not None else 0
        if worker.session.newest is None and worker.world_size < worker.session.seat.least_workers:
            worker.report(step, "waiting for workers")
            worker.warn(
                f"waiting: {worker.world_size} of at least {worker.session.seat.least_workers} workers are there"
            )
        self.go_over(done=True, after_loss=False)

    def agreed(self, work: Callable[[], T]) -> T:
        """Do what all workers do together, again if a member is lost in it, until every member has its result."""
        if not self._worker.is_elastic:
            return work()
        self._operation += 1
        self._name_place()
        results: list[T] = []
        while True:
            try:
                if not results:
                    results.append(work())
                self._worker.axis.barrier(f"end of {self._worker.place}")
                return results[0]
            except PeerLost:
                if self.go_over(done=bool(results)).all_done:
                    return results[0]
                results.clear()

    def go_over(self, *, done: bool = False, after_loss: bool = True) -> Arrival:
        """Leave the group for the newest one, as soon as there is one. If that fails, for the one after it."""
        undone = self.training.go_back() if after_loss and self.training is not None else 0
        while True:
            group = self._session.await_group(NEXT_GROUP_S, stranded=after_loss)
            if group.rank < 0:
                raise Dismissed
            try:
                arrival = self._arrive(group, done)
            except PeerLost:
                after_loss = True  # another member was lost meanwhile: there will be a newer group
            else:
                self._tell_restart(undone, after_loss)
                return arrival

    def _tell_restart(self, undone: int, after_loss: bool) -> None:
        """Also where nothing was undone here: a chief that was lost may have recorded a step more."""
        training = self.training
        if after_loss and training is not None and training.engine.goes_back and self._has_state:
            self._worker.emit(RoundRestarted(time_s=time.time(), step=training.progress.step, steps=undone))

    def wait_for_admission(self) -> bool:
        """A worker that was started into a running run waits here. False: the run has finished this call without it."""
        while self._worker.rank < 0:
            group = self._session.offer(self._worker.call, NEXT_GROUP_S)
            if group is None:
                return False
            try:
                self._arrive(group, done=False)
            except PeerLost:
                self.go_over()
        assert self._has_state, "admitted to a group of which nobody has a state"
        return True

    def wait_for_end_of_call(self) -> None:
        """The same in a call without steps, which nobody can join."""
        self._session.await_end_of_call(self._worker.call, CALL_S)

    @property
    def run_call(self) -> int:
        """The public call that the run is in, as a newcomer is told."""
        return self._session.run_call

    # ---- going over ----

    @property
    def _session(self) -> Session:
        assert isinstance(self._worker.session, Session)
        return self._worker.session

    def _name_place(self) -> None:
        step = self.training.progress.step if self.training is not None else 0
        self._worker.place = f"{self._worker.call}.{step}.{self._operation}"

    def _arrive(self, group: Group, done: bool) -> Arrival:
        worker, training = self._worker, self.training
        worker.enter(group)
        mine = self._standing(done)
        told = worker.axis.all_gather_bytes("standings", msgspec.msgpack.encode(mine))
        standings = [msgspec.msgpack.decode(data, type=Standing) for data in told]
        source, needed, arrival = decide(standings, group.rank)
        if any(one.has_state and one.mapped is None for one in standings):
            _ = worker.network  # connected by all at the same time: a newcomer asks for it later than the others
        if training is not None:
            training.engine.regroup(worker.axis, worker.sharing)
        if source is not None and needed:
            self._share_state(source, standings[source], arrival.received)
        for listener in (self._regrouped, *self._listeners):
            listener()
        return arrival

    def _standing(self, done: bool) -> Standing:
        training = self.training
        return Standing(
            call=self._worker.call,
            step=training.progress.step if training is not None and self._has_state else 0,
            operation=self._operation,
            done=done,
            has_state=self._has_state,
            division=self.division,
            mapped=training.engine.held.mapped if training is not None and self._has_state else None,
        )

    def _share_state(self, source: int, standing: Standing, receives: bool) -> None:
        training = self.training
        take = take_shared(self._worker.axis, training, source, with_hooks=not self._has_state)
        if receives:  # no collective from here on: a state is taken whole or not at all
            assert training is not None
            training.engine.held.attach(standing.mapped)
            take()
            training.keep()
            self._operation, self.division, self._has_state = 0, "", True


def take_shared(
    axis: Axis, training: Training | None, source: int, *, with_hooks: bool = False, from_shared_memory: bool = True
) -> Callable[[], None]:
    """Have everybody see the state of rank `source`. What is returned makes this worker take it over.

    With `from_shared_memory`, which ranks of one host have in common, tensors that lie there are not sent.
    """
    sends = axis.rank == source
    tensors: dict[str, Tensor] = {}
    data = b""
    if sends:
        assert training is not None
        tensors, data = _packed(training, from_shared_memory)
    state = msgspec.msgpack.decode(axis.all_gather_bytes("state", data)[source], type=_State)
    if not sends:
        tensors = {one.name: _empty(one) for one in state.tensors if one.at is None}
    axis.broadcast_([tensors[one.name] for one in state.tensors if one.at is None], "state", source=source)

    def take() -> None:
        assert training is not None
        for one in state.tensors:
            if one.at is not None:
                tensors[one.name] = training.engine.held.shared_tensor(one.at, one.shape, one.stride)
        training.slices = state.slices
        training.take(state.parts, tensors, with_hooks=with_hooks)
        training.last_stats = StepStats(**state.stats)

    return take


def _packed(training: Training, from_shared_memory: bool) -> tuple[dict[str, Tensor], bytes]:
    rows = training.engine.served_rows
    with rows.telling_peers() if rows is not None else nullcontext():
        tensors, parts = training.parts()
    where = training.engine.held.where if from_shared_memory else lambda tensor: None
    shapes = [_shape(name, one, where(one)) for name, one in tensors.items()]
    last = training.last_stats
    stats = {} if last is None else {name: getattr(last, name) for name in ("grad_norm", "skipped", "stop", "lr")}
    known = {"loss": last.loss if last else 0.0, "rows": last.rows if last else 0, **stats}
    return tensors, msgspec.msgpack.encode(_State(parts, shapes, training.slices, known))


def _shape(name: str, one: Tensor, where: tuple[str, int] | None) -> _Shape:
    return _Shape(name, str(one.dtype).removeprefix("torch."), list(one.shape), list(one.stride()), where)


def _empty(one: _Shape) -> Tensor:
    return torch.empty(one.shape, dtype=getattr(torch, one.dtype))
