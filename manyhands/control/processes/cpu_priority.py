"""Lowers the CPU priority of a process that is not needed yet, and restores it when it is.

Linux only. With autogroup scheduling, which gives each session a share of the CPUs, the owner of a session may lower
and raise its share. Otherwise each thread has a niceness, which not every user may lower again: if this user may not,
it stays unchanged, or a process that is needed later would stay slow for good.
"""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

__all__ = ["hold_back", "let_go"]

# A quarter of a CPU that another process wants, too. With less, a script would need minutes to run to its end.
LOWER = 5
_CAP_SYS_NICE = 23


def hold_back(pid: int) -> None:
    """Lower the priority of a process that was just started and leads its own session."""
    _set_share(pid, LOWER)
    if _can_undo(_nice(0)):
        _set_nice(pid, LOWER)


def let_go(pid: int) -> bool:
    """Give the process, with all its threads, the priority of this one. False: not done yet, try again."""
    mine = _nice(0)
    for thread in _threads(pid):
        if _nice(thread) > mine:
            _set_nice(thread, mine)
    return _set_share(pid, 0) and not any(_nice(thread) > mine for thread in _threads(pid))


def _set_share(pid: int, nice: int) -> bool:
    try:
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))
    except BlockingIOError:  # the kernel allows ten changes a second, for all processes together
        return False
    except OSError:  # it has ended, or the kernel has no such groups
        return True
    return True


def _can_undo(nice: int) -> bool:
    """Whether this user may lower the niceness of a process again; see getrlimit(2)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NICE)
    return soft == resource.RLIM_INFINITY or soft >= 20 - nice or bool(_capabilities() >> _CAP_SYS_NICE & 1)


def _capabilities() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return int(line.split()[1], 16)
    return 0


def _threads(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return []


def _nice(thread: int) -> int:
    """The niceness of a thread (0: this one); the lowest possible if it has ended."""
    with contextlib.suppress(OSError):
        return os.getpriority(os.PRIO_PROCESS, thread)
    return -20


def _set_nice(thread: int, nice: int) -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, nice)
