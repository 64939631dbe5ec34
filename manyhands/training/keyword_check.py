"""Errors for unknown keywords of public calls that suggest the nearest known one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from manyhands.errors import SpecError
from manyhands.spec.load import nearest

__all__ = ["checked_keywords"]

P = ParamSpec("P")
R = TypeVar("R")

_keywords: dict[str, list[str]] = {}
"""Known keywords by the name of the call."""


def checked_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which raises `SpecError` with a suggestion where Python would raise `TypeError`."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    name = function.__qualname__.removesuffix(".__init__")
    _keywords[name] = known

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for keyword in kwargs:
            if keyword not in known:
                raise _unknown(name, keyword)
        return function(*args, **kwargs)

    return checked


def _unknown(name: str, keyword: str) -> SpecError:
    """The keyword may belong to another call of the same object: epochs are for `fit`, not for `Trainer`."""
    text, owner, own = f"{name} has no argument {keyword!r}.", name.partition(".")[0], _keywords[name]
    calls = [call for call in _keywords if call.partition(".")[0] == owner]
    others = {one: call for call in reversed(calls) for one in _keywords[call]}  # `fit` before `predict`
    meant = nearest(keyword, [*others, *own])
    if meant and meant[0] not in own:
        call = others[meant[0]]
        return SpecError(f"{text} Did you mean {meant[0]} of {call}?", fix=[f"{call}(..., {meant[0]}=...)"])
    guess = f" Did you mean {meant[0]}?" if meant else ""
    return SpecError(text + guess, fix=[f"{one}=..." for one in meant[:1] or own])
