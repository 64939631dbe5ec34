"""The steps of one call under parameter servers, as arithmetic: their rows and slices, and where epochs end. Pure."""

from __future__ import annotations

import msgspec

from manyhands.data.sample_order import num_slices

__all__ = ["Course"]


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of one call over rows by number, from wherever it began."""

    call: int
    first: int
    """Number of the first step, and below, of the last."""
    last: int
    start_row: int
    """Rows of the first step's epoch that were consumed before it."""
    num_rows: int
    batch_size: int
    slices: int
    whole: bool
    """A step is computed by one worker, all its slices one after the other."""

    def rows(self, step: int) -> int:
        return min(self.batch_size, self.num_rows - self.start(step))

    def places(self, step: int) -> int:
        """How many slices a step is cut into; none of them is empty."""
        rows = self.rows(step)
        return num_slices(rows, self.slices, short=rows < self.batch_size)

    def items(self, step: int) -> int:
        """In how many pieces a step is handed out."""
        return 1 if self.whole else self.places(step)

    def ends_epoch(self, step: int) -> bool:
        return self._steps_from(self.start(step)) == 1

    def next_end(self, step: int) -> int:
        """The first step from this one on after which all meet: an epoch's last, or the call's."""
        return min(self.last, step - 1 + self._steps_from(self.start(step)))

    def start(self, step: int) -> int:
        """Rows of its epoch that are consumed before a step. The first epoch may begin anywhere, all others at 0."""
        steps = step - self.first
        in_first = self._steps_from(self.start_row)
        if steps < in_first:
            return self.start_row + steps * self.batch_size
        return (steps - in_first) % self._steps_from(0) * self.batch_size

    def _steps_from(self, row: int) -> int:
        """How many steps the rest of an epoch takes."""
        return -(-(self.num_rows - row) // self.batch_size)
