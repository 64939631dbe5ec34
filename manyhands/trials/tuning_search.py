"""Decides which settings to try on this machine, how fast a trial was, and which setting to choose. Pure.

Settings that change the maths are not changed unless the user allows it: bf16, another V for a model with dropout or
BatchNorm, another batch. Settings that only change rounding (threads, memory format) may change, except in an exact
run. Trials are run by `trial_runner`. Start reading at `next_trial` and `choose`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from manyhands.observe.event_text import count
from manyhands.spec.load import KEYS, flag_name

__all__ = [
    "Gauge",
    "Ground",
    "Measured",
    "Result",
    "Trial",
    "TuningChoice",
    "choose",
    "flags_of",
    "next_trial",
    "notes",
    "settings_of",
    "table",
    "words_of",
    "worker_counts",
]

# A smaller gain is not worth a setting, even if it is larger than the noise.
MARGIN = 0.03
# If two runs of one setting differ by more than TOO_NOISY, ratios between settings mean nothing, unless one wins by
# CLEARLY times the noise.
TOO_NOISY, CLEARLY = 0.25, 4.0
# Worker counts to try differ by at least this factor, or measuring a large machine would take an hour.
SPACING = 1.5
WARM_UP_STEPS = 3
MIN_STEPS = 3
BLOCKS = 8


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the script."""

    workers: int
    threads: int
    memory_format: str = "contiguous"
    allocator: str = "keep"
    precision: str = "fp32"
    slices: int | None = None
    """V, where it must not follow from the number of workers."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    rows_per_s: float
    noise: float
    """Relative error of `rows_per_s`, estimated from the variation between the trial's steps."""
    steps: int
    rows: int
    """Examples per global batch."""
    slices: int = 0
    """V, as the trial ran."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    trial: Trial
    measured: Measured | None = None
    failed: str = ""


class Ground(msgspec.Struct, frozen=True, kw_only=True):
    """Basis of the search: the machine, the default settings, and what must not change."""

    default: Trial
    slices: int
    """V of the default run."""
    cores: int
    most_workers: int
    allow_maths: bool = False
    exact: bool = False
    slices_given: bool = False
    depends_on_slices: str = ""
    averages: bool = False
    """Workers train separate weights between averaging rounds: the result depends on their number."""
    pinned: frozenset[str] = frozenset()
    """Settings given as flags: they are not varied."""

    @property
    def holds_slices(self) -> bool:
        """Whether V must not change: the user set it, or results depend on it."""
        return self.slices_given or (not self.allow_maths and bool(self.exact or self.depends_on_slices))

    @property
    def holds_workers(self) -> bool:
        return self.averages and not self.allow_maths

    @property
    def bits_matter(self) -> bool:
        return self.exact and not self.allow_maths


class TuningChoice(msgspec.Struct, frozen=True, kw_only=True):
    trial: Trial
    ratio: float
    """Its rows per second over the default's."""
    noise: float
    """Relative difference between two measurements of one setting; a setting has to win by more to be chosen."""
    too_noisy: bool = False
    """The noise is so large that ratios mean nothing: nothing is chosen."""


def worker_counts(cores: int, most: int) -> list[int]:
    """The divisors of `cores`, from 1 to `cores`, at most `most`, and spaced so that they are not too many."""
    even = [workers for workers in range(1, cores + 1) if cores % workers == 0]
    if len(even) == 2 and cores > 3:  # a prime: leave one core to the rest of the machine
        even = [workers for workers in range(1, cores) if (cores - 1) % workers == 0] + [cores]
    counts: list[int] = []
    for workers in reversed([workers for workers in even if workers <= most]):
        if not counts or workers == 1 or workers <= counts[-1] / SPACING:
            counts.append(workers)
    return counts[::-1]


