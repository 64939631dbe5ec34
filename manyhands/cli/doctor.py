"""`mh doctor`: whether this machine can train, and what to do where it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import click
import msgspec

from manyhands.runtime.checkup import Finding, examine
from manyhands.spec.load import environment

__all__ = ["doctor"]


@click.command()
@click.option("--run-dir", default="runs", metavar="DIR", show_default=True, help="Where runs will be written.")
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
@click.pass_context
def doctor(ctx: click.Context, run_dir: str, as_json: bool) -> None:
    """Check that this machine can train.

    Versions, cores, load, memory, loopback, shared memory, the disk under DIR, the clock, limits, encryption, and a sum
    over two real processes. Ends with 3 when a check fails; a warning does not count as one.
    """
    findings = []
    for finding in examine(Path(run_dir), environment()):
        findings.append(finding)
        if not as_json:
            click.echo(_lines(finding))
    failed = [finding.check for finding in findings if finding.verdict == "fail"]
    if as_json:
        click.echo(json.dumps({"ok": not failed, "findings": msgspec.to_builtins(findings)}, indent=2))
    elif failed:
        click.echo(f"This machine cannot train yet: {', '.join(failed)}.")
    if failed:
        ctx.exit(3)


def _lines(finding: Finding) -> str:
    lines = [f"{finding.verdict:<4}  {finding.check:<13}  {finding.text}"]
    return "\n".join(lines + [f"      try: {suggestion}" for suggestion in finding.fix])
