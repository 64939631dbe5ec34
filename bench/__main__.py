"""`python -m bench [overhead|ddp] [--json] [--blocks N] [--launches N] [--write PAGE]`; without a name, both."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from bench import ddp, overhead, report, workloads
from bench.child import ScriptFailed
from bench.machine import describe, machine

DEFAULT_BLOCKS = 15
DEFAULT_BLOCK_S = 0.6
DEFAULT_LAUNCHES = {"overhead": 1, "ddp": 3}


def main(argv: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(argv)
    facts = machine()
    _say(describe(facts))
    try:
        results = [_measure(bench, workload, asked) for bench, workload in _chosen(asked)]
    except ScriptFailed as error:
        _say(f"A benchmark's script failed: {error}")
        return 1
    found = {"date": date.today().isoformat(), "machine": facts, "results": results}
    print(json.dumps(found, indent=2) if asked.json else report.table(results))
    if asked.write:
        report.write_into(Path(asked.write), report.markdown(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Side-by-side measurements on this machine.")
    parser.add_argument("bench", nargs="?", choices=["overhead", "ddp"], help="default: both")
    parser.add_argument("--json", action="store_true", help="everything that was measured, for programs")
    parser.add_argument("--blocks", type=int, default=DEFAULT_BLOCKS, help="blocks per side, over all launches")
    parser.add_argument("--launches", type=int, help="blocks are divided among so many; default: 3 for ddp, else 1")
    parser.add_argument("--seconds", type=float, default=DEFAULT_BLOCK_S, help="seconds per block, about")
    parser.add_argument("--workload", help="one only: " + ", ".join({**workloads.OVERHEAD, **workloads.DDP}))
    parser.add_argument("--workers", type=int, default=2, help="of the ddp benchmark")
    parser.add_argument("--write", metavar="PAGE", help="also replace the results section of this Markdown page")
    return parser


def _chosen(asked: argparse.Namespace) -> list[tuple[str, str]]:
    every = [("overhead", name) for name in workloads.OVERHEAD] + [("ddp", name) for name in workloads.DDP]
    return [(bench, name) for bench, name in every if asked.bench in (None, bench) and asked.workload in (None, name)]


def _measure(bench: str, workload: str, asked: argparse.Namespace) -> dict[str, Any]:
    _say(f"{bench}: {workload} ...")
    launches = asked.launches or DEFAULT_LAUNCHES[bench]
    size = {"num_blocks": asked.blocks, "block_s": asked.seconds, "launches": launches}
    if bench == "overhead":
        return overhead.measure(workload, **size)
    return ddp.measure(workload, **size, workers=asked.workers)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
