"""What a worker of an elastic run does when its group changes: switch to the new generation and recover the state.

The protocol is docs/protocols/elastic.md. A group changes in the middle of a collective, because a member was lost, or
at the end of a step, because members join or leave. In both cases all members of the new generation exchange their
progress, and a member that is behind receives the state of one that is not. `Regroup.switch_generation` does that;
`agreed` repeats collective operations outside of steps after a member was lost. In a static run all of this does
nothing.
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
from manyhands.parallel.replicas.model_parallel_replica import PartitionSpec
from manyhands.spec.worker_identity import Group
from manyhands.strategies.model_parallel import Mesh
from manyhands.training.elastic.part_recovery_decision import hand_over, words
from manyhands.training.elastic.recovery_decision import (
    Doing,
    Evaluated,
    RecoveryOutcome,
    WorkerProgress,
    can_join,
    decide,
    evaluation_result,
    finished_operations,
    is_done,
    trainings_differ,
)
from manyhands.training.elastic.state_transfer import broadcast_state
from manyhands.training.worker.worker import Worker

if TYPE_CHECKING:
    from manyhands.training.state.training_state import TrainingState

__all__ = ["Dismissed", "Regroup"]

# How long to wait for the next generation. None is issued while the coordinator is down.
NEXT_GROUP_S = 600.0
# How long to wait for a replacement: a process starts within seconds, a host restarts within a minute.
REPLACEMENT_S = 60.0
# A call may take hours; beyond this, something is wrong with the run.
CALL_S = 24 * 3600.0

T = TypeVar("T")


class Dismissed(SystemExit):
    """This worker is no longer needed: its script ends here with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


class _TooFewWorkers(PeerLost):
    """The group has too few workers to train."""


class _CannotJoin(PeerLost):
    """Members are in an operation that a newcomer cannot join, or this newcomer does not have all of its part yet."""