def _splits(ground: Ground) -> list[Trial]:
    default = ground.default
    most = min(ground.most_workers, ground.slices) if ground.holds_slices else ground.most_workers
    trials = [default]
    for workers in [default.workers] if ground.holds_workers else worker_counts(ground.cores, most):
        fixed = "threads" in ground.pinned or ground.exact
        keep_slices = ground.holds_slices and not ground.slices_given and workers != default.workers
        trial = msgspec.structs.replace(
            default,
            workers=workers,
            threads=default.threads if fixed else max(1, ground.cores // workers),
            slices=ground.slices if keep_slices else None,
        )
        if trial not in trials:
            trials.append(trial)
    return trials


def _variations(ground: Ground, best: Trial) -> list[dict[str, Any]]:
    """Further changes to try; each is kept only if it wins."""
    found: list[dict[str, Any]] = []
    if best.threads > 1 and not ground.exact and "threads" not in ground.pinned:
        found.append({"threads": best.threads // 2})  # two threads on one core are often no faster than one
    if not ground.bits_matter and "memory_format" not in ground.pinned:
        found.append({"memory_format": "contiguous" if best.memory_format != "contiguous" else "channels_last"})
    if "allocator" not in ground.pinned:
        found.append({"allocator": "system" if best.allocator == "keep" else "keep"})
    if ground.allow_maths and "precision" not in ground.pinned and best.precision != "bf16":
        found.append({"precision": "bf16"})
    return found


def next_trial(ground: Ground, results: Sequence[Result]) -> Trial | None:
    """What to try after these results; None when nothing is left.

    First the splits of the cores, then changes of the best one, then, if anything won, the default once more: the
    difference between its two measurements is the noise that the winner has to exceed.
    """
    tried = [result.trial for result in results]
    missing = [trial for trial in _splits(ground) if trial not in tried]
    if missing:
        return missing[0]
    if tried.count(ground.default) > 1:
        return None
    best, candidate = _climb(ground, results)
    return candidate or (ground.default if best.trial != ground.default else None)


def choose(ground: Ground, results: Sequence[Result]) -> TuningChoice:
    """The fastest setting, if it beats the default by more than the noise; among equals the simplest."""
    best, _ = _climb(ground, results)
    noise, ratio = _noise(ground, results), _ratio(ground, results, best)
    loudest = max(noise, _usual_noise(results))
    if loudest > TOO_NOISY and ratio - 1 < CLEARLY * loudest:
        return TuningChoice(trial=ground.default, ratio=1.0, noise=loudest, too_noisy=True)
    if best.trial == ground.default or ratio <= 1 + max(MARGIN, noise):  # against both of its runs
        return TuningChoice(trial=ground.default, ratio=1.0, noise=noise)
    return TuningChoice(trial=best.trial, ratio=ratio, noise=noise)


def _climb(ground: Ground, results: Sequence[Result]) -> tuple[Result, Trial | None]:
    """Starting from the best split, apply one change after the other, keeping winners; also the first untried change.

    Once the default has run twice, its noise counts as well, and an earlier win may no longer be one.
    """
    best = _best_split(ground, results)
    for change in _variations(ground, best.trial):
        candidate = msgspec.structs.replace(best.trial, **change)
        found = next((result for result in results if result.trial == candidate), None)
        if found is None:
            return best, candidate
        if _wins(ground, results, found, best):
            best = found
    return best, None


def _best_split(ground: Ground, results: Sequence[Result]) -> Result:
    splits = [_result(results, trial) for trial in _splits(ground)]
    fastest = splits[0]
    for split in splits[1:]:
        if _allowed(ground, results, split) and _rate(split) > _rate(fastest):
            fastest = split
    if not _wins(ground, results, fastest, splits[0]):
        return splits[0]
    good = [
        split
        for split in splits
        if _wins(ground, results, split, splits[0]) and not _wins(ground, results, fastest, split)
    ]
    return min(good, key=lambda split: split.trial.workers)


def _result(results: Sequence[Result], trial: Trial) -> Result:
    return next(result for result in results if result.trial == trial)


def _rate(result: Result) -> float:
    return result.measured.rows_per_s if result.measured is not None else 0.0


def _allowed(ground: Ground, results: Sequence[Result], result: Result) -> bool:
    """Whether it ran, and with the default's batch size."""
    default = _result(results, ground.default).measured
    if result.measured is None or default is None:
        return False
    return ground.allow_maths or result.measured.rows == default.rows


def _wins(ground: Ground, results: Sequence[Result], one: Result, other: Result) -> bool:
    if not _allowed(ground, results, one) or one.trial == other.trial:
        return False
    noises = [result.measured.noise for result in (one, other) if result.measured is not None]
    return _rate(one) > _rate(other) * (1 + max(MARGIN, _noise(ground, results), *noises))


def _defaults(ground: Ground, results: Sequence[Result]) -> list[float]:
    return [_rate(result) for result in results if result.trial == ground.default and result.measured is not None]


def _noise(ground: Ground, results: Sequence[Result]) -> float:
    rates = _defaults(ground, results)
    return (max(rates) - min(rates)) / statistics.mean(rates) if rates else 0.0


def _usual_noise(results: Sequence[Result]) -> float:
    """Median noise within one trial."""
    noises = [result.measured.noise for result in results if result.measured is not None]
    return statistics.median(noises) if noises else 0.0


def _ratio(ground: Ground, results: Sequence[Result], result: Result) -> float:
    rates = _defaults(ground, results)
    return _rate(result) / statistics.mean(rates) if rates else 0.0


class Gauge:
    """Collects a trial's steps; says when there are enough, and how fast they were."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._warm_steps = self._warm_s = 0.0
        self._took: list[tuple[int, float]] = []
        self._measured_s = 0.0

    @property
    def steps(self) -> int:
        """All steps, including warm-up."""
        return round(self._warm_steps) + len(self._took)

    def add(self, rows: int, took_s: float) -> None:
        if self._warm_steps < WARM_UP_STEPS and self._warm_s < max(self._seconds, 1.0):
            self._warm_steps += 1
            self._warm_s += took_s
        elif took_s > 0:
            self._took.append((rows, took_s))
            self._measured_s += took_s

    @property
    def enough(self) -> bool:
        if self._measured_s < self._seconds:
            return False
        return len(self._took) >= MIN_STEPS or self._measured_s >= 3 * self._seconds

    def measured(self, slices: int = 0) -> Measured | None:
        """Measured over blocks of consecutive steps: single steps would hide waits that occur only in some."""
        if not self._took:
            return None
        rates = [sum(rows for rows, _ in block) / sum(took for _, took in block) for block in self._blocks()]
        middle = statistics.median(rates)
        quarters = statistics.quantiles(rates, n=4) if len(rates) > 3 else [min(rates), middle, max(rates)]
        noise = (quarters[2] - quarters[0]) / middle / math.sqrt(len(rates))
        most_rows = max(rows for rows, _ in self._took)
        return Measured(rows_per_s=middle, noise=noise, steps=len(self._took), rows=most_rows, slices=slices)

    def _blocks(self) -> list[list[tuple[int, float]]]:
        size = max(1, len(self._took) // BLOCKS)
        return [self._took[start : start + size] for start in range(0, len(self._took) - size + 1, size)]


def settings_of(trial: Trial, default: Trial) -> dict[str, Any]:
    """Settings for a config file that reproduce this trial, by name; precision and V only if they were changed."""
    settings = {name: getattr(trial, name) for name in ("workers", "threads", "memory_format", "allocator")}
    if trial.precision != default.precision:
        settings["precision"] = trial.precision
    if trial.slices is not None:
        settings["slices"] = trial.slices
    return settings


def flags_of(trial: Trial, default: Trial) -> dict[str, Any]:
    """Flags that turn the default run into this trial, by dotted key; none for the default itself."""
    if trial == default:
        return {}
    asked = settings_of(trial, default)
    same = [name for name in ("memory_format", "allocator") if asked[name] == getattr(default, name)]
    return {KEYS[name].dotted: value for name, value in asked.items() if name not in same}


def words_of(flags: dict[str, Any]) -> list[str]:
    """Flags as command-line words: ["-n", "2", "--threads", "1"]."""
    words = []
    for dotted, value in flags.items():
        name = dotted.rpartition(".")[2]
        flag = "-n" if name == "workers" else flag_name(name)
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, str(value)]
    return words


_HEADER = ("workers", "threads", "V", "memory", "allocator", "precision", "rows/s", "noise", "x default", "")


def table(ground: Ground, results: Sequence[Result], choice: TuningChoice) -> str:
    rows = [_HEADER, *(_row(ground, results, result, choice) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER) - 1)]
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows)


def _row(ground: Ground, results: Sequence[Result], result: Result, choice: TuningChoice) -> tuple[str, ...]:
    trial, measured = result.trial, result.measured
    settings = (trial.memory_format, trial.allocator, trial.precision)
    remarks = ["default"] if trial == ground.default else []
    remarks += ["chosen"] if trial == choice.trial and not choice.too_noisy else []
    slices = str(measured.slices if measured and measured.slices else trial.slices or "")
    start = (str(trial.workers), str(trial.threads), slices, *settings)
    if measured is None:
        return (*start, "-", "-", "-", f"failed: {result.failed}")
    if not _allowed(ground, results, result):
        remarks.append(f"batches of {measured.rows} rows")
    ratio = "?" if choice.too_noisy else f"{_ratio(ground, results, result):.2f}"
    speed = (count(measured.rows_per_s), f"{100 * measured.noise:.1f}%", ratio)
    return (*start, *speed, ", ".join(remarks))


def notes(ground: Ground, results: Sequence[Result], choice: TuningChoice) -> list[str]:
    """Notes: what was not tried, why, and what to type to try it; and what the choice changes."""
    found = []
    if ground.holds_workers:
        found.append(
            "Other numbers of workers were not tried: each worker trains separate weights, so the result depends on "
            "their number. --allow-maths tries them."
        )
    bounded = ground.holds_slices and ground.slices < min(ground.most_workers, ground.cores)
    if bounded and ground.slices_given:
        found.append(f"More than {ground.slices} workers were not tried: V={ground.slices} is given.")
    elif bounded:
        why = f"the model has {ground.depends_on_slices}" if ground.depends_on_slices else "the run is exact"
        found.append(
            f"More than {ground.slices} workers were not tried: they need a larger V, and {why}, so V changes the "
            f"result. --slices {ground.cores} compares at that V, --allow-maths lets V follow the workers."
        )
    if ground.exact:
        found.append("The run is exact: the number of threads is part of its result, and was not changed.")
    if not ground.allow_maths and ground.default.precision == "fp32" and "precision" not in ground.pinned:
        found.append("bf16 was not tried: it changes the maths. --allow-maths tries it.")
    default = _result(results, ground.default).measured
    if default is not None and any(r.measured is not None and r.measured.rows != default.rows for r in results):
        found.append("The batch grows with the workers (batch_per_worker), which changes the maths.")
    chosen = _result(results, choice.trial).measured
    if chosen is not None and chosen.slices != ground.slices and ground.depends_on_slices:
        found.append(
            f"The choice has V={chosen.slices} instead of V={ground.slices}, which changes the results of a model with "
            f"{ground.depends_on_slices}."
        )
    if choice.trial.precision != ground.default.precision:
        found.append(f"The choice has {choice.trial.precision} instead of {ground.default.precision}.")
    return found
