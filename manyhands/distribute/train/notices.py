"""What the adapters say to the user: each remark once per process, and how names that have no meaning here are refused.

Start reading at `say_once`.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from manyhands.errors import NotHere, SpecError
from manyhands.spec.keyword_check import suggested

__all__ = ["forget_notices", "is_misspelt", "not_here", "refuse_unknown", "say_once"]

MISSPELT_RATIO = 0.9
_said: set[str] = set()


def say_once(text: str) -> None:
    """Warn, unless this process has said the same before."""
    if text not in _said:
        _said.add(text)
        warnings.warn(text, UserWarning, stacklevel=_callers_level())


def _callers_level() -> int:
    """How far up the code is that is not ours: the line to show."""
    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("manyhands."):
        frame, level = frame.f_back, level + 1
    return level


def forget_notices() -> None:
    """Say everything again: for tests."""
    _said.clear()


def not_here(name: str, instead: Mapping[str, tuple[str, str]]) -> NotHere:
    """The error for a name of TensorFlow in `instead`, which has why, and what to write."""
    why, fix = instead[name]
    return NotHere(f"{name} has no meaning here: {why}.", fix=[fix])


def is_misspelt(name: str, wanted: str) -> bool:
    """Whether a name is this one with a letter or two wrong, as in printed programs; other errors stay errors."""
    alike = difflib.SequenceMatcher(None, name.lower(), wanted.lower()).ratio()
    return name[:1] == wanted[:1] and alike >= MISSPELT_RATIO


def refuse_unknown(owner: str, options: Mapping[str, Any], known: Collection[str]) -> None:
    """`SpecError` for options of a TensorFlow name that nothing here acts on; `known` are those that it has."""
    for option in options:
        others = [one for one in known if one != option]
        guess, fix = ("", [f"no {option}="]) if option in known else suggested(option, others)
        raise SpecError(f"{owner} has no option {option!r} here.{guess}", where=owner, fix=fix)
