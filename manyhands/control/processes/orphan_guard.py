"""The guard process: when an agent is gone, however it ended, it kills the processes that the agent left.

Run by path as a small separate process (`python -I -S orphan_guard.py DIRECTORY`), with the agent's pipe as its
standard input. Lines name the sessions of workers; the end of the pipe means that the agent is gone. Then every
process of these sessions, and every process whose environment names DIRECTORY, is killed, and DIRECTORY is removed.
Standard library only, so it starts in milliseconds and depends on nothing that can break.
"""

import os
import shutil
import signal
import sys
import time

__all__ = ["clean_up", "kill_all", "zombies_below"]

ROUNDS = 100
PAUSE_S = 0.05
# multiprocessing's resource tracker: once all its users are dead it removes their named semaphores and shared memory,
# which would stay for ever, and exits.
TRACKER = b"multiprocessing.resource_tracker"


def members(sessions: set[int], marker: bytes | None = None) -> list[int]:
    """Live processes of these sessions, or with `marker` in their environment; not zombies, and not this process."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and (_session(name) in sessions or _marked(name, marker)):
            found.append(int(name))
    return found


def zombies_below(parent: int, session: int) -> list[int]:
    """Dead children of `parent` that belong to this session and were not collected yet."""
    wanted = (b"Z", str(parent).encode(), str(session).encode())
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _state(name) == wanted]


def _session(pid: str) -> int:
    state, _, session = _state(pid)
    return -1 if state in (b"Z", b"X", b"") else int(session)


def _state(pid: str) -> tuple[bytes, bytes, bytes]:
    """Its state, its parent and its session; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may contain anything; after its last ")" come state, parent, group, session.
            state, parent, _, session = file.read().rpartition(b")")[2].split()[:4]
    except (OSError, ValueError):
        return b"", b"", b""
    return state, parent, session


def _marked(pid: str, marker: bytes | None) -> bool:
    if marker is None:
        return False
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return marker in file.read()
    except OSError:
        return False


def _is_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return TRACKER in file.read()
    except OSError:
        return False


def kill_all(sessions: set[int], marker: bytes | None = None, rounds: int = ROUNDS) -> bool:
    """SIGKILL until no process is left; repeatedly, since a process may fork meanwhile. True when all are gone.

    Resource trackers get time to exit, and are killed only in the last rounds.
    """
    for number in range(rounds):
        if kill_round(sessions, marker, patient=number < rounds * 4 // 5):
            return True
        time.sleep(PAUSE_S)
    return False


def kill_round(sessions: set[int], marker: bytes | None = None, *, patient: bool) -> bool:
    """SIGKILL to all that exist now, but not to resource trackers if `patient`; True when no process existed."""
    pids = members(sessions, marker)
    for pid in pids:
        if patient and _is_tracker(pid):
            continue
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    return not pids


def clean_up(sessions: set[int], directory: str) -> None:
    """Kill the processes that an agent has left, and remove its directory."""
    kill_all(sessions, f"MANYHANDS_AGENT=ipc://{directory}/".encode())
    shutil.rmtree(directory, ignore_errors=True)


def main(directory: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        if line[:1] == "+":
            sessions.add(int(line[1:]))
        elif line[:1] == "-":
            sessions.discard(int(line[1:]))
    clean_up(sessions, directory)


if __name__ == "__main__":
    main(sys.argv[1])
