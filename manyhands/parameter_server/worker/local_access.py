"""How a worker reaches weights and rows of servers on its own host: they are in memory that it shares with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor, nn

from manyhands.parallel.model.flat_layout import in_memory_order
from manyhands.parallel.model.step_buffers import ForeignState
from manyhands.parameter_server.memory.copies import copy_large_
from manyhands.parameter_server.memory.versioned_memory import Attendance, Memory, ServedMemory, course_register
from manyhands.parameter_server.protocol.chunk_placement import Chunk
from manyhands.parameter_server.protocol.leases import Held
from manyhands.parameter_server.protocol.messages import Of, Open
from manyhands.parameter_server.server.server import open_memory
from manyhands.parameter_server.tables.server_tables import Tables
from manyhands.parameter_server.worker.server_connection import Link

__all__ = ["Local"]


class Local:
    is_away = False

    def __init__(self, link: Link, memory: Memory) -> None:
        self._link, self.memory = link, memory
        self._served: ServedMemory | None = None
        self._own: list[Tensor] | None = None
        self._passed = 0
        """How many updates servers have made while this worker last made a gradient."""

    def enter(
        self, model: nn.Module, opened: Open, parts: Sequence[Sequence[Chunk]], foreign: ForeignState
    ) -> ServedMemory:
        served, self._parts = self._served, parts
        wanted = (opened.layout, opened.copies, opened.rows)
        if served is None or (served.layout, served.copies, served.num_rows) != wanted:
            self._served = served = open_memory(model, self.memory, opened, foreign)
        return served

    def brings(self, *, states: bool) -> list[Of]:
        """Nothing: what this worker writes, servers find."""
        return []

    def open(self, opened: Open, is_wanted: Callable[[], bool]) -> None:
        self._link.open(opened, is_wanted)

    def last_course(self) -> Open:
        return msgspec.msgpack.decode(course_register(self.memory, 0).value, type=Open)

    def standings(self, opened: Open) -> list[bytes]:
        return [self._memory_now.standing(server).value for server in range(opened.servers)]

    def put_rows(self, tables: Tables | None, servers: int) -> list[int]:
        """They are where servers find them."""
        return []

    def fetch_rows(self, tables: Tables) -> None:
        """They are here."""

    def fetch_states(self, opened: Open, version: int, mores: Sequence[bytes]) -> None:
        """They are here."""

    def look(self, version: int) -> bool:
        """It is here, and stays as it is for as long as this worker needs it."""
        return True

    def read(self) -> tuple[list[Tensor], int] | None:
        """The newest weights where they are, and their version, if all servers have the same.

        None also where servers are expected to make too many updates before this worker is done: one more than last
        time would be too many.
        """
        served, versions = self._memory_now, self._versions()
        if self._passed + 1 > served.copies - 2 or len(versions) > 1:
            return None
        (version,) = versions
        return served.weights(version).views, version

    def stayed(self, version: int) -> bool:
        """Whether nobody has written to this version's memory."""
        self._passed = max(self._versions()) - version
        return self._passed <= self._memory_now.copies - 2

    def _versions(self) -> set[int]:
        return {self._memory_now.version(server) for server in range(len(self._parts))}

    def pull(self) -> tuple[list[Tensor], list[int]]:
        """Copies, which stay as they are, of the newest weights, and each server's version of them."""
        served = self._memory_now
        if self._own is None or len(self._own) != len(served.params):
            self._own = [torch.empty_like(param) for param in served.params]
        with torch.no_grad():
            versions = [self._pull_part(self._own, server, chunks) for server, chunks in enumerate(self._parts)]
        return self._own, versions

    def _pull_part(self, own: Sequence[Tensor], server: int, chunks: Sequence[Chunk]) -> int:
        served = self._memory_now
        while True:
            version = served.version(server)
            views = served.weights(version).views
            for place, start, stop in chunks:
                if stop - start == views[place].numel():
                    copy_large_(own[place], views[place])
                else:
                    copy_large_(in_memory_order(own[place])[start:stop], in_memory_order(views[place])[start:stop])
            if served.version(server) <= version + served.copies - 2:  # nobody wrote there meanwhile
                return version

    def row(self, held: Held) -> int:
        return held.row

    def send(self, held: Held) -> None:
        """It is there."""

    def are_up(self, servers: int) -> bool:
        return Attendance(self.memory).has_all(servers)

    def close(self) -> None:
        self._link.close()

    @property
    def _memory_now(self) -> ServedMemory:
        assert self._served is not None, "enter comes first"
        return self._served
