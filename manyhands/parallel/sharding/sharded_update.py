"""Which models and optimizers can be sharded over ranks row by row, and the update of each rank's shard.

Used by both backends: `fsdp_backend`, which gathers block by block, and `gather_per_step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import ASGD, Adadelta, Adamax, NAdam, Optimizer, RAdam, Rprop

from manyhands.comm.axis import Axis
from manyhands.errors import SpecError
from manyhands.optim.ftrl import FTRL
from manyhands.parallel.gradients.gradient_norm import norm_blocks, norm_of, squares_of
from manyhands.parallel.model.per_part_optimizers import SeveralOptimizers
from manyhands.parallel.model.step_buffers import MAX_SHADOW_NUMEL
from manyhands.parallel.model.tensor_shard import TensorShard
from manyhands.parallel.weights.fused_update import has_fused
from manyhands.parallel.weights.local_update import LocalUpdate

__all__ = ["ShardedUpdate", "check_dividable", "cut_states_", "stays_whole"]

_ELEMENTWISE = {Adadelta, Adamax, ASGD, FTRL, NAdam, RAdam, Rprop}


def elementwise(optimizer: Optimizer) -> bool:
    """Whether an element's new value is known to depend on that element alone, so that shards of tensors suffice.

    As in `owner_updates.ownable`, this cannot be seen from outside. Adafactor, Muon and LBFGS need more.
    """
    if isinstance(optimizer, SeveralOptimizers):
        return all(elementwise(one) for one in optimizer.optimizers.values())
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    declared = getattr(optimizer, "divisible_by", "") == "elements"  # by one that wraps another library's
    return (has_fused(optimizer) or type(optimizer) in _ELEMENTWISE or declared) and not hooks


def check_dividable(model: nn.Module, optimizer: Optimizer) -> None:
    if not elementwise(optimizer):
        raise SpecError(
            f"{type(getattr(optimizer, 'keras', optimizer)).__name__} is not known to update each element "
            "independently, and each worker has only a shard of a parameter."
            + (f" {why}." if (why := getattr(optimizer, "why_whole", "")) else ""),
            fix=["torch.optim.AdamW, or another of torch's that does", 'strategy="mirrored"; of a mesh, sharded=False'],
        )
    for name, param in model.named_parameters():
        if param.ndim == 0 and param.requires_grad:
            raise SpecError(
                f"{name} is a single number, which cannot be sharded.",
                fix=["torch.nn.Parameter(torch.ones(1)), of one dim"],
            )


def stays_whole(param: nn.Parameter) -> bool:
    """Whether it is frozen and either small, as `StepBuffers` lets a forward pass change it, or without any dim."""
    return not param.requires_grad and (param.numel() <= MAX_SHADOW_NUMEL or param.ndim == 0)


def cut_states_(optimizer: Optimizer, shares: Mapping[int, TensorShard]) -> None:
    """Shard optimizer state that exists before the first step; `shares` are by the parameter's id."""
    for param, values in optimizer.state.items():
        share = shares.get(id(param))
        if share is not None:
            cut = [key for key, value in values.items() if isinstance(value, Tensor) and share.fits(value)]
            values |= {key: share.cut(values[key]) for key in cut}


class ShardedUpdate(LocalUpdate):
    """Every rank updates its shard, with an optimizer that has only this shard."""

    def __init__(self, params: Sequence[Tensor], optimizer: Optimizer, axis: Axis) -> None:
        super().__init__(params, optimizer)
        self._axis = axis

    def norm(self) -> float:
        """The norm over all ranks, the same on each."""
        mine = squares_of(list(norm_blocks(self._grads()))).sum().cpu()
        return norm_of(self._axis.all_gather(mine, "norm of gradients"))
