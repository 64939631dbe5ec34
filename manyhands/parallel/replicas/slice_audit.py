"""Two ranks compute one slice of every step: whether their gradients are the same, and which rank is wrong if not.

Ranks do not send gradients but summaries of them: with `exact` a digest per parameter, which detects a single bit; else
a few sums per parameter, compared within a tolerance. The slice, its owner and the rank that computes it again are
functions of (seed, step), so all ranks know them. Start reading at `Audit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from torch import Tensor, nn

from manyhands.comm.axis import Axis
from manyhands.parallel.replicas.divergence import Appointment, WrongGradient, appoint, wrong_one
from manyhands.parallel.replicas.fingerprint import digest

__all__ = ["HALF_TOLERANCE", "TOLERANCE", "Audit"]

TOLERANCE = 1e-3
"""How much sums of a gradient may differ without `exact`, as a fraction of the norm of the whole gradient."""
HALF_TOLERANCE = 5e-2
"""The same if forward and backward compute in half precision."""
_SUMS = 3

GradientSummary = list[list[float]] | list[int]
"""A digest, or a few sums, of the gradient of each parameter."""


class Audit:
    """Per step `begin`; `watching` around the owner's backward of the slice; then all ranks call `compare`."""

    def __init__(self, seed: int, tolerance: float) -> None:
        """A `tolerance` of 0 means bit for bit."""
        self._seed, self._tolerance = seed, tolerance
        self.appointment: Appointment | None = None
        """That of the current step; None: no slice of it is compared."""

    def begin(self, step: int, shares: Sequence[range]) -> None:
        self.appointment = appoint(self._seed, step, shares) if len(shares) > 1 else None
        self._summary: GradientSummary = []

    def cancel(self) -> None:
        """Do not compare in this step: ranks were lost in it."""
        self.appointment = None

    def is_mine(self, place: int, rank: int) -> bool:
        appointment = self.appointment
        return appointment is not None and (appointment.place, appointment.owner) == (place, rank)

    @contextmanager
    def watching(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        """Summarise the gradients of a backward pass as autograd computes them, before they are accumulated."""
        summary: dict[int, list[float] | int] = {}

        def watch(index: int) -> Callable[[Tensor], None]:
            def arrived(grad: Tensor) -> None:
                dense = grad.to_dense() if grad.is_sparse else grad
                summary[index] = _sums(dense) if self._tolerance else digest(dense)

            return arrived

        hooks = [param.register_hook(watch(index)) for index, param in enumerate(params)]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        nothing: list[float] | int = [0.0] * (1 + _SUMS) if self._tolerance else 0
        self._summary = [summary.get(index, nothing) for index in range(len(params))]  # type: ignore[assignment]

    def compare(self, axis: Axis, again: Callable[[], None]) -> None:
        """Raise `WrongGradient` on every rank unless owner and auditor agree.

        `again` computes the slice again, inside `watching`.
        """
        appointment = self.appointment
        if appointment is None:
            return
        owner, auditor, third = appointment.owner, appointment.auditor, appointment.third
        if axis.rank == auditor:
            again()
        first = self._gather(axis, (owner, auditor))
        if self._alike(first[owner], first[auditor]):
            return
        asked = (owner, auditor) if third is None else (third,)
        if axis.rank in asked:
            again()
        second = self._gather(axis, asked)
        if third is None:
            wrong = wrong_one((self._alike(first[owner], second[owner]), self._alike(first[auditor], second[auditor])))
            raise WrongGradient(appointment, asked[wrong] if wrong is not None else None)
        with_owner, with_auditor = (self._alike(second[third], first[rank]) for rank in (owner, auditor))
        if with_owner == with_auditor:
            raise WrongGradient(appointment, None)
        raise WrongGradient(appointment, auditor if with_owner else owner)

    def _gather(self, axis: Axis, senders: Sequence[int]) -> list[GradientSummary]:
        mine = msgspec.msgpack.encode(self._summary) if axis.rank in senders else b""
        assert self.appointment is not None
        gathered = axis.all_gather_bytes(f"audit of step {self.appointment.step}", mine)
        return [msgspec.msgpack.decode(data) if data else [] for data in gathered]

    def _alike(self, left: GradientSummary, right: GradientSummary) -> bool:
        if not self._tolerance:
            return left == right
        rows = list(zip(left, right, strict=True))
        length = math.sqrt(sum(max(one[0], other[0]) for one, other in rows))  # type: ignore[index]
        limit = self._tolerance * length
        pairs = [pair for one, other in rows for pair in zip(one[1:], other[1:], strict=True)]  # type: ignore[index]
        lengths = [(math.sqrt(one[0]), math.sqrt(other[0])) for one, other in rows]  # type: ignore[index]
        return all(a == b or abs(a - b) <= limit or (a != a and b != b) for a, b in [*pairs, *lengths])


def _sums(grad: Tensor) -> list[float]:
    """The square of its norm, and three sums of every third value: a wrong value changes one of them."""
    values = grad.detach().double().reshape(-1)
    return [float(values.square().sum()), *(float(values[start::_SUMS].sum()) for start in range(_SUMS))]
