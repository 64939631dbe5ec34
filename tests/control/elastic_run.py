"""Elastic runs of workers that train nothing, for tests: what they do is a script, what they see they note down."""

from __future__ import annotations

import json
import os
import signal
import textwrap
import time
from typing import Any

from conftest import Launched, Launcher, until

# A worker that counts steps, switches to each new generation, and notes down each group that it enters.
TRAIN = """
import json
from manyhands.errors import PeerLost, PeerTimeout
def note(what, group, **more):
    facts = {"what": what, "slot": IDENTITY.slot, "pid": os.getpid(), "at": time.monotonic(), "rank": group.rank,
             "generation": group.generation, "lost": group.lost, "slots": group.slots, "hosts": group.hosts,
             "call": group.call, **more}
    with open(HERE / "groups.jsonl", "a") as file:
        file.write(json.dumps(facts) + "\\n")
def enter(session, group):
    session.enter(group)
    note("entered", group)
def begin(call=1):
    session = join()
    if IDENTITY.joining:
        enter(session, session.offer(call, 60))
    else:
        note("entered", session.group)
    return session
def leave(session):
    note("dismissed", session.newest)
    session.close()
    sys.exit(0)
def step(session):
    session.report(int(time.monotonic() * 100), "training", 1)
    if (newest := session.newest) is not None:
        leave(session) if newest.rank < 0 else enter(session, newest)
    time.sleep(0.002)
def train(session, end="end"):
    while not (HERE / end).exists():
        step(session)
"""
PLAIN = "train(begin())"


class Elastic:
    def __init__(self, launcher: Launcher, body: str, **request: Any) -> None:
        script = TRAIN + textwrap.dedent(body)
        self.folder, self.workers = launcher.folder, request.get("workers", 3)
        self.run: Launched = launcher(script, **{"workers": 3, "elastic": [1, 4], **request})

    def notes(self, what: str = "entered") -> list[dict[str, Any]]:
        path = self.folder / "groups.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [entry for entry in map(json.loads, lines) if entry["what"] == what]

    def members(self, slots: list[int], *, after: float = 0.0) -> list[dict[str, Any]]:
        """Once a generation of these slots, in any order, is entered by all of them: what they noted, by rank."""

        def complete() -> list[dict[str, Any]]:
            found: dict[str, list[dict[str, Any]]] = {}
            for entry in self.notes():
                if sorted(entry["slots"]) == sorted(slots) and entry["at"] > after:
                    found.setdefault(entry["generation"], []).append(entry)
            whole = [entries for entries in found.values() if len(entries) == len(slots)]
            return sorted(whole[-1], key=lambda entry: entry["rank"]) if whole else []

        return until(complete, what=f"a group of {slots}; {self.notes()}")

    def end(self) -> None:
        (self.folder / "end").touch()
        assert self.run.wait() == 0, self.run.err

    def join(self, launcher: Launcher, workers: int) -> Launched:
        """A second host, for a run that was started with HOSTS; it has so many workers."""
        file = self.folder / "join.json"
        return launcher(join=until(lambda: file.exists() and json.loads(file.read_text())), workers=workers)


HOSTS = {"hosts_wanted": 2, "listen": "127.0.0.1", "join_file": "join.json"}


def by_slot(members: list[dict[str, Any]]) -> dict[int, int]:
    return {entry["slot"]: entry["pid"] for entry in members}


def kill(*pids: int) -> float:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return time.monotonic()
