"""A model's memory: counted, and measured in one slice's forward pass.

Weights, gradients and optimizer state are counted; what a forward pass keeps for backward is measured once, on one
slice, without changing the model. Start reading at `kept_for_backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from manyhands.torch_private import pytree

__all__ = ["kept_by_parts", "kept_for_backward", "num_bytes", "states_per_weight"]

PROBE = 16
"""Elements of the weight on which an optimizer of the same kind is tried."""


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def states_per_weight(optimizer: Optimizer) -> float:
    """How many numbers the optimizer keeps for each weight: tried on a separate weight."""
    weight = nn.Parameter(torch.zeros(PROBE))
    group = {"params": [weight], **optimizer.defaults}
    probe = type(optimizer)([group], lr=optimizer.defaults.get("lr", 0.0))  # type: ignore[call-arg]
    weight.grad = torch.zeros(PROBE)
    probe.step(lambda: 0.0)
    kept = sum(one.numel() for one in probe.state[weight].values() if isinstance(one, Tensor))
    return kept // PROBE


def kept_for_backward(model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any) -> int:
    """Bytes that the forward pass of this slice keeps, besides the weights."""
    with _untouched(model) as proxy, _counting(model) as kept:
        result = loss(proxy, batch)  # kept until the hooks are gone: its memory must not be freed and reused
    del result
    return sum(kept.values())


def kept_by_parts(model: nn.Module, parts: Iterable[Callable[[Any], Any]]) -> list[int]:
    """The same for each of the parts of the model, each called with the output of the part before."""
    found, carried = [], None
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[]):
        for part in parts:
            with _counting(model) as kept, torch.enable_grad():
                carried = part(carried)
            found.append(sum(kept.values()))
            carried = pytree.tree_map_only(Tensor, lambda one: one.detach(), carried)
    with torch.no_grad():
        for buffer, value in before:
            buffer.copy_(value)
    return found


@contextmanager
def _counting(model: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes that autograd keeps, by address; the model's own tensors are not counted."""
    weights = {one.untyped_storage().data_ptr() for one in [*model.parameters(), *model.buffers()]}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        # Detached: a node that keeps its own output would keep itself, and the whole graph, for ever.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


class _StandIn(nn.Module):
    """Calls the model with copies of its buffers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_model", model)  # not a child: its weights must not be this module's
        self._copies = {name: one.clone() for name, one in model.named_buffers()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self._model, self._copies, args, kwargs)  # type: ignore[arg-type]


@contextmanager
def _untouched(model: nn.Module) -> Iterator[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        yield _StandIn(model)
