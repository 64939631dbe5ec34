"""A misspelt keyword of a public call is answered with the one that was meant."""

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
"""Of every call that is checked, by its name."""


def checked_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which says what it takes before Python says that it does not take something."""
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
    """Another call of the same object may be the one that was meant: epochs are for `fit`, not for `Trainer`."""
    text, owner, own = f"{name} has no argument {keyword!r}.", name.partition(".")[0], _keywords[name]
    calls = [call for call in _keywords if call.partition(".")[0] == owner]
    others = {one: call for call in reversed(calls) for one in _keywords[call]}  # `fit` before `predict`
    meant = nearest(keyword, [*others, *own])
    if meant and meant[0] not in own:
        call = others[meant[0]]
        return SpecError(f"{text} Did you mean {meant[0]} of {call}?", fix=[f"{call}(..., {meant[0]}=...)"])
    guess = f" Did you mean {meant[0]}?" if meant else ""
    return SpecError(text + guess, fix=[f"{one}=..." for one in meant[:1] or own])
