"""The weights that workers agree on while each trains its own: how they follow, fragment by fragment.

Every rank has the same agreed weights, and moves them by the same rule. What travels is how far each rank's own weights
are from them. Start reading at `AgreedWeights.begin` and `.apply`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from manyhands.comm.axis import Axis
from manyhands.comm.codecs import Codec
from manyhands.parallel.averaging.averaging_rules import (
    OUTER_LR,
    OUTER_MOMENTUM,
    Rule,
    combine,
    elastic_center,
    mean,
    mix,
    nesterov,
)
from manyhands.parallel.averaging.combine_ranks import Combination, exchange_in_pair

__all__ = ["AgreedWeights", "OuterStep", "mean_of_ranks_"]


class OuterStep(msgspec.Struct, frozen=True, kw_only=True):
    """How agreed weights move, once it is known how far the workers are from them."""

    kind: Literal["mean", "nesterov", "elastic"] = "mean"
    rule: Rule = "mean"
    trim: float = 0.2
    lr: float = OUTER_LR
    momentum: float = OUTER_MOMENTUM
    pull: float = 0.9
    """EASGD's beta: how far the center goes, of the way to the workers' mean; each worker goes beta / workers of the
    way to the center."""
    own_share: float = 0.0
    """How much of its own weights a worker keeps when agreed ones arrive."""


class AgreedWeights:
    """Of `params`, in `fragments` of their places. Whatever is under way belongs to one group of ranks."""

    def __init__(
        self, params: Sequence[Tensor], fragments: Sequence[Sequence[int]], how: OuterStep, codec: Codec | None
    ) -> None:
        self._params = [[params[place].detach() for place in places] for places in fragments]
        self._how, self._codec = how, codec
        self._agreed = [flat(members) for members in self._params]
        self._velocity = [torch.zeros_like(one) for one in self._agreed] if how.kind == "nesterov" else []
        self._under_way: dict[int, Combination] = {}
        self._arrived: dict[int, Tensor] = {}
        self.bytes_sent = 0

    @property
    def under_way(self) -> list[int]:
        """Fragments that were begun and not applied."""
        return [*self._under_way, *self._arrived]

    def begin(self, fragment: int, axis: Axis, weights: Sequence[float], name: str) -> None:
        """Send out how far this rank is from the agreed weights of a fragment. For all ranks, in the same order."""
        rule = partial(combine, rule=self._how.rule, weights=weights, trim=self._how.trim)
        row = self._agreed[fragment] - flat(self._params[fragment])
        self._under_way[fragment] = one = Combination(row, axis, rule, self._codec, f"{name}, fragment {fragment}")
        one.begin()
        self.bytes_sent += one.bytes_sent

    def advance(self, fragment: int) -> None:
        if fragment in self._under_way:
            self._under_way[fragment].advance()

    def receive(self) -> None:
        """Wait for all that is under way, and apply none of it yet."""
        for fragment in list(self._under_way):
            self._arrived[fragment] = self._under_way.pop(fragment).finish()

    def apply(self, fragment: int, num_workers: int, *, wholly: bool = False) -> None:
        """Move the agreed weights, and this rank's own as the rule says; `wholly`: to the agreed ones."""
        if fragment in self._under_way:
            self._arrived[fragment] = self._under_way.pop(fragment).finish()
        delta, before, how = self._arrived.pop(fragment), self._agreed[fragment], self._how
        match how.kind:
            case "mean":
                after = before - delta
            case "nesterov":
                after, self._velocity[fragment] = nesterov(
                    before, delta, self._velocity[fragment], lr=how.lr, momentum=how.momentum
                )
            case "elastic":
                after = elastic_center(before, delta, how.pull / num_workers, num_workers)
        self._agreed[fragment] = after
        own = flat(self._params[fragment])
        if wholly:
            own = after
        elif how.kind == "elastic":
            own = mix(own, before, 1.0 - how.pull / num_workers)
        else:
            own = mix(own, after, how.own_share) if how.own_share else after
        unflatten_(own, self._params[fragment])

    def meet(self, axis: Axis, partner: int | None, name: str) -> None:
        """Average this rank's own weights with its partner's; the agreed ones stay where they are."""
        for fragment, params in enumerate(self._params):
            own = flat(params)
            other = exchange_in_pair(own, axis, partner, f"{name}, fragment {fragment}")
            unflatten_(mean(torch.stack([own, other])), params)
            self.bytes_sent += own.numel() * own.element_size() if partner is not None else 0

    def drop(self) -> None:
        """Forget what is under way: the ranks that it is of are another group's now."""
        self._under_way, self._arrived = {}, {}

    def accept(self) -> None:
        """This rank's weights, which are the same on every rank, are the agreed ones now."""
        self.drop()
        self._agreed = [flat(params) for params in self._params]
        self._velocity = [torch.zeros_like(one) for one in self._velocity]

    def state(self) -> dict[str, Any]:
        assert not self._under_way, "receive comes first"
        arrived = {str(fragment): row for fragment, row in self._arrived.items()}
        return {"agreed": self._agreed, "velocity": self._velocity, "arrived": arrived}

    def restore(self, state: dict[str, Any]) -> None:
        self.drop()
        self._agreed = [one.clone() for one in state["agreed"]]
        self._velocity = [one.clone() for one in state["velocity"]]
        self._arrived = {int(fragment): row.clone() for fragment, row in state["arrived"].items()}


def mean_of_ranks_(tensors: Sequence[Tensor], axis: Axis, name: str) -> None:
    """Every floating tensor becomes the mean over the ranks; any other, rank 0's."""
    numbers = [one for one in tensors if one.is_floating_point()]
    if numbers:
        combination = Combination(flat(numbers), axis, mean, None, name)
        combination.begin()
        unflatten_(combination.finish(), numbers)
    axis.broadcast_([one for one in tensors if not one.is_floating_point()], name)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """One row of them all, as fp32; fp64 where one of them is."""
    wide = any(one.dtype == torch.float64 for one in tensors)
    dtype, device = torch.float64 if wide else torch.float32, tensors[0].device if tensors else None
    rows = [one.detach().reshape(-1).to(dtype) for one in tensors]
    return torch.cat(rows) if rows else torch.empty(0, dtype=dtype, device=device)


def unflatten_(row: Tensor, tensors: Sequence[Tensor]) -> None:
    start = 0
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(row[start : start + tensor.numel()].view_as(tensor))
            start += tensor.numel()
