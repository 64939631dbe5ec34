"""Keeps Python's garbage collector out of steps: all workers collect at the end of the same step.

A collection may take longer than a step and may start at any time, and then every worker waits for the one that
collects. So the collector is disabled inside steps. When the interpreter would have collected, a worker requests it
with its next step, and all workers collect after that one (`StepStats.collect`), a step or two later. Between steps, in
validation and after_step hooks, the collector runs if these alone leave enough garbage to trigger it. A collector that
the user has disabled stays disabled, and nothing is collected. Start reading at `GarbageCollection.wanted`.
"""

from __future__ import annotations

import gc
import time

from manyhands.launcher.worker_process.import_hooks import num_kept

__all__ = ["GarbageCollection"]

Thresholds = tuple[int, int, int]


class GarbageCollection:
    """`begin` and `end` enclose a call of `fit` or a loop, `hold` and `release` a step in it."""

    def __init__(self, *, manage: bool) -> None:
        self._manage = manage
        self._frozen = self._held = self._ours = False
        self._raised: tuple[Thresholds, Thresholds] | None = None

    def begin(self) -> None:
        """Freeze the objects that exist now, which live as long as the call: collections skip them.

        Without a full collection before, which would walk over all of torch: older garbage stays until `end`.
        """
        if self._manage and gc.isenabled() and gc.get_freeze_count() <= num_kept():
            gc.collect(1)
            gc.freeze()
            self._frozen = True

    def end(self) -> None:
        self.release()
        self._lower()
        if self._frozen:
            gc.unfreeze()
            self._frozen = False

    def hold(self) -> None:
        if self._manage and not self._held:
            self._lower()
            self._ours = gc.isenabled()
            if self._ours:
                gc.disable()
                self._held = True

    def release(self) -> None:
        if self._held:
            self._raise()
            gc.enable()
            self._held = False

    def let_go(self) -> None:
        """Release, and collect if it is due: after a step that no other worker takes at the same time."""
        due = self.wanted
        self.release()
        if due:
            self.collect()

    def _raise(self) -> None:
        """Do not count what steps have left towards Python's threshold: `collect` takes care of that."""
        youngest, middle, oldest = usual = gc.get_threshold()
        if youngest > 0:
            raised = (gc.get_count()[0] + youngest, middle, oldest)
            gc.set_threshold(*raised)
            self._raised = usual, raised

    def _lower(self) -> None:
        if self._raised is not None:
            usual, raised = self._raised
            if gc.get_threshold() == raised:  # otherwise the user has changed it since
                gc.set_threshold(*usual)
            self._raised = None

    @property
    def wanted(self) -> bool:
        """Whether the interpreter would have collected by now; inside a step."""
        return self._held and 0 < gc.get_threshold()[0] < gc.get_count()[0]

    def collect(self) -> float:
        """Collect the generations that the interpreter would have, at least the youngest. Returns the seconds taken."""
        if not self._ours:
            return 0.0
        began = time.perf_counter()
        gc.collect(_oldest_due())
        return time.perf_counter() - began


def _oldest_due() -> int:
    """The oldest generation whose threshold is passed, or the youngest."""
    pairs = enumerate(zip(gc.get_count(), gc.get_threshold(), strict=True))
    return max((generation for generation, (count, threshold) in pairs if 0 < threshold < count), default=0)
