"""Named variables on servers: which server stores which, which changes count, which commits are still to send. Pure.

A call's changes are one commit: all of them or none, numbered in the order in which calls completed. The
`VariableLedger` is the cluster's side: it keeps every commit until its server has acknowledged it, and sends it again
to a restarted server. `Versions` is a server's side of one variable: a repeated commit changes nothing, and versions
that running calls may still read are kept. Start reading at `VariableLedger.commit`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

__all__ = ["Change", "VariableCommit", "VariableInfo", "VariableLedger", "Versions"]

# Per server: commits sent and not yet acknowledged; and all commits not yet acknowledged, beyond which no further calls
# are assigned.
WINDOW = 64
MOST_BEHIND = 256
# Limit of a list of all variables: workers and restarted servers get it in a single message.
MOST_LISTED_BYTES = 2**19

V = TypeVar("V")


class VariableInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One variable, as listings show it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name, without "torch."."""
    num_bytes: int
    server: int
    version: int
    """Number of changes so far; 1: as created."""


class Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call's change to one variable; at most one per variable."""

    name: str
    op: Literal["assign", "add"]
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


class VariableCommit(NamedTuple):
    """The changes of one call to the variables of one server; `payloads` in the order of `changes`."""

    number: int
    changes: tuple[Change, ...]
    payloads: tuple[Any, ...]


class _Behind:
    """Commits that one server has not acknowledged yet."""

    def __init__(self) -> None:
        self.commits: deque[VariableCommit] = deque()
        self.num_sent = 0
        self.last = 0
        self.acknowledged = 0
        self.num_bytes = 0


class VariableLedger:
    """The list of variables, the number of the last commit, and the commits that each server has not acknowledged."""

    def __init__(self) -> None:
        self.commits = 0
        self._catalogue: dict[str, VariableInfo] = {}
        self._listed_bytes = 0
        self._servers: dict[int, _Behind] = {}

    @property
    def catalogue(self) -> dict[str, VariableInfo]:
        return dict(self._catalogue)

    @property
    def marks(self) -> dict[int, int]:
        """By server: the last commit that changes its variables; shows a server if it has reached a snapshot."""
        return {server: behind.last for server, behind in self._servers.items()}

    @property
    def behind(self) -> bool:
        """Whether a server is so far behind that calls should wait."""
        return any(len(behind.commits) >= MOST_BEHIND for behind in self._servers.values())

    def add_server(self, server: int) -> None:
        self._servers[server] = _Behind()

    def refusal(self, changes: Sequence[Change]) -> str | None:
        """Why these changes cannot be made; None if they can."""
        names = [change.name for change in changes]
        if len(set(names)) != len(names):
            return "It changes a variable twice."
        if changes and not self._servers:
            return "It changes variables, but this cluster has no server to store them."
        fresh = sum(_listed_bytes(change) for change in changes if change.name not in self._catalogue)
        if fresh and self._listed_bytes + fresh > MOST_LISTED_BYTES:
            return (
                f"There are {len(self._catalogue)} variables: with more, or with names this long, their list does not "
                "fit into one message."
            )
        return next((why for change in changes if (why := self._refusal(change))), None)

    def _refusal(self, change: Change) -> str | None:
        known = self._catalogue.get(change.name)
        if known is None:
            return f"It adds to variable {change.name!r}, which does not exist." if change.op == "add" else None
        if (known.shape, known.dtype) != (change.shape, change.dtype):
            has, gets = (f"{one.dtype}{list(one.shape)}" for one in (known, change))
            return f"Variable {change.name!r} is {has}, but it would {change.op} {gets}."
        return None

    def place(self, changes: Sequence[Change]) -> list[VariableInfo]:
        """Variables that these changes would create, each on the server with the fewest bytes."""
        sizes = {server: behind.num_bytes for server, behind in sorted(self._servers.items())}
        fresh = []
        for change in changes:
            if change.name in self._catalogue:
                continue
            server = min(sizes, key=sizes.__getitem__)
            sizes[server] += change.num_bytes
            fresh.append(
                VariableInfo(
                    name=change.name,
                    shape=change.shape,
                    dtype=change.dtype,
                    num_bytes=change.num_bytes,
                    server=server,
                    version=0,
                )
            )
        return fresh

    def commit(self, changes: Sequence[Change], payloads: Sequence[Any], fresh: Sequence[VariableInfo] = ()) -> int:
        """Commit the changes of one call; returns the commit's number. Call `refusal` and `place` before."""
        assert self.refusal(changes) is None
        for info in fresh:
            self._catalogue[info.name] = info
            self._listed_bytes += _listed_bytes(info)
            self._servers[info.server].num_bytes += info.num_bytes
        if not changes:
            return self.commits
        self.commits += 1
        parts: dict[int, list[tuple[Change, Any]]] = {}
        for change, payload in zip(changes, payloads, strict=True):
            info = self._catalogue[change.name]
            self._catalogue[change.name] = replace(info, version=info.version + 1)
            parts.setdefault(info.server, []).append((change, payload))
        for server, part in parts.items():
            behind = self._servers[server]
            behind.last = self.commits
            behind.commits.append(VariableCommit(self.commits, *zip(*part, strict=True)))
        return self.commits

    def due(self, server: int) -> list[VariableCommit]:
        """The commits to send now; they then count as sent."""
        behind = self._servers[server]
        stop = min(len(behind.commits), WINDOW)
        fresh = [behind.commits[index] for index in range(behind.num_sent, stop)]
        behind.num_sent = max(behind.num_sent, stop)
        return fresh

    def applied(self, server: int, number: int) -> None:
        """The server has stored this commit and all before it in shared memory."""
        behind = self._servers[server]
        behind.acknowledged = max(behind.acknowledged, number)
        while behind.commits and behind.commits[0].number <= number and behind.num_sent:
            behind.commits.popleft()
            behind.num_sent -= 1

    def started_again(self, server: int) -> int:
        """Send all unacknowledged commits again to a restarted server; returns the last acknowledged commit."""
        self._servers[server].num_sent = 0
        return self._servers[server].acknowledged


def _listed_bytes(one: Change | VariableInfo) -> int:
    return 64 + len(one.name.encode()) + 9 * len(one.shape)


class Versions(Generic[V]):
    """The versions of one variable, on its server."""

    def __init__(self, restored: tuple[int, V] | None = None) -> None:
        """`restored`: the newest version, with its commit, as found by a restarted server."""
        self._commits: list[int] = [restored[0]] if restored else []
        self._values: list[V] = [restored[1]] if restored else []
        self._complete = restored is None
        """No older version is missing."""

    @property
    def newest(self) -> tuple[int, V] | None:
        return (self._commits[-1], self._values[-1]) if self._commits else None

    def has(self, commit: int) -> bool:
        """Whether the commit is included or does not change this variable; commits arrive in order."""
        return bool(self._commits) and self._commits[-1] >= commit

    def put(self, commit: int, value: V) -> None:
        assert not self.has(commit)
        self._commits.append(commit)
        self._values.append(value)

    def at(self, snapshot: int) -> V | Literal["absent", "gone"]:
        """The variable as of that commit; "gone" if that version was dropped, "absent" if it did not exist yet."""
        index = bisect_right(self._commits, snapshot)
        if index:
            return self._values[index - 1]
        return "absent" if self._complete else "gone"

    def forget(self, oldest: int) -> None:
        """Drop versions that only snapshots before this commit would read."""
        num_dropped = bisect_right(self._commits, oldest) - 1
        if num_dropped > 0:
            del self._commits[:num_dropped], self._values[:num_dropped]
            self._complete = False
