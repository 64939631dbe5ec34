"""`mh check`: the user's own program for a few steps under every layout that fits this machine, against one process.

Each run is a trial in a directory that is thrown away, as `mh tune` makes them; workers write down what they came to
(`check_recording`). What is compared with what is pure. Start reading at `check`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from manyhands.control.messages.launch_request import WorkerCommand
from manyhands.errors import TrainingFailed, UsageError
from manyhands.spec.load import CHECK_VARIABLE, KEYS, TRIAL_VARIABLE, environment, nearest
from manyhands.spec.probe_requests import CheckOrder
from manyhands.trials.check_recording import Checked, deviation, read_record, size_of
from manyhands.trials.trial_process import Failed, Order
from manyhands.trials.trial_runner import IN_A_TRIAL

__all__ = ["Asked", "Finding", "Layout", "Report", "check", "check_repeats", "layouts_for", "tolerance_for"]

TOLERANCE = 1e-5
HALF_TOLERANCE = 2e-2
WORST_SHOWN = 5
EXPLAINED_SHOWN = 3
MARGIN = 10.0
"""A layout may deviate so many times as far as one process does from itself when its weights are nudged."""
REPEATS = 100.0
"""First losses of two runs of one process may be so many tolerances apart, of which the second begins with nudged
weights: what is further apart, the script drew anew."""
ZERO = 1e-6
"""A gradient below this part of the model's largest is rounding, and nothing else."""


class Layout(NamedTuple):
    """A strategy, what it is made with, and how many workers that takes."""

    name: str
    strategy: str
    workers: int
    settings: Mapping[str, Any] = {}


