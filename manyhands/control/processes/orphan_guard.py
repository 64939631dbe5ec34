"""The last one out: when an agent is gone, however it went, end what it left behind.

Run by path as a small process of its own (`python -I -S guard.py DIRECTORY`), with the agent's pipe as its standard
input. Lines on it name the sessions of workers; its end means the agent is gone. Then every process of these sessions,
and every process whose environment names DIRECTORY, is killed, and DIRECTORY is removed. Standard library only, so it
starts in milliseconds and depends on nothing that can break.
"""

import os
import shutil
import signal
import sys
import time

__all__ = ["clean_up", "kill_all"]

ROUNDS = 100
PAUSE_S = 0.05
# multiprocessing's own cleaner: once all who used them are dead it removes their semaphores and shared memory, which
# have names and would stay for ever, and ends.
TRACKER = b"multiprocessing.resource_tracker"


def members(sessions: set[int], marker: bytes | None = None) -> list[int]:
    """Live processes of these sessions, or with `marker` in their environment; zombies and this one do not count."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and (_session(name) in sessions or _marked(name, marker)):
            found.append(int(name))
    return found


def _session(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may hold anything; after its last ")" come state, parent, group, session.
            state, _, _, session = file.read().rpartition(b")")[2].split()[:4]
    except (OSError, ValueError):
        return -1
    return -1 if state in (b"Z", b"X") else int(session)


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
    """SIGKILL until nobody is left; more than once, since a process may fork while we look. True when all are gone.

    Resource trackers are left to end by themselves, and are killed only if they have not by the last rounds.
    """
    for number in range(rounds):
        if kill_round(sessions, marker, patient=number < rounds * 4 // 5):
            return True
        time.sleep(PAUSE_S)
    return False


def kill_round(sessions: set[int], marker: bytes | None = None, *, patient: bool) -> bool:
    """SIGKILL to all that are there now, but for resource trackers if `patient`; True when nobody was there."""
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
    """End what an agent has left behind, and remove its directory."""
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
