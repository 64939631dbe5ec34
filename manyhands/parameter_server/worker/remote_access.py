"""How a worker reaches servers on another host: it has memory of its own, and frames bring it up to date.

Of the weights it has one version, of gradients one row: before it computes it fetches what it was granted, and before
it tells servers of a gradient it has sent each of them its chunks. What goes over the wire is in `messages`, and how it
gets there in `frames`; the other end is `remote_worker_service`. Start reading at `Remote.look` and `Remote.send`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from torch import Tensor, nn

from manyhands.comm.host_memory import HostMemory, Segment
from manyhands.parallel.model.step_buffers import ForeignState
from manyhands.parameter_server.memory.frames import own_segment
from manyhands.parameter_server.memory.server_streams import Streams
from manyhands.parameter_server.memory.versioned_memory import ServedMemory
from manyhands.parameter_server.protocol.chunk_placement import Chunk
from manyhands.parameter_server.protocol.leases import Held
from manyhands.parameter_server.protocol.messages import Number, Of, Open
from manyhands.parameter_server.server.server import open_memory
from manyhands.parameter_server.tables.server_tables import Tables, parts_of
from manyhands.parameter_server.worker.server_connection import Link
from manyhands.parameter_server.worker.stream_transfers import Fetch, Opening, Push

__all__ = ["Remote"]


class Remote:
    is_away = True

    def __init__(self, link: Link, worker: int, *, clips: bool) -> None:
        """`clips`: servers need the norm of whole gradients, and each is sent all of it."""
        self._link, self._worker, self._clips = link, worker, clips
        self._own = HostMemory()
        self._served: ServedMemory | None = None
        self._number: Number = (0, 0, 0)
        self._at: int | None = None
        """The version that is here."""
        self._rows: list[Segment] = []
        """Rows of embeddings that the next course begins with, for each server."""

    def memory(self, name: str, num_bytes: int) -> Segment:
        return Segment(self._own.fd, num_bytes, self._own.allot(f"{name} {num_bytes}", num_bytes))

    def enter(
        self, model: nn.Module, opened: Open, parts: Sequence[Sequence[Chunk]], foreign: ForeignState
    ) -> ServedMemory:
        """Memory for one version of the weights and one gradient."""
        here = msgspec.structs.replace(opened, copies=1, rows=1)
        self._served = served = open_memory(model, self.memory, here, foreign)
        self._streams = [
            Streams(served, chunks, server, opened.states, clips=self._clips) for server, chunks in enumerate(parts)
        ]
        self._number, self._at = opened.number, None
        return served

    def brings(self, *, states: bool) -> list[Of]:
        """What servers do not find in place when this worker has a course opened."""
        return ["weights", "states"] if states else ["weights"]

    def open(self, opened: Open, is_wanted: Callable[[], bool]) -> None:
        """Have every server begin this course with what is here."""
        self._number = opened.number
        self._link.follow(opened)
        rows: Sequence[Segment | None] = self._rows or [None] * opened.servers
        streams = [
            streams.brought(opened.brings, opened.version, opened.more, mine)
            for streams, mine in zip(self._streams, rows, strict=True)
        ]
        talks = [Opening(server, opened, one) for server, one in enumerate(streams)]
        self._link.carry(talks, "begin a course", is_wanted)
        self._rows = []

    def last_course(self) -> Open:
        """What the first server was last told to do."""
        self._link.reach(1)
        fetch = self._fetch(0, "course", None)
        self._link.carry([fetch], "say which course it is in")
        return msgspec.msgpack.decode(fetch.value, type=Open)

    def standings(self, opened: Open) -> list[bytes]:
        """What each server committed last."""
        self._number = opened.number
        self._link.reach(opened.servers)
        fetches = [self._fetch(server, "standing", None) for server in range(opened.servers)]
        self._link.carry(fetches, "say what they have committed")
        return [fetch.value for fetch in fetches]

    def put_rows(self, tables: Tables | None, servers: int) -> list[int]:
        """Have the rows that are here go with the next course: how many bytes each server gets."""
        packed = [tables.pack(parts_of(server, servers)) for server in range(servers)] if tables is not None else []
        self._rows = [own_segment(len(one)) for one in packed]
        for segment, one in zip(self._rows, packed, strict=True):
            segment.buffer[:] = one
        return [len(one) for one in packed]

    def fetch_rows(self, tables: Tables) -> None:
        """Have all rows here."""
        fetches = [self._fetch(server, "tables", None) for server in range(len(self._streams))]
        self._link.carry(fetches, "give their rows")
        for fetch in fetches:
            tables.unpack(fetch.value)

    def fetch_states(self, opened: Open, version: int, mores: Sequence[bytes]) -> None:
        """Have the optimizer's states here. `mores`: what each server has said of its own."""
        streams = [one.states(version, more) for one, more in zip(self._streams, mores, strict=True)]
        fetches = [self._fetch(server, "states", version, one.write) for server, one in enumerate(streams)]
        self._link.carry(fetches, "give their states")

    def look(self, version: int) -> bool:
        """Have this version here; False: some server does not have it any more."""
        if self._at == version:
            return True
        self._at = None
        fetches = self._fetch_weights(version)
        if any(fetch.is_gone for fetch in fetches):
            return False
        self._at = version
        return True

    def pull(self) -> tuple[list[Tensor], list[int]]:
        """The newest weights, and the oldest version of each server's that is among them."""
        self._at = None
        fetches = self._fetch_weights(None)
        return self._memory_now.weights(0).views, [fetch.oldest for fetch in fetches]

    def read(self) -> None:
        """They are elsewhere."""
        return None

    def stayed(self, version: int) -> bool:
        """What was fetched is this worker's own."""
        return True

    def row(self, held: Held) -> int:
        return 0

    def send(self, held: Held) -> None:
        """Have this gradient where servers find it; returns when each has all of its chunks."""
        streams = [streams.row(0) for streams in self._streams]
        pushes = [Push(server, self._number, self._worker, held, one) for server, one in enumerate(streams)]
        self._link.carry(pushes, f"take the gradient of step {held.step}")

    def are_up(self, servers: int) -> bool:
        """Not known from here: another number of servers waits for the next meeting."""
        return False

    def close(self) -> None:
        self._link.close()
        self._own.close()

    def _fetch_weights(self, version: int | None) -> list[Fetch]:
        streams = [streams.weights(0) for streams in self._streams]
        fetches = [self._fetch(server, "weights", version, one.write) for server, one in enumerate(streams)]
        self._link.carry(fetches, "give their weights")
        return fetches

    def _fetch(
        self, server: int, of: Of, version: int | None, write: Callable[[int, bytes], None] | None = None
    ) -> Fetch:
        return Fetch(server, self._number, self._link.ticket(), of, version, write)

    @property
    def _memory_now(self) -> ServedMemory:
        assert self._served is not None, "enter comes first"
        return self._served
