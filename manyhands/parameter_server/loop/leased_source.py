"""`fit` under parameter servers: from one meeting of all workers to the next, each takes whatever work there is.

A course ends where all workers have something to do together: at an epoch's end, for a checkpoint, when workers come or
go, or because somebody wants to stop. In between, a worker hears of every update that servers make, in their order, and
its hooks do too. Start reading at `ServedFit._loop`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from manyhands.control.membership.state import parse_generation
from manyhands.events import StalenessSeen
from manyhands.parameter_server.engine.served import Served
from manyhands.parameter_server.memory.versioned_memory import JOURNAL_LENGTH
from manyhands.parameter_server.protocol.interval import Course
from manyhands.parameter_server.protocol.leases import Held, Item
from manyhands.parameter_server.protocol.messages import Done, Number
from manyhands.strategies.base import StepStats
from manyhands.training.loop.fit_history import Fit
from manyhands.training.step.validation_schedule import last_row_of

__all__ = ["ServedFit"]

# What workers wish to meet for; the largest wins, and is asked for again where a larger one won.
REOPEN, REGROUP, VALIDATE, SAVE, END_FIT, LEAVE = 1, 2, 3, 4, 5, 6


class ServedFit(Fit):
    """The same duties around steps as `Fit`; other steps."""

    _why = 0
    """What all workers met for last."""
    _kept_servers = 0
    """How many servers it was said to go on with, though others are wanted."""

    def run(self) -> list[dict[str, float]]:
        self._staleness: Counter[int] = Counter()
        try:
            return super().run()
        finally:
            self._worker.emit(StalenessSeen(step=self._training.progress.step, updates=dict(self._staleness)))

    @property
    def _engine(self) -> Served:
        engine = self._training.engine
        assert isinstance(engine, Served)
        return engine

    def _loop(self) -> None:
        self._steps.begin()
        if self._training.progress.ended or (self._is_open and self._after_their_meeting()):
            return
        while (course := self._next_course()) is not None:
            if not self._enter(course):
                if self._after_their_meeting():
                    return
                continue
            why, group = self._take_course(), self._worker.group.generation
            last_of_epoch = self._steps.batches.at(self._training.progress.step).last_of_epoch
            if self._after_meeting(why, last_of_epoch=last_of_epoch):
                return
            self._go_over(why, group)

    def _after_their_meeting(self) -> bool:
        """The same of one that this worker was not at, but has the state of."""
        assert self._training.last_stats is not None
        return self._after_meeting(self._training.last_stats.stop, last_of_epoch=self._is_epoch_open)

    def _enter(self, course: Course) -> bool:
        """By all workers. False: this one lost the others in it, and they have taken a part of it, and met, since."""
        begins_at = self._training.progress.step
        self._regrouping.agreed(lambda: self._open(course))
        return self._training.progress.step == begins_at

    def _after_meeting(self, why: int, *, last_of_epoch: bool = False) -> bool:
        """What follows a meeting. True: no course does."""
        training, steps = self._training, self._steps
        assert training.last_stats is not None, "all meet after a step"
        training.last_stats.stop = why  # a newcomer is told of it with the state
        step = training.progress.step
        self._worker.report(step, "meeting")
        self._end_interval(why, last_of_epoch=last_of_epoch)
        if why == LEAVE:
            steps.leave()
        steps.saver.after_step(save=why == SAVE or self._is_save_step(step))
        return training.progress.ended

    def _ends_fit(self, stop: int) -> bool:
        return stop == END_FIT

    def _requests_row(self, stop: int) -> bool:
        return stop == VALIDATE

    def _go_over(self, why: int, group: str) -> None:
        """To a newer group than that which met, if all met for it. If they went over meanwhile, there may be none."""
        if why == REGROUP and self._worker.group.generation == group:
            self._regrouping.change()

    def _next_course(self) -> Course | None:
        """To the next thing that all workers do together, as far as that is known."""
        progress, batches, every = self._training.progress, self._steps.batches, self._steps.saver.every_steps
        schedule, first, total = batches.schedule, progress.step + 1, self._steps.total_steps
        assert total is not None, "rows by number end"
        if first > total:
            return None
        rows = batches.num_rows - progress.row
        last = min(total, progress.step + -(-rows // schedule.batch_size))
        if every is not None:
            last = min(last, progress.step + every - progress.step % every)
        due = self._next_due()
        if due is not None:
            last = min(last, due)
        if self._engine.keeps_log:  # servers that make it all again can tell of so many updates
            last = min(last, progress.step + JOURNAL_LENGTH)
        return Course(
            call=progress.call,
            first=first,
            last=last,
            start_row=0,
            num_rows=rows,
            batch_size=schedule.batch_size,
            slices=schedule.slices,
            whole=self._engine.is_async,
        )

    def _next_due(self) -> int | None:
        """The next step after which `fit` validates, as far as that is known."""
        validations, progress = self._settings.validations, self._training.progress
        return None if validations is None else validations.next_step(progress.step, progress.call_step)

    def _open(self, course: Course) -> None:
        self._worker.report(self._training.progress.step, "opening a course")
        self._engine.soon = self._steps.batches.how_far
        scheduled = self._settings.scheduler_every == "step"
        self._engine.open(self._number(), course, self._training.scheduler, scheduled=scheduled)
        before, self._kept_servers = self._kept_servers, self._engine.keeps_servers
        if self._kept_servers not in (0, before):
            self._worker.warn(
                f"The run goes on with {self._kept_servers} servers: where they write a log, their number is that of "
                "the log. Stop the run, and start it again with another --servers."
            )

    def _number(self) -> Number:
        """The same on every worker of the generation: each has opened as many courses in it, in all trainings."""
        number = self._worker.script.next_course(parse_generation(self._worker.group.generation))
        self._worker.script.enter_course(number)
        return number

    def _take_course(self) -> int:
        """Why all workers have met."""
        for work, version in self._given_work():
            self._do(work, version)
        return self._why

    def _given_work(self) -> Iterator[tuple[Held, int]]:
        """What this worker is to compute next, and with which weights, until all meet; `_why` says then what for."""
        engine, worker, garbage = self._engine, self._worker, self._training.garbage
        while True:
            worker.report(self._training.progress.step, "waiting for work")
            reply = engine.ask(self._wish)
            for done in reply.done:
                self._hear(done)
            self._steps.saver.tell_ended()  # a meeting, which tells of them elsewhere, may be far away
            self._call_with(self._steps.saver.committed)  # the chief's hooks; the others' at the end of `fit`
            if reply.save:
                self._steps.saver.save_for_logs()
            if reply.meet is not None:
                self._why = reply.why
                return
            if reply.work is not None:
                self._expect(reply.work.item, reply.soon)
                garbage.hold()
                yield reply.work, reply.version
                garbage.let_go()

    def _do(self, work: Held, version: int) -> None:
        self._announce(work.step)
        self._worker.report(work.step, "training")
        self._engine.compute(self._steps.batches.at(work.step), work, version)

    def _expect(self, now: Item, soon: Sequence[Item]) -> None:
        """Have what is leased fetched, and what will be, where it is of use."""
        batches = self._steps.batches
        if batches.how_far:
            batches.expect([now, *soon], whole=self._engine.is_async)

    def _wish(self) -> int:
        """What all workers should meet for, as far as this one is concerned."""
        if self._worker.stop_requested:
            return LEAVE
        if self.stop_asked:
            return END_FIT
        if self._is_time_for_row and self._training.progress.step > self._last_row:
            return VALIDATE
        if self._steps.saver.is_time:
            return SAVE
        newest = self._worker.session.newest
        if newest is not None and newest.lost:
            return REGROUP
        if self._worker.is_chief and self._regrouping.change_is_due:
            return REGROUP
        return REOPEN if self._worker.is_chief and self._engine.wants_other_servers else 0

    @property
    def _last_row(self) -> int:
        return last_row_of(self._training.progress.history, self._training.progress.call_step)

    def _is_save_step(self, step: int) -> bool:
        every = self._steps.saver.every_steps
        return every is not None and step % every == 0

    def _announce(self, step: int) -> None:
        if step > self._announced:
            self._announced = step
            self._hooks.call("before_step", self._trainer, step)

    def _hear(self, done: Done) -> None:
        """An update was made. The n-th takes the run past the n-th batch, whichever it was made of."""
        step = self._steps.batches.at(done.update)
        self._announce(step.number)
        self._staleness[done.staleness] += 1
        stats = StepStats(
            loss=done.loss,
            rows=done.rows,
            seconds=self._engine.take_times(),
            grad_norm=done.grad_norm,
            staleness=done.staleness,
            lr=done.lr,
        )
        if self._engine.is_async:
            batch = self._steps.batches.at(done.step)
            stats.batch, stats.start = batch.number, (batch.epoch, batch.start)
        self._commit(step, stats)
