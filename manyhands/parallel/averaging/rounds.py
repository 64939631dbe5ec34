"""When workers average, which fragments, and in which pairs: arithmetic over step numbers, worker numbers and times.

`step` is always the number of finished steps. No torch, no clock. Start reading at `Rounds`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

__all__ = ["Closing", "Downpour", "Quorum", "Rounds", "Rule", "close_round", "fragments_of", "pairs"]

Rule = Literal["mean", "weighted", "median", "trimmed"]
"""How the workers' contributions are combined: `averaging_rules` implements each."""


class Rounds(msgspec.Struct, frozen=True, kw_only=True):
    """The weights are cut into `fragments`; each is averaged once in `every` steps, spread evenly over the round.

    An average that begins after step t is applied at the end of step t + `overlap`. Up to step `post_local`, all
    fragments are averaged after every step.
    """

    every: int
    post_local: int = 0
    fragments: int = 1
    overlap: int = 0

    def begins(self, step: int) -> tuple[int, ...]:
        """The fragments whose averaging begins after `step` finished steps."""
        if step <= 0:
            return ()
        if step <= self.post_local:
            return tuple(range(self.fragments))
        since = step - self.post_local
        offsets = [fragment * self.every // self.fragments for fragment in range(self.fragments)]
        return tuple(p for p, offset in enumerate(offsets) if since >= offset and (since - offset) % self.every == 0)

    def ends(self, step: int) -> tuple[int, ...]:
        """The fragments whose average is applied at the end of step `step`."""
        return self.begins(step - self.overlap)

    def closes(self, step: int) -> bool:
        """Whether a round ends there: no averaging is in progress, and all earlier steps have been averaged."""
        return step <= self.post_local or (step - self.post_local) % self.every == 0


class Downpour(msgspec.Struct, frozen=True):
    """Separate periods for a worker's pulls from and pushes to the servers."""

    pull_every: int = 1
    push_every: int = 1

    def pulls(self, step: int) -> bool:
        """Whether a worker with `step` finished steps pulls the weights before its next one."""
        return step % self.pull_every == 0


def pairs(seed: int, number: int, members: Iterable[int]) -> list[tuple[int, int]]:
    """The pairs that average in round `number`; if the number of members is odd, one member has no partner.

    Every rank computes the same pairs, in any order of `members`. Over the rounds each member is paired with each
    other one.
    """

    def draw(member: int) -> bytes:
        return hashlib.blake2s(f"{seed} {number} {member}".encode(), digest_size=8).digest()

    drawn = sorted(members, key=lambda member: (draw(member), member))
    return list(zip(drawn[::2], drawn[1::2], strict=False))


class Quorum(msgspec.Struct, frozen=True, kw_only=True):
    """When a round closes that does not wait for all workers, and how the contributions that arrived are combined."""

    least: int | float
    """A number of workers, or a fraction of the workers that may still contribute."""
    deadline_s: float
    """Counted from the first contribution."""
    rule: Rule = "mean"
    trim: float = 0.2

    def of(self, num_workers: int) -> int:
        wanted = self.least if isinstance(self.least, int) else math.ceil(self.least * num_workers)
        return max(1, min(wanted, num_workers))


class Closing(msgspec.Struct, frozen=True):
    at_s: float
    """Counted from the beginning of the round."""
    members: tuple[int, ...]
    """The workers whose contributions count, in ascending order."""


def close_round(
    arrived_s: Mapping[int, float], expected: Sequence[int], *, quorum: int, deadline_s: float, now_s: float
) -> Closing | None:
    """The contributions with which a round closes; None while it stays open.

    A round closes when all `expected` workers have contributed; else at the deadline, or after it as soon as `quorum`
    workers have. A later contribution belongs to no round. `expected` are the live workers: a round does not wait for
    a dead one.
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
    """Parameter indices in `count` fragments of about the same size; the parameters of one module stay together.

    Modules are assigned in order to the smallest fragment so far, so each fragment has modules of all depths of the
    model. With fewer modules than `count`, some fragments are empty.
    """
    modules: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        modules.setdefault(name.rpartition(".")[0], []).append(index)
    fragments: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for indices in modules.values():
        smallest = min(range(count), key=lambda fragment: loads[fragment])
        fragments[smallest] += indices
        loads[smallest] += sum(sizes[index] for index in indices)
    return fragments
