"""Seconds of every layer, forward and backward, from torch's profiler.

Hooks open a named range around each module's forward. An operation that autograd records has a sequence number, and the
backward operation that belongs to it has the same, so its time counts for the layer that ran the operation. Start
reading at `layer_times`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import nn

__all__ = ["OUTSIDE", "LayerTime", "layer_ranges", "layer_times", "merge_layers"]

RANGE = "layer "
BACKWARD = "autograd::engine::evaluate_function: "
OUTSIDE = "outside of layers"
"""The loss, sums of gradients, the update, and what the script computes itself."""


class LayerTime(msgspec.Struct, frozen=True):
    name: str
    kind: str
    """Its class."""
    forward_s: float
    """Of one step; without the layers inside it."""
    backward_s: float
    calls: float
    """Per step."""

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


@contextmanager
def layer_ranges(model: nn.Module) -> Iterator[None]:
    """Inside, the profiler sees each forward pass of a module as a range with the module's name."""
    opened: list[Any] = []

    def enter(name: str) -> Any:
        def before(module: nn.Module, args: Any) -> None:
            opened.append(torch.profiler.record_function(RANGE + name))
            opened[-1].__enter__()

        return before

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        opened.pop().__exit__(None, None, None)

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name or type(model).__name__)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def layer_times(events: Sequence[Any], model: nn.Module, steps: int) -> list[LayerTime]:
    """The layers that took any time, the longest first. `events` are the profiler's, of this many steps."""
    kinds = {name or type(model).__name__: type(module).__name__ for name, module in model.named_modules()}
    forward, backward, calls, inner = dict[str, float](), dict[str, float](), dict[str, int](), dict[str, float]()
    layer_of: dict[int, tuple[float, str]] = {}
    for event in events:
        if event.name.startswith(RANGE):
            name = event.name.removeprefix(RANGE)
            calls[name] = calls.get(name, 0) + 1
            forward[name] = forward.get(name, 0.0) + event.cpu_time_total
            outer = _layer_around(event)
            if outer is not None:
                inner[outer] = inner.get(outer, 0.0) + event.cpu_time_total
        elif event.sequence_nr >= 0 and not event.name.startswith(BACKWARD):
            around = _layer_around(event)
            # An operation without a gradient has the number of the next one that has: the last one counts.
            start = float(event.time_range.start)
            if around is not None and start >= layer_of.get(event.sequence_nr, (0.0, ""))[0]:
                layer_of[event.sequence_nr] = start, around
    for event in events:
        if event.cpu_parent is None and not event.name.startswith((RANGE, BACKWARD)):
            forward[OUTSIDE] = forward.get(OUTSIDE, 0.0) + event.cpu_time_total
        elif event.name.startswith(BACKWARD):
            name = layer_of.get(event.sequence_nr, (0.0, OUTSIDE))[1]
            backward[name] = backward.get(name, 0.0) + event.cpu_time_total
    found = [
        LayerTime(
            name=name,
            kind=kinds.get(name, ""),
            forward_s=max(0.0, forward.get(name, 0.0) - inner.get(name, 0.0)) / 1e6 / steps,
            backward_s=backward.get(name, 0.0) / 1e6 / steps,
            calls=calls.get(name, 0) / steps,
        )
        for name in dict.fromkeys([*forward, *backward])
    ]
    return sorted((one for one in found if one.seconds > 0), key=lambda one: -one.seconds)


def _layer_around(event: Any) -> str | None:
    parent = event.cpu_parent
    while parent is not None and not parent.name.startswith(RANGE):
        parent = parent.cpu_parent
    return None if parent is None else str(parent.name.removeprefix(RANGE))


def merge_layers(workers: Sequence[Sequence[LayerTime]]) -> list[LayerTime]:
    """Of each layer the times of the worker that takes longest for it; workers may have different layers."""
    slowest: dict[str, LayerTime] = {}
    for layers in workers:
        for layer in layers:
            if layer.name not in slowest or layer.seconds > slowest[layer.name].seconds:
                slowest[layer.name] = layer
    return sorted(slowest.values(), key=lambda one: -one.seconds)