ALONE = Layout("one process", "single", 1)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    command: WorkerCommand
    flags: dict[str, Any] = {}
    config_file: str | None = None
    steps: int = 5
    slices: int = 4
    most_workers: int = 4
    only: tuple[str, ...] = ()
    """Names of layouts; all that fit if there are none."""
    timeout_s: float = 180.0


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What a layout came to, as largest deviations from one process; None where there was nothing to compare."""

    layout: str
    workers: int
    failed: str = ""
    """Why it did not run, in a line."""
    loss: float | None = None
    gradients: float | None = None
    norm: float | None = None
    weights: float | None = None
    worst: list[tuple[str, float]] = []
    """What deviates by more than it may, by name, the worst first."""
    explained: list[tuple[str, float, str]] = []
    """What deviates by more than the tolerance, and does so by rounding alone; and why that is."""

    @property
    def agrees(self) -> bool:
        return not self.failed and not self.worst


class Report(msgspec.Struct, frozen=True, kw_only=True):
    steps: int
    slices: int
    tolerance: float
    findings: list[Finding]

    @property
    def deviates(self) -> bool:
        return any(not one.failed and not one.agrees for one in self.findings)


class Deviations(msgspec.Struct, frozen=True):
    """By name: how far one run is from another, relative to what was compared."""

    losses: dict[str, float]
    gradients: dict[str, float]
    norms: dict[str, float]
    weights: dict[str, float]

    def all(self) -> dict[str, float]:
        gradients = {f"gradient of {name}": value for name, value in self.gradients.items()}
        return {**self.losses, **self.norms, **gradients, **self.weights}


def layouts_for(most_workers: int) -> list[Layout]:
    """Every layout that so many workers can make."""
    found = [
        Layout("mirrored 2", "mirrored", 2),
        Layout("central storage 2", "central_storage", 2),
        *(Layout(f"sharded {level} 2", "sharded", 2, {"level": level}) for level in ("optimizer", "parameters")),
        Layout("tensor 2", "tensor", 2),
        *(
            Layout(f"pipeline 2 {schedule}", "pipeline", 2, {"schedule": schedule})
            for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble")
        ),
        Layout("mesh 2 data x 2 tensor", "mesh", 4, {"data": 2, "tensor": 2}),
        Layout("mesh 2 data x 2 pipeline", "mesh", 4, {"data": 2, "pipeline": 2}),
        Layout("mesh 2 tensor x 2 pipeline", "mesh", 4, {"tensor": 2, "pipeline": 2}),
        *(
            Layout(f"sharded mesh 2 data x 2 {axis}", "mesh", 4, {"data": 2, axis: 2, "sharded": True})
            for axis in ("tensor", "pipeline")
        ),
    ]
    return [layout for layout in found if layout.workers <= most_workers]


def check(asked: Asked, say: Callable[[str], None]) -> Report:
    """Run them all; `say` gets a line for each. Raises what the script itself fails with in one process."""
    layouts = _chosen(asked)
    alone, why = _run(asked, ALONE)
    if alone is None:
        raise TrainingFailed(f"The script fails in one process, so there is nothing to compare with: {why}")
    nudged, _ = _run(asked, ALONE, nudged=True)
    tolerance, findings = tolerance_for(alone), list[Finding]()
    if nudged is not None:
        check_repeats(alone.record.losses, nudged.record.losses, tolerance)
    rounding = deviations(alone, nudged).all() if nudged is not None else {}
    for layout in layouts:
        found, why = _run(asked, layout)
        finding = compare(layout, alone, found, tolerance, rounding) if found else _failed(layout, why)
        findings.append(finding)
        say(line_of(finding))
    return Report(steps=asked.steps, slices=asked.slices, tolerance=tolerance, findings=findings)


def check_repeats(losses: Sequence[float], again: Sequence[float], tolerance: float) -> None:
    """Raise where a script draws its data or weights anew in every process: then no two runs can be compared."""
    first = list(_relative("loss", losses[:1], again[:1]).values())
    if first and not first[0] <= min(REPEATS * tolerance, 0.5):
        raise TrainingFailed(
            f"Two runs of one process begin with a loss of {losses[0]:.6g} and {again[0]:.6g}, so no layout can be "
            "compared with them. The script draws something itself, such as its data or how it is split, and every "
            "worker of a run draws it anew: they would not train on the same data.",
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


def tolerance_for(alone: Checked) -> float:
    """Half precision, whoever asked for it, rounds a thousand times more."""
    floats = [one for one in alone.weights.values() if one.is_floating_point()]
    is_half = alone.record.precision not in ("fp32", "fp64") or any(one.dtype.itemsize < 4 for one in floats)
    return HALF_TOLERANCE if is_half else TOLERANCE


def deviations(alone: Checked, found: Checked) -> Deviations:
    """A gradient is measured against the largest of the model: one whose true value is 0 has no size of its own."""
    size = size_of(alone.gradients.values())
    return Deviations(
        _relative("loss", alone.record.losses, found.record.losses),
        _each(alone.gradients, found.gradients, size) if found.gradients else {},
        _relative("norm", alone.record.norms, found.record.norms),
        _each(alone.weights, found.weights, None) if found.weights else {},
    )


def compare(
    layout: Layout, alone: Checked, found: Checked, tolerance: float, rounding: Mapping[str, float] | None = None
) -> Finding:
    """`rounding` is how far one process is from itself with nudged weights: what a layout may be off by, too."""
    off = deviations(alone, found)
    rounding = rounding or {}
    beyond = sorted(((name, one) for name, one in off.all().items() if one > tolerance), key=lambda one: -one[1])
    worst = [(name, one) for name, one in beyond if not one <= MARGIN * rounding.get(name, 0.0)]
    unexplained = {name for name, _ in worst}
    return Finding(
        layout=layout.name,
        workers=layout.workers,
        loss=max(off.losses.values(), default=None),
        gradients=max(off.gradients.values(), default=None),
        norm=max(off.norms.values(), default=None),
        weights=max(off.weights.values(), default=None),
        worst=worst[:WORST_SHOWN],
        explained=[(name, one, _why(name, alone, found, tolerance)) for name, one in beyond if name not in unexplained],
    )


def _why(name: str, alone: Checked, found: Checked, tolerance: float) -> str:
    """Why rounding moves it so far."""
    gradient, before, after = (of.get(name) for of in (alone.gradients, alone.weights, found.weights))
    if gradient is None or before is None or after is None or gradient.shape != before.shape:
        return "nudged weights move it as far in one process"
    moved = (before.double() - after.double()).abs() > tolerance * size_of([before])
    if size_of([gradient[moved]]) > ZERO * size_of(alone.gradients.values()):
        return "nudged weights move it as far in one process"
    which = "its true gradient is 0" if bool(moved.all()) else f"the true gradient of {int(moved.sum())} values is 0"
    return f"{which}, and the optimizer turns what rounding leaves of it into steps"


def _each(alone: Mapping[str, Tensor], found: Mapping[str, Tensor], size: float | None) -> dict[str, float]:
    return {name: deviation(one, found[name], size) if name in found else float("inf") for name, one in alone.items()}


def _relative(name: str, alone: Sequence[float], found: Sequence[float]) -> dict[str, float]:
    """Of the step where it is largest."""
    if len(alone) != len(found):
        return {name: float("inf")}
    off = [abs(a - b) / max(abs(a), 1e-30) for a, b in zip(alone, found, strict=True)]
    return {name: max(off)} if off else {}


def _failed(layout: Layout, why: str) -> Finding:
    return Finding(layout=layout.name, workers=layout.workers, failed=why)


def line_of(finding: Finding) -> str:
    if finding.failed:
        return f"{finding.layout:<28} does not run: {finding.failed}"
    verdict = "same" if finding.agrees else "DEVIATES"
    numbers = {name: getattr(finding, name) for name in ("loss", "gradients", "norm", "weights")}
    told = "  ".join(f"{name} {value:.1e}" for name, value in numbers.items() if value is not None)
    return "\n".join([f"{finding.layout:<28} {verdict:<9} {told}", *_below(finding)])


def _below(finding: Finding) -> Iterator[str]:
    for name, value in finding.worst:
        yield f"    {name}: {value:.1e}"
    for name, value, why in finding.explained[:EXPLAINED_SHOWN]:
        yield f"    (rounding: {name} {value:.1e}; {why})"
    if len(finding.explained) > EXPLAINED_SHOWN:
        yield f"    (and {len(finding.explained) - EXPLAINED_SHOWN} more that rounding moves)"


def _run(asked: Asked, layout: Layout, *, nudged: bool = False) -> tuple[Checked | None, str]:
    """What the script came to under this layout; or why not, in a line."""
    order = CheckOrder(asked.steps, layout.strategy, dict(layout.settings), nudged)
    environ = {**environment(), TRIAL_VARIABLE: "1", CHECK_VARIABLE: msgspec.json.encode(order).decode()}
    with tempfile.TemporaryDirectory(prefix="manyhands-check-", ignore_cleanup_errors=True) as folder:
        run_dir = Path(folder) / "run"
        try:
            done = subprocess.run(
                [sys.executable, "-m", "manyhands.trials.trial_process"],
                input=msgspec.json.encode(_trial(asked, layout, str(run_dir))),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environ,
                timeout=asked.timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, f"it did not come to step {asked.steps} within {asked.timeout_s:g} s"
        return read_record(run_dir), _reason(done.stdout)


def _trial(asked: Asked, layout: Layout, run_dir: str) -> Order:
    given = {KEYS[name].dotted: value for name, value in asked.flags.items()}
    forced = {"train.strategy": layout.strategy, "launch.workers": layout.workers, "train.slices": asked.slices}
    return Order(
        command=asked.command,
        run_dir=run_dir,
        parent=os.getpid(),
        # As many threads everywhere: a sum over two of them rounds otherwise than over one.
        flags={"launch.threads": 1, **given, **forced, **IN_A_TRIAL, "run.run_dir": run_dir},
        config_file=asked.config_file,
    )


def _reason(output: bytes) -> str:
    decoder = msgspec.json.Decoder(Failed)
    for line in output.splitlines():
        if b'"Failed"' in line:
            return decoder.decode(line).reason
    return "it ended without a step of mh.Trainer"
