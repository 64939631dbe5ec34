"""`mh check`: runs the user's program for a few steps under every layout that fits, and compares with one process.

Each run is a trial in a temporary directory, as in `mh tune`; workers record their results (`check_recording`). The
comparison is pure. Start reading at `check`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from manyhands.control.messages.launch_request import WorkerCommand
from manyhands.errors import TrainingFailed, UsageError
from manyhands.spec.load import CHECK_VARIABLE, nearest
from manyhands.spec.probe_requests import CheckOrder
from manyhands.strategies.registry import STRATEGIES
from manyhands.trials.check_recording import Checked, deviation, read_record, size_of
from manyhands.trials.trial_process import Failed, TrialRequest
from manyhands.trials.trial_runner import by_dotted_key, run_trial

__all__ = ["Asked", "Layout", "LayoutFinding", "LayoutReport", "check", "check_repeats", "layouts_for", "tolerance_for"]

TOLERANCE = 1e-5
HALF_TOLERANCE = 2e-2
WORST_SHOWN = 5
EXPLAINED_SHOWN = 3
MARGIN = 10.0
"""A layout may deviate this many times as far as one process does from itself when its initial weights are nudged."""
REPEATS = 100.0
"""The first losses of two runs of one process, the second with nudged weights, may differ by this many tolerances: a
larger difference means that the script draws random numbers without a seed."""
ZERO = 1e-6
"""A gradient below this fraction of the model's largest is only rounding."""


class Layout(NamedTuple):
    """A strategy, its constructor arguments, and the number of workers it needs."""

    name: str
    strategy: str
    workers: int
    settings: Mapping[str, Any] = {}


SINGLE = Layout("one process", "single", 1)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    command: WorkerCommand
    flags: dict[str, Any] = {}
    config_file: str | None = None
    steps: int = 5
    slices: int = 4
    most_workers: int = 4
    only: tuple[str, ...] = ()
    """Names of layouts; empty: all that fit."""
    timeout_s: float = 180.0


