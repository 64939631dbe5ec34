"""What holds a run back, from measured step times. Pure.

Every round of trials begins and ends with the run as it is, so a round's ratio has a control beside it: how far the two
differ is the noise. The share of a cause is what a step takes less without it. Start reading at `judge`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Literal

import msgspec

__all__ = ["AS_IS", "Cause", "Finding", "Noise", "Round", "Verdict", "Way", "findings_of", "judge", "noise_of"]

Cause = Literal["data", "exchange", "computation"]

LEAST_NOISE = 0.02
"""Below this, a difference between two settings is not believed, however alike the controls are."""
TOO_NOISY = 0.25


class Way(msgspec.Struct, frozen=True):
    """A way to run the script: as it is, without one of the costs, or with another setting."""

    name: str
    """In words: "as it is", "data for free", "num_workers=2"."""
    cause: Cause | None = None
    """The cost that it does without, or that its setting is to reduce."""
    removes: bool = False
    """Without the cost altogether: shows its share. Otherwise it is something to do."""
    advice: str = ""
    """What to write or type to get it."""
    changes: str = ""
    """What it changes in results."""
    order: dict[str, int] = {}
    """Fields of `ProfileOrder`."""
    flags: dict[str, str | int] = {}
    """Settings by dotted key."""
    alone: bool = False
    """Each worker trains alone on its share of every batch."""


AS_IS = Way("as it is")


class Round(msgspec.Struct, frozen=True):
    """Mean seconds of a step: as it is, at the beginning and at the end of the round, and each other way by name."""

    before: float
    after: float
    ways: dict[str, float]

    @property
    def as_is(self) -> float:
        return (self.before + self.after) / 2


class Noise(msgspec.Struct, frozen=True):
    value: float
    """Relative: smaller differences may be chance."""
    controls: float
    """By how much two trials of the run as it is differed, relative; the median of the rounds."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What a step takes less in one way, as a fraction of the step as it is."""

    way: Way
    saves: float
    noise: float

    @property
    def is_clear(self) -> bool:
        """Beyond the noise."""
        return abs(self.saves) > self.noise


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    step_s: float
    noise: Noise
    shares: dict[str, float]
    """What each cause holds of a step. What is left when the others are for free is computation; a cause that could
    not be tried is part of that, and named with it: "computation or exchange"."""
    holds_back: str | None
    """The cause with the largest share; None: the trials differ too much to say."""
    findings: list[Finding]
    untried: dict[str, str] = {}
    """Ways that could not be tried, with the reason."""

    def best_remedy(self, cause: Cause) -> Finding | None:
        """The clear saving for this cause that is the largest, of those to do."""
        clear = [one for one in self.findings if one.way.cause == cause and not one.way.removes and one.is_clear]
        best = max(clear, key=lambda one: one.saves, default=None)
        return best if best is not None and best.saves > 0 else None

    def removed(self, cause: Cause) -> Finding | None:
        return next((one for one in self.findings if one.way.removes and one.way.cause == cause), None)


def noise_of(rounds: Sequence[Round]) -> Noise:
    controls = median(abs(one.before - one.after) / one.as_is for one in rounds)
    return Noise(max(LEAST_NOISE, controls), controls)


def findings_of(ways: Sequence[Way], rounds: Sequence[Round]) -> list[Finding]:
    """The median saving over the rounds that have the way; its noise: the controls', or how far rounds differ."""
    floor, found = noise_of(rounds).value, []
    for way in ways:
        saved = [1.0 - one.ways[way.name] / one.as_is for one in rounds if way.name in one.ways]
        if saved:
            middle = median(saved)
            spread = median(abs(one - middle) for one in saved)
            found.append(Finding(way=way, saves=middle, noise=max(floor, 1.5 * spread)))
    return found


def judge(
    ways: Sequence[Way], rounds: Sequence[Round], untried: Mapping[str, str] | None = None, *, alone: bool = False
) -> Verdict:
    """`alone`: the run has one worker, which exchanges nothing."""
    findings, noise = findings_of(ways, rounds), noise_of(rounds)
    removed = {one.way.cause: one for one in findings if one.way.removes}
    shares: dict[str, float] = {}
    for cause in ("data", "exchange"):
        if cause in removed:
            one = removed[cause]
            shares[cause] = max(0.0, one.saves) if one.is_clear else 0.0
    total = sum(shares.values())
    if total > 1.0:  # while data is waited for, other workers wait for the exchange: both savings have that time
        shares = {cause: share / total for cause, share in shares.items()}
    unknown = [cause for cause in ("data", "exchange") if cause not in removed and not (alone and cause == "exchange")]
    shares[" or ".join(["computation", *unknown])] = max(0.0, 1.0 - sum(shares.values()))
    largest = max(shares, key=lambda cause: shares[cause])
    # A share is 1 less a ratio of two times, so an error in them counts as far as that ratio is large.
    wrong_by = noise.controls * (1.0 - shares[largest] if largest in removed else 1.0)
    too_noisy = noise.controls > TOO_NOISY and shares[largest] < 0.5 + wrong_by
    return Verdict(
        step_s=median(one.as_is for one in rounds),
        noise=noise,
        shares=shares,
        holds_back=None if too_noisy else largest,
        findings=findings,
        untried=dict(untried or {}),
    )
