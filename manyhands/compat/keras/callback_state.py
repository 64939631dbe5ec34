"""The state of Keras's callbacks, which have no methods for it: what their attributes hold, as plain values.

Numbers, text, arrays, tensors and lists, tuples, sets and dicts of these are saved. Functions, classes, and parts of
Keras are made by the script again. Anything else is named, once, when training starts. Start reading at `state_of`.
"""

from __future__ import annotations

import copy
import functools
import types
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["restore", "state_of", "unsaved"]

SKIPPED = ("_model", "model", "params")
PLAIN = (bool, int, float, str, type(None), np.generic, np.ndarray, torch.Tensor)
MADE_AGAIN = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, np.ufunc)


def state_of(callback: Any) -> dict[str, Any]:
    """A copy of every attribute that can be saved, by name."""
    return {name: copy.deepcopy(_saved(value)) for name, value in _attributes(callback) if _is_saved(value)}


def restore(callback: Any, state: Mapping[str, Any]) -> None:
    """Give the attributes back. Sets and deques were saved as lists: the attribute says which it is."""
    for name, value in state.items():
        now = vars(callback).get(name)
        if isinstance(now, deque):
            value = deque(value, now.maxlen)
        elif isinstance(now, set):
            value = set(value)
        elif isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
            value = value.clone()
        setattr(callback, name, value)


def unsaved(callback: Any) -> list[str]:
    """The attributes that hold something else: after a resume they are what the script makes them."""
    return [
        f"{name} ({type(value).__name__})"
        for name, value in _attributes(callback)
        if not _is_saved(value) and not _is_made_again(value)
    ]


def _attributes(callback: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(callback).items() if name not in SKIPPED]


def _is_saved(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str | int) and _is_saved(one) for key, one in value.items())
    if isinstance(value, list | tuple | set | deque):
        return all(map(_is_saved, value))
    return isinstance(value, PLAIN)


def _saved(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, set | deque):
        return list(value)
    return value


def _is_made_again(value: Any) -> bool:
    """Functions and classes, and what belongs to Keras: the model, its layers, optimizer and metrics."""
    if isinstance(value, MADE_AGAIN) or type(value).__module__.partition(".")[0] == "keras":
        return True
    if isinstance(value, list | tuple):
        return all(_is_saved(one) or _is_made_again(one) for one in value)
    return isinstance(value, torch.nn.Module | functools.partial)