class LayoutFinding(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a layout: the largest deviations from one process; None where there was nothing to compare."""

    layout: str
    workers: int
    failed: str = ""
    """Why it did not run, in one line."""
    loss: float | None = None
    gradients: float | None = None
    norm: float | None = None
    weights: float | None = None
    worst: list[tuple[str, float]] = []
    """Names and deviations that are not explained by rounding, the worst first."""
    explained: list[tuple[str, float, str]] = []
    """Names and deviations above the tolerance that rounding alone explains, with the reason."""

    @property
    def agrees(self) -> bool:
        return not self.failed and not self.worst


class LayoutReport(msgspec.Struct, frozen=True, kw_only=True):
    steps: int
    slices: int
    tolerance: float
    findings: list[LayoutFinding]

    @property
    def deviates(self) -> bool:
        return any(not one.failed and not one.agrees for one in self.findings)


class Deviations(msgspec.Struct, frozen=True):
    """Relative deviations of one run from another, by name."""

    losses: dict[str, float]
    gradients: dict[str, float]
    norms: dict[str, float]
    weights: dict[str, float]

    def all(self) -> dict[str, float]:
        gradients = {f"gradient of {name}": value for name, value in self.gradients.items()}
        return {**self.losses, **self.norms, **gradients, **self.weights}


VARIANTS = {
    "sharded": [Layout(f"sharded {level} 2", "sharded", 2, {"level": level}) for level in ("optimizer", "parameters")],
    "pipeline": [
        Layout(f"pipeline 2 {schedule}", "pipeline", 2, {"schedule": schedule})
        for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble")
    ],
    "mesh": [
        Layout("mesh 2 data x 2 tensor", "mesh", 4, {"data": 2, "tensor": 2}),
        Layout("mesh 2 data x 2 pipeline", "mesh", 4, {"data": 2, "pipeline": 2}),
        Layout("mesh 2 tensor x 2 pipeline", "mesh", 4, {"tensor": 2, "pipeline": 2}),
        *(
            Layout(f"sharded mesh 2 data x 2 {axis}", "mesh", 4, {"data": 2, axis: 2, "sharded": True})
            for axis in ("tensor", "pipeline")
        ),
    ],
}
"""Strategies with several layouts; the others have one, of two workers."""


def layouts_for(most_workers: int) -> list[Layout]:
    """Every layout that this many workers allow, of the strategies whose result is that of one process."""
    several = [name for name, entry in STRATEGIES.items() if entry.is_alike and name != SINGLE.strategy]
    found = [VARIANTS.get(name) or [Layout(f"{name.replace('_', ' ')} 2", name, 2)] for name in several]
    return [layout for layouts in found for layout in layouts if layout.workers <= most_workers]


def check(asked: Asked, say: Callable[[str], None]) -> LayoutReport:
    """Run all layouts; `say` gets a line for each. Raises if the script fails in one process."""
    layouts = _chosen(asked)
    single, why = _run(asked, SINGLE)
    if single is None:
        raise TrainingFailed(f"The script fails in one process, so there is nothing to compare with: {why}")
    nudged, _ = _run(asked, SINGLE, nudged=True)
    tolerance, findings = tolerance_for(single), list[LayoutFinding]()
    if nudged is not None:
        check_repeats(single.record.losses, nudged.record.losses, tolerance)
    rounding = deviations(single, nudged).all() if nudged is not None else {}
    for layout in layouts:
        found, why = _run(asked, layout)
        finding = compare(layout, single, found, tolerance, rounding) if found else _failed(layout, why)
        findings.append(finding)
        say(line_of(finding))
    return LayoutReport(steps=asked.steps, slices=asked.slices, tolerance=tolerance, findings=findings)


def check_repeats(losses: Sequence[float], again: Sequence[float], tolerance: float) -> None:
    """Raise if a script draws its data or weights without a fixed seed: then no two runs can be compared."""
    first = list(_relative("loss", losses[:1], again[:1]).values())
    if first and not first[0] <= min(REPEATS * tolerance, 0.5):
        raise TrainingFailed(
            f"Two runs of one process start with a loss of {losses[0]:.6g} and {again[0]:.6g}, so no layout can be "
            "compared with them. The script draws random numbers without a seed, such as for its data or their split, "
            "and every worker draws different ones: they would not train on the same data.",
            fix=["torch.manual_seed(0) before the script draws", "random_split(..., generator=...)"],
        )


def _chosen(asked: Asked) -> list[Layout]:
    fitting = layouts_for(asked.most_workers)
    if not asked.only:
        return fitting
    names = [layout.name for layout in fitting]
    for wanted in asked.only:
        if not any(name.startswith(wanted) for name in names):
            raise UsageError(
                f"No layout of up to {asked.most_workers} workers is called {wanted}.",
                where="--only",
                fix=[f"--only {name!r}" for name in nearest(wanted, names) or names],
            )
    return [layout for layout in fitting if layout.name.startswith(asked.only)]


def tolerance_for(single: Checked) -> float:
    """Half precision, set by a flag or by the script, rounds a thousand times more."""
    floats = [one for one in single.weights.values() if one.is_floating_point()]
    is_half = single.record.precision not in ("fp32", "fp64") or any(one.dtype.itemsize < 4 for one in floats)
    return HALF_TOLERANCE if is_half else TOLERANCE


def deviations(single: Checked, found: Checked) -> Deviations:
    """Gradients are compared relative to the model's largest gradient: one whose true value is 0 has no scale."""
    size = size_of(single.gradients.values())
    return Deviations(
        _relative("loss", single.record.losses, found.record.losses),
        _each(single.gradients, found.gradients, size) if found.gradients else {},
        _relative("norm", single.record.norms, found.record.norms),
        _each(single.weights, found.weights, None) if found.weights else {},
    )


def compare(
    layout: Layout, single: Checked, found: Checked, tolerance: float, rounding: Mapping[str, float] | None = None
) -> LayoutFinding:
    """`rounding`: deviations of one process with nudged weights from itself; a layout may deviate by a multiple."""
    off = deviations(single, found)
    rounding = rounding or {}
    beyond = sorted(((name, one) for name, one in off.all().items() if one > tolerance), key=lambda one: -one[1])
    worst = [(name, one) for name, one in beyond if not one <= MARGIN * rounding.get(name, 0.0)]
    unexplained = {name for name, _ in worst}
    return LayoutFinding(
        layout=layout.name,
        workers=layout.workers,
        loss=max(off.losses.values(), default=None),
        gradients=max(off.gradients.values(), default=None),
        norm=max(off.norms.values(), default=None),
        weights=max(off.weights.values(), default=None),
        worst=worst[:WORST_SHOWN],
        explained=[
            (name, one, _why(name, single, found, tolerance)) for name, one in beyond if name not in unexplained
        ],
    )


def _why(name: str, single: Checked, found: Checked, tolerance: float) -> str:
    """Why rounding explains this deviation."""
    gradient, before, after = (of.get(name) for of in (single.gradients, single.weights, found.weights))
    if gradient is None or before is None or after is None or gradient.shape != before.shape:
        return "nudged initial weights change it as much in one process"
    moved = (before.double() - after.double()).abs() > tolerance * size_of([before])
    if size_of([gradient[moved]]) > ZERO * size_of(single.gradients.values()):
        return "nudged initial weights change it as much in one process"
    which = "its true gradient is 0" if bool(moved.all()) else f"the true gradient of {int(moved.sum())} values is 0"
    return f"{which}, and the optimizer scales its rounding error up to full steps"


def _each(single: Mapping[str, Tensor], found: Mapping[str, Tensor], size: float | None) -> dict[str, float]:
    return {name: deviation(one, found[name], size) if name in found else float("inf") for name, one in single.items()}


def _relative(name: str, single: Sequence[float], found: Sequence[float]) -> dict[str, float]:
    """The largest relative difference over all steps."""
    if len(single) != len(found):
        return {name: float("inf")}
    off = [abs(a - b) / max(abs(a), 1e-30) for a, b in zip(single, found, strict=True)]
    return {name: max(off)} if off else {}


def _failed(layout: Layout, why: str) -> LayoutFinding:
    return LayoutFinding(layout=layout.name, workers=layout.workers, failed=why)


def line_of(finding: LayoutFinding) -> str:
    if finding.failed:
        return f"{finding.layout:<28} does not run: {finding.failed}"
    verdict = "same" if finding.agrees else "DEVIATES"
    numbers = {name: getattr(finding, name) for name in ("loss", "gradients", "norm", "weights")}
    shown = "  ".join(f"{name} {value:.1e}" for name, value in numbers.items() if value is not None)
    return "\n".join([f"{finding.layout:<28} {verdict:<9} {shown}", *_below(finding)])


def _below(finding: LayoutFinding) -> Iterator[str]:
    for name, value in finding.worst:
        yield f"    {name}: {value:.1e}"
    for name, value, why in finding.explained[:EXPLAINED_SHOWN]:
        yield f"    (rounding: {name} {value:.1e}; {why})"
    if len(finding.explained) > EXPLAINED_SHOWN:
        yield f"    (and {len(finding.explained) - EXPLAINED_SHOWN} more that rounding explains)"


def _run(asked: Asked, layout: Layout, *, nudged: bool = False) -> tuple[Checked | None, str]:
    """The record of the script under this layout; or None and the reason, in one line."""
    order = CheckOrder(asked.steps, layout.strategy, dict(layout.settings), nudged)
    forced = {"train.strategy": layout.strategy, "launch.workers": layout.workers, "train.slices": asked.slices}
    # The same number of threads everywhere: it changes the rounding of sums.
    flags = {"launch.threads": 1, **by_dotted_key(asked.flags), **forced}
    give_up_at = time.monotonic() + asked.timeout_s
    request = TrialRequest(command=asked.command, flags=flags, config_file=asked.config_file)
    with run_trial(request, **{CHECK_VARIABLE: msgspec.json.encode(order).decode()}) as trial:
        failures = [one.reason for one in trial.reports(until=lambda: give_up_at) if isinstance(one, Failed)]
        if not trial.has_ended:
            return None, f"it did not reach step {asked.steps} within {asked.timeout_s:g} s"
        return read_record(trial.run_dir), next(iter(failures), "it ended without a step of mh.Trainer")
