"""Slurm's short forms of lists: `n[1-3,07]` for names, `2(x3),1` for numbers. Pure and bounded."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from manyhands.errors import SpecError

__all__ = ["expand_counts", "expand_names"]

MAX_NODES = 65536
_RANGE = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10}))?")
_COUNT = re.compile(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?")
_PLAIN = re.compile(r"[A-Za-z0-9_.:-]*")


def expand_names(expression: str) -> list[str]:
    """The names that `scontrol show hostnames` prints for the same expression. `SpecError` if it is none."""
    names = itertools.islice(_names(expression), MAX_NODES + 1)
    found = list(names)
    if len(found) > MAX_NODES:
        raise SpecError(f"The node list {expression[:80]!r} has more than {MAX_NODES} names.")
    return found


def _names(expression: str) -> Iterator[str]:
    for part in _split(expression):
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        if not part or any(not _PLAIN.fullmatch(text) for text in pieces[::2]):
            raise SpecError(f"{expression[:80]!r} is not a list of nodes.", fix=["n1,n2", "n[1-2]"])
        choices = [[text] if place % 2 == 0 else _numbers(text, expression) for place, text in enumerate(pieces)]
        yield from map("".join, itertools.product(*choices))


def _split(expression: str) -> list[str]:
    """At the commas outside of brackets."""
    return re.split(r",(?![^\[\]]*\])", expression)


def _numbers(text: str, expression: str) -> list[str]:
    """ "1-3,07" -> 1, 2, 3, 07: a number keeps the width that the first of its range has."""
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if not int(first) <= int(last) < int(first) + MAX_NODES:
            raise SpecError(f"{expression[:80]!r} is not a list of nodes: {part[:20]!r}.", fix=["n[1-2]"])
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def expand_counts(text: str) -> list[int]:
    """ "2(x3),1" -> 2, 2, 2, 1: tasks of each node. Empty if it is not such a list."""
    found: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        times = int(match[2] or 1) if match else 0
        if match is None or len(found) + times > MAX_NODES:
            return []
        found += [int(match[1])] * times
    return found
