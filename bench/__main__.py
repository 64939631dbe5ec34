"""`python -m bench [NAME ...]`: side-by-side measurements on this machine; without a name, all that can run here.

A name is that of a row or of a benchmark; `--list` has them. `modes` compares our strategies with each other, and is
only measured when it is asked for; `modes small link` is some of its parts: small, wide, deep, link. A row that cannot
run is printed with the reason, and counts as neither met nor missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from bench.driver.child import ScriptFailed
from bench.hosts import accuracy, averaging, hosts
from bench.layouts import divided
from bench.modes import modes, modes_report
from bench.modes.networks import NETWORKS
from bench.recovery import recovery
from bench.replicas import augmented_pictures, collectives, ddp, keras_fit, memory, others, overhead
from bench.results import picture, report
from bench.results.compare import Measured, Size, judge
from bench.results.machine import describe, machine
from bench.results.table import Row, chosen
from bench.servers import served

DEFAULT_BLOCKS = 15
DEFAULT_BLOCK_S = 0.6


class Bench(NamedTuple):
    measure: Callable[[str, Size], Measured]
    why_not: Callable[[str], str | None] = lambda workload: None
    launches: int = 3


MEASURES = {
    "overhead": Bench(overhead.measure, launches=1),
    "collectives": Bench(collectives.measure, collectives.why_not),
    "ddp": Bench(ddp.measure),
    "peers": Bench(others.measure, others.why_not),
    "hosts": Bench(hosts.measure, hosts.why_not),
    "accuracy": Bench(accuracy.measure, accuracy.why_not, launches=1),
    "averaging": Bench(averaging.measure, averaging.why_not, launches=1),
    "memory": Bench(memory.measure, memory.why_not, launches=1),
    "served": Bench(served.measure, served.why_not),
    "keras": Bench(keras_fit.measure, keras_fit.why_not, launches=1),
    "pictures": Bench(augmented_pictures.measure, augmented_pictures.why_not, launches=1),
    "recovery": Bench(recovery.measure, launches=1),
    "sharded": Bench(divided.sharded),
    "tensor": Bench(divided.tensor),
    "pipeline": Bench(divided.pipeline),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    asked = parser.parse_args(argv)
    if without := [page for page in asked.write if not report.has_results(page)]:
        parser.error(f"{without[0]} is no page with a results section, between the lines\n{report.BEGIN}\n{report.END}")
    if asked.names[:1] == ["modes"]:
        return _modes(parser, asked)
    try:
        rows = chosen(asked.names)
    except ValueError as error:
        parser.error(str(error))
    if asked.list:
        print(report.listing(rows))
        return 0
    facts = machine()
    _say(describe(facts))
    results = _results(rows, asked)
    found = {"date": date.today().isoformat(), "machine": facts, "results": results}
    print(json.dumps(found, indent=2) if asked.json else report.table(results))
    for page in asked.write:
        page.with_suffix(".svg").write_text(picture.draw(results))
        report.write_into(page, report.markdown(found, page.with_suffix(".svg").name))
    return 1 if any("failed" in result for result in results) else 0


def _modes(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> int:
    """No targets and no peers: the strategies, side by side."""
    parts = (*NETWORKS, "link")
    if unknown := [name for name in asked.names[1:] if name not in parts]:
        parser.error(f"modes has no {', '.join(unknown)}; it has {', '.join(parts)}")
    facts, blocks, launches = machine(), asked.blocks, asked.launches or 1
    _say(describe(facts))
    results = modes.measure(asked.names[1:] or parts, blocks, asked.seconds, launches)
    size = {"blocks": blocks, "block_s": asked.seconds, "launches": launches}
    found = {"date": date.today().isoformat(), "machine": facts, **size, "results": results}
    print(json.dumps(found, indent=2) if asked.json else modes_report.text(found))
    for page in asked.write:
        words = modes_report.CHINESE if "zh" in page.parts else modes_report.ENGLISH
        report.write_into(page, modes_report.markdown(found, words))
    rows = [row for part in results.values() if isinstance(part, list) for row in part]
    return 1 if any("failed" in row for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Side-by-side measurements on this machine.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows or benchmarks; default: all")
    parser.add_argument("--list", action="store_true", help="the rows, their peers and targets; nothing is measured")
    parser.add_argument("--json", action="store_true", help="everything that was measured, for programs")
    parser.add_argument("--blocks", type=int, default=DEFAULT_BLOCKS, help="blocks per side, over all launches")
    parser.add_argument("--launches", type=int, help="divide the blocks among so many; default: 3, of one process 1")
    parser.add_argument("--seconds", type=float, default=DEFAULT_BLOCK_S, help="seconds per block, about")
    parser.add_argument(
        "--write", metavar="PAGE", nargs="+", type=Path, default=[],
        help="also write the results section of these pages, and, but for modes, PAGE.svg beside it",
    )  # fmt: skip
    return parser


def _results(rows: Sequence[Row], asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Every row's result, in order. Rows of one measurement are measured once; a failure is a result, too."""
    found: dict[tuple[str, str], Measured | dict[str, str]] = {}
    results = []
    for row in rows:
        measurement = row.bench, row.workload
        if measurement not in found:
            found[measurement] = _measure(*measurement, asked)
        outcome = found[measurement]
        results.append(judge(row, outcome) if isinstance(outcome, Measured) else report.unmeasured(row, outcome))
    return results


def _measure(bench: str, workload: str, asked: argparse.Namespace) -> Measured | dict[str, str]:
    chosen_bench = MEASURES[bench]
    if reason := chosen_bench.why_not(workload):
        _say(f"{bench}: {workload}: skipped: {reason}")
        return {"skipped": reason}
    _say(f"{bench}: {workload} ...")
    try:
        return chosen_bench.measure(
            workload, Size(asked.blocks, asked.seconds, asked.launches or chosen_bench.launches)
        )
    except ScriptFailed as error:
        _say(f"{bench}: {workload}: failed: {error}")
        return {"failed": str(error).splitlines()[0]}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
