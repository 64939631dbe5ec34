"""`mh doctor`: checks whether this machine can train, and says how to fix what fails."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

import click

from manyhands import exact_json
from manyhands.errors import UsageError
from manyhands.launcher.machine_check import CheckResult, examine
from manyhands.spec.load import environment

__all__ = ["doctor"]


@click.command()
@click.option("--run-dir", default="runs", metavar="DIR", show_default=True, help="Directory that runs will write to.")
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
@click.option("--gpu", is_flag=True, help="Test every strategy on this machine's CUDA devices, in five minutes.")
@click.option(
    "--device", type=click.Choice(["cuda", "cpu"]), default="cuda", help="For --gpu: cpu runs the same without a GPU."
)
@click.option("--only", multiple=True, metavar="NAME", help="For --gpu: only this strategy; may be repeated.")
@click.pass_context
def doctor(
    ctx: click.Context, run_dir: str, as_json: bool, gpu: bool, device: Literal["cuda", "cpu"], only: tuple[str, ...]
) -> None:
    """Check that this machine can train.

    Checks versions, cores, load, memory, loopback, shared memory, the disk under DIR, the clock, limits, encryption,
    and an all-reduce between two processes. Exit code 3 if a check fails; warnings do not count.

    With --gpu: every strategy trains a small network on handwritten digits, on one or two GPUs, and is compared with
    one process; then its speed is compared with DistributedDataParallel; prints a report to paste. Exit code 3 if there
    is no GPU, 1 if a strategy fails or deviates.
    """
    if gpu:
        ctx.exit(_try_devices(device, only, as_json))
    if only or device != "cuda":
        raise UsageError("--device and --only need --gpu.", where="mh doctor", fix=["mh doctor --gpu ..."])
    findings = []
    for finding in examine(Path(run_dir), environment()):
        findings.append(finding)
        if not as_json:
            click.echo(_lines(finding))
    failed = [finding.check for finding in findings if finding.verdict == "fail"]
    if as_json:
        click.echo(exact_json.encode({"ok": not failed, "findings": findings}, indent=2))
    elif failed:
        click.echo(f"This machine cannot train yet: {', '.join(failed)}.")
    if failed:
        ctx.exit(3)


def _try_devices(device: str, only: tuple[str, ...], as_json: bool) -> int:
    from manyhands.cli.machine.device_report import examine_devices, text_of
    from manyhands.trials.trial_runner import ended_by_signals

    with ended_by_signals():
        report = examine_devices(device, only, functools.partial(click.echo, err=True))
    click.echo(exact_json.encode(report, indent=2) if as_json else text_of(report))
    return 0 if report.is_fine else 1


def _lines(finding: CheckResult) -> str:
    lines = [f"{finding.verdict:<4}  {finding.check:<13}  {finding.text}"]
    return "\n".join(lines + [f"      try: {suggestion}" for suggestion in finding.fix])
