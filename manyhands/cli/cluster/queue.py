"""`mh queue`: the jobs of the queue, and why each has the workers that it has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from manyhands import exact_json
from manyhands.cli.cluster.queue_option import queue_option
from manyhands.observe.event_text import clean
from manyhands.scheduler.queue_folder import QueueFolder
from manyhands.scheduler.queue_state import QueuedJob

__all__ = ["queue"]

COLUMNS = ("job", "name", "state", "workers", "step", "why")


@click.command()
@click.option("--why", "job", metavar="JOB", help="Only this job: the last decision about it, in one line.")
@queue_option
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
def queue(job: str | None, directory: Path, as_json: bool) -> None:
    """Show the jobs of the queue: their state, their workers, and the last decision about each."""
    folder = QueueFolder(directory)
    known = folder.log.load().jobs
    if job is not None:
        folder.submission(job)  # refuses one that does not exist
    rows = [_row(folder, one, known.get(one)) for one in folder.submitted() if job in (None, one)]
    if as_json:
        click.echo(exact_json.encode({"daemon": folder.has_daemon(), "jobs": rows}, indent=2))
        return
    if job is not None:
        click.echo(clean(rows[0]["why"]))
        return
    click.echo("\n".join(_table(rows)) if rows else f"There is no job in {folder.path}.")
    if not folder.has_daemon():
        click.echo("No daemon serves this queue; mh cluster up does.")


def _row(folder: QueueFolder, job: str, known: QueuedJob | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"job": job, "run_dir": str(folder.run_dir(job)), "output": str(folder.output(job))}
    if known is None:
        name = os.path.basename(folder.submission(job).script)
        why = "submitted; the daemon has not seen it yet"
        return {**facts, "name": name, "state": "waiting", "workers": 0, "step": 0, "total_steps": None, "why": why}
    facts |= {"name": known.name, "state": known.phase, "workers": known.workers, "least": known.least}
    facts |= {"most": known.most, "step": known.step, "total_steps": known.total_steps, "starts": known.starts}
    return {**facts, "exit_code": known.exit_code, "why": known.why}


def _table(rows: list[dict[str, Any]]) -> list[str]:
    shown = [[_cell(row, column) for column in COLUMNS] for row in rows]
    widths = [max(len(line[at]) for line in [list(COLUMNS), *shown]) for at in range(len(COLUMNS))]
    lines = [list(COLUMNS), *shown]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _cell(row: dict[str, Any], column: str) -> str:
    if column == "step" and row["total_steps"]:
        return f"{row['step']}/{row['total_steps']}"
    return clean(str(row[column]))
