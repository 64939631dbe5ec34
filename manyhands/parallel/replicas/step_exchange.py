"""What ranks tell each other besides gradients, once per step: every slice's loss, what anyone wants, their times."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.comm.axis import Axis, Pending
from manyhands.parallel.gradients.network_sum import GradientSum
from manyhands.parallel.gradients.reduce_scatter_sum import ShardedSum
from manyhands.parallel.gradients.shared_memory_sum import SharedGradients
from manyhands.parallel.model.step_buffers import StepBuffers
from manyhands.parallel.replicas.phase_timer import PHASES

__all__ = ["NO_TIMES", "Exchange", "Heard", "Note", "Report"]


class Report(NamedTuple):
    """What a slice says of itself: the sum of its losses, their weight, and what it made of the batch statistics."""

    total: float
    weight: float
    statistics: Tensor


class Note(NamedTuple):
    """What a rank says for itself."""

    stop: int
    collect: bool
    """Whether garbage should be collected after this step, by all ranks at once."""
    times: Sequence[float]
    """Of the step before: seconds at work in each of `PHASES`, and seconds of waiting; `NO_TIMES` if not known."""


class Heard(NamedTuple):
    """What all ranks said."""

    reports: list[Report]
    """In slice order."""
    stop: int
    """The largest."""
    collect: bool
    """Whether anyone wants it."""
    times: Sequence[Sequence[float]]
    """By rank; empty where the ranks that took part in the step are not those of its begin."""
    changes: bytes
    """The buffers that slice 0 changed."""


NO_TIMES = (0.0,) * (len(PHASES) + 1)
_TIMES_AT = 3
_SLICES_AT = _TIMES_AT + len(NO_TIMES)
_NOTHING = torch.empty(0, dtype=torch.float64)


class Exchange:
    """One small message per step and rank: its note, and each slice's loss, weight and statistics.

    It travels with the gradients where it can: a collective of its own would be a twentieth of a step of 12 ms. Where
    a rank takes the seats of others, which only gradients in shared memory have, it posts a message for each.
    """

    def __init__(
        self,
        axis: Axis,
        gradients: GradientSum | SharedGradients | ShardedSum,
        shares: Sequence[range],
        note: Note,
        buffers: StepBuffers,
        number: int,
        hashes: Sequence[float] = (),
        *,
        may_ride: bool = True,
    ) -> None:
        """`hashes` tell of this rank's copy of the weights, in steps where copies are compared; as many on each.

        Without `may_ride` the message is posted when gradients are under way already.
        """
        self._may_ride = may_ride
        self._axis, self._gradients, self.shares = axis, gradients, shares
        self._note, self._buffers, self._number = note, buffers, number
        self.moved = False
        self._alone = axis.size == len(shares) == 1
        self._reports: list[Report] = []
        slots, self._width = max(map(len, shares)), buffers.numel
        self._hashes = hashes
        self._first = _SLICES_AT + len(hashes)
        self._num_numbers = self._first + 2 * slots
        self.hashes: list[Sequence[float]] = []
        """Every rank's, after `finish`; none of a step that ranks were lost in."""
        self._length = self._num_numbers + slots * self._width
        self.posted = False

    def post(self, reports: Sequence[Report]) -> None:
        """What this rank's slices, or those of a seat that it took, say of themselves."""
        self.posted = True
        changes = self._buffers.first_changes()
        if self._alone:
            self._reports, self._changes = list(reports), changes
            return
        note = self._note
        numbers = [float(note.stop), float(len(changes)), float(note.collect), *note.times, *self._hashes]
        for report in reports:
            numbers += [report.total, report.weight]
        self._carried = self._may_ride and self._gradients.can_carry(8 * self._length)
        if self._carried and not self._width:
            self._gradients.carry(struct.pack(f"{len(numbers)}d", *numbers))
            return
        mine = torch.zeros(self._length, dtype=torch.float64)
        mine[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        for i, report in enumerate(reports if self._width else ()):
            self._statistics(mine, i).copy_(report.statistics)
        if self._carried:
            self._gradients.carry(mine.numpy().tobytes())
            return
        self._everyone = torch.empty(self._axis.size, len(mine), dtype=torch.float64)
        name = f"losses of step {self._number}"
        self._pending: Pending = self._axis.all_gather_start(self._everyone.view(-1), mine, name)

    def finish(self) -> Heard:
        if self._alone:
            return Heard(self._reports, self._note.stop, self._note.collect, (), self._changes)
        numbers = self._numbers()
        if self._hashes and not self.moved:
            self.hashes = [row[_SLICES_AT : self._first] for row in numbers]
        first = self._first
        reports = [
            Report(row[first + 2 * i], row[first + 2 * i + 1], self._statistics_of(rank, i))
            for rank, (row, share) in enumerate(zip(numbers, self.shares, strict=True))
            for i in range(len(share))
        ]
        changes = self._buffers.first_changes()
        if any(row[1] for row in numbers):
            sent = self._axis.all_gather_bytes(f"buffers of step {self._number}", changes)
            changes = next(data for data in sent if data)
        stop, collect = int(max(row[0] for row in numbers)), any(row[2] for row in numbers)
        times = () if self.moved else [row[_TIMES_AT:_SLICES_AT] for row in numbers]
        return Heard(reports, stop, collect, times, changes)

    def move(self, axis: Axis) -> None:
        """Some ranks of the step are lost: the others finish it."""
        self._axis, self.moved = axis, True

    def is_whole(self, seat: int) -> bool:
        """Whether all that a lost rank's seat has to say is in its message: changed buffers themselves are not."""
        return not self._layout.unpack_from(self._gradients.carried()[seat])[1]

    @property
    def _layout(self) -> struct.Struct:
        return struct.Struct(f"{self._num_numbers}d")

    def _numbers(self) -> list[Sequence[float]]:
        """Each rank's message, after the gradients' own end."""
        if self._carried:
            messages = self._gradients.carried()
            if self._width:
                whole = bytearray(b"".join(message[: 8 * self._length] for message in messages))
                self._everyone = torch.frombuffer(whole, dtype=torch.float64).view(len(messages), -1)
            return [self._layout.unpack_from(message) for message in messages]
        self._pending.wait()
        numbers: list[Sequence[float]] = self._everyone[:, : self._num_numbers].tolist()
        return numbers

    def _statistics_of(self, rank: int, i: int) -> Tensor:
        return self._statistics(self._everyone[rank], i) if self._width else _NOTHING

    def _statistics(self, message: Tensor, i: int) -> Tensor:
        start = self._num_numbers + i * self._width
        return message[start : start + self._width]
