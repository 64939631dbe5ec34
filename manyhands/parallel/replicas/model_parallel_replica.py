"""One replica of a model over several ranks: what each of them has of it, and what they agree on in every step.

The ranks of a replica are mates. Together they compute every slice of the replica: each its part of all layers
(tensor), all parts of its layers (pipeline), or both. Gradients are summed between ranks that have the same part, which
is the engine's business; here is what mates have to tell each other. Start reading at `Spread`.
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
from manyhands.parallel.gradients.custom_reduction import Reduction
from manyhands.parallel.gradients.gradient_norm import blocks_of, norm_of, squares_of
from manyhands.parallel.model.per_part_optimizers import SeveralOptimizers
from manyhands.parallel.model.tensor_shard import Share
from manyhands.parallel.replicas.step_exchange import Heard, Report

__all__ = ["Divided", "Division", "Passes", "Spread", "Tie"]


class Passes(Protocol):
    """Runs slices forward and backward where this rank has some layers only; `pipeline.stage_runner` does it."""

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""

    def run(self, pieces: Sequence[Any], slices: Any, name: str) -> None:
        """Every slice of the replica through this rank's stages; `slices` is told of each (`pipeline_slices`)."""

    @property
    def computed(self) -> Mapping[str, float]:
        """Seconds of the last run by phase; the rest of it was waiting for other stages."""


@dataclass(frozen=True)
class Tie:
    """A parameter that several stages have: `line` are the ranks with a copy, `first` counts it in norms."""

    param: nn.Parameter
    line: Axis


@dataclass(frozen=True)
class Divided:
    """What this rank has of a model."""

    local: nn.Module
    """Its parameters and buffers are the ones that are here."""
    stand_in: Any
    """What the user's loss and metrics are called with."""
    shares: Mapping[str, Share] = field(default_factory=dict)
    """Of tensors that are here in part, by their names in the user's model."""
    present: frozenset[str] | None = None
    """The names of what is here; None: everything is, in part or in full."""
    counted: frozenset[int] = frozenset()
    """Parameters, by id, whose gradients this rank adds to the global norm: every value counts once among mates."""
    ties: Sequence[Tie] = ()
    passes: Passes | None = None
    costs: tuple[float, ...] = ()
    """Of the model's blocks, by which it was cut into stages."""

    def again(self, model: nn.Module, shares: Mapping[int, Share]) -> Divided:
        """Once more: of what is here of the user's model, these parts by parameter's id."""
        every_name = model.named_parameters(remove_duplicate=False)
        named, outer = [(name, shares[id(one)]) for name, one in every_name if id(one) in shares], self.shares
        parts = {name: share.within(outer[name]) if name in outer else share for name, share in named}
        return replace(self, shares={**outer, **parts})


class Division(msgspec.Struct, frozen=True):
    """What a rank has to know that joins others, who have divided the model already."""

    costs: list[float]
    knowing: int
    """Which of the mates computes the loss."""


class Spread:
    """`world` gives all ranks, `mates` those of this replica, in the order of their places."""

    def __init__(
        self,
        world: Callable[[], Axis],
        mates: Callable[[], Axis],
        divide_: Callable[[nn.Module, Sequence[float] | None], Divided],
        reduction: Reduction | None = None,
    ) -> None:
        """`reduction` is the user's own way to put slices' gradients together."""
        self._world, self._find_mates, self._divide, self.reduction = world, mates, divide_, reduction
        self.mates: Axis
        self.divided: Divided
        self._knowing = 0

    @property
    def is_divided(self) -> bool:
        return hasattr(self, "divided")

    @property
    def division(self) -> Division:
        return Division(list(self.divided.costs), self._knowing)

    def divide_(self, model: nn.Module, optimizer: Optimizer, known: Division | None = None) -> Divided:
        """Have every rank begin with rank 0's weights, and keep its part of them; the optimizer keeps the same part.

        With `known` the others have done so before, and only this rank has its part yet to take.
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
        knows = self.divided.passes is None or self.divided.passes.is_last
        self._knowing = self.mates.all_gather_bytes("who computes the loss", b"1" if knows else b"0").index(b"1")
        return self.divided

    def _cut_states(self, optimizer: Optimizer, names: Mapping[Tensor, str]) -> None:
        """Some optimizers have states before their first step; `names` are those of parameters that are here."""
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
            mine = torch.zeros_like(param) if param.grad is None else param.grad.contiguous()
            everyone = mine.new_empty(line.size, *mine.shape)
            line.all_gather_start(everyone.view(-1), mine.view(-1), "gradients of tied weights").wait()
            param.grad = everyone.sum(0)

    def norm(self, params: Sequence[nn.Parameter], parts: Axis | None = None) -> float:
        """Of the whole gradient, the same on all mates; ranks along `parts` have a part of each of these."""
        grads = [param.grad for param in params if param.grad is not None and id(param) in self.divided.counted]
        mine = squares_of(list(blocks_of(grads))).sum().view(1)
        everyone = _gathered(mine, self.mates)
        return norm_of(everyone if parts is None else _gathered(everyone, parts))

    def agree(self, heard: Heard) -> Heard:
        """What anyone wants, over all mates; what slices say is the same on each already."""
        mine = torch.tensor([float(heard.stop), float(heard.collect)], dtype=torch.float64)
        everyone = mine.new_empty(self.mates.size, len(mine))
        self.mates.all_gather_start(everyone.view(-1), mine, "what mates want").wait()
        stop, collect = everyone.amax(0).tolist()
        return heard._replace(stop=int(stop), collect=bool(collect))

    def told(self, reports: Sequence[Report]) -> list[Report]:
        """The slices' losses and weights, which only those who compute the loss know, beside this rank's statistics."""
        numbers = torch.tensor([[report.total, report.weight] for report in reports], dtype=torch.float64)
        if not reports:  # a short batch, of which this replica has nothing
            return []
        self.mates.broadcast_([numbers], "losses of the last stage", source=self._knowing)
        rows: list[list[float]] = numbers.tolist()
        return [Report(total, weight, mine.statistics) for (total, weight), mine in zip(rows, reports, strict=True)]


def _gathered(mine: Tensor, axis: Axis) -> Tensor:
    everyone = mine.new_empty(axis.size * len(mine))
    axis.all_gather_start(everyone, mine, "norm of the gradient").wait()
    return everyone


def _check_divisible(optimizer: Optimizer) -> None:
    """Refuse what updates a matrix by looking at all of it."""
    if isinstance(optimizer, Adafactor | Muon):
        raise SpecError(
            f"{type(optimizer).__name__} looks at whole matrices, and each worker has a part of them.",
            fix=["torch.optim.AdamW", "mh.Pipeline, whose workers have whole layers"],
        )
