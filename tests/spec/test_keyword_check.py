"""Unknown keywords of functions and classes: the nearest one is suggested, and all are listed."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import pytest

from manyhands.errors import SpecError
from manyhands.spec.keyword_check import checked_class


@checked_class(name="Loom")
class Weaving:
    def __init__(self, threads: int = 1) -> None:
        self.threads = threads

    def weave(self, pattern: str = "plain", **rest: Any) -> dict[str, Any]:
        return {"pattern": pattern, **rest}

    def stop(self, reason: str = "") -> str:
        return reason

    @staticmethod
    def size(width: int = 1) -> int:
        return width


class Child(Weaving):
    def __init__(self, colour: str, **rest: Any) -> None:
        super().__init__(**rest)
        self.colour = colour


@checked_class()
class Pair(NamedTuple):
    left: int
    right: int = 0


@checked_class()
class Nothing:
    pass


def test_a_class_suggests_its_arguments_and_those_of_its_methods() -> None:
    with pytest.raises(SpecError, match=r"Loom has no argument 'thread'\. Did you mean threads\?") as refused:
        Weaving(thread=2)  # type: ignore[call-arg]
    assert refused.value.fix == ("threads=...", "its arguments: threads")
    with pytest.raises(SpecError, match=r"Did you mean reason of Loom\.stop\?"):
        Weaving(reasons="")  # type: ignore[call-arg]
    with pytest.raises(SpecError, match=r"Loom\.size has no argument 'hue'"):
        Weaving.size(hue=2)  # type: ignore[call-arg]
    assert Weaving(threads=3).stop(reason="late") == "late" and Weaving.size(width=4) == 4


def test_what_takes_any_keywords_and_what_inherits_stay_as_they_are() -> None:
    assert Weaving().weave(hue=3) == {"pattern": "plain", "hue": 3}
    child = Child("red", threads=2)
    assert (child.colour, child.threads) == ("red", 2)
    assert list(inspect.signature(Weaving).parameters) == ["threads"]


def test_tuples_and_classes_without_a_constructor_are_checked() -> None:
    assert Pair(1, right=2) == (1, 2) and Pair(1)._replace(left=5).left == 5 and isinstance(Nothing(), Nothing)
    with pytest.raises(SpecError, match=r"Pair has no argument 'rigth'\. Did you mean right\?"):
        Pair(1, rigth=2)  # type: ignore[call-arg]
    with pytest.raises(SpecError, match="Nothing has no argument 'a'") as refused:
        Nothing(a=1)  # type: ignore[call-arg]
    assert refused.value.fix == ("no arguments",)
