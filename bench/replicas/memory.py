"""Host memory of four workers: `mh run -n 4` against DistributedDataParallel in four processes, one after the other.

All processes of a side are counted, launcher included: their proportional set size, in which memory that several
processes map counts once, and shared memory that is allocated although no process has touched it yet. The sides do not
run at the same time: they would halve each other's share of torch's code.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

import psutil

from bench.driver.baton import Side, taking_turns
from bench.driver.child import ScriptFailed
from bench.driver.sides import torch_side, trainer
from bench.programs.workloads import WORKLOADS
from bench.results.compare import Measured, Size

__all__ = ["bytes_of", "measure", "why_not"]

MODEL = "mlp-100m"
WORKERS = 4
STEPS = 6
NEEDED_BYTES = 14e9
# A side that leaves less than this to the rest of the machine is ended, before the kernel kills another process.
LEFT_BYTES = 3e9


def why_not(_allocator: str) -> str | None:
    if not Path("/proc/self/smaps_rollup").exists():
        return "no proportional set sizes here: Linux has them"
    free = psutil.virtual_memory().available
    if free < NEEDED_BYTES:
        return f"DDP may need {NEEDED_BYTES / 1e9:g} GB; {free / 1e9:.1f} GB are free"
    return None


def measure(allocator: str, size: Size) -> Measured:
    """`size.launches` pairs of runs; the peak over the steps of each. Both sides have the same allocator settings."""
    ours = trainer(MODEL, WORKERS, flags=("--allocator", allocator))
    sides = [ours, torch_side("DDP", "ddp", MODEL, WORKERS, allocator=allocator == "keep")]
    found = [{side.name: [_peak(side)] for side in sides} for _ in range(size.launches)]
    settings = {"model": WORKLOADS[MODEL].model, "batch": WORKLOADS[MODEL].batch * WORKERS, "workers": WORKERS}
    return Measured(found, {**settings, "threads": 1, "steps": STEPS})


def _peak(side: Side) -> float:
    seen: list[int] = []

    def look(pids: list[int]) -> None:
        seen.append(bytes_of(_trees(pids)))
        if psutil.virtual_memory().available < LEFT_BYTES:
            raise ScriptFailed(f"{side.name} was ended at {seen[-1] / 1e9:.1f} GB: the machine has no more to give")

    with taking_turns([side], look) as baton:
        seen.clear()  # without the start-up
        baton.run(side.name, STEPS)
    return float(max(seen))


def bytes_of(pids: Iterable[int]) -> int:
    """The host memory that these processes use together."""
    pids = list(pids)
    rollups = [text for pid in pids if (text := _rollup(pid)) is not None]
    own = sum(_kilobytes(text, "Pss_Anon") + _kilobytes(text, "Pss_File") for text in rollups)
    mapped = sum(_kilobytes(text, "Pss_Shmem") for text in rollups)
    return 1024 * own + max(1024 * mapped, _allocated_memfds(pids))


def _rollup(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None  # ended meanwhile


def _kilobytes(rollup: str, name: str) -> int:
    found = re.search(rf"^{name}: +(\d+) kB", rollup, re.MULTILINE)
    return int(found.group(1)) if found else 0


def _allocated_memfds(pids: Iterable[int]) -> int:
    """Anonymous shared memory is allocated in full when it is created, but counts as mapped only where touched."""
    sizes = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    if os.readlink(link).startswith("/memfd:"):
                        status = link.stat()
                        sizes[status.st_ino] = 512 * status.st_blocks
    return sum(sizes.values())


def _trees(pids: Iterable[int]) -> list[int]:
    found: list[int] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return found
