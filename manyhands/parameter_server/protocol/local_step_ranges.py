"""Several batches per lease: a worker trains on a local-step range alone, and pushes once. Pure.

To servers a range is one step of any length: leased, pushed and applied once. Servers number these steps through the
run, in `local_update`; the run's steps are batches, as always. Start reading at `LocalStepRanges.batches`.
"""

from __future__ import annotations

import msgspec

from manyhands.parameter_server.protocol.leases import Interval

__all__ = ["LocalStepRanges"]


class LocalStepRanges(msgspec.Struct, frozen=True):
    """Batches `first` to `last`, `every` per range; the last range may have fewer."""

    every: int
    first: int
    last: int
    update: int
    """The number of the first range, as servers count."""

    def batches(self, number: int) -> range:
        """Of one range."""
        start = self.first + (number - self.update) * self.every
        return range(start, min(start + self.every, self.last + 1))

    def interval(self, by_batch: Interval) -> Interval:
        """The interval as servers see it, from one whose steps are these batches."""
        num_batches = self.last - self.first + 1
        return msgspec.structs.replace(
            by_batch,
            first=self.update,
            last=self.update - 1 + -(-num_batches // self.every),
            num_rows=min(by_batch.num_rows, num_batches * by_batch.batch_size),
            batch_size=self.every * by_batch.batch_size,
            slices=1,
        )
