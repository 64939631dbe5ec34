"""One slice of every step, computed by two ranks: whether their gradients are the same, and who is wrong if not.

What ranks send each other is not gradients but what is needed to compare them: with `exact` a digest of each
parameter's, so that one bit is seen; else a few sums of each, compared to a tolerance. Whose slice it is and who
computes it again are functions of (seed, step), so all ranks know. Start reading at `Audit`.
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
"""How far sums of a gradient may be apart without `exact`, as a part of the length of the whole gradient."""
HALF_TOLERANCE = 5e-2
"""The same where forward and backward compute with half the bits."""
_SUMS = 3

Account = list[list[float]] | list[int]
"""What a rank says of a gradient, parameter by parameter."""


class Audit:
    """Per step `begin`; `watching` around the owner's backward of the slice; then `compare`, by all ranks."""

    def __init__(self, seed: int, tolerance: float) -> None:
        """A `tolerance` of 0 means bit for bit."""
        self._seed, self._tolerance = seed, tolerance
        self.appointment: Appointment | None = None
        """Of the step under way; None: nothing is compared in it."""

    def begin(self, step: int, shares: Sequence[range]) -> None:
        self.appointment = appoint(self._seed, step, shares) if len(shares) > 1 else None
        self._account: Account = []

    def cancel(self) -> None:
        """Ranks were lost in the step."""
        self.appointment = None

    def is_mine(self, place: int, rank: int) -> bool:
        found = self.appointment
        return found is not None and (found.place, found.owner) == (place, rank)

    @contextmanager
    def watching(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        """Take account of the gradients that backward makes, as they come and before anybody adds to them."""
        account: dict[int, list[float] | int] = {}

        def watch(index: int) -> Callable[[Tensor], None]:
            def arrived(grad: Tensor) -> None:
                dense = grad.to_dense() if grad.is_sparse else grad
                account[index] = _sums(dense) if self._tolerance else digest(dense)

            return arrived

        hooks = [param.register_hook(watch(index)) for index, param in enumerate(params)]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        nothing: list[float] | int = [0.0] * (1 + _SUMS) if self._tolerance else 0
        self._account = [account.get(index, nothing) for index in range(len(params))]  # type: ignore[assignment]

    def compare(self, axis: Axis, again: Callable[[], None]) -> None:
        """`WrongGradient` on every rank, unless owner and auditor agree. `again` computes the slice, watched."""
        found = self.appointment
        if found is None:
            return
        owner, auditor, third = found.owner, found.auditor, found.third
        if axis.rank == auditor:
            again()
        first = self._tell(axis, (owner, auditor))
        if self._alike(first[owner], first[auditor]):
            return
        asked = (owner, auditor) if third is None else (third,)
        if axis.rank in asked:
            again()
        second = self._tell(axis, asked)
        if third is None:
            wrong = wrong_one((self._alike(first[owner], second[owner]), self._alike(first[auditor], second[auditor])))
            raise WrongGradient(found, asked[wrong] if wrong is not None else None)
        with_owner, with_auditor = (self._alike(second[third], first[rank]) for rank in (owner, auditor))
        if with_owner == with_auditor:
            raise WrongGradient(found, None)
        raise WrongGradient(found, auditor if with_owner else owner)

    def _tell(self, axis: Axis, who: Sequence[int]) -> list[Account]:
        mine = msgspec.msgpack.encode(self._account) if axis.rank in who else b""
        assert self.appointment is not None
        told = axis.all_gather_bytes(f"audit of step {self.appointment.step}", mine)
        return [msgspec.msgpack.decode(data) if data else [] for data in told]

    def _alike(self, left: Account, right: Account) -> bool:
        if not self._tolerance:
            return left == right
        rows = list(zip(left, right, strict=True))
        length = math.sqrt(sum(max(one[0], other[0]) for one, other in rows))  # type: ignore[index]
        limit = self._tolerance * length
        pairs = [pair for one, other in rows for pair in zip(one[1:], other[1:], strict=True)]  # type: ignore[index]
        lengths = [(math.sqrt(one[0]), math.sqrt(other[0])) for one, other in rows]  # type: ignore[index]
        return all(a == b or abs(a - b) <= limit or (a != a and b != b) for a, b in [*pairs, *lengths])


def _sums(grad: Tensor) -> list[float]:
    """The square of its length, and sums of every third value: one that is wrong shows in one of them."""
    values = grad.detach().double().reshape(-1)
    return [float(values.square().sum()), *(float(values[start::_SUMS].sum()) for start in range(_SUMS))]
