"""Results as a table for people, as JSON for programs, and as the results section of a Markdown page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import ddp, overhead
from bench.machine import describe

__all__ = ["BEGIN", "END", "markdown", "table", "write_into"]

BEGIN = "<!-- results: begin (written by `python -m bench --write`; changes by hand are lost) -->"
END = "<!-- results: end -->"

_TITLES = {"overhead": overhead.TITLE, "ddp": ddp.TITLE}
_HEADINGS = ("workload", "ours ms", "peer ms", "peer again ms", "ours / peer", "A/A", "limit", "met")


def table(results: Sequence[dict[str, Any]]) -> str:
    """Plain text, one table per benchmark."""
    parts = []
    for bench, rows in _by_bench(results):
        cells = [_HEADINGS, *map(_cells, rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(_HEADINGS))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        parts.append("\n".join([f"{_TITLES[bench]} ({_settings(rows)})", *lines]))
    return "\n\n".join(parts)


def markdown(report: dict[str, Any]) -> str:
    lines = [f"Measured {report['date']} on: {describe(report['machine'])}."]
    for bench, rows in _by_bench(report["results"]):
        lines += ["", f"### {_TITLES[bench]}", "", f"{_settings(rows)}.", ""]
        lines += [_row(_HEADINGS), _row(["---"] * len(_HEADINGS)), *(_row(_cells(row)) for row in rows)]
    return "\n".join(lines)


def write_into(path: Path, text: str) -> None:
    """Replace what stands between the marks of a page."""
    page = path.read_text()
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no results section: it needs the lines\n{BEGIN}\n{END}")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def _by_bench(results: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    return [(name, rows) for name in _TITLES if (rows := [row for row in results if row["bench"] == name])]


def _settings(rows: Sequence[dict[str, Any]]) -> str:
    threads = "/".join(map(str, sorted({row["threads"] for row in rows})))
    sizes = f"{rows[0]['blocks']} blocks per side in {rows[0]['launches']} launch(es)"
    return f"{sizes}, {threads} threads per process"


def _cells(row: dict[str, Any]) -> list[str]:
    sides = [f"{side['median']:.3f}" for side in row["ms_per_step"].values()]
    ratio, control = row["ratio"], row["control"]
    name = f"{row['workload']}, batch {row['batch']}"
    return [name, *sides, _interval(ratio), _interval(control), f"{row['limit']:.3f}", "yes" if row["met"] else "no"]


def _interval(value: dict[str, float]) -> str:
    return f"{value['median']:.3f} ({value['low']:.3f} to {value['high']:.3f})"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
