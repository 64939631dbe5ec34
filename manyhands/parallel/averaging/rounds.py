"""When workers average, what, and with whom: plain arithmetic over step numbers, worker numbers and times.

`step` always counts the steps that are done. No torch, no clock. Start reading at `Rounds`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

__all__ = ["Closing", "Downpour", "Quorum", "Rounds", "Rule", "close_round", "fragments_of", "pairs"]

Rule = Literal["mean", "weighted", "median", "trimmed"]
"""How what workers have becomes one: `averaging_rules` has each."""


class Rounds(msgspec.Struct, frozen=True, kw_only=True):
    """Weights in `fragments` parts, each averaged once in `every` steps, one after the other over the round.

    What is averaged after step t arrives with step t + `overlap`. Until step `post_local` everything is averaged after
    every step.
    """

    every: int
    post_local: int = 0
    fragments: int = 1
    overlap: int = 0

    def begins(self, step: int) -> tuple[int, ...]:
        """The fragments whose average is begun once `step` steps are done."""
        if step <= 0:
            return ()
        if step <= self.post_local:
            return tuple(range(self.fragments))
        since = step - self.post_local
        offsets = [fragment * self.every // self.fragments for fragment in range(self.fragments)]
        return tuple(p for p, offset in enumerate(offsets) if since >= offset and (since - offset) % self.every == 0)

    def ends(self, step: int) -> tuple[int, ...]:
        """The fragments whose average is applied with the end of step `step`."""
        return self.begins(step - self.overlap)

    def closes(self, step: int) -> bool:
        """Whether a round ends there: nothing is under way, and all that was before it has been averaged."""
        return step <= self.post_local or (step - self.post_local) % self.every == 0


class Downpour(msgspec.Struct, frozen=True):
    """Separate periods for the two ways between a worker and the servers."""

    pull_every: int = 1
    push_every: int = 1

    def pulls(self, step: int) -> bool:
        """Whether fresh weights are asked for before the next step, once `step` are done."""
        return step % self.pull_every == 0


def pairs(seed: int, number: int, members: Iterable[int]) -> list[tuple[int, int]]:
    """Who averages with whom in round `number`; of an odd number of members, one with nobody.

    The same for everybody who knows the members, in whatever order. Over the rounds everybody meets everybody.
    """

    def lot(member: int) -> bytes:
        return hashlib.blake2s(f"{seed} {number} {member}".encode(), digest_size=8).digest()

    drawn = sorted(members, key=lambda member: (lot(member), member))
    return list(zip(drawn[::2], drawn[1::2], strict=False))


class Quorum(msgspec.Struct, frozen=True, kw_only=True):
    """When a round closes that does not wait for everybody, and how those who have come are put together."""

    least: int | float
    """So many workers, or such a part of those who may still come."""
    deadline_s: float
    """Since the first has come."""
    rule: Rule = "mean"
    trim: float = 0.2

    def of(self, num_workers: int) -> int:
        wanted = self.least if isinstance(self.least, int) else math.ceil(self.least * num_workers)
        return max(1, min(wanted, num_workers))


class Closing(msgspec.Struct, frozen=True):
    at_s: float
    """Since the round's begin."""
    members: tuple[int, ...]
    """Whose contributions count, in their order."""


def close_round(
    arrived_s: Mapping[int, float], expected: Sequence[int], *, quorum: int, deadline_s: float, now_s: float
) -> Closing | None:
    """Which contributions a round closes with; None: it is open, still.

    It closes as soon as all are there that are expected; else at the deadline, or as soon after it as `quorum` are
    there. Whoever comes later belongs to no round. `expected` are those who live: a dead worker is not waited for.
    """
    times = sorted((arrived_s[member], member) for member in expected if member in arrived_s)
    if len(times) == len(expected) and times and times[-1][0] <= deadline_s:
        return Closing(times[-1][0], tuple(sorted(member for _, member in times)))
    if len(times) < quorum:
        return None
    at_s = max(deadline_s, times[quorum - 1][0])
    if now_s < at_s:
        return None
    return Closing(at_s, tuple(sorted(member for time_s, member in times if time_s <= at_s)))


def fragments_of(names: Sequence[str], sizes: Sequence[int], count: int) -> list[list[int]]:
    """Parameters, by their place, in `count` fragments of about the same size; those of one module stay together.

    Modules go, in order, to the fragment that is smallest so far, so that each has parts of all depths of the model.
    Fewer modules than `count` leave fragments empty.
    """
    modules: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        modules.setdefault(name.rpartition(".")[0], []).append(place)
    fragments: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for places in modules.values():
        smallest = min(range(count), key=lambda fragment: loads[fragment])
        fragments[smallest] += places
        loads[smallest] += sum(sizes[place] for place in places)
    return fragments
