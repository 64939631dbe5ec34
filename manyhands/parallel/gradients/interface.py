"""The interface of gradient sums to strategies and backends, for any group of ranks and any transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from manyhands.comm.host_memory import Segment
from manyhands.comm.peer_waits import Waiting

__all__ = ["Residuals", "Sum"]


class Residuals(Protocol):
    """Rounding errors of a codec so far, by parameter: they are added to what is sent next (error feedback)."""

    @property
    def params(self) -> Sequence[nn.Parameter]: ...
    @property
    def settled_order(self) -> list[int] | None:
        """The final order of the buckets: with it, another object rounds as this one does."""

    def residuals(self) -> dict[int, Tensor]:
        """This rank's residuals, by the parameter's index in `params`; the next step changes them."""

    def gather_residuals(self) -> dict[int, Tensor]:
        """On rank 0 the residuals by parameter, a row per rank or host; empty on the other ranks. A collective."""

    def restore(self, order: Sequence[int] | None, rows: Mapping[int, Tensor]) -> None:
        """Continue from saved values of `settled_order` and `gather_residuals`."""

    def succeed(self, before: Residuals) -> None:
        """Take over the residuals of `before` for the parameters that both have. A collective.

        If both have the same parameters, also take over its order.
        """

    def scale_residuals(self, factor: float) -> None:
        """Gradients are `factor` times as large from now on."""


class Sum(Protocol):
    """The gradient of the whole batch: every slice's gradients, summed along the slice tree, over all ranks.

    One object lives as long as the model. Per step: `begin`, then for each of this rank's slices `before_backward` and
    `after_backward`, then `finish`. The caller applies slice weights: gradients are summed as backward leaves them.
    """

    params: list[nn.Parameter]
    bytes_sent: int
    """By this rank, in the last step."""

    @property
    def coded(self) -> Residuals | None:
        """The residuals, where gradients are sent through a codec."""
        return None

    @property
    def segments(self) -> Sequence[Segment]:
        """Memory that ranks share."""
        return ()

    @property
    def waits(self) -> list[Waiting]:
        """Counters of the time spent waiting for other ranks."""
        ...

    def begin(self, count: int, shares: Sequence[range], name: str) -> None:
        """Start a step of `count` slices, of which rank r computes `shares[r]`."""

    def before_backward(self, v: int) -> None:
        """Backward of slice `v` comes next; slices come in ascending order."""

    def after_backward(self, v: int) -> None: ...

    def finish(self) -> None:
        """Wait for all ranks' gradients."""

    def can_carry(self, num_bytes: int) -> bool:
        """Whether every rank's message of at most so many bytes can be sent with this step's gradients."""
        ...

    def carry(self, message: bytes) -> None:
        """Send a message with the gradients; call it before backward of the rank's last slice."""

    def carried(self) -> list[bytes]:
        """Every rank's message, followed by zeros; after `finish`."""
        ...

    def leave(self) -> None:
        """Detach from the parameters."""

    def close(self) -> None:
        """Detach from the parameters, and free memory that ranks share."""
        self.leave()
