"""Which server stores which tensors, or chunks of them, so that all servers have about as many bytes. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from manyhands.errors import SpecError

__all__ = ["CHUNK", "Chunk", "divide", "pinned"]

CHUNK = 2**20
"""Elements, 4 MB of fp32: larger tensors are split over several servers, where the optimizer allows it."""


class Chunk(NamedTuple):
    """Elements [start, stop) of the tensor with index `place`."""

    place: int
    start: int
    stop: int


def pinned(names: Sequence[str], place: Mapping[str, int], num_servers: int) -> dict[int, int]:
    """The user's placement: index in `names` -> server, by the first pattern that matches."""
    found: dict[int, int] = {}
    for pattern, server in place.items():
        matches = [number for number, name in enumerate(names) if fnmatch.fnmatchcase(name, pattern)]
        if not matches:
            raise SpecError(
                f"place={{{pattern!r}: {server}}} matches no trained parameter.", fix=[repr(name) for name in names[:3]]
            )
        if not 0 <= server < num_servers:
            raise SpecError(
                f"place={{{pattern!r}: {server}}} names a server that does not exist: this run has {num_servers}.",
                fix=[f"a number from 0 to {num_servers - 1}", f"servers={server + 1}"],
            )
        for number in matches:
            found.setdefault(number, server)
    return found


def divide(numels: Sequence[int], num_servers: int, pins: Mapping[int, int], *, whole: bool) -> list[list[Chunk]]:
    """Each server's chunks, ordered by tensor and start. With `whole`, no tensor is split."""
    parts: list[list[Chunk]] = [[] for _ in range(num_servers)]
    sizes = [0] * num_servers

    def give(chunk: Chunk, server: int) -> None:
        parts[server].append(chunk)
        sizes[server] += chunk.stop - chunk.start

    free: list[Chunk] = []
    for place, numel in enumerate(numels):
        if place in pins or whole or numel <= CHUNK:
            chunks = [Chunk(place, 0, numel)]
        else:
            chunks = [Chunk(place, start, min(start + CHUNK, numel)) for start in range(0, numel, CHUNK)]
        if place in pins:
            give(chunks[0], pins[place])
        else:
            free += chunks
    # The largest first: the small ones that follow even out the difference.
    for chunk in sorted(free, key=lambda chunk: (chunk.start - chunk.stop, chunk)):
        give(chunk, sizes.index(min(sizes)))
    return [sorted(part) for part in parts]
