"""Letting a process that nobody waits for have little of the processors that others want, until somebody does.

Linux only. Where sessions share processors as groups ("autogroup"), whoever owns a session lowers and raises its share.
Elsewhere each thread has a niceness, which not everybody may take back: who could not leaves it alone, as a process
that has to hurry later would be held back for good.
"""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

__all__ = ["hold_back", "let_go"]

# A quarter of a processor that somebody else wants, too. With less, a script would take minutes to get to its end.
LOWER = 5
_CAP_SYS_NICE = 23


def hold_back(pid: int) -> None:
    """A process that was just started, and leads its own session, comes after others."""
    _set_share(pid, LOWER)
    if _may_take_back(_nice(0)):
        _set_nice(pid, LOWER)


def let_go(pid: int) -> bool:
    """From now on it counts as much as this process does, with all its threads. False: not yet, try again."""
    mine = _nice(0)
    for thread in _threads(pid):
        if _nice(thread) > mine:
            _set_nice(thread, mine)
    return _set_share(pid, 0) and not any(_nice(thread) > mine for thread in _threads(pid))


def _set_share(pid: int, nice: int) -> bool:
    try:
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))
    except BlockingIOError:  # the kernel does this ten times a second, for all who ask
        return False
    except OSError:  # it has ended, or the kernel has no such groups
        return True
    return True


def _may_take_back(nice: int) -> bool:
    """Whether a process of this one's user can be given a lower niceness again; see getrlimit(2)."""
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
    """0 is this one; of one that has ended, what is never too high."""
    with contextlib.suppress(OSError):
        return os.getpriority(os.PRIO_PROCESS, thread)
    return -20


def _set_nice(thread: int, nice: int) -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, nice)
