"""Activation checkpointing: activations are computed again in backward, which saves memory for a second forward pass.

The values are bitwise the same: random states are restored for the second pass, and its changes to buffers, such as
batch statistics, are dropped. Names and objects of the model stay as they are. Start reading at `recompute`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from manyhands.errors import SpecError
from manyhands.parallel.model.layer_blocks import blocks_of, matching

__all__ = ["recompute", "recomputing"]


def recompute(model: nn.Module, which: str | tuple[str, ...], where: str) -> list[str]:
    """Keep only the inputs of these layers: "blocks", or patterns of names. Returns their names. Idempotent."""
    patterns = (which,) if isinstance(which, str) else tuple(which) if isinstance(which, tuple | list) else ()
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        fix = ['recompute="blocks"', 'recompute=("layers.*",), patterns of names']
        raise SpecError(f"recompute is {which!r}.", where=where, fix=fix)
    chosen = _repeated_blocks(model) if which == "blocks" else matching(model, patterns, where)
    for module in chosen.values():
        if not hasattr(module.forward, "is_computed_again"):
            module.forward = _checkpointed(module, module.forward)
    return list(chosen)


@contextmanager
def recomputing(model: nn.Module, which: str | tuple[str, ...], where: str) -> Iterator[int]:
    """The same inside a `with` block, to measure what it saves; yields the number of layers."""
    before = {id(module): module.__dict__.get("forward") for module in model.modules()}
    names = recompute(model, which, where)
    try:
        yield len(names)
    finally:
        for module in map(model.get_submodule, names):
            del module.forward
            if (own := before[id(module)]) is not None:
                module.forward = own


def _repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost blocks that have siblings of the same type: a block with nearly the whole model would save nothing.

    Blocks within a chosen block are computed again with it, and not a second time on their own.
    """
    blocks, chosen = blocks_of(model), dict[str, nn.Module]()
    for name, block in reversed(blocks.items()):  # outer ones first
        holds_others = any(other.startswith(f"{name}.") for other in blocks)
        alike = [other for other in blocks if _parent(other) == _parent(name) and type(blocks[other]) is type(block)]
        within = any(name.startswith(f"{other}.") for other in chosen)
        if not within and (len(alike) > 1 or not holds_others):
            chosen[name] = block
    return chosen


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _checkpointed(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=True, context_fn=lambda: _contexts(module), **kwargs
        )

    call.is_computed_again = True  # type: ignore[attr-defined]
    return call


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _copied_buffers(module)


@contextmanager
def _copied_buffers(module: nn.Module) -> Iterator[None]:
    """The second pass writes to copies. Restoring the buffers afterwards would not do: autograd detects the writes."""
    originals = [(one, name, buffer) for one in module.modules() for name, buffer in one._buffers.items()]
    for one, name, buffer in originals:
        one._buffers[name] = buffer.clone() if buffer is not None else None
    try:
        yield
    finally:
        for one, name, buffer in originals:
            one._buffers[name] = buffer
