"""Values in trees: tuples, lists and dicts, as torch has them, and dataclasses of the user's."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from manyhands.torch_private import pytree

__all__ = ["tree_flatten"]


def tree_flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """As torch's, which from then on looks into every dataclass that was met here, too."""
    leaves, spec = pytree.tree_flatten(value)
    unknown = {type(leaf) for leaf in leaves if _can_be_opened(leaf)}
    if not unknown:
        return leaves, spec
    for kind in unknown:
        torch.export.register_dataclass(kind)
    return tree_flatten(value)


def _can_be_opened(leaf: Any) -> bool:
    """An instance that can be made again from what it holds."""
    return (
        dataclasses.is_dataclass(leaf)
        and not isinstance(leaf, type)
        and all(field.init for field in dataclasses.fields(leaf))
    )
