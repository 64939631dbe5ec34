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


def checked_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which says what it takes before Python says that it does not take something."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for keyword in kwargs:
            if keyword not in known:
                meant = nearest(keyword, known)
                raise SpecError(
                    f"{name} has no argument {keyword!r}." + (f" Did you mean {meant[0]}?" if meant else ""),
                    fix=[f"{one}=..." for one in meant or known],
                )
        return function(*args, **kwargs)

    return checked
