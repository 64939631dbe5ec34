"""What ranks exchange besides gradients, once per step: every slice's loss, the ranks' requests and their times."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.comm.axis import Axis, Pending
from manyhands.parallel.gradients.interface import Sum
from manyhands.parallel.model.step_buffers import StepBuffers
from manyhands.parallel.replicas.phase_timer import PHASES

__all__ = ["NO_TIMES", "SliceReport", "StepExchange", "StepReplies", "StepRequest"]


class SliceReport(NamedTuple):
    """The sum of a slice's losses, their weight, and its update of the batch statistics."""

    total: float
    weight: float
    statistics: Tensor


class StepRequest(NamedTuple):
    """A rank's own requests and times."""

    stop: int
    collect: bool
    """Whether garbage should be collected after this step, by all ranks at once."""
    times: Sequence[float]
    """Of the step before: seconds of work in each of `PHASES`, and seconds of waiting; `NO_TIMES` if unknown."""


class StepReplies(NamedTuple):
    """The messages of all ranks, combined."""

    reports: list[SliceReport]
    """In slice order."""
    stop: int
    """The largest request."""
    collect: bool
    """Whether any rank requests it."""
    times: Sequence[Sequence[float]]
    """By rank; empty if ranks were lost during the step."""
    changes: bytes
    """The buffers that slice 0 changed."""


NO_TIMES = (0.0,) * (len(PHASES) + 1)
_TIMES_AT = 3
_SLICES_AT = _TIMES_AT + len(NO_TIMES)
_NOTHING = torch.empty(0, dtype=torch.float64)


class StepExchange:
    """One small message per step and rank: its request, and each slice's loss, weight and statistics.

    It is sent with the gradients if possible: a separate collective would take a twentieth of a step of 12 ms. A rank
    that takes over lost ranks' shares of the step, which only gradients in shared memory allow, posts one message for
    each share.
    """

    def __init__(
        self,
        axis: Axis,
        gradients: Sum,
        shares: Sequence[range],
        request: StepRequest,
        buffers: StepBuffers,
        number: int,
        hashes: Sequence[float] = (),
        *,
        may_ride: bool = True,
    ) -> None:
        """`hashes` are those of this rank's copy of the weights in steps that compare copies; as many on each rank.

        Pass `may_ride=False` if the message is posted after the gradients were sent.
        """
        self._may_attach = may_ride
        self._axis, self._gradients, self.shares = axis, gradients, shares
        self._request, self._buffers, self._number = request, buffers, number
        self.moved = False
        self._alone = axis.size == len(shares) == 1
        self._reports: list[SliceReport] = []
        slots, self._width = max(map(len, shares)), buffers.numel
        self._hashes = hashes
        self._first = _SLICES_AT + len(hashes)
        self._num_numbers = self._first + 2 * slots
        self.hashes: list[Sequence[float]] = []
        """Every rank's hashes, after `finish`; empty if ranks were lost in the step."""
        self._length = self._num_numbers + slots * self._width
        self.posted = False

    def post(self, reports: Sequence[SliceReport]) -> None:
        """Send the reports of this rank's slices, or of the slices of a share that it took over."""
        self.posted = True
        changes = self._buffers.first_changes()
        if self._alone:
            self._reports, self._changes = list(reports), changes
            return
        request = self._request
        numbers = [float(request.stop), float(len(changes)), float(request.collect), *request.times, *self._hashes]
        for report in reports:
            numbers += [report.total, report.weight]
        self._attached = self._may_attach and self._gradients.can_carry(8 * self._length)
        if self._attached and not self._width:
            self._gradients.carry(struct.pack(f"{len(numbers)}d", *numbers))
            return
        mine = torch.zeros(self._length, dtype=torch.float64)
        mine[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        for i, report in enumerate(reports if self._width else ()):
            self._statistics(mine, i).copy_(report.statistics)
        if self._attached:
            self._gradients.carry(mine.numpy().tobytes())
            return
        self._gathered = torch.empty(self._axis.size, len(mine), dtype=torch.float64)
        name = f"losses of step {self._number}"
        self._pending: Pending = self._axis.all_gather_start(self._gathered.view(-1), mine, name)

    def finish(self) -> StepReplies:
        if self._alone:
            return StepReplies(self._reports, self._request.stop, self._request.collect, (), self._changes)
        numbers = self._numbers()
        if self._hashes and not self.moved:
            self.hashes = [row[_SLICES_AT : self._first] for row in numbers]
        first = self._first
        reports = [
            SliceReport(row[first + 2 * i], row[first + 2 * i + 1], self._statistics_of(rank, i))
            for rank, (row, share) in enumerate(zip(numbers, self.shares, strict=True))
            for i in range(len(share))
        ]
        changes = self._buffers.first_changes()
        if any(row[1] for row in numbers):
            sent = self._axis.all_gather_bytes(f"buffers of step {self._number}", changes)
            changes = next(data for data in sent if data)
        stop, collect = int(max(row[0] for row in numbers)), any(row[2] for row in numbers)
        times = () if self.moved else [row[_TIMES_AT:_SLICES_AT] for row in numbers]
        return StepReplies(reports, stop, collect, times, changes)

    def move(self, axis: Axis) -> None:
        """Let the remaining ranks finish the step after some were lost."""
        self._axis, self.moved = axis, True

    def is_whole(self, share: int) -> bool:
        """Whether a lost rank's message has all that is needed of its share: changed buffers are not part of it."""
        return not self._layout.unpack_from(self._gradients.carried()[share])[1]

    @property
    def _layout(self) -> struct.Struct:
        return struct.Struct(f"{self._num_numbers}d")

    def _numbers(self) -> list[Sequence[float]]:
        """Each rank's message, once the gradients are summed."""
        if self._attached:
            messages = self._gradients.carried()
            if self._width:
                whole = bytearray(b"".join(message[: 8 * self._length] for message in messages))
                self._gathered = torch.frombuffer(whole, dtype=torch.float64).view(len(messages), -1)
            return [self._layout.unpack_from(message) for message in messages]
        self._pending.wait()
        numbers: list[Sequence[float]] = self._gathered[:, : self._num_numbers].tolist()
        return numbers

    def _statistics_of(self, rank: int, i: int) -> Tensor:
        return self._statistics(self._gathered[rank], i) if self._width else _NOTHING

    def _statistics(self, message: Tensor, i: int) -> Tensor:
        start = self._num_numbers + i * self._width
        return message[start : start + self._width]