class Regroup:
    """Keeps one training in step with the group. `training` is set when it is built; before that there is no state."""

    def __init__(self, worker: Worker, regrouped: Callable[[], None]) -> None:
        self._worker, self._regrouped = worker, regrouped
        self.training: TrainingState | None = None
        self._has_state = self._is_newcomer = False
        self._operation = 0
        self.division = ""
        self._doing: Doing = "steps"
        self._result: Evaluated | None = None
        self._received_result: Evaluated | None = None
        """The result of the evaluation that the members were in when they admitted this worker."""
        self.resumed = 0
        """The call in which the checkpoint was taken that this worker, or the source of its state, resumed from."""
        self._has_too_few = False
        """This worker's group cannot train before more workers have joined."""
        self._listeners: list[Callable[[], None]] = []
        self._recovered_in: str | None = None
        """The generation in which this training last exchanged progress."""

    # ---- what callers use ----

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Within the context, call `listener` after every change of group: for values that depend on the rank."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def settled(self) -> None:
        """This worker has a state: it was built, or loaded from a checkpoint."""
        self._has_state, self._recovered_in = True, self._worker.group.generation

    def take_up(self) -> bool:
        """Continue this training after another one was in use, in the current group. False: no worker has its state."""
        training, worker = self.training, self._worker
        assert training is not None
        if self._recovered_in != worker.group.generation:
            worker.follow_group()
            try:
                self._recover(worker.group, done=False)
            except PeerLost:
                if not worker.is_elastic:
                    raise
                self.switch_generation()
            if not self._has_state:
                return False
        self.agreed(training.engine.take_up)
        return True

    def step_done(self) -> None:
        self._operation, self.division, self._received_result = 0, "", None
        self._update_location()

    @property
    def change_is_due(self) -> bool:
        """Whether the chief should request that all members switch generations at the end of the next step."""
        newest, worker = self._worker.session.newest, self._worker
        if newest is None:  # too few workers: wait for more
            return bool(worker.world_size < worker.session.identity.least_workers)
        return newest.call in (0, worker.call)

    def change(self) -> None:
        """Switch to the new generation, on all members, between two steps."""
        worker, step = self._worker, self.training.progress.step if self.training is not None else 0
        if worker.session.newest is None and worker.world_size < worker.session.identity.least_workers:
            worker.report(step, "waiting for workers")
            worker.events.warn(
                f"waiting: {worker.world_size} of at least {worker.session.identity.least_workers} workers are there"
            )
        self.switch_generation(after_loss=False)

    def evaluated(self, work: Callable[[], Evaluated]) -> Evaluated:
        """Run an evaluation between two steps. Newcomers can join it, or receive its result from the members."""
        self._received_result, received = None, self._received_result
        if received is not None:
            self._operation += 1
            return received
        return self.agreed(work, doing="an evaluation")

    def agreed(self, work: Callable[[], T], *, doing: Doing = "something else") -> T:
        """Run an operation of all workers; repeat it when a member is lost, until every member has the result."""
        if not self._worker.is_elastic:
            return work()
        self._operation += 1
        self._update_location()
        results: list[T] = []
        while True:
            try:
                if not results:
                    results.append(work())
                self._worker.axis.barrier(f"end of {self._worker.place}")
                return results[0]
            except PeerLost:
                result: Any = results[0] if doing == "an evaluation" and results else None
                if self.switch_generation(doing, done=bool(results), result=result).all_done:
                    return results[0]
                results.clear()

    def switch_generation(
        self,
        doing: Doing = "steps",
        *,
        done: bool = False,
        after_loss: bool = True,
        result: Evaluated | None = None,
    ) -> RecoveryOutcome:
        """Switch to the newest generation as soon as there is one. If that fails, switch to the one after it.

        `doing` is the operation that this worker is in, and `done` says whether it has the result. `result` is that of
        an evaluation, which newcomers receive if no member repeats it.
        """
        self._doing, self._result = doing, result
        undone = self.training.roll_back() if after_loss and self.training is not None else 0
        while True:
            group = self._next_group(stranded=after_loss)
            if group.rank < 0:
                raise Dismissed
            try:
                outcome = self._switch_to(group, done)
            except _TooFewWorkers:
                after_loss = False  # no member was lost: the group waits for more workers
            except PeerLost as lost:
                if isinstance(lost, _CannotJoin) and self._is_newcomer:
                    raise
                after_loss = True  # another member was lost meanwhile: a newer generation follows
            else:
                self._report_restart(undone, after_loss)
                return outcome

    def _next_group(self, *, stranded: bool) -> Group:
        """Wait for the next generation; if this group is too small to train, wait for replacements.

        If the run allows fewer workers, that wait is short: the remaining ones are enough for the next attempt.
        """
        identity = self._session.identity
        if not self._has_too_few or identity.least_workers == identity.most_workers:
            return self._session.await_group(NEXT_GROUP_S, stranded=stranded)
        try:
            return self._session.await_group(REPLACEMENT_S, stranded=stranded)
        except PeerTimeout as timeout:
            raise PartLost(
                f"No replacement for the lost workers joined within {REPLACEMENT_S:g} s: the remaining workers restart "
                "from the last checkpoint."
            ) from timeout

    def _report_restart(self, undone: int, after_loss: bool) -> None:
        """Report it even if this worker undid no step: a chief that was lost may have recorded one step more."""
        training = self.training
        if after_loss and training is not None and training.engine.rolls_back and self._has_state:
            self._worker.events.emit(RoundRestarted(time_s=time.time(), step=training.progress.step, steps=undone))

    def end_if_replica_incomplete(self) -> None:
        """End this worker if its replica is incomplete at the start of an attempt: the complete replicas are enough."""
        worker = self._worker
        while worker.is_elastic and not worker.is_waiting and worker.formation is None:
            if worker.session.identity.slot in left_over(worker.one_replica, worker.group.slots):
                text = (
                    f"The worker in slot {worker.session.identity.slot} ends: its replica is incomplete, and the "
                    "complete ones are enough."
                )
                worker.events.emit_own(Warned(text=text))
                raise Dismissed
            worker.enter(self._session.await_group(NEXT_GROUP_S))

    def wait_for_admission(self) -> bool:
        """Wait, as a worker started during the run, to be admitted. False: the run finished this call without it."""
        if self._worker.is_divided and not isinstance(self._worker.strategy, Mesh):
            self.wait_for_end_of_call()  # the workers that the attempt began with have all parts
            return False
        self._is_newcomer = True
        while self._worker.rank < 0:
            group = self._session.offer(self._worker.call, NEXT_GROUP_S)
            if group is None:
                return False
            try:
                self._switch_to(group, done=False)
            except _CannotJoin:
                raise
            except _TooFewWorkers:
                self.switch_generation(after_loss=False)
            except PeerLost:
                self.switch_generation()
        assert self._has_state, "admitted to a group in which no worker has a state"
        self._is_newcomer = False
        return True

    def wait_for_end_of_call(self) -> None:
        """Wait, as a newcomer, for the end of a call that has no steps, and that it therefore cannot join."""
        self._session.await_end_of_call(self._worker.call, CALL_S)

    @property
    def run_call(self) -> int:
        """The public call that the run is in, as the agent reports it to a newcomer."""
        return self._session.run_call

    # ---- switching to a new generation ----

    @property
    def _session(self) -> Session:
        return self._worker.agent_session

    def _update_location(self) -> None:
        step = self.training.progress.step if self.training is not None else 0
        self._worker.place = f"{self._worker.call}.{step}.{self._operation}"

    def _switch_to(self, group: Group, done: bool) -> RecoveryOutcome:
        self._worker.enter(group)
        return self._recover(group, done)

    def _recover(self, group: Group, done: bool) -> RecoveryOutcome:
        """Exchange progress with all members; a member that is behind receives the state of this training."""
        worker, training = self._worker, self.training
        self._recovered_in = group.generation
        if worker.is_divided:
            return self._recover_parts(group, done)
        progress = self._exchange_progress(done)
        source, needed, outcome = decide(progress, group.rank)
        if source is not None and not can_join(progress, progress[source]):
            raise _CannotJoin("A newcomer was admitted during an operation that it cannot join. It ends and restarts.")
        result = None if self._has_state or source is None else evaluation_result(progress, progress[source])
        if any(one.has_state and one.mapped is None for one in progress):
            _ = worker.network  # all members must connect it now: a newcomer would need it later than the others
        if training is not None:
            training.engine.regroup(worker.axis, worker.sharing)
        if source is not None and needed:
            self._share_state(source, progress[source], outcome.received)
        self._received_result = result
        for listener in (self._regrouped, *self._listeners):
            listener()
        return outcome

    def _recover_parts(self, group: Group, done: bool) -> RecoveryOutcome:
        """The same for a partitioned model: a member receives the state of one that has the same part."""
        worker, training, mine = self._worker, self.training, self._my_progress(done)
        assert training is not None
        formation = self._positions(group)
        progress = self._exchange_progress(done)
        if trainings_differ(progress):
            raise _lost_outside_of_steps()
        division = next((one.parts for one in progress if one.parts is not None), None)
        recovery, is_new = hand_over(progress, formation), not self._has_state
        if recovery is None or division is None:
            raise PartLost(
                "The live workers do not have all of the model at one step: the run goes back to its last checkpoint."
            )
        giver = progress[recovery.givers[group.rank]]
        if not all(can_join(progress, progress[rank]) for rank in recovery.givers):
            raise _lost_outside_of_steps()
        self._partition(division, wait=not all(one.has_state for one in progress))
        line, takes = formation.line(group.rank, "data"), recovery.takes[group.rank]
        if any(recovery.takes[rank] for rank in line):
            source = line.index(recovery.givers[group.rank])
            take = broadcast_state(worker.replicas, training, source, with_hooks=not self._has_state, own=True)
            if takes:
                take()
                training.keep()
                self._operation, self.division, self._has_state = finished_operations(giver), "", True
                worker.script.steps = dict(giver.steps)
        self._received_result = evaluation_result(progress, giver) if is_new else None
        for listener in (self._regrouped, *self._listeners):
            listener()
        received = takes and (not mine.has_state or mine.step < recovery.step)
        return RecoveryOutcome(received, same_step=False, all_done=is_done(progress, mine))

    def _partition(self, division: PartitionSpec, *, wait: bool) -> None:
        """Partition the model on a newcomer, which has no deadline. With `wait`, all members wait for that."""
        training = self.training
        assert training is not None
        try:
            training.partition(division)
        except PeerLost as lost:
            if training.has_part:
                raise
            text = "Workers were lost while a newcomer took its part of the model. The newcomer ends and restarts."
            raise _CannotJoin(text) from lost
        if wait:
            self._worker.wait_for_all("parts of newcomers")

    def _positions(self, group: Group) -> Formation:
        """The grid positions of this group's ranks; `_TooFewWorkers` if more workers must join before it can train."""
        worker, replica = self._worker, self._worker.one_replica
        if lost := parts_without(replica, group.slots):
            parts = "; ".join(words(part, replica) for part in lost)
            raise PartLost(f"No living worker has {parts}; the last checkpoint has all of the model")
        self._has_too_few = worker.formation is None
        if worker.formation is not None:
            return worker.formation
        if self._doing == "something else":
            raise _lost_outside_of_steps()
        worker.report(self.training.progress.step if self.training is not None else 0, "waiting for workers")
        raise _TooFewWorkers("The group has too few workers to train.")

    def _exchange_progress(self, done: bool) -> list[WorkerProgress]:
        received = self._worker.axis.all_gather_bytes(
            "progress of the workers", msgspec.msgpack.encode(self._my_progress(done))
        )
        return [msgspec.msgpack.decode(data, type=WorkerProgress) for data in received]

    def _my_progress(self, done: bool) -> WorkerProgress:
        training = self.training
        return WorkerProgress(
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

    def _share_state(self, source: int, source_progress: WorkerProgress, receives: bool) -> None:
        training = self.training
        take = broadcast_state(self._worker.axis, training, source, with_hooks=not self._has_state)
        if receives:  # no collective from here on: the state is taken over completely or not at all
            assert training is not None
            training.engine.held.attach(source_progress.mapped)
            take()
            training.keep()
            self._operation, self.division, self._has_state = finished_operations(source_progress), "", True
            self.resumed = source_progress.resumed
            self._worker.script.steps = dict(source_progress.steps)


def _lost_outside_of_steps() -> PartLost:
    return PartLost(
        "A worker was lost during a save, the setup or another operation that its replacement cannot join: the run "
        "goes back to its last checkpoint."
    )
