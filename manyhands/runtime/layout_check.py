"""`mh check`: the user's own program for a few steps under every layout that fits this machine, against one process.

Each run is a trial in a directory that is thrown away, as `mh tune` makes them; workers write down what they came to
(`check_record`). What is compared with what is pure. Start reading at `check`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from manyhands.control.launch_request import WorkerCommand
from manyhands.errors import TrainingFailed, UsageError
from manyhands.runtime.check_record import Checked, deviation, read_record
from manyhands.runtime.trial_agent import Failed, Order
from manyhands.runtime.trials import IN_A_TRIAL
from manyhands.spec.check_order import CheckOrder
from manyhands.spec.load import CHECK_VARIABLE, KEYS, TRIAL_VARIABLE, environment, nearest

__all__ = ["Asked", "Finding", "Layout", "Report", "check", "layouts_for", "tolerance_for"]

TOLERANCE = 1e-5
HALF_TOLERANCE = 2e-2
WORST_SHOWN = 5


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
    """Tensors that deviate by more than the tolerance, by name, the worst first."""

    def is_within(self, tolerance: float) -> bool:
        found = (self.loss, self.gradients, self.norm, self.weights)
        return not self.failed and all(one is None or one <= tolerance for one in found)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    steps: int
    slices: int
    tolerance: float
    findings: list[Finding]

    @property
    def deviates(self) -> bool:
        return any(not one.failed and not one.is_within(self.tolerance) for one in self.findings)


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
    tolerance, findings = tolerance_for(alone), list[Finding]()
    for layout in layouts:
        found, why = _run(asked, layout)
        finding = compare(layout, alone, found, tolerance) if found else _failed(layout, why)
        findings.append(finding)
        say(line_of(finding, tolerance))
    return Report(steps=asked.steps, slices=asked.slices, tolerance=tolerance, findings=findings)


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


def compare(layout: Layout, alone: Checked, found: Checked, tolerance: float) -> Finding:
    weights = _deviations(alone.weights, found.weights)
    gradients = _deviations(alone.gradients, found.gradients)
    named = [*((f"gradient of {name}", one) for name, one in gradients.items()), *weights.items()]
    worst = sorted((one for one in named if one[1] > tolerance), key=lambda one: -one[1])
    return Finding(
        layout=layout.name,
        workers=layout.workers,
        loss=_largest(_relative(alone.record.losses, found.record.losses)),
        gradients=_largest(gradients.values()),
        norm=_largest(_relative(alone.record.norms, found.record.norms)),
        weights=_largest(weights.values()),
        worst=worst[:WORST_SHOWN],
    )


def _deviations(alone: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, float]:
    if not found:
        return {}
    return {name: deviation(one, found[name]) if name in found else float("inf") for name, one in alone.items()}


def _relative(alone: Sequence[float], found: Sequence[float]) -> list[float]:
    if len(alone) != len(found):
        return [float("inf")]
    return [abs(a - b) / max(abs(a), 1e-30) for a, b in zip(alone, found, strict=True)]


def _largest(values: Any) -> float | None:
    return max(values, default=None)


def _failed(layout: Layout, why: str) -> Finding:
    return Finding(layout=layout.name, workers=layout.workers, failed=why)


def line_of(finding: Finding, tolerance: float) -> str:
    if finding.failed:
        return f"{finding.layout:<28} does not run: {finding.failed}"
    verdict = "same" if finding.is_within(tolerance) else "DEVIATES"
    numbers = {name: getattr(finding, name) for name in ("loss", "gradients", "norm", "weights")}
    told = "  ".join(f"{name} {value:.1e}" for name, value in numbers.items() if value is not None)
    worst = "".join(f"\n    {name}: {value:.1e}" for name, value in finding.worst)
    return f"{finding.layout:<28} {verdict:<9} {told}{worst}"


def _run(asked: Asked, layout: Layout) -> tuple[Checked | None, str]:
    """What the script came to under this layout; or why not, in a line."""
    order = CheckOrder(asked.steps, layout.strategy, dict(layout.settings))
    environ = {**environment(), TRIAL_VARIABLE: "1", CHECK_VARIABLE: msgspec.json.encode(order).decode()}
    with tempfile.TemporaryDirectory(prefix="manyhands-check-", ignore_cleanup_errors=True) as folder:
        run_dir = Path(folder) / "run"
        try:
            done = subprocess.run(
                [sys.executable, "-m", "manyhands.runtime.trial_agent"],
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
        flags={**given, **forced, **IN_A_TRIAL, "run.run_dir": run_dir},
        config_file=asked.config_file,
    )


def _reason(output: bytes) -> str:
    decoder = msgspec.json.Decoder(Failed)
    for line in output.splitlines():
        if b'"Failed"' in line:
            return decoder.decode(line).reason
    return "it ended without a step of mh.Trainer"
