"""From a model to its stages: its blocks, their costs, and where to cut.

Only this module knows which kinds of models can be cut, and how. Start reading at `pipeline_blocks` and `cut`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.errors import SpecError
from manyhands.parallel.pipeline.exported_stages import ExportedModel
from manyhands.parallel.pipeline.partition import BlockRange, Blocks, Chain, Inputs, balance, starts_at
from manyhands.parallel.pipeline.stage_blocks import is_chain
from manyhands.torch_private import pytree

__all__ = ["check_enough", "cut", "measure", "pipeline_blocks", "sizes_of"]


def pipeline_blocks(model: nn.Module, inputs: Inputs, stages: int, at: Sequence[str] = ()) -> Blocks:
    """A Sequential's modules, or those that another model calls with these inputs. The model is not changed."""
    return Chain(model) if is_chain(model) else ExportedModel(model, inputs, stages, at)


def check_enough(blocks: Blocks, workers: int, chunks: int) -> None:
    """Raise `SpecError` if there are fewer blocks than stages."""
    count = len(blocks.names)
    if count < workers * chunks > workers:
        fewer = [f"chunks={count // workers}"] if count >= workers else [f"stages={count}, chunks=1"]
        raise SpecError(
            f"{workers} workers with {chunks} stages each need {workers * chunks} blocks; the model has {count}.",
            fix=[*fewer, "smaller blocks: a longer nn.Sequential, or more modules in the model"],
        )


def cut(
    blocks: Blocks,
    stages: int,
    *,
    at: Sequence[str] = (),
    costs: Sequence[float] | None = None,
    place: Mapping[str, int] | None = None,
) -> Sequence[BlockRange]:
    """Cut into this many stages: at the blocks that the user named (`at`), else balanced by the blocks' costs.

    Without costs, by their sizes; `place` says which stage has the blocks that match a pattern. Every rank must cut
    with the same numbers.
    """
    if at:
        return blocks.parts(starts_at(blocks.names, at, stages))
    sizes = sizes_of(blocks)
    return blocks.parts(balance(costs or sizes, stages, sizes, _pins(blocks, place or {}, stages)))


def _pins(blocks: Blocks, place: Mapping[str, int], stages: int) -> dict[int, int]:
    """The stage of each pinned block, from patterns that match names of blocks or of modules that contain them."""
    pins: dict[int, int] = {}
    for pattern, stage in place.items():
        found = [
            number
            for number, name in enumerate(blocks.names)
            if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
        ]
        if not found:
            raise SpecError(f"place: no block is called {pattern!r}.", fix=[f"one of {', '.join(blocks.names)}"])
        if not 0 <= stage < stages:
            raise SpecError(
                f"place: {pattern!r} is to be on stage {stage}, but there are {stages} stages, counted from 0.",
                fix=[f"place={{{pattern!r}: {stages - 1}}}"],
            )
        pins |= dict.fromkeys(found, stage)
    return pins


def sizes_of(blocks: Blocks) -> list[float]:
    """Bytes of each block's parameters."""
    return [
        float(sum(param.numel() * param.element_size() for param in {id(p): p for p in part.params.values()}.values()))
        for part in _one_by_one(blocks)
    ]


def measure(
    blocks: Blocks, inputs: Inputs, times: int = 3, loss: Callable[[Any], Any] = lambda output: output
) -> list[float]:
    """Seconds of each block's forward and backward on such inputs: the median of `times` runs, after one to warm up.

    The `loss` of the model's output counts with the last block. It has no side effects: gradients are not kept,
    buffers and the random generator are restored.
    """
    parts = _one_by_one(blocks)
    state = torch.default_generator.get_state()
    buffers = {id(b): b for part in parts for module in part.modules.values() for b in module.buffers()}.values()
    before = [(buffer, buffer.clone()) for buffer in buffers]
    rounds = []
    try:
        for _ in range(times + 1):
            rounds.append(_measure_once(parts, inputs, loss))
            for buffer, value in before:
                buffer.copy_(value)
    finally:
        torch.default_generator.set_state(state)
    return [median(seconds) for seconds in zip(*rounds[1:], strict=True)]


def _one_by_one(blocks: Blocks) -> Sequence[BlockRange]:
    return blocks.parts(range(len(blocks.names)))


def _measure_once(parts: Sequence[BlockRange], inputs: Inputs, loss: Callable[[Any], Any]) -> list[float]:
    seconds, carried = [], None
    for part in parts:
        began = perf_counter()
        with torch.enable_grad():
            output = part(inputs, carried)
            if part is parts[-1]:
                output = loss(output)
        _backward(output, part, carried)
        seconds.append(perf_counter() - began)
        carried = pytree.tree_map_only(Tensor, _as_received, output)
    return seconds


def _backward(output: Any, part: BlockRange, carried: Any) -> None:
    """Compute the gradients of the block's weights, and of its inputs from other stages."""
    outputs = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    received = [leaf for leaf in pytree.tree_leaves(carried) if isinstance(leaf, Tensor)]
    wanted = [one for one in (*part.params.values(), *received) if one.requires_grad]
    if outputs and wanted:
        torch.autograd.grad(outputs, wanted, [torch.ones_like(one) for one in outputs], allow_unused=True)


def _as_received(tensor: Tensor) -> Tensor:
    """The tensor as a stage receives it from another one."""
    detached = tensor.detach()
    return detached.requires_grad_().clone() if tensor.requires_grad else detached
