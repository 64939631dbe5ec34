"""What a worker of an elastic run does when its group changes: go over to the newer one, and agree on where all stand.

The protocol is docs/protocols/elastic.md. A group changes in the middle of a collective, because a member is gone, or
at a step's end, because members come or leave. Either way all members of the newer group tell each other where they
stand, and whoever is behind gets the state of one who is not. `Regrouping.go_over` does that; `agreed` wraps work that
all workers do together outside of steps. In a static run nothing here has anything to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from manyhands.comm.mesh import Formation, left_over, parts_without
from manyhands.control.session.session import Session
from manyhands.errors import PartLost, PeerLost, PeerTimeout
from manyhands.events import RoundRestarted, Warned
from manyhands.parallel.replicas.model_parallel_replica import Division
from manyhands.spec.worker_identity import Group
from manyhands.strategies.model_parallel import Mesh
from manyhands.training.elastic.part_recovery_decision import hand_over, words
from manyhands.training.elastic.recovery_decision import (
    Arrival,
    Doing,
    Evaluated,
    Standing,
    are_apart,
    can_join,
    decide,
    has_behind_it,
    is_done,
    told_result,
)
from manyhands.training.elastic.state_transfer import take_shared
from manyhands.training.worker.worker import Worker

if TYPE_CHECKING:
    from manyhands.training.state.training_state import Training

__all__ = ["Dismissed", "Regrouping"]

# While there is no coordinator, changes wait, and so does a worker that has lost its group.
NEXT_GROUP_S = 600.0
# A process takes seconds to come; a host that was restarted, a minute.
REPLACEMENT_S = 60.0
# A call may take its hours; beyond that, something is wrong with the run.
CALL_S = 24 * 3600.0

T = TypeVar("T")


class Dismissed(SystemExit):
    """This worker is not needed any more; its script ends here, and well."""

    def __init__(self) -> None:
        super().__init__(0)


class _Incomplete(PeerLost):
    """The group lacks workers that it takes to train."""


class _Inopportune(PeerLost):
    """The others are in the middle of what a newcomer cannot join, or it is itself half-way into having a part."""


class Regrouping:
    """`training` is set once there is something to train; until then this worker has no state to give."""

    def __init__(self, worker: Worker, regrouped: Callable[[], None]) -> None:
        self._worker, self._regrouped = worker, regrouped
        self.training: Training | None = None
        self._has_state = self._is_newcomer = False
        self._operation = 0
        self.division = ""
        self._doing: Doing = "steps"
        self._result: Evaluated | None = None
        self._told: Evaluated | None = None
        """What the others came to in the evaluation that they were in when this worker was admitted."""
        self.resumed = 0
        """The call that the checkpoint was taken in which this worker, or who gave it its state, began with."""
        self._is_short = False
        """Nobody of this worker's group can train before others have come."""
        self._listeners: list[Callable[[], None]] = []
        self._stood_in: str | None = None
        """The generation that this training last stood in."""

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
        self._has_state, self._stood_in = True, self._worker.group.generation

    def take_up(self) -> bool:
        """Go on with this training, after others, in the group as it is by now. False: no worker has its state."""
        training, worker = self.training, self._worker
        assert training is not None
        if self._stood_in != worker.group.generation:
            worker.follow_group()
            try:
                self._stand(worker.group, done=False)
            except PeerLost:
                if not worker.is_elastic:
                    raise
                self.go_over()
            if not self._has_state:
                return False
        self.agreed(training.engine.take_up)
        return True

    def step_done(self) -> None:
        self._operation, self.division, self._told = 0, "", None
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
        self.go_over(after_loss=False)

    def evaluated(self, work: Callable[[], Evaluated]) -> Evaluated:
        """An evaluation between two steps, which newcomers can join, too, or are told the result of."""
        self._told, told = None, self._told
        if told is not None:
            self._operation += 1
            return told
        return self.agreed(work, doing="an evaluation")

    def agreed(self, work: Callable[[], T], *, doing: Doing = "something else") -> T:
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
                result: Any = results[0] if doing == "an evaluation" and results else None
                if self.go_over(doing, done=bool(results), result=result).all_done:
                    return results[0]
                results.clear()

    def go_over(
        self,
        doing: Doing = "steps",
        *,
        done: bool = False,
        after_loss: bool = True,
        result: Evaluated | None = None,
    ) -> Arrival:
        """Leave the group for the newest one, as soon as there is one. If that fails, for the one after it.

        `doing`, and whether that is `done`: what this worker is in the middle of. `result` is that of an evaluation,
        which newcomers are told if nobody repeats it.
        """
        self._doing, self._result = doing, result
        undone = self.training.go_back() if after_loss and self.training is not None else 0
        while True:
            group = self._next_group(stranded=after_loss)
            if group.rank < 0:
                raise Dismissed
            try:
                arrival = self._arrive(group, done)
            except _Incomplete:
                after_loss = False  # nobody is to be found gone: others have to come
            except PeerLost as lost:
                if isinstance(lost, _Inopportune) and self._is_newcomer:
                    raise
                after_loss = True  # another member was lost meanwhile: there will be a newer group
            else:
                self._tell_restart(undone, after_loss)
                return arrival

    def _next_group(self, *, stranded: bool) -> Group:
        """Those who cannot train with what is left wait for a replacement: for as long as the run does, or as they may.

        Where fewer would do, they are as many as it takes in the next attempt.
        """
        seat = self._session.seat
        if not self._is_short or seat.least_workers == seat.most_workers:
            return self._session.await_group(NEXT_GROUP_S, stranded=stranded)
        try:
            return self._session.await_group(REPLACEMENT_S, stranded=stranded)
        except PeerTimeout as nobody:
            raise PartLost(
                f"Nobody came within {REPLACEMENT_S:g} s in place of workers that were lost: what is left goes on from "
                "the last checkpoint."
            ) from nobody

    def _tell_restart(self, undone: int, after_loss: bool) -> None:
        """Also where nothing was undone here: a chief that was lost may have recorded a step more."""
        training = self.training
        if after_loss and training is not None and training.engine.goes_back and self._has_state:
            self._worker.emit(RoundRestarted(time_s=time.time(), step=training.progress.step, steps=undone))

    def find_place(self) -> None:
        """Where an attempt begins with more workers than whole replicas take, those who are left over go."""
        worker = self._worker
        while worker.is_elastic and not worker.is_waiting and worker.formation is None:
            if worker.session.seat.slot in left_over(worker.one_replica, worker.group.slots):
                text = f"The worker in slot {worker.session.seat.slot} is left over, and goes: the others are enough."
                worker.tell(Warned(text=text))
                raise Dismissed
            worker.enter(self._session.await_group(NEXT_GROUP_S))

    def wait_for_admission(self) -> bool:
        """A worker that was started into a running run waits here. False: the run has finished this call without it."""
        if self._worker.is_divided and not isinstance(self._worker.strategy, Mesh):
            self.wait_for_end_of_call()  # its parts are as many as the attempt began with
            return False
        self._is_newcomer = True
        while self._worker.rank < 0:
            group = self._session.offer(self._worker.call, NEXT_GROUP_S)
            if group is None:
                return False
            try:
                self._arrive(group, done=False)
            except _Inopportune:
                raise
            except _Incomplete:
                self.go_over(after_loss=False)
            except PeerLost:
                self.go_over()
        assert self._has_state, "admitted to a group of which nobody has a state"
        self._is_newcomer = False
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
        self._worker.enter(group)
        return self._stand(group, done)

    def _stand(self, group: Group, done: bool) -> Arrival:
        """All members tell each other where they stand, and whoever lacks the state of this training gets it."""
        worker, training = self._worker, self.training
        self._stood_in = group.generation
        if worker.is_divided:
            return self._arrive_in_parts(group, done)
        standings = self._tell_standings(done)
        source, needed, arrival = decide(standings, group.rank)
        if source is not None and not can_join(standings, standings[source]):
            raise _Inopportune("A newcomer came while the others did what it cannot join. It goes, and another comes.")
        result = None if self._has_state or source is None else told_result(standings, standings[source])
        if any(one.has_state and one.mapped is None for one in standings):
            _ = worker.network  # connected by all at the same time: a newcomer asks for it later than the others
        if training is not None:
            training.engine.regroup(worker.axis, worker.sharing)
        if source is not None and needed:
            self._share_state(source, standings[source], arrival.received)
        self._told = result
        for listener in (self._regrouped, *self._listeners):
            listener()
        return arrival

    def _arrive_in_parts(self, group: Group, done: bool) -> Arrival:
        """The same where each has a part of the model, and gets the state of one that has the same part."""
        worker, training, mine = self._worker, self.training, self._standing(done)
        assert training is not None
        formation = self._form(group)
        standings = self._tell_standings(done)
        if are_apart(standings):
            raise _lost_outside_of_steps()
        division = next((one.parts for one in standings if one.parts is not None), None)
        handover, is_new = hand_over(standings, formation), not self._has_state
        if handover is None or division is None:
            raise PartLost("No step of the run is known whole any more: it goes back to its last checkpoint.")
        giver = standings[handover.givers[group.rank]]
        if not all(can_join(standings, standings[rank]) for rank in handover.givers):
            raise _lost_outside_of_steps()
        self._take_part(division, wait=not all(one.has_state for one in standings))
        line, takes = formation.line(group.rank, "data"), handover.takes[group.rank]
        if any(handover.takes[rank] for rank in line):
            source = line.index(handover.givers[group.rank])
            take = take_shared(worker.replicas, training, source, with_hooks=not self._has_state, own=True)
            if takes:
                take()
                training.keep()
                self._operation, self.division, self._has_state = has_behind_it(giver), "", True
                worker.script.steps = dict(giver.steps)
        self._told = told_result(standings, giver) if is_new else None
        for listener in (self._regrouped, *self._listeners):
            listener()
        received = takes and (not mine.has_state or mine.step < handover.step)
        return Arrival(received, same_step=False, all_done=is_done(standings, mine))

    def _take_part(self, division: Division, *, wait: bool) -> None:
        """A newcomer cuts the model into parts, which has no deadline; the others `wait` for it."""
        training = self.training
        assert training is not None
        try:
            training.take_part(division)
        except PeerLost as lost:
            if training.has_part:
                raise
            text = "Others were lost while a newcomer took its part of the model. It goes, and another comes."
            raise _Inopportune(text) from lost
        if wait:
            self._worker.wait_for_all("parts of newcomers")

    def _form(self, group: Group) -> Formation:
        """Who stands where in this group; `_Incomplete` if it takes others before anybody can train."""
        worker, replica = self._worker, self._worker.one_replica
        if lost := parts_without(replica, group.slots):
            told = "; ".join(words(part, replica) for part in lost)
            raise PartLost(f"No living worker has {told}; the last checkpoint has all of the model")
        self._is_short = worker.formation is None
        if worker.formation is not None:
            return worker.formation
        if self._doing == "something else":
            raise _lost_outside_of_steps()
        worker.report(self.training.progress.step if self.training is not None else 0, "waiting for workers")
        raise _Incomplete("Workers are missing.")

    def _tell_standings(self, done: bool) -> list[Standing]:
        told = self._worker.axis.all_gather_bytes("standings", msgspec.msgpack.encode(self._standing(done)))
        return [msgspec.msgpack.decode(data, type=Standing) for data in told]

    def _standing(self, done: bool) -> Standing:
        training = self.training
        return Standing(
            call=self._worker.call,
            use=self._worker.script.uses,
            steps=self._worker.script.steps,
            step=training.progress.step if training is not None and self._has_state else 0,
            operation=self._operation,
            done=done,
            doing=self._doing,
            has_state=self._has_state,
            is_newcomer=self._is_newcomer and not self._has_state,
            division=self.division,
            mapped=training.engine.held.mapped if training is not None and self._has_state else None,
            parts=training.division if training is not None and self._has_state else None,
            result=self._result,
            resumed=self.resumed,
        )

    def _share_state(self, source: int, standing: Standing, receives: bool) -> None:
        training = self.training
        take = take_shared(self._worker.axis, training, source, with_hooks=not self._has_state)
        if receives:  # no collective from here on: a state is taken whole or not at all
            assert training is not None
            training.engine.held.attach(standing.mapped)
            take()
            training.keep()
            self._operation, self.division, self._has_state = has_behind_it(standing), "", True
            self.resumed = standing.resumed
            self._worker.script.steps = dict(standing.steps)


def _lost_outside_of_steps() -> PartLost:
    return PartLost(
        "A worker was lost while all of them saved, got ready or did something else that no other can join: the run "
        "goes back to its last checkpoint."
    )
