"""From summed gradients to new weights, on a rank that has a copy of all weights.

Each step calls `scale`, which multiplies the gradient by a number; then, if the norm is needed, `norm` and `clip`,
which multiplies again; then `apply`, the optimizer's step, unless the step is skipped. `fused_shared_weights` and
`owner_updates` have the same methods for weights that ranks share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from manyhands.comm.host_memory import Segment
from manyhands.parallel.gradients.gradient_norm import global_norm
from manyhands.parallel.weights.fused_update import Fused, fusible
from manyhands.torch_private import foreach_mul_

__all__ = ["LocalUpdate", "Update", "runs_fused"]


class Update(Protocol):
    @property
    def segments(self) -> Sequence[Segment]:
        """Memory that ranks share."""

    def scale(self, factor: float) -> None: ...
    def norm(self) -> float: ...
    def clip(self, factor: float) -> None: ...
    def apply(self) -> None: ...
    def release(self) -> None:
        """Give this rank its own weights and optimizer state, without waiting for the others."""

    def close(self) -> None:
        """The same, and give back what ranks share, once all of them are here."""


def runs_fused(optimizer: Optimizer) -> bool:
    """Whether a single rank runs the fused version; with any division of the work, all ranks must do the same."""
    return not fusible(optimizer, [param for group in optimizer.param_groups for param in group["params"]])


class LocalUpdate:
    """The whole optimizer runs on this rank, fused if possible. Gradients stay in `.grad`."""

    segments: Sequence[Segment] = ()

    def __init__(self, params: Sequence[Tensor], optimizer: Optimizer) -> None:
        """`params` are those that take gradients."""
        self._params, self._optimizer = params, optimizer
        self._fused = self._fuse()

    def _fuse(self) -> Fused | None:
        return Fused(self._optimizer) if runs_fused(self._optimizer) else None

    def scale(self, factor: float) -> None:
        grads = self._grads()
        if factor != 1.0 and grads:
            foreach_mul_(grads, factor)

    def norm(self) -> float:
        return global_norm(self._grads())

    clip = scale

    def apply(self) -> None:
        if self._fused is not None and not self._fused.is_current:
            self._fused.close()
            self._fused = self._fuse()
        self._optimizer.step() if self._fused is None else self._fused.apply()

    def release(self) -> None:
        if self._fused is not None:
            self._fused.close()

    close = release

    def _grads(self) -> list[Tensor]:
        return [param.grad for param in self._params if param.grad is not None]
