"""Steps with parameter servers: from one sync point of all workers to the next, each worker computes its leases.

An interval ends where all workers have to act together: at the end of an epoch, for a checkpoint, when workers join or
leave, or because a worker has to stop. In between, servers report every update to every worker, in order, and each
worker commits it. Start reading at `LeasedSource.leases`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from manyhands.control.membership.state import parse_generation
from manyhands.data.batches import Step
from manyhands.events import RoundsClosed, StalenessSeen
from manyhands.parameter_server.engine.leased_engine import LeasedEngine
from manyhands.parameter_server.engine.local_steps_engine import LocalStepsEngine
from manyhands.parameter_server.memory.versioned_memory import JOURNAL_LENGTH
from manyhands.parameter_server.protocol.leases import Interval, Item, Lease
from manyhands.parameter_server.protocol.local_step_ranges import LocalStepRanges
from manyhands.parameter_server.protocol.messages import Number, UpdateDone
from manyhands.strategies.base import StepStats
from manyhands.training.loop.step_lifecycle import StepLifecycle
from manyhands.training.step.step_requests import END_FIT, LEAVE, REGROUP, REOPEN, SAVE, VALIDATE

__all__ = ["LeasedSource", "LocalStepsSource", "leased_source"]


def leased_source(lifecycle: StepLifecycle) -> LeasedSource:
    """The source for the strategy: it leases slices, or several batches at a time."""
    local = lifecycle.training.worker.strategy.takes_local_steps
    return LocalStepsSource(lifecycle) if local else LeasedSource(lifecycle)


class LeasedSource:
    """The slices of an interval's steps that servers lease to this worker."""

    def __init__(self, lifecycle: StepLifecycle) -> None:
        self._lifecycle, self._training = lifecycle, lifecycle.training
        self._worker, self._saver = lifecycle.training.worker, lifecycle.saver
        assert isinstance(self._training.engine, LeasedEngine)
        self.engine = self._training.engine
        self.reopens = False
        """The interval is to be opened again, because settings have changed; only the chief's value counts."""
        self._stop = 0
        """What all workers have to do at the last sync point."""
        self._kept_servers = 0
        """The number of servers in the last warning that the run keeps them, though another number is wanted."""
        self._staleness: Counter[int] = Counter()

    def train(self) -> None:
        if self._lifecycle.begin():
            for lease, version in self.leases():
                self._compute(lease, version)

    def leases(self) -> Iterator[tuple[Lease, int]]:
        """The leases of this worker, each with the version of the weights to use, over all intervals."""
        while (interval := self._next_interval()) is not None:
            if self._enter(interval):
                yield from self._granted()
                is_over = self._end_interval()
            else:
                is_over = self._lifecycle.after_received()
            if is_over:
                return
            self._lifecycle.change_group()

    def close(self) -> None:
        self._worker.events.emit(StalenessSeen(step=self._training.progress.step, updates=dict(self._staleness)))

    # ---- intervals ----

    def _next_interval(self) -> Interval | None:
        """The interval up to the next point where all workers act together, as far as that is known."""
        progress, batches, every = self._training.progress, self._lifecycle.batches, self._saver.every_steps
        schedule, first, total = batches.schedule, progress.step + 1, self._lifecycle.total_steps
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
        if self.engine.keeps_log:  # servers that replay their log can report at most so many updates
            last = min(last, progress.step + JOURNAL_LENGTH)
        return Interval(
            call=progress.call,
            first=first,
            last=last,
            start_row=0,
            num_rows=rows,
            batch_size=schedule.batch_size,
            slices=schedule.slices,
            whole=self.engine.is_async,
        )

    def _next_due(self) -> int | None:
        """The next step after which `fit` validates, as far as that is known."""
        history = self._lifecycle.history
        return None if history is None else history.next_due()

    def _enter(self, interval: Interval) -> bool:
        """Called by all workers. False: this worker lost the others, which have done a part of the interval since."""
        begins_at = self._training.progress.step
        self._lifecycle.agreed(lambda: self._open(interval))
        return self._training.progress.step == begins_at

    def _open(self, interval: Interval) -> None:
        self._worker.report(self._training.progress.step, "opening an interval")
        self.engine.soon = self._lifecycle.batches.how_far
        scheduled = self._lifecycle.schedules_steps
        self.engine.open(self._number(), interval, self._training.scheduler, scheduled=scheduled)
        self.reopens = False
        before, self._kept_servers = self._kept_servers, self.engine.keeps_servers
        if self._kept_servers not in (0, before):
            self._worker.events.warn(
                f"The run keeps its {self._kept_servers} servers: while they write a log, their number cannot change. "
                "Stop the run, and start it again with another --servers."
            )

    def _number(self) -> Number:
        """The same on every worker of the generation, since each has opened as many intervals in all trainings."""
        number = self._worker.script.next_interval(parse_generation(self._worker.group.generation))
        self._worker.script.enter_interval(number)
        return number

    def _end_interval(self) -> bool:
        """Act on the request of a sync point. True: there is no further interval."""
        self._lifecycle.group = self._worker.group.generation
        assert self._training.last_stats is not None, "a sync point follows a step"
        self._training.last_stats.stop = self._stop  # a joining worker receives it with the state
        step = self._training.progress.step
        self._worker.report(step, "at a sync point")
        last_of_epoch = self._lifecycle.batches.at(step).last_of_epoch
        return self._lifecycle.after(self._stop, last_of_epoch=last_of_epoch)

    # ---- between two sync points ----

    def _granted(self) -> Iterator[tuple[Lease, int]]:
        """The leases of this worker until the next sync point; then `_stop` says what all workers do there."""
        garbage = self._training.garbage
        while True:
            self._worker.report(self._training.progress.step, "waiting for work")
            reply = self.engine.ask(self._request)
            for update in reply.done:
                self._commit(update)
            self._lifecycle.report_saves()
            if reply.save:
                self._saver.save_for_logs()
            if reply.meet is not None:
                self._stop = reply.why
                return
            if reply.work is not None:
                self._expect(reply.work.item, reply.soon)
                garbage.hold()
                yield reply.work, reply.version
                garbage.let_go()

    def _expect(self, now: Item, soon: Sequence[Item]) -> None:
        """Prefetch the data of this lease and of the next ones, where the source supports it."""
        batches = self._lifecycle.batches
        if batches.how_far:
            batches.expect([now, *soon], whole=self.engine.is_async)

    def _request(self) -> int:
        """What this worker requests that all workers synchronise for."""
        lifecycle, worker, history = self._lifecycle, self._worker, self._lifecycle.history
        if worker.stop_requested:
            return LEAVE
        if lifecycle.end_requested:
            return END_FIT
        if history is not None and history.is_time_for_row and self._training.progress.step > history.last_row:
            return VALIDATE
        if self._saver.is_time:
            return SAVE
        newest = worker.session.newest
        if (newest is not None and newest.lost) or lifecycle.change_is_due:
            return REGROUP
        return REOPEN if worker.is_chief and (self.engine.wants_other_servers or self.reopens) else 0

    def _compute(self, lease: Lease, version: int) -> None:
        self._lifecycle.announce(lease.step)
        self._worker.report(lease.step, "training")
        self.engine.compute(self._lifecycle.batches.at(lease.step), lease, version)

    def _commit(self, update: UpdateDone) -> None:
        """Commit an update. The n-th update is step n of the run, whichever batch it was computed from."""
        step = self._lifecycle.batches.at(update.update)
        self._lifecycle.announce(step.number)
        self._staleness[update.staleness] += 1
        stats = StepStats(
            loss=update.loss,
            rows=update.rows,
            seconds=self.engine.take_times(),
            grad_norm=update.grad_norm,
            staleness=update.staleness,
            lr=update.lr,
        )
        if self.engine.is_async:
            batch = self._lifecycle.batches.at(update.step)
            stats.batch, stats.start = batch.number, (batch.epoch, batch.start)
        self._lifecycle.commit(step, stats)


