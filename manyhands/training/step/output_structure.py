"""The structure of a model's output (dicts, tuples, dataclasses of tensors) as plain values, and back.

For workers that have no output themselves, and for records. A class is sent as its name and looked up among the modules
that this process has imported: nothing is imported, and nothing is called that torch's pytrees do not know. Start
reading at `describe`.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from typing import Any

import torch
from torch.utils import _pytree as pytree

from manyhands.errors import DataError

__all__ = ["describe", "rebuild"]

_CLASS = "$class"
_FIX = ["a dict or a tuple of tensors as the model's output", "the class at the top level of a file"]


def describe(spec: pytree.TreeSpec) -> Any:
    """As values that JSON can hold; `DataError` for a class that another process could not find by name."""
    if spec.is_leaf():
        return None
    kind = None if spec.type is collections.namedtuple else _name(spec.type)  # its class is in the context
    return [kind, _plain(spec.context), [describe(spec.child(number)) for number in range(spec.num_children)]]


def rebuild(described: Any) -> pytree.TreeSpec:
    """The inverse of `describe`; `DataError` for a class that this process has not imported."""
    if described is None:
        return pytree.tree_flatten(torch.empty(0))[1]
    name, context, children = described
    kind = collections.namedtuple if name is None else _node(name)
    return pytree.TreeSpec(kind, _restored(context), [rebuild(child) for child in children])


def _name(kind: type) -> str:
    if _found(name := f"{kind.__module__}:{kind.__qualname__}") is not kind:
        raise DataError(f"Outputs of the class {kind.__qualname__} cannot be described to other workers.", fix=_FIX)
    return name


def _found(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _class(name: str) -> type:
    found = _found(name)
    if not isinstance(found, type):
        raise DataError(f"Outputs are of the class {name}, which is not imported here.", fix=_FIX)
    return found


def _node(name: str) -> type:
    kind = _class(name)
    if kind not in pytree.SUPPORTED_NODES and dataclasses.is_dataclass(kind):
        torch.export.register_dataclass(kind)
    if kind not in pytree.SUPPORTED_NODES:
        raise DataError(f"Outputs are of the class {name}, which torch cannot make from tensors here.", fix=_FIX)
    return kind


def _plain(context: Any) -> Any:
    if isinstance(context, type):
        return {_CLASS: _name(context)}
    if isinstance(context, list | tuple):
        return [_plain(one) for one in context]
    if context is None or isinstance(context, str | int | float | bool):
        return context
    raise DataError(
        f"Outputs whose structure has a {type(context).__name__} cannot be described to other workers.", fix=_FIX
    )


def _restored(context: Any) -> Any:
    if isinstance(context, dict):
        return _class(context[_CLASS])
    return [_restored(one) for one in context] if isinstance(context, list) else context
