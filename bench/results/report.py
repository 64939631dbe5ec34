"""Results as a plain-text table, and as the results section of a Markdown page. For programs, `--json` prints them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.results.machine import describe
from bench.results.table import BENCHES, Row, Target

__all__ = ["BEGIN", "END", "has_results", "listing", "markdown", "outcome", "table", "unmeasured", "wish", "write_into"]

BEGIN = "<!-- results: begin (written by `python -m bench --write`; changes by hand are lost) -->"
END = "<!-- results: end -->"

_HEADINGS = ("what", "against", "ours", "peer", "peer again", "result", "A/A", "target", "met")
_WORDS = {
    "speed": "times as fast",
    "time": "times its time",
    "memory": "times its memory",
    "loss": "times its loss",
    "points": "points lost",
}
_ALONE = {"median": "s", "p95": "s", "share": "%"}


def listing(rows: Sequence[Row]) -> str:
    return _aligned([(row.name, row.bench, row.what, f"against {row.peer}", wish(row.target)) for row in rows])


def unmeasured(row: Row, reason: dict[str, str]) -> dict[str, Any]:
    """The result of a row that could not be measured here."""
    of = {"of": row.target.of, "target": row.target.limit}
    return {"row": row.name, "bench": row.bench, "what": row.what, "against": row.peer, **of, **reason}


def table(results: Sequence[dict[str, Any]]) -> str:
    """Plain text, one table per benchmark."""
    parts = []
    for bench, rows in _by_bench(results):
        lines = [BENCHES[bench], *_settings(rows), _aligned([_HEADINGS, *map(_cells, rows)]), *_peers(rows)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def markdown(report: dict[str, Any], picture: str) -> str:
    lines = [f"Measured {report['date']} on: {describe(report['machine'])}.", "", f"![Results]({picture})"]
    for bench, rows in _by_bench(report["results"]):
        lines += ["", f"### {BENCHES[bench]}", "", *(f"{line}.\n" for line in _settings(rows))]
        lines += [_row(_HEADINGS), _row(["---"] * len(_HEADINGS)), *(_row(_cells(row)) for row in rows)]
        if peers := _peers(rows):
            lines += ["", *(f"- {line}" for line in peers)]
    return "\n".join(lines)


def has_results(path: Path) -> bool:
    """Whether it is a page to write into: asked before anything is measured, which takes long."""
    return path.is_file() and BEGIN in (page := path.read_text()) and END in page


def write_into(path: Path, text: str) -> None:
    """Replace the text between the marks of a page."""
    page = path.read_text()
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no results section: it needs the lines\n{BEGIN}\n{END}")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def wish(target: Target) -> str:
    if not target.is_ratio:
        limit = 100 * target.limit if target.of == "share" else target.limit
        return f"{'at least' if target.at_least else 'at most'} {limit:g} {_ALONE[target.of]}"
    return f"{'at least' if target.at_least else 'at most'} {target.limit:g} {_WORDS[target.of]}"


def outcome(result: dict[str, Any]) -> str:
    """Met or missed, by how much, and whether the interval leaves a doubt."""
    if "value" not in result:
        return "skipped" if "skipped" in result else "failed"
    doubt = "" if result["clear"] else ", within the noise"
    if result["met"]:
        return f"yes{doubt}"
    missed = result["missed_by"]
    by = f"{missed:.2f} points" if result["of"] == "points" else f"{missed:.0%}" if missed >= 0.1 else f"{missed:.1%}"
    return f"no, by {by}{doubt}"


def _by_bench(results: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    return [(name, rows) for name in BENCHES if (rows := [row for row in results if row["bench"] == name])]


def _settings(rows: Sequence[dict[str, Any]]) -> list[str]:
    measured = [row for row in rows if "value" in row]
    if not measured:
        return []
    threads = "/".join(map(str, sorted({row["threads"] for row in measured})))
    some = measured[0]
    blocks = _counted(some["blocks"], "block", "blocks")
    launches = _counted(some["launches"], "launch", "launches")
    return [f"{blocks} per side in {launches}, threads per process: {threads}"]


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _peers(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How sides in separate processes were set up, as they reported it."""
    found = {side: facts for row in rows for side, facts in row.get("of_sides", {}).items() if "again" not in side}
    return [f"{side}: {_facts(facts)}" for side, facts in found.items()]


def _facts(facts: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return f"{versions}; {facts['how']}" if "how" in facts else versions


def _cells(row: dict[str, Any]) -> list[str]:
    target = wish(Target(row["of"], row["target"]))
    if "value" not in row:
        reason = row.get("skipped") or row["failed"]
        return [row["what"], row["against"], *["-"] * 5, target, f"{outcome(row)}: {reason}"]
    sides = [_measure(side["median"], row["unit"]) for side in row["sides"].values()]
    sides += ["-"] * (3 - len(sides))
    control = _interval(row["control"]) if row["control"] else "-"
    return [_title(row), row["against"], *sides, _interval(row["value"]), control, target, outcome(row)]


def _title(row: dict[str, Any]) -> str:
    return f"{row['what']}, batch {row['batch']}" if "batch" in row else row["what"]


def _measure(value: float, unit: str) -> str:
    return f"{value:.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}"


def _interval(value: dict[str, float]) -> str:
    return f"{value['middle']:.3f} ({value['low']:.3f} to {value['high']:.3f})"


def _aligned(cells: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
