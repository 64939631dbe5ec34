"""Who is odd: pure judgements over the hashes of copies that should be the same, and over a slice computed twice.

Every rank is given the same hashes and comes to the same verdict, so nobody needs to be asked. What is done about it
is `training/loop/divergence_repair.py`'s business. Start reading at `verdict`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

__all__ = [
    "Appointment",
    "CopiesDiffer",
    "Hashes",
    "Verdict",
    "WrongGradient",
    "appoint",
    "odd_ones",
    "odd_parts",
    "verdict",
    "wrong_one",
]


Part = TypeVar("Part", bound=Hashable)


class Hashes(NamedTuple):
    """What a rank says of its copy."""

    own: int
    """Hash of what it has by itself: the same on every rank, or one of them is wrong."""
    shared: int = 0
    """Hash of its part of weights that its host's ranks share: the same in the same place of every host."""

    def numbers(self) -> tuple[float, ...]:
        """For an exchange of floats, which hold 32 bits each without loss."""
        return tuple(float(half) for one in self for half in (one % 2**32, one >> 32))

    @staticmethod
    def of(numbers: Sequence[float]) -> Hashes:
        low, high, shared_low, shared_high = map(int, numbers)
        return Hashes(low + (high << 32), shared_low + (shared_high << 32))


class Verdict(NamedTuple):
    odd: tuple[int, ...] = ()
    """Ranks whose copy is not that of most; where nobody can tell, all that are in question."""
    source: int | None = 0
    """A rank whose copy is right; None where nobody can tell."""

    @property
    def agrees(self) -> bool:
        return not self.odd


class CopiesDiffer(Exception):
    """All ranks have seen it, before the step changed anything. The loop heals what can be, and begins it anew."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


class Appointment(NamedTuple):
    """Who computes which slice (its place among those that have rows) of a step a second time."""

    step: int
    place: int
    owner: int
    auditor: int
    third: int | None
    """Who is asked where the two disagree; None: there are two ranks, and both do it again."""


class WrongGradient(Exception):
    """A slice's gradients, computed twice, were not the same. All ranks know, before the step changed anything."""

    def __init__(self, asked: Appointment, rank: int | None) -> None:
        """`rank` is who was wrong; None where nobody can tell."""
        super().__init__(f"rank {rank} is wrong: {asked}")
        self.asked, self.rank = asked, rank


def odd_ones(hashes: Sequence[Hashable]) -> list[int] | None:
    """Places whose hash is not that of more than half; None where no hash has so many."""
    if not hashes:
        return []
    common, count = Counter(hashes).most_common(1)[0]
    if 2 * count <= len(hashes):
        return None
    return [place for place, one in enumerate(hashes) if one != common]


def odd_parts(told: Sequence[Mapping[Part, int]]) -> dict[Part, list[int]]:
    """Of a divided model: hashes of what each rank has, by part. Parts of which there are unlike copies, and whose."""
    held: dict[Part, list[int]] = {}
    for rank, hashes in enumerate(told):
        for part in hashes:
            held.setdefault(part, []).append(rank)
    return {part: ranks for part, ranks in held.items() if len({told[rank][part] for rank in ranks}) > 1}


def verdict(told: Sequence[Hashes], per_host: int = 0) -> Verdict:
    """Whose copy is odd. With `per_host` above 0, so many ranks share a host's weights: they are one copy."""
    everyone = range(len(told))
    size = per_host or len(told)
    hosts = [everyone[first : first + size] for first in everyone[::size]]
    odd = odd_ones([one.own for one in told])
    odd_hosts = odd_ones([tuple(told[rank].shared for rank in host) for host in hosts])
    if odd is None or odd_hosts is None:
        return Verdict(tuple(everyone), None)
    wrong = {*odd, *(rank for host in odd_hosts for rank in hosts[host])}
    right = [rank for rank in everyone if rank not in wrong]
    return Verdict(tuple(sorted(wrong)), right[0]) if right else Verdict(tuple(everyone), None)


def appoint(seed: int, step: int, shares: Sequence[range]) -> Appointment:
    """Of the slices that `shares` gives to each rank. Every slice has its turn some day."""
    key = hashlib.blake2s(f"audit {seed} {step}".encode(), digest_size=8).digest()
    place = int.from_bytes(key, "little") % sum(map(len, shares))
    owner = next(rank for rank, share in enumerate(shares) if place in share)
    auditor, third = (owner + 1) % len(shares), (owner + 2) % len(shares)
    return Appointment(step, place, owner, auditor, third if third != owner else None)


def wrong_one(repeats: tuple[bool, bool]) -> int | None:
    """Which of two ranks that disagree is wrong: the one that does not come to its own result again. None: either."""
    return None if repeats[0] == repeats[1] else repeats.index(False)
