"""`mh doctor --gpu`: compares every strategy on this machine's GPUs with one process, and its speed with DDP.

The result is a report to paste. Each layout is a run of `manyhands.recipes.device_check` in a temporary directory. What
is run and what is reported are plain values; the same code runs on the CPU (`--device cpu`), which is how it is tested
without a GPU. Start reading at `examine_devices`.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from manyhands import __version__
from manyhands.errors import EnvironmentProblem, UsageError
from manyhands.recipes.device_check import DeviceOrder, DeviceOutcome
from manyhands.spec.load import nearest
from manyhands.strategies.registry import STRATEGIES
from manyhands.trials.check_recording import deviation

__all__ = ["Compared", "DeviceReport", "MachineFacts", "examine_devices", "layouts", "text_of", "this_machine"]

# Twenty steps of fp32 with additions in another order; the report shows the deviations in any case.
TOLERANCE = 1e-3
# Time limit of one run, and time after which no further run starts: on GPUs all of it should take five minutes. On a
# CPU, which tests only this code and not the machine, the limits are higher.
RUN_TIMEOUT_S = {"cuda": 90.0, "cpu": 600.0}
BUDGET_S = {"cuda": 270.0, "cpu": 7200.0}


class MachineFacts(msgspec.Struct, kw_only=True):
    manyhands: str
    python: str
    torch: str
    cuda: str
    nccl: str
    system: str
    devices: list[str]


class DeviceLayout(NamedTuple):
    name: str
    strategy: str
    workers: int = 1
    settings: dict[str, Any] = {}
    servers: int = 0
    is_alike: bool = True
    """Whether it promises the same weights as one process."""


class Compared(msgspec.Struct, kw_only=True):
    layout: str
    workers: int
    weights: float | None = None
    """The largest deviation of a weight from one process, relative to the largest weight of its tensor."""
    rows_per_s: float = 0.0
    peak_bytes: int = 0
    failed: str = ""
    is_alike: bool = True
    slices: int = 0
    """Forward and backward passes per step."""
    threads: int = 0
    """Threads per worker."""

    @property
    def verdict(self) -> str:
        if self.failed:
            return "FAILED"
        if not self.is_alike:
            return "runs"
        return "same" if self.weights is not None and self.weights <= TOLERANCE else "DEVIATES"


class DeviceReport(msgspec.Struct, kw_only=True):
    machine: MachineFacts
    compared: list[Compared]
    speed: list[Compared]
    """The same network trained by `mh.Mirrored` and by DDP, with equally many passes, examples and threads."""
    not_run: list[str] = []
    seconds: float = 0.0

    @property
    def is_fine(self) -> bool:
        return all(one.verdict in ("same", "runs") for one in self.compared) and not any(
            one.failed for one in self.speed
        )


def layouts(workers: int, device: str) -> list[DeviceLayout]:
    """One layout of every strategy, with one worker per GPU, at most 2.

    `CentralStorage` is left out on several GPUs, whose workers share no memory.
    """
    variants: dict[str, list[DeviceLayout]] = {
        "sharded": [
            DeviceLayout(f"sharded {level}", "sharded", workers, {"level": level})
            for level in ("optimizer", "gradients", "parameters")
        ],
        "pipeline": [
            DeviceLayout(f"pipeline {one}", "pipeline", workers, {"schedule": one})
            for one in ("gpipe", "1f1b", "zero_bubble")
        ],
        "mesh": [DeviceLayout("mesh data", "mesh", workers, {"data": workers})],
        "parameter_server": [
            DeviceLayout(
                "parameter_server sync", "parameter_server", workers, {"servers": 1, "mode": "sync"}, servers=1
            )
        ],
        "local_sgd": [DeviceLayout("local_sgd", "local_sgd", workers, {"every": 4}, is_alike=False)],
    }
    no_memory = device != "cpu" and workers > 1
    names = [name for name in STRATEGIES if name != "single" and not (no_memory and name == "central_storage")]
    usual = {name: DeviceLayout(name, name, workers, is_alike=STRATEGIES[name].is_alike) for name in names}
    return [one for name in names for one in variants.get(name) or [usual[name]]]


def this_machine(device: str) -> MachineFacts:
    """Raises `EnvironmentProblem` if there is no such device."""
    import torch

    found = MachineFacts(
        manyhands=__version__,
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda or "none",
        nccl="none",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        devices=["CPU"],
    )
    if device == "cpu":
        return found
    if not torch.cuda.is_available():
        built = (
            f"torch {found.torch} was built for CUDA {found.cuda}" if torch.version.cuda else "torch was built for CPUs"
        )
        raise EnvironmentProblem(
            f"There is no CUDA device here: {built}, and it finds none.",
            fix=[
                "nvidia-smi, to see whether the driver finds one",
                "mh doctor --gpu --device cpu, to see what would be run",
            ],
        )
    found.devices = [_card(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
    found.nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def _card(properties: Any) -> str:
    return f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"


def examine_devices(device: str, only: Sequence[str], say: Callable[[str], None]) -> DeviceReport:
    """Run everything; `say` gets a line for each layout. Raises if there is no device, or the single process fails."""
    started, machine = time.monotonic(), this_machine(device)
    workers = 2 if device == "cpu" else min(2, len(machine.devices))
    names = ("cpu",) if device == "cpu" else tuple(f"cuda:{number}" for number in range(workers))
    chosen = _chosen(layouts(workers, device), only)
    with tempfile.TemporaryDirectory(prefix="manyhands-devices-", ignore_cleanup_errors=True) as folder:
        runs = _Runs(Path(folder), names)
        single = runs.weights_of(DeviceLayout("one process", "single"))
        compared, not_run = list[Compared](), list[str]()
        if device != "cpu":
            on_cpu = _Runs(Path(folder) / "cpu", ("cpu",)).compare(DeviceLayout("one process, CPU", "single"), single)
            compared.append(on_cpu)
            say(line_of(on_cpu))
        for layout in chosen:
            if time.monotonic() - started > BUDGET_S[device]:
                not_run.append(layout.name)
                continue
            compared.append(runs.compare(layout, single))
            say(line_of(compared[-1]))
        speed = [runs.time(DeviceLayout(name, strategy, workers), device) for name, strategy in _SPEED_RUNS]
    return DeviceReport(
        machine=machine, compared=compared, speed=speed, not_run=not_run, seconds=time.monotonic() - started
    )


_SPEED_RUNS = (("mh.Mirrored", "mirrored"), ("DistributedDataParallel", "ddp"))


def _chosen(fitting: list[DeviceLayout], only: Sequence[str]) -> list[DeviceLayout]:
    known = [layout.name for layout in fitting]
    for wanted in only:
        if not any(name.startswith(wanted) for name in known):
            fix = [f"--only {name!r}" for name in nearest(wanted, known) or known]
            raise UsageError(f"No layout is called {wanted}.", where="--only", fix=fix)
    return [layout for layout in fitting if not only or layout.name.startswith(tuple(only))]


class _Runs:
    """Starts runs one after the other, each in a separate directory below `folder`."""

    def __init__(self, folder: Path, devices: tuple[str, ...]) -> None:
        self._folder, self._devices = folder, devices

    def weights_of(self, layout: DeviceLayout) -> dict[str, Any]:
        _, weights, why = self._run(layout)
        if weights is None:
            raise EnvironmentProblem(
                f"Training in one process fails on {self._devices[0]}, so there is nothing to compare with: {why}"
            )
        return weights

    def compare(self, layout: DeviceLayout, single: dict[str, Any]) -> Compared:
        outcome, weights, why = self._run(layout)
        if outcome is None or weights is None:
            return Compared(layout=layout.name, workers=layout.workers, failed=why)
        unlike = [deviation(one, weights[name]) if name in weights else float("inf") for name, one in single.items()]
        return Compared(
            layout=layout.name,
            workers=layout.workers,
            weights=max(unlike),
            rows_per_s=outcome.rows_per_s,
            peak_bytes=outcome.peak_bytes,
            is_alike=layout.is_alike,
        )

    def time(self, layout: DeviceLayout, device: str) -> Compared:
        size = {"steps": 30} if device == "cpu" else {"steps": 200, "width": 8192, "batch_size": 1024}
        threads = max(1, len(os.sched_getaffinity(0)) // layout.workers)
        # DDP does one pass per worker and step: more slices would mean more, smaller passes.
        outcome, _, why = self._run(layout, "--threads", str(threads), slices=layout.workers, **size)
        if outcome is None:
            return Compared(layout=layout.name, workers=layout.workers, failed=why)
        return Compared(
            layout=layout.name,
            workers=layout.workers,
            rows_per_s=outcome.rows_per_s,
            peak_bytes=outcome.peak_bytes,
            slices=outcome.slices,
            threads=outcome.threads,
        )

    def _run(
        self, layout: DeviceLayout, *flags: str, **size: Any
    ) -> tuple[DeviceOutcome | None, dict[str, Any] | None, str]:
        """The outcome and weights that the chief wrote; or None and the reason."""
        from safetensors.torch import load_file

        folder = self._folder / f"{layout.name.replace(' ', '-')}-{len(size)}"
        folder.mkdir(parents=True)
        order = DeviceOrder(
            strategy=layout.strategy, settings=layout.settings, devices=self._devices, folder=str(folder), **size
        )
        servers = ["--servers", str(layout.servers)] if layout.servers else []
        command = [
            *(
                sys.executable,
                "-m",
                "manyhands.cli.main",
                "run",
                "--on=here",
                "-n",
                str(layout.workers),
                *servers,
                *flags,
            ),
            *("--run-dir", str(folder / "run"), "--ui", "none", "--max-restarts", "0"),
            *("-m", "manyhands.recipes.device_check", msgspec.json.encode(order).decode()),
        ]
        timeout_s = RUN_TIMEOUT_S[self._devices[0].partition(":")[0]]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return None, None, f"the run did not end within {timeout_s:g} s"
        if ended.returncode or not (folder / "outcome.json").exists():
            return None, None, _error_line(ended.stderr) or f"the run ended with exit code {ended.returncode}"
        outcome = msgspec.json.decode((folder / "outcome.json").read_bytes(), type=DeviceOutcome)
        saved = folder / "model.safetensors"
        return outcome, load_file(saved) if saved.exists() else None, ""


def _error_line(text: str) -> str:
    """The line that names the error, if there is one; else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if line.split(":")[0].endswith(("Error", "Problem", "Failed", "Lost", "Timeout"))]
    return (named or lines or [""])[-1][:300]


