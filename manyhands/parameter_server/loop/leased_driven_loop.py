"""Another library's loop with parameter servers: it counts updates; between two of them this worker computes leases.

Every worker's loop sees every update of the run, in order, whichever worker computed it; so all have the same number of
steps, and the same calls of callbacks. A worker that finds several updates made at once does nothing in the steps that
are behind it. At the end of an epoch all workers are at the same update. Start reading at `LeasedDrivenLoop.compute`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from manyhands.data.batches import Step
from manyhands.parameter_server.loop.leased_source import LeasedSource
from manyhands.parameter_server.memory.optimizer_states import settings_of
from manyhands.parameter_server.protocol.leases import Interval, Lease
from manyhands.strategies.base import SliceLike, StepStats
from manyhands.training.loop.step_lifecycle import StepLifecycle

__all__ = ["LeasedDrivenLoop"]


class LeasedDrivenLoop(LeasedSource):
    """`begin`; then for each `next_step`, `compute`."""

    def __init__(self, lifecycle: StepLifecycle, together_every: int | None) -> None:
        """`together_every`: an epoch of the other library, in steps, where it is not a pass over the data."""
        super().__init__(lifecycle)
        self._every, self._epoch_start = together_every, 0
        self._items = self._leases_and_sync_points()
        self._next = 0
        self._is_together = self._is_over = False
        self._settings: list[dict[str, Any]] = []
        lifecycle.observers.append(self._count)

    def begin(self) -> None:
        self._is_over = not self._lifecycle.begin() or self._training.progress.ended
        self._next = self._training.progress.step
        self._epoch_start = self._training.progress.call_step

    def begin_epoch(self, taken: int) -> None:
        """An epoch of the other library begins after so many steps of the call."""
        self._epoch_start = self._training.progress.call_step + taken

    def close(self) -> None:
        self._items.close()  # type: ignore[attr-defined]  # a generator
        super().close()

    def request_end(self) -> None:
        self._lifecycle.end_requested = True

    @property
    def is_end_requested(self) -> bool:
        return self._lifecycle.end_requested

    def next_step(self) -> Step | None:
        """The next update; None after the last."""
        total = self._lifecycle.total_steps
        if self._is_over or (total is not None and self._next >= total):
            return None
        self._next += 1
        return self._lifecycle.batches.at(self._next)

    def compute(self, step: Step, loss_of: Callable[[SliceLike], Tensor]) -> None:
        """Compute leases until this update is made; after the last one of an epoch, until all workers are there."""
        self._note_settings()
        while not self._is_done(step):
            item = next(self._items, None)
            self._is_together = item is None
            if item is not None:
                self._compute_lease(*item, loss_of)

    def _is_done(self, step: Step) -> bool:
        if self._is_over:
            return True
        if self._training.progress.step < step.number:
            return False
        return self._is_together or not (step.last_of_epoch or self._ends_epoch(step.number))

    def _ends_epoch(self, number: int) -> bool:
        return self._every is not None and number == self._epoch_start + self._every

    def _compute_lease(self, lease: Lease, version: int, loss_of: Callable[[SliceLike], Tensor]) -> None:
        self._lifecycle.announce(lease.step)
        self._worker.report(lease.step, "training")
        step = self._lifecycle.batches.at(lease.step)
        slices = self.engine.computing(step, lease, version, may_repeat=True)
        for piece in slices:
            if piece is not None:
                slices.send(loss_of(piece))

    def _leases_and_sync_points(self) -> Iterator[tuple[Lease, int] | None]:
        """The leases of this worker; None after each interval, when all workers are at the same update."""
        while (interval := self._next_interval()) is not None:
            if self._enter(interval):
                yield from self._granted()
                self._is_over = self._end_interval()
            else:  # this worker has received the state of the others
                self._is_over = self._lifecycle.after_received()
            yield None
            if self._is_over:
                return
            self._lifecycle.change_group()
        self._is_over = True

    def _next_due(self) -> int | None:
        return None if self._every is None else self._epoch_start + self._every

    # ---- settings of the optimizer, which the other library's code may change between steps ----

    def _open(self, interval: Interval) -> None:
        self._settings = self._read_settings()
        super()._open(interval)

    def _note_settings(self) -> None:
        """Servers get the chief's changed settings when the next interval begins."""
        if self._settings and self._read_settings() != self._settings:
            self.reopens = True

    def _read_settings(self) -> list[dict[str, Any]]:
        optimizer = self._training.optimizer
        refresh = getattr(optimizer, "refresh_settings", None)
        if refresh is not None:
            refresh()
        counted = ("lr", "iterations") if getattr(optimizer, "has_schedule", False) else ("iterations",)
        return [{name: one for name, one in group.items() if name not in counted} for group in settings_of(optimizer)]

    def _count(self, step: Step, stats: StepStats) -> None:
        count = getattr(self._training.optimizer, "count_update", None)
        if count is not None:
            count()
