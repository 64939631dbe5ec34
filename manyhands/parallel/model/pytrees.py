"""Trees of values: tuples, lists and dicts, as in torch, and the user's dataclasses."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from manyhands.torch_private import pytree

__all__ = ["tree_flatten"]


def tree_flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Like torch's, but also flattens dataclasses: each class found is registered with torch for good."""
    leaves, spec = pytree.tree_flatten(value)
    unknown = {type(leaf) for leaf in leaves if _can_be_opened(leaf)}
    if not unknown:
        return leaves, spec
    for kind in unknown:
        torch.export.register_dataclass(kind)
    return tree_flatten(value)


def _can_be_opened(leaf: Any) -> bool:
    """Whether it is a dataclass instance that can be constructed again from its fields."""
    return (
        dataclasses.is_dataclass(leaf)
        and not isinstance(leaf, type)
        and all(field.init for field in dataclasses.fields(leaf))
    )
