"""What ranks tell each other besides gradients, once per step: every slice's loss, and whether anyone wants to stop."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.comm.axis import Axis, Pending
from manyhands.parallel.buffers import StepBuffers
from manyhands.parallel.gradients import GradientSum
from manyhands.parallel.shared_gradients import SharedGradients

__all__ = ["Exchange", "Report"]


class Report(NamedTuple):
    """What a slice says of itself: the sum of its losses, their weight, and what it made of the batch statistics."""

    total: float
    weight: float
    statistics: Tensor


_NOTHING = torch.empty(0, dtype=torch.float64)


class Exchange:
    """One small message per step and rank: each slice's loss, weight and statistics; whether anyone wants to stop.

    It travels with the gradients where it can: a collective of its own would be a twentieth of a step of 12 ms. Where
    a rank takes the seats of others, which only gradients in shared memory have, it posts a message for each.
    """

    def __init__(
        self,
        axis: Axis,
        gradients: GradientSum | SharedGradients,
        shares: Sequence[range],
        stop: int,
        buffers: StepBuffers,
        number: int,
        note: Sequence[float] = (),
    ) -> None:
        """`note` is whatever else a rank has to say; in one step as many numbers on each."""
        self._axis, self._gradients, self.shares = axis, gradients, shares
        self._stop, self._buffers, self._number = stop, buffers, number
        self._alone = axis.size == len(shares) == 1
        self._reports: list[Report] = []
        slots, self._width = max(map(len, shares)), buffers.numel
        self._note, self._is_moved = note, False
        self._first = 2 + len(note)
        self._num_numbers = self._first + 2 * slots
        self.notes: list[Sequence[float]] = []
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
        numbers = [float(self._stop), float(len(changes)), *self._note]
        for report in reports:
            numbers += [report.total, report.weight]
        self._carried = self._gradients.can_carry(8 * self._length)
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

    def finish(self) -> tuple[list[Report], int, bytes]:
        """All slices' reports in slice order, the largest `stop`, and the buffers that slice 0 changed."""
        if self._alone:
            return self._reports, self._stop, self._changes
        numbers = self._numbers()
        if self._note and not self._is_moved:
            self.notes = [row[2 : self._first] for row in numbers]
        first = self._first
        reports = [
            Report(numbers[rank][first + 2 * i], numbers[rank][first + 1 + 2 * i], self._statistics_of(rank, i))
            for rank, share in enumerate(self.shares)
            for i in range(len(share))
        ]
        changes = self._buffers.first_changes()
        if any(row[1] for row in numbers):
            sent = self._axis.all_gather_bytes(f"buffers of step {self._number}", changes)
            changes = next(data for data in sent if data)
        return reports, int(max(row[0] for row in numbers)), changes

    def move(self, axis: Axis) -> None:
        """Some ranks of the step are lost: the others finish it."""
        self._axis, self._is_moved = axis, True

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