class LocalStepsSource(LeasedSource):
    """Several batches per lease: a worker trains its own weights on them, and servers apply the result as one update.

    The run's steps are still batches: an update advances the run by as many as the lease had. At the end of each epoch
    and of `fit`, every worker has the agreed weights.
    """

    def __init__(self, lifecycle: StepLifecycle) -> None:
        super().__init__(lifecycle)
        assert isinstance(self.engine, LocalStepsEngine) and lifecycle.history is not None
        self._local = self.engine
        self._ranges = LocalStepRanges(1, 1, 0, 1)
        self._round_sizes: Counter[int] = Counter()
        lifecycle.history.at_epoch_end = self._local.use_agreed_weights

    def train(self) -> None:
        super().train()
        self._local.use_agreed_weights()

    def close(self) -> None:
        super().close()
        if self._local.has_rounds:
            rounds = {workers: steps // workers for workers, steps in self._round_sizes.items()}
            self._worker.events.emit(RoundsClosed(step=self._training.progress.step, rounds=rounds))

    def _next_interval(self) -> Interval | None:
        interval = super()._next_interval()
        if interval is None:
            return None
        self._ranges = LocalStepRanges(self._local.every, interval.first, interval.last, self._local.updates + 1)
        return self._ranges.interval(interval)

    def _next_due(self) -> int | None:
        """Rounded to the end of a lease: if validation cut one short, the result would differ."""
        due, step, every = super()._next_due(), self._training.progress.step, self._local.every
        return None if due is None else step - (step - due) // every * every

    def _compute(self, lease: Lease, version: int) -> None:
        self._local.train_range(self._steps(self._ranges.batches(lease.step)), lease)

    def _steps(self, batches: range) -> Iterator[Step]:
        for number in batches:
            self._lifecycle.announce(number)
            self._worker.report(number, "training")
            yield self._lifecycle.batches.at(number)

    def _commit(self, update: UpdateDone) -> None:
        """Commit a lease. The n-th applied batch is step n of the run, whichever batch it was."""
        batches = self._lifecycle.batches
        self._staleness[update.staleness] += 1
        self._round_sizes[update.together] += 1
        for number in self._ranges.batches(update.step):
            step, batch = batches.at(self._training.progress.step + 1), batches.at(number)
            self._lifecycle.announce(step.number)
            stats = StepStats(
                loss=update.loss,
                rows=batch.rows,
                seconds=self.engine.take_times(),
                staleness=update.staleness,
                batch=batch.number,
                start=(batch.epoch, batch.start),
                together=update.together if self._local.has_rounds else None,
                lr=float(self._training.optimizer.param_groups[0]["lr"]),
            )
            self._lifecycle.commit(step, stats)
