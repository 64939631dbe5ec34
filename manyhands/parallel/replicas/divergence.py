"""Which rank diverged: pure decisions from the hashes of copies that should be equal, and from a slice computed twice.

Every rank has the same hashes and reaches the same verdict without another message. The repair is in
`training/loop/divergence_repair.py`. Start reading at `verdict`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

__all__ = [
    "Appointment",
    "CopiesDiffer",
    "DivergenceVerdict",
    "Hashes",
    "WrongGradient",
    "appoint",
    "odd_ones",
    "odd_parts",
    "verdict",
    "wrong_one",
]


Part = TypeVar("Part", bound=Hashable)


class Hashes(NamedTuple):
    """The hashes that a rank reports of its copy."""

    own: int
    """Hash of the state in the rank's own memory: if it is not the same on every rank, one of them is wrong."""
    shared: int = 0
    """Hash of its part of the weights that its host's ranks share: the same for the same part on every host."""

    def numbers(self) -> tuple[float, ...]:
        """The hashes as floats for an exchange of floats, each of which holds 32 bits exactly."""
        return tuple(float(half) for one in self for half in (one % 2**32, one >> 32))

    @staticmethod
    def of(numbers: Sequence[float]) -> Hashes:
        low, high, shared_low, shared_high = map(int, numbers)
        return Hashes(low + (high << 32), shared_low + (shared_high << 32))


class DivergenceVerdict(NamedTuple):
    odd: tuple[int, ...] = ()
    """Ranks whose copy differs from the majority's; without a majority, all ranks that may be wrong."""
    source: int | None = 0
    """A rank whose copy is right; None without a majority."""

    @property
    def agrees(self) -> bool:
        return not self.odd


class CopiesDiffer(Exception):
    """Raised on all ranks before the step has changed anything. The loop repairs what it can and repeats the step."""

    def __init__(self, verdict: DivergenceVerdict) -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


class Appointment(NamedTuple):
    """Which rank computes which slice of a step a second time; `place` is its index among slices that have rows."""

    step: int
    place: int
    owner: int
    auditor: int
    third: int | None
    """The rank that computes the slice if the two disagree; None: there are two ranks, and both repeat it."""


class WrongGradient(Exception):
    """A slice's gradients, computed twice, differed. Raised on all ranks before the step has changed anything."""

    def __init__(self, asked: Appointment, rank: int | None) -> None:
        """`rank` was wrong; None if that cannot be decided."""
        super().__init__(f"rank {rank} is wrong: {asked}")
        self.asked, self.rank = asked, rank


def odd_ones(hashes: Sequence[Hashable]) -> list[int] | None:
    """Indices whose hash differs from that of the majority; None if no hash has more than half."""
    if not hashes:
        return []
    common, count = Counter(hashes).most_common(1)[0]
    if 2 * count <= len(hashes):
        return None
    return [index for index, one in enumerate(hashes) if one != common]


def odd_parts(by_rank: Sequence[Mapping[Part, int]]) -> dict[Part, list[int]]:
    """For a sharded model, from each rank's hashes by part: the parts whose copies differ, and their ranks."""
    ranks_by_part: dict[Part, list[int]] = {}
    for rank, hashes in enumerate(by_rank):
        for part in hashes:
            ranks_by_part.setdefault(part, []).append(rank)
    return {part: ranks for part, ranks in ranks_by_part.items() if len({by_rank[rank][part] for rank in ranks}) > 1}


def verdict(by_rank: Sequence[Hashes], per_host: int = 0) -> DivergenceVerdict:
    """Which ranks' copies differ. If `per_host` is above 0, that many ranks share one host's weights as one copy."""
    all_ranks = range(len(by_rank))
    size = per_host or len(by_rank)
    hosts = [all_ranks[first : first + size] for first in all_ranks[::size]]
    odd = odd_ones([one.own for one in by_rank])
    odd_hosts = odd_ones([tuple(by_rank[rank].shared for rank in host) for host in hosts])
    if odd is None or odd_hosts is None:
        return DivergenceVerdict(tuple(all_ranks), None)
    wrong = {*odd, *(rank for host in odd_hosts for rank in hosts[host])}
    right = [rank for rank in all_ranks if rank not in wrong]
    return DivergenceVerdict(tuple(sorted(wrong)), right[0]) if right else DivergenceVerdict(tuple(all_ranks), None)


def appoint(seed: int, step: int, shares: Sequence[range]) -> Appointment:
    """Choose one of the slices that `shares` gives to each rank. Over the steps every slice is chosen."""
    key = hashlib.blake2s(f"audit {seed} {step}".encode(), digest_size=8).digest()
    place = int.from_bytes(key, "little") % sum(map(len, shares))
    owner = next(rank for rank, share in enumerate(shares) if place in share)
    auditor, third = (owner + 1) % len(shares), (owner + 2) % len(shares)
    return Appointment(step, place, owner, auditor, third if third != owner else None)


def wrong_one(repeats: tuple[bool, bool]) -> int | None:
    """Which of two ranks that disagree is wrong: the one that does not reproduce its own result. None: undecided."""
    return None if repeats[0] == repeats[1] else repeats.index(False)
