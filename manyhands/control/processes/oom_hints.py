"""Hints that a worker ran out of memory. A SIGKILL leaves no reason, so these are guesses, and are labelled so."""

from __future__ import annotations

from pathlib import Path

import psutil

__all__ = ["MemoryWatch"]

NEARLY_ALL = 0.85

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_KILLS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


class MemoryWatch:
    """Resident sizes at the last sample, their memory limit, and the cgroup's count of OOM kills."""

    def __init__(self) -> None:
        self._rss: dict[int, int] = {}
        self._kills = _oom_kills()

    def look(self, pids: list[int]) -> None:
        for pid in pids:
            try:
                self._rss[pid] = psutil.Process(pid).memory_info().rss
            except psutil.Error:
                continue

    def hint(self, pid: int) -> str:
        """Why the kernel may have killed `pid`, which ended by SIGKILL; empty without an indication."""
        rss, limit, kills = self._rss.pop(pid, 0), _limit(), _oom_kills()
        seen = f"rss {_gib(rss)} of {_gib(limit)} when last seen" if rss else "its size was not seen"
        if kills > self._kills:
            self._kills = kills
            return f"kernel OOM: the group's count of OOM kills rose to {kills}; {seen}"
        return f"kernel OOM: {seen}" if rss > NEARLY_ALL * limit else ""


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _limit() -> int:
    total = int(psutil.virtual_memory().total)
    for path in _LIMITS:
        text = _read(path).strip()
        if text.isdigit():
            return min(total, int(text))
    return total


def _oom_kills() -> int:
    for path in _KILLS:
        for line in _read(path).splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.strip().isdigit():
                return int(count)
    return 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
