"""One replica of a model over several ranks: which part each rank has, and what they exchange in every step.

`mates` are the ranks of the same replica. Together they compute every slice of the replica: each computes its shard of
all layers (tensor parallel), all of some layers (pipeline), or both. The engine sums gradients between ranks that have
the same part; this module has the exchanges within the replica. Start reading at `ModelParallelReplica`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Adafactor, Muon, Optimizer

from manyhands.comm.axis import Axis
from manyhands.errors import SpecError
from manyhands.parallel.gradients.gradient_norm import norm_blocks, norm_of, squares_of
from manyhands.parallel.model.per_part_optimizers import SeveralOptimizers
from manyhands.parallel.model.tensor_shard import TensorShard
from manyhands.parallel.replicas.step_exchange import SliceReport, StepReplies

__all__ = ["ModelParallelReplica", "PartitionSpec", "ReplicaPart", "StagePasses", "Tie"]


class StagePasses(Protocol):
    """Runs slices forward and backward if this rank has only some layers (`parallel.pipeline.stage_runner`)."""

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""

    def run(self, pieces: Sequence[Any], slices: Any, name: str) -> None:
        """Run every slice of the replica through this rank's stages; `slices` has callbacks (`pipeline_slices`)."""

    @property
    def computed(self) -> Mapping[str, float]:
        """Seconds of the last run by phase; the rest of the run was waiting for other stages."""


@dataclass(frozen=True)
class Tie:
    """A parameter that several stages have: `line` are the ranks with a copy."""

    param: nn.Parameter
    line: Axis


@dataclass(frozen=True)
class ReplicaPart:
    """The part of a model that this rank has."""

    local: nn.Module
    """The module whose parameters and buffers this rank has."""
    proxy: Any
    """The object that the user's loss and metrics get as the model."""
    shares: Mapping[str, TensorShard] = field(default_factory=dict)
    """The shards of tensors that this rank has in part, by their names in the user's model."""
    present: frozenset[str] | None = None
    """The names of the tensors that this rank has; None: all of them, in part or in full."""
    counted: frozenset[int] = frozenset()
    """Ids of parameters whose gradients this rank adds to the global norm: each value counts once per replica."""
    ties: Sequence[Tie] = ()
    passes: StagePasses | None = None
    costs: tuple[float, ...] = ()
    """The costs of the model's blocks by which it was cut into stages."""

    def again(self, model: nn.Module, shares: Mapping[int, TensorShard]) -> ReplicaPart:
        """The same part, sharded further: `shares` are shards of what this rank has, by the parameter's id."""
        every_name = model.named_parameters(remove_duplicate=False)
        named, outer = [(name, shares[id(one)]) for name, one in every_name if id(one) in shares], self.shares
        parts = {name: share.within(outer[name]) if name in outer else share for name, share in named}
        return replace(self, shares={**outer, **parts})


class PartitionSpec(msgspec.Struct, frozen=True):
    """What a rank needs to know when it joins ranks that have partitioned the model already."""

    costs: list[float]
    knowing: int
    """Which rank of the replica computes the loss."""


