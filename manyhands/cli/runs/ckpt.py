"""`mh ckpt`: list, verify and export checkpoints. Works on a live run's directory too: it only reads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from manyhands import exact_json
from manyhands.errors import CheckpointError, CheckpointTooNew, UsageError

__all__ = ["ckpt"]

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def ckpt() -> None:
    """List, verify and export checkpoints.

    RUN_OR_DIR is a run directory, its checkpoints directory, or one checkpoint.
    """


@ckpt.command()
@click.argument("run_or_dir")
@_JSON
def ls(run_or_dir: str, as_json: bool) -> None:
    """List the checkpoints of RUN_OR_DIR, newest first. Reads manifests and file sizes, not the data."""
    rows = [_row(path, hashes=False) for path in _checkpoints(run_or_dir)]
    _show(rows, as_json, ["step", "epoch", "state", "size", "tensors", "workers", "results", "path"])


@ckpt.command()
@click.argument("run_or_dir")
@_JSON
@click.pass_context
def verify(ctx: click.Context, run_or_dir: str, as_json: bool) -> None:
    """Check every file of RUN_OR_DIR[@STEP] against its SHA-256. Exit code 3 if one is damaged."""
    rows = [_row(path, hashes=True) for path in _checkpoints(run_or_dir)]
    _show(rows, as_json, ["step", "state", "size", "path", "problem"])
    if any(row["problem"] for row in rows):
        ctx.exit(CheckpointError.exit_code)


@ckpt.command()
@click.argument("run_or_dir")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="The file to write.")
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["safetensors", "pt"]),
    help="pt: a dict of tensors by torch.save, for programs that read nothing else. Default: by the file's extension, "
    ".safetensors, .pt or .pth; others are refused.",
)
@click.option("--all-tensors", is_flag=True, help="Optimizer and other tensors too, under their full names.")
@click.option("--force", is_flag=True, help="Overwrite the file.")
@_JSON
def export(run_or_dir: str, output: str, file_format: Any, all_tensors: bool, force: bool, as_json: bool) -> None:
    """Write the model of RUN_OR_DIR[@STEP] (default: the newest that verifies) to one file."""
    from manyhands.checkpoint.export import export as export_checkpoint
    from manyhands.checkpoint.export import format_of

    file_format = file_format or format_of(Path(output))  # any other extension is refused
    path = _one_checkpoint(run_or_dir)
    export_checkpoint(path, Path(output), file_format, not all_tensors, force=force)
    size = Path(output).stat().st_size
    if as_json:
        _print_json({"checkpoint": str(path), "output": output, "format": file_format, "num_bytes": size})
    else:
        click.echo(f"{output}: {_size(size)} from {path}")


def _split(run_or_dir: str) -> tuple[Path, int | None]:
    """The directory and the step of RUN_OR_DIR[@STEP]; an existing directory with an @ in its name is preferred."""
    where, at, step = run_or_dir.rpartition("@")
    if not at or Path(run_or_dir).exists():
        return Path(run_or_dir), None
    if not step.isdigit():
        raise UsageError(f"{step!r} is not a step, in {run_or_dir!r}.", fix=[f"{where}@100"])
    return Path(where), int(step)


def _checkpoints(run_or_dir: str) -> list[Path]:
    """Directories named like checkpoints, newest commit first; never empty."""
    from manyhands.checkpoint.format import MANIFEST
    from manyhands.checkpoint.reader import scan

    directory, step = _split(run_or_dir)
    if not directory.is_dir():
        raise UsageError(f"There is no directory {directory}.", fix=["mh ckpt ls RUN_DIRECTORY"])
    if (directory / MANIFEST).exists():
        return [directory]
    root = directory / "checkpoints" if (directory / "checkpoints").is_dir() else directory
    found = [candidate for candidate in scan(root) if step is None or candidate.name.step == step]
    if not found:
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise UsageError(f"There is {what} in {root}.", fix=[f"mh ckpt ls {directory}"] if step is not None else [])
    return [candidate.path for candidate in found]


def _one_checkpoint(run_or_dir: str) -> Path:
    from manyhands.checkpoint.reader import newest_valid

    paths = _checkpoints(run_or_dir)
    directory, step = _split(run_or_dir)
    if step is not None or paths == [directory]:
        return paths[0]
    found = newest_valid(paths[0].parent)
    if found is None:
        raise UsageError(f"There is no checkpoint in {paths[0].parent}.")
    for reason in found.skipped:
        click.echo(f"skipped: {reason}", err=True)
    return found.path


def _row(path: Path, hashes: bool) -> dict[str, Any]:
    from manyhands.checkpoint.format import parse_step_name
    from manyhands.checkpoint.reader import verify_files

    name = parse_step_name(path.name)
    row: dict[str, Any] = {"step": name.step if name else None, "path": str(path), "state": "ok", "problem": None}
    try:
        manifest = verify_files(path, hashes=hashes)
    except CheckpointError as error:
        state = "newer format" if isinstance(error, CheckpointTooNew) else "damaged"
        return row | {"state": state, "problem": error.what}
    return row | {
        "step": manifest.step,
        "epoch": manifest.epoch,
        "run": manifest.run,
        "generation": f"{manifest.generation[0]}.{manifest.generation[1]}",
        "workers": manifest.world_size,
        "slices": manifest.slices,
        "results": manifest.results,
        "tensors": len(manifest.tensors),
        "num_bytes": manifest.num_bytes,
        "model": manifest.model,
        "verified": hashes,
    }


def _show(rows: list[dict[str, Any]], as_json: bool, columns: list[str]) -> None:
    if as_json:
        _print_json({"checkpoints": rows})
        return
    cells = [[_cell(row, column) for column in columns] for row in rows]
    if sys.stdout.isatty():
        _print_table(columns, cells)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in [columns, *cells]:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _print_table(columns: list[str], cells: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None)
    for line in cells:
        # Text, not markup: names come from files.
        table.add_row(*(Text(cell, style="red" if cell == "damaged" else "") for cell in line))
    Console().print(table)


def _cell(row: dict[str, Any], column: str) -> str:
    if column == "size":
        return _size(row["num_bytes"]) if "num_bytes" in row else "-"
    value = row.get(column)
    if column == "epoch" and value is not None:
        value += 1  # shown from 1, as in a run's output
    if isinstance(value, dict):
        value = " ".join(f"{name}={number:.4g}" for name, number in value.items())
    return "-" if value in (None, "") else "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes} B"


def _print_json(value: Any) -> None:
    click.echo(exact_json.encode(value))