def line_of(one: Compared) -> str:
    result = f"weights {one.weights:.1e}  {one.rows_per_s:,.0f} rows/s" if one.weights is not None else one.failed
    return f"{one.layout:<24} {one.verdict:<9} {result}"


def text_of(report: DeviceReport) -> str:
    """Markdown, to be pasted into an issue."""
    machine, alike = report.machine, [one for one in report.compared if one.is_alike]
    lines = [
        "### mh doctor --gpu",
        "",
        f"manyhands {machine.manyhands}, torch {machine.torch}, CUDA {machine.cuda}, NCCL {machine.nccl}, "
        f"Python {machine.python}, {machine.system}",
        *(f"- device {number}: {name}" for number, name in enumerate(machine.devices)),
        "",
        "| strategy | workers | against one process | weights differ by | rows/s | device memory |",
        "|---|---|---|---|---|---|",
        *(_row(one) for one in report.compared),
        "",
        "| speed | workers | passes per step | threads per worker | rows/s | device memory |",
        "|---|---|---|---|---|---|",
        *(
            f"| {one.layout} | {one.workers} | {one.slices} | {one.threads} | {_speed(one)} | {_memory(one)} |"
            for one in report.speed
        ),
        "",
        *(f"- {one.layout}: {one.failed}" for one in [*report.compared, *report.speed] if one.failed),
        *([f"- not run, for lack of time: {', '.join(report.not_run)}"] if report.not_run else []),
        f"{sum(one.verdict == 'same' for one in alike)} of {len(alike)} end with the weights of one process "
        f"(to {TOLERANCE:g}), in {report.seconds:.0f} s.",
    ]
    return "\n".join(lines)


def _row(one: Compared) -> str:
    unlike = f"{one.weights:.1e}" if one.weights is not None else "-"
    return f"| {one.layout} | {one.workers} | {one.verdict} | {unlike} | {_speed(one)} | {_memory(one)} |"


def _speed(one: Compared) -> str:
    return f"{one.rows_per_s:,.0f}" if not one.failed else "FAILED"


def _memory(one: Compared) -> str:
    return f"{one.peak_bytes / 1e6:,.0f} MB" if one.peak_bytes else "-"
