"""The machine that numbers come from: a number without it means nothing."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["describe", "machine"]


def machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "manyhands": version("manyhands"),
        "load_before": round(os.getloadavg()[0], 2),
    }


def describe(facts: dict[str, Any]) -> str:
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gb']} GB, {facts['system']}, "
        f"Python {facts['python']}, torch {facts['torch']}, manyhands {facts['manyhands']}; "
        f"load before: {facts['load_before']}"
    )


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
