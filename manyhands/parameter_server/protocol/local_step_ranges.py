"""Batches that are leased several at a time: a worker trains on a stretch of them by itself, and pushes once. Pure.

To servers a stretch is one step, whatever its length: it is leased, pushed and applied once. Their steps are counted
through the run, in `local_update`; the run's own are batches, as ever. Start reading at `Stretches.batches`.
"""

from __future__ import annotations

import msgspec

from manyhands.parameter_server.protocol.interval import Course

__all__ = ["Stretches"]


class Stretches(msgspec.Struct, frozen=True):
    """Batches `first` to `last`, `every` at a time; the last ones may be fewer."""

    every: int
    first: int
    last: int
    update: int
    """The number of the first stretch, as servers count."""

    def batches(self, number: int) -> range:
        """Of one stretch."""
        start = self.first + (number - self.update) * self.every
        return range(start, min(start + self.every, self.last + 1))

    def course(self, by_batch: Course) -> Course:
        """The course that servers see, of one that has these batches for its steps."""
        num_batches = self.last - self.first + 1
        return msgspec.structs.replace(
            by_batch,
            first=self.update,
            last=self.update - 1 + -(-num_batches // self.every),
            num_rows=min(by_batch.num_rows, num_batches * by_batch.batch_size),
            batch_size=self.every * by_batch.batch_size,
            slices=1,
        )
