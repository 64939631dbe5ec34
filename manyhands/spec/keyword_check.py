"""Errors for unknown keywords of public calls that suggest the nearest known one, and list what is there.

Start reading at `checked_keywords`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from manyhands.errors import SpecError
from manyhands.spec.load import nearest

__all__ = ["checked_class", "checked_keywords", "suggested"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_keywords: dict[str, list[str]] = {}
"""Known keywords by the name of the call."""


def checked_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which raises `SpecError` with a suggestion where Python would raise `TypeError`."""
    return _checked(function, function.__qualname__.removesuffix(".__init__"))


def checked_class(*, name: str = "") -> Callable[[type[T]], type[T]]:
    """For a class: its constructor and its public methods, as `checked_keywords`; `name` is what users call it.

    What takes any keywords (`**options`) is left as it is: it refuses unknown ones itself.
    """

    def check(kind: type[T]) -> type[T]:
        called = name or kind.__name__
        if issubclass(kind, tuple):
            kind.__new__ = _checked(kind.__new__, called)  # type: ignore[method-assign]
        elif kind.__init__ is object.__init__:
            kind.__init__ = _checked(_nothing, called)  # type: ignore[method-assign]
        elif "__init__" in vars(kind):
            kind.__init__ = _checked(kind.__init__, called)  # type: ignore[method-assign]
        for attribute, value in list(vars(kind).items()):
            is_static = isinstance(value, staticmethod)
            function = value.__func__ if is_static else value
            if not attribute.startswith("_") and inspect.isfunction(function):
                checked = _checked(function, f"{called}.{attribute}")
                setattr(kind, attribute, staticmethod(checked) if is_static else checked)
        return kind

    return check


def _nothing(self: Any) -> None:
    """The constructor of a class that has none."""


def _checked(function: Callable[P, R], name: str) -> Callable[P, R]:
    parameters = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return function
    known = [one for one in parameters if one not in ("self", "_cls")]
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
        return SpecError(f"{text} Did you mean {meant[0]} of {call}?", fix=[f"{call}(..., {meant[0]}=...)", _all(own)])
    guess, fix = suggested(keyword, own)
    return SpecError(text + guess, fix=fix)


def suggested(keyword: str, known: Iterable[str]) -> tuple[str, list[str]]:
    """For an unknown keyword: the question whether the nearest one was meant, or ""; what to write instead."""
    every = list(known)
    meant = nearest(keyword, every)
    guess = f" Did you mean {meant[0]}?" if meant else ""
    return guess, [*(f"{one}=..." for one in meant), _all(every)]


def _all(known: list[str]) -> str:
    return f"its arguments: {', '.join(known)}" if known else "no arguments"