class ModelParallelReplica:
    """`world` returns the axis of all ranks, `mates` that of this replica's ranks, in grid order."""

    def __init__(
        self,
        world: Callable[[], Axis],
        mates: Callable[[], Axis],
        divide_: Callable[[nn.Module, Sequence[float] | None], ReplicaPart],
    ) -> None:
        self._world, self._find_mates, self._divide = world, mates, divide_
        self.mates: Axis
        self.divided: ReplicaPart
        self._knowing = 0

    @property
    def is_divided(self) -> bool:
        return hasattr(self, "divided")

    @property
    def division(self) -> PartitionSpec:
        return PartitionSpec(list(self.divided.costs), self._knowing)

    def divide_(self, model: nn.Module, optimizer: Optimizer, known: PartitionSpec | None = None) -> ReplicaPart:
        """Give every rank its part of rank 0's weights; the optimizer keeps the same part.

        With `known`, the other ranks have done so before, and only this rank still has to take its part.
        """
        self.mates = self._find_mates()
        if known is None:
            self._world().broadcast_([*model.parameters(), *model.buffers()], "weights of rank 0")
        names = {id(param): name for name, param in model.named_parameters()}
        self.divided = self._divide(model, known.costs if known is not None else None)
        here = {id(param) for param in self.divided.local.parameters()}
        for one in optimizer.optimizers.values() if isinstance(optimizer, SeveralOptimizers) else [optimizer]:
            if self.divided.shares:
                _check_divisible(one)
            for group in one.param_groups:
                group["params"] = [param for param in group["params"] if id(param) in here]
            self._cut_states(one, {param: names[id(param)] for param in one.state if id(param) in here})
        if known is not None:
            self._knowing = known.knowing
            return self.divided
        has_loss = self.divided.passes is None or self.divided.passes.is_last
        self._knowing = self.mates.all_gather_bytes("rank of the loss", b"1" if has_loss else b"0").index(b"1")
        return self.divided

    def _cut_states(self, optimizer: Optimizer, names: Mapping[Tensor, str]) -> None:
        """Shard optimizer state that exists before the first step; `names` are those of this rank's parameters."""
        for param in [*optimizer.state]:
            share = self.divided.shares.get(names.get(param, ""))
            if param not in names:
                del optimizer.state[param]
            elif share is not None:
                values = optimizer.state[param]
                fitting = {key: one for key, one in values.items() if isinstance(one, Tensor) and share.fits(one)}
                values |= {key: share.cut(one) for key, one in fitting.items()}

    def settle(self) -> None:
        """Sum the gradients of parameters that several stages have, in the order of the stages."""
        for tie in self.divided.ties:
            param, line = tie.param, tie.line
            mine = torch.zeros_like(param) if param.grad is None else param.grad
            param.grad = line.all_gather(mine, "gradients of tied weights").sum(0)

    def norm(self, params: Sequence[nn.Parameter], parts: Axis | None = None) -> float:
        """The norm of the whole gradient, the same on all ranks of the replica.

        With `parts`, each rank along that axis has a part of each gradient.
        """
        grads = [param.grad for param in params if param.grad is not None and id(param) in self.divided.counted]
        squares = squares_of(list(norm_blocks(grads))).sum()
        for axis in [self.mates] if parts is None else [self.mates, parts]:
            squares = axis.all_gather(squares, "norm of the gradient").view(-1)
        return norm_of(squares)

    def agree(self, replies: StepReplies) -> StepReplies:
        """Combine the requests of all ranks of the replica; the slices' reports are the same on each already."""
        mine = torch.tensor([float(replies.stop), float(replies.collect)], dtype=torch.float64)
        stop, collect = self.mates.all_gather(mine, "requests within the replica").amax(0).tolist()
        return replies._replace(stop=int(stop), collect=bool(collect))

    def told(self, reports: Sequence[SliceReport]) -> list[SliceReport]:
        """Add the slices' losses and weights, which only the last stage's ranks know, to this rank's statistics."""
        numbers = torch.tensor([[report.total, report.weight] for report in reports], dtype=torch.float64)
        if not reports:  # a short batch: this replica has no slice of it
            return []
        self.mates.broadcast_([numbers], "losses of the last stage", source=self._knowing)
        rows: list[list[float]] = numbers.tolist()
        return [
            SliceReport(total, weight, mine.statistics) for (total, weight), mine in zip(rows, reports, strict=True)
        ]


def _check_divisible(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose update of a matrix depends on the whole matrix."""
    if isinstance(optimizer, Adafactor | Muon):
        raise SpecError(
            f"{type(optimizer).__name__} needs whole matrices for its update, and each worker has a shard of them.",
            fix=["torch.optim.AdamW", "mh.PipelineParallel, whose workers have whole layers"],
        )
