"""How a worker reaches weights and embedding rows of servers on the same host: in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import torch
from torch import Tensor, nn

from manyhands.comm.host_memory import Memory
from manyhands.parallel.model.flat_layout import in_memory_order
from manyhands.parallel.model.step_buffers import ForeignState
from manyhands.parameter_server.memory.versioned_memory import Attendance, VersionedMemory, copy_large_, open_register
from manyhands.parameter_server.protocol.chunk_placement import Chunk
from manyhands.parameter_server.protocol.leases import Lease
from manyhands.parameter_server.protocol.messages import Of, Open
from manyhands.parameter_server.server.server import open_memory
from manyhands.parameter_server.tables.server_tables import ServerTables
from manyhands.parameter_server.worker.server_connection import ServerConnection

__all__ = ["LocalAccess", "ServerAccess"]


class ServerAccess(Protocol):
    """How a worker reaches the servers' memory: `LocalAccess` shares it with them, `RemoteAccess` sends frames."""

    is_away: bool

    @property
    def memory(self) -> Memory:
        """The servers' memory, or this worker's private one, with regions of the same names."""

    def enter(
        self, model: nn.Module, opened: Open, parts: Sequence[Sequence[Chunk]], foreign: ForeignState
    ) -> VersionedMemory:
        """This worker's view of an interval's memory; `parts` are the chunks of each server."""

    def brings(self, *, states: bool) -> list[Of]: ...

    def open(self, opened: Open, is_wanted: Callable[[], bool]) -> None:
        """Called by the chief: have all servers begin this interval with what it has put into the memory. `PeerLost`
        once it `is_wanted` no longer.
        """

    def last_interval(self) -> Open: ...

    def standings(self, opened: Open) -> list[bytes]: ...

    def put_rows(self, tables: ServerTables | None, servers: int) -> list[int]:
        """Called by the chief: have these rows in the servers' memory when the interval begins."""

    def fetch_rows(self, tables: ServerTables) -> None: ...

    def fetch_states(self, opened: Open, version: int, mores: Sequence[bytes]) -> None: ...

    def look(self, version: int) -> bool:
        """Have these weights and buffers in the memory; False: they no longer exist, so their lease is void."""

    def pull(self) -> tuple[list[Tensor], list[int]]: ...

    def read(self) -> tuple[list[Tensor], int] | None:
        """The newest weights without a copy, and their version; None where a copy is better."""

    def stayed(self, version: int) -> bool:
        """Whether weights of this version are unchanged, so that a gradient computed with them is valid."""

    def row(self, held: Lease) -> int:
        """The number of the buffer for this gradient."""

    def send(self, held: Lease) -> None:
        """Make the gradient available to the servers."""

    def are_up(self, servers: int) -> bool: ...

    def close(self) -> None: ...


class LocalAccess:
    is_away = False

    def __init__(self, link: ServerConnection, memory: Memory) -> None:
        self._link, self.memory = link, memory
        self._served: VersionedMemory | None = None
        self._copies: list[Tensor] | None = None
        self._updates_meanwhile = 0
        """How many updates servers made while this worker computed its last gradient."""

    def enter(
        self, model: nn.Module, opened: Open, parts: Sequence[Sequence[Chunk]], foreign: ForeignState
    ) -> VersionedMemory:
        served, self._parts = self._served, parts
        wanted = (opened.layout, opened.copies, opened.rows)
        if served is None or (served.layout, served.copies, served.num_rows) != wanted:
            self._served = served = open_memory(model, self.memory, opened, foreign)
        return served

    def brings(self, *, states: bool) -> list[Of]:
        """Nothing: servers read what this worker writes."""
        return []

    def open(self, opened: Open, is_wanted: Callable[[], bool]) -> None:
        self._link.open(opened, is_wanted)

    def last_interval(self) -> Open:
        return msgspec.msgpack.decode(open_register(self.memory, 0).value, type=Open)

    def standings(self, opened: Open) -> list[bytes]:
        return [self._entered_memory.standing(server).value for server in range(opened.servers)]

    def put_rows(self, tables: ServerTables | None, servers: int) -> list[int]:
        """Servers already share them."""
        return []

    def fetch_rows(self, tables: ServerTables) -> None:
        """They are in shared memory."""

    def fetch_states(self, opened: Open, version: int, mores: Sequence[bytes]) -> None:
        """They are in shared memory."""

    def look(self, version: int) -> bool:
        """Already in shared memory, and unchanged for as long as this worker needs it."""
        return True

    def read(self) -> tuple[list[Tensor], int] | None:
        """The newest weights without a copy, and their version, if all servers have the same.

        None also if servers are expected to make too many updates before this worker is done: one more than last
        time would be too many.
        """
        served, versions = self._entered_memory, self._versions()
        if self._updates_meanwhile + 1 > served.copies - 2 or len(versions) > 1:
            return None
        (version,) = versions
        return served.weights(version).views, version

    def stayed(self, version: int) -> bool:
        """Whether no server has written to this version's memory."""
        self._updates_meanwhile = max(self._versions()) - version
        return self._updates_meanwhile <= self._entered_memory.copies - 2

    def _versions(self) -> set[int]:
        return {self._entered_memory.version(server) for server in range(len(self._parts))}

    def pull(self) -> tuple[list[Tensor], list[int]]:
        """Private copies of the newest weights, and each server's version of them."""
        served = self._entered_memory
        if self._copies is None or len(self._copies) != len(served.params):
            self._copies = [torch.empty_like(param) for param in served.params]
        with torch.no_grad():
            versions = [self._pull_part(self._copies, server, chunks) for server, chunks in enumerate(self._parts)]
        return self._copies, versions

    def _pull_part(self, copies: Sequence[Tensor], server: int, chunks: Sequence[Chunk]) -> int:
        served = self._entered_memory
        while True:
            version = served.version(server)
            views = served.weights(version).views
            for place, start, stop in chunks:
                if stop - start == views[place].numel():
                    copy_large_(copies[place], views[place])
                else:
                    copy_large_(in_memory_order(copies[place])[start:stop], in_memory_order(views[place])[start:stop])
            if served.version(server) <= version + served.copies - 2:  # no server wrote there meanwhile
                return version

    def row(self, held: Lease) -> int:
        return held.row

    def send(self, held: Lease) -> None:
        """It is in shared memory."""

    def are_up(self, servers: int) -> bool:
        return Attendance(self.memory).has_all(servers)

    def close(self) -> None:
        self._link.close()

    @property
    def _entered_memory(self) -> VersionedMemory:
        assert self._served is not None, "enter comes first"
        return self._served
