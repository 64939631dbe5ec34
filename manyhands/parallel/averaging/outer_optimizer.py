"""The agreed (outer) weights of local SGD, and how they follow the workers' local weights, fragment by fragment.

Every rank has the same agreed weights and moves them by the same rule. Each rank sends the difference between the
agreed weights and its own. Start reading at `AgreedWeights.begin` and `.apply`.
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
from manyhands.parallel.averaging.averaging_rules import Rule, combine, elastic_center, mean, mix, nesterov
from manyhands.parallel.averaging.combine_ranks import Combination, exchange_in_pair

__all__ = ["AgreedWeights", "OuterStep", "mean_of_ranks_"]


class OuterStep(msgspec.Struct, frozen=True, kw_only=True):
    """How the agreed weights move, given the workers' differences from them."""

    kind: Literal["mean", "nesterov", "elastic"]
    rule: Rule
    trim: float
    lr: float
    momentum: float
    pull: float
    """EASGD's beta: the center moves this fraction of the way to the workers' mean, and each worker moves
    beta / workers of the way to the center."""
    own_share: float
    """The fraction of the local weights that a worker keeps when agreed weights arrive."""


class AgreedWeights:
    """The agreed weights of `params`; `fragments` lists the parameter indices of each fragment.

    Averaging in progress belongs to one group of ranks: call `drop` when the group changes.
    """

    def __init__(
        self, params: Sequence[Tensor], fragments: Sequence[Sequence[int]], settings: OuterStep, codec: Codec | None
    ) -> None:
        self._params = [[params[index].detach() for index in indices] for indices in fragments]
        self._settings, self._codec = settings, codec
        self._agreed = [flat(members) for members in self._params]
        self._velocity = [torch.zeros_like(one) for one in self._agreed] if settings.kind == "nesterov" else []
        self._pending: dict[int, Combination] = {}
        self._arrived: dict[int, Tensor] = {}
        self.bytes_sent = 0

    @property
    def under_way(self) -> list[int]:
        """Fragments whose averaging has begun and is not applied yet."""
        return [*self._pending, *self._arrived]

    def begin(self, fragment: int, axis: Axis, weights: Sequence[float], name: str) -> None:
        """Start averaging the ranks' differences from a fragment's agreed weights. All ranks call it, in one order."""
        rule = partial(combine, rule=self._settings.rule, weights=weights, trim=self._settings.trim)
        vector = self._agreed[fragment] - flat(self._params[fragment])
        self._pending[fragment] = one = Combination(vector, axis, rule, self._codec, f"{name}, fragment {fragment}")
        one.begin()
        self.bytes_sent += one.bytes_sent

    def advance(self, fragment: int) -> None:
        if fragment in self._pending:
            self._pending[fragment].advance()

    def receive(self) -> None:
        """Wait for all averaging in progress, and apply none of it yet."""
        for fragment in list(self._pending):
            self._arrived[fragment] = self._pending.pop(fragment).finish()

    def apply(self, fragment: int, num_workers: int, *, wholly: bool = False) -> None:
        """Move the agreed weights, and this rank's own by the rule; with `wholly`, set its own to the agreed ones."""
        if fragment in self._pending:
            self._arrived[fragment] = self._pending.pop(fragment).finish()
        delta, before, settings = self._arrived.pop(fragment), self._agreed[fragment], self._settings
        match settings.kind:
            case "mean":
                after = before - delta
            case "nesterov":
                after, self._velocity[fragment] = nesterov(
                    before, delta, self._velocity[fragment], lr=settings.lr, momentum=settings.momentum
                )
            case "elastic":
                after = elastic_center(before, delta, settings.pull / num_workers, num_workers)
        self._agreed[fragment] = after
        own = flat(self._params[fragment])
        if wholly:
            own = after
        elif settings.kind == "elastic":
            own = mix(own, before, 1.0 - settings.pull / num_workers)
        else:
            own = mix(own, after, settings.own_share) if settings.own_share else after
        unflatten_(own, self._params[fragment])

    def average_pair(self, axis: Axis, partner: int | None, name: str) -> None:
        """Average this rank's own weights with its partner's; the agreed weights do not change."""
        for fragment, params in enumerate(self._params):
            own = flat(params)
            other = exchange_in_pair(own, axis, partner, f"{name}, fragment {fragment}")
            unflatten_(mean(torch.stack([own, other])), params)
            self.bytes_sent += own.numel() * own.element_size() if partner is not None else 0

    def drop(self) -> None:
        """Discard averaging in progress: the group of ranks has changed."""
        self._pending, self._arrived = {}, {}

    def accept(self) -> None:
        """Make this rank's weights, which are the same on every rank, the agreed ones."""
        self.drop()
        self._agreed = [flat(params) for params in self._params]
        self._velocity = [torch.zeros_like(one) for one in self._velocity]

    def state(self) -> dict[str, Any]:
        assert not self._pending, "call receive() before state()"
        arrived = {str(fragment): vector for fragment, vector in self._arrived.items()}
        return {"agreed": self._agreed, "velocity": self._velocity, "arrived": arrived}

    def restore(self, state: dict[str, Any]) -> None:
        self.drop()
        self._agreed = [one.clone() for one in state["agreed"]]
        self._velocity = [one.clone() for one in state["velocity"]]
        self._arrived = {int(fragment): vector.clone() for fragment, vector in state["arrived"].items()}


def mean_of_ranks_(tensors: Sequence[Tensor], axis: Axis, name: str) -> None:
    """Set every floating-point tensor to its mean over the ranks, and any other tensor to rank 0's."""
    numbers = [one for one in tensors if one.is_floating_point()]
    if numbers:
        combination = Combination(flat(numbers), axis, mean, None, name)
        combination.begin()
        unflatten_(combination.finish(), numbers)
    axis.broadcast_([one for one in tensors if not one.is_floating_point()], name)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """All tensors as one flat fp32 vector; fp64 if any of them is fp64."""
    wide = any(one.dtype == torch.float64 for one in tensors)
    dtype, device = torch.float64 if wide else torch.float32, tensors[0].device if tensors else None
    vectors = [one.detach().reshape(-1).to(dtype) for one in tensors]
    return torch.cat(vectors) if vectors else torch.empty(0, dtype=dtype, device=device)


def unflatten_(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    start = 0
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(vector[start : start + tensor.numel()].view_as(tensor))
            start += tensor.numel()
