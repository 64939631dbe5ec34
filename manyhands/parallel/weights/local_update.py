"""From the sum of gradients to new weights, on every rank's own copy of them.

Once per step `scale` comes first, which multiplies the gradient by a number; then, if asked for, `norm` and `clip`,
which multiplies once more; then `apply`, the optimizer's step, unless the step is skipped. `fused_shared_weights` and
`owner_updates` have the same verbs for weights that ranks share.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from manyhands.parallel.gradients.gradient_norm import global_norm
from manyhands.parallel.gradients.network_sum import GradientSum
from manyhands.parallel.gradients.reduce_scatter_sum import ShardedSum
from manyhands.parallel.gradients.shared_memory_sum import SharedGradients
from manyhands.parallel.weights.fused_update import Fused, fusible
from manyhands.torch_private import foreach_mul_

__all__ = ["LocalUpdate", "Update", "runs_fused"]


class Update(Protocol):
    def scale(self, factor: float) -> None: ...
    def norm(self) -> float: ...
    def clip(self, factor: float) -> None: ...
    def apply(self) -> None: ...
    def close(self) -> None: ...


def runs_fused(optimizer: Optimizer) -> bool:
    """Whether a rank by itself runs the fused version; however the work is divided, all must do as one does."""
    return not fusible(optimizer, [param for group in optimizer.param_groups for param in group["params"]])


class LocalUpdate:
    """The optimizer runs in full on this rank, fused where it can be. Gradients are in `.grad` all the time."""

    def __init__(self, gradients: GradientSum | SharedGradients | ShardedSum, optimizer: Optimizer) -> None:
        self._gradients, self._optimizer = gradients, optimizer
        self._fused = self._fuse()

    def _fuse(self) -> Fused | None:
        return Fused(self._optimizer) if runs_fused(self._optimizer) else None

    def move(self, gradients: GradientSum | SharedGradients) -> None:
        """From now on gradients come from here."""
        self._gradients = gradients

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

    def close(self) -> None:
        if self._fused is not None:
            self._fused.close()

    def _grads(self) -> list[Tensor]:
        return [param.grad for param in self._gradients.params if param.grad is not None]
