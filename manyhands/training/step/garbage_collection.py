"""Python's garbage collector, kept out of steps: it runs at the end of a step, of the same one on every worker.

A collection may take longer than a step, comes when it pleases, and every worker waits for the one it came to. So it is
held back inside steps. Where the interpreter would have collected, a worker says so with its next step, and all collect
when that one is done (`StepStats.collect`): nothing waits longer for it than a step or two. Between steps, in
validation and after_step hooks, the collector runs if they leave as much garbage by themselves as makes it run. One
that the user has disabled stays so, and nothing is collected. Start reading at `Garbage.wanted`.
"""

from __future__ import annotations

import gc
import time

from manyhands.launcher.worker_process.import_hooks import num_kept

__all__ = ["Garbage"]

Thresholds = tuple[int, int, int]


class Garbage:
    """`begin` and `end` enclose a call of `fit` or a loop, `hold` and `release` a step in it."""

    def __init__(self, *, manage: bool) -> None:
        self._manage = manage
        self._frozen = self._held = self._ours = False
        self._raised: tuple[Thresholds, Thresholds] | None = None

    def begin(self) -> None:
        """What is there now is there to stay: collections need not look at it any more.

        Without a full collection first, which takes as long as torch is large: older garbage waits for `end`.
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
        """Release, and collect what is due: after a step that nobody else takes at the same time."""
        due = self.wanted
        self.release()
        if due:
            self.collect()

    def _raise(self) -> None:
        """What steps have left is ours to collect: without it, there is as much room as ever until Python does."""
        youngest, middle, oldest = usual = gc.get_threshold()
        if youngest > 0:
            raised = (gc.get_count()[0] + youngest, middle, oldest)
            gc.set_threshold(*raised)
            self._raised = usual, raised

    def _lower(self) -> None:
        if self._raised is not None:
            usual, raised = self._raised
            if gc.get_threshold() == raised:  # else the user has set others since
                gc.set_threshold(*usual)
            self._raised = None

    @property
    def wanted(self) -> bool:
        """Whether the interpreter would have collected by now; inside a step."""
        return self._held and 0 < gc.get_threshold()[0] < gc.get_count()[0]

    def collect(self) -> float:
        """As the interpreter would have, at least what is young. The seconds that it took."""
        if not self._ours:
            return 0.0
        began = time.perf_counter()
        gc.collect(_oldest_due())
        return time.perf_counter() - began


def _oldest_due() -> int:
    """The oldest generation whose threshold is passed, or the youngest."""
    pairs = enumerate(zip(gc.get_count(), gc.get_threshold(), strict=True))
    return max((generation for generation, (count, threshold) in pairs if 0 < threshold < count), default=0)
