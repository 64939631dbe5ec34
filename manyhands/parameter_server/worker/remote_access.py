"""How a worker reaches servers on another host: it has private memory, which frames bring up to date.

It has one version of the weights and one gradient buffer: before it computes it fetches the version of its lease, and
before it notifies servers of a gradient it has sent each of them its chunks. The messages are in `messages`, the flow
control in `frames`; the other end is `remote_worker_service`. Start reading at `RemoteAccess.look` and
`RemoteAccess.send`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from torch import Tensor, nn

from manyhands.comm.host_memory import HostMemory, Segment
from manyhands.parallel.model.step_buffers import ForeignState
from manyhands.parameter_server.memory.frames import own_segment
from manyhands.parameter_server.memory.server_streams import ServerStreams
from manyhands.parameter_server.memory.versioned_memory import VersionedMemory
from manyhands.parameter_server.protocol.chunk_placement import Chunk
from manyhands.parameter_server.protocol.leases import Lease
from manyhands.parameter_server.protocol.messages import Number, Of, Open
from manyhands.parameter_server.server.server import open_memory
from manyhands.parameter_server.tables.server_tables import ServerTables, parts_of
from manyhands.parameter_server.worker.server_connection import ServerConnection
from manyhands.parameter_server.worker.stream_transfers import FetchStream, OpenStream, PushStream

__all__ = ["RemoteAccess"]


class RemoteAccess:
    is_away = True

    def __init__(self, link: ServerConnection, worker: int, *, clips: bool) -> None:
        """`clips`: servers need the norm of whole gradients, and each is sent all of it."""
        self._link, self._worker, self._clips = link, worker, clips
        self._private = HostMemory()
        self._served: VersionedMemory | None = None
        self._number: Number = (0, 0, 0)
        self._version_here: int | None = None
        """The version that this worker has."""
        self._packed_rows: list[Segment] = []
        """Embedding rows that the next interval begins with, for each server."""

    def memory(self, name: str, num_bytes: int) -> Segment:
        return Segment(self._private.fd, num_bytes, self._private.allot(f"{name} {num_bytes}", num_bytes))

    def enter(
        self, model: nn.Module, opened: Open, parts: Sequence[Sequence[Chunk]], foreign: ForeignState
    ) -> VersionedMemory:
        """Memory for one version of the weights and one gradient."""
        here = msgspec.structs.replace(opened, copies=1, rows=1)
        self._served = served = open_memory(model, self.memory, here, foreign)
        self._streams = [
            ServerStreams(served, chunks, server, opened.states, clips=self._clips)
            for server, chunks in enumerate(parts)
        ]
        self._number, self._version_here = opened.number, None
        return served

    def brings(self, *, states: bool) -> list[Of]:
        """What servers do not find in memory when this worker opens an interval."""
        return ["weights", "states"] if states else ["weights"]

    def open(self, opened: Open, is_wanted: Callable[[], bool]) -> None:
        """Have every server begin this interval with the data of this worker."""
        self._number = opened.number
        self._link.follow(opened)
        rows: Sequence[Segment | None] = self._packed_rows or [None] * opened.servers
        streams = [
            streams.brought(opened.brings, opened.version, opened.more, mine)
            for streams, mine in zip(self._streams, rows, strict=True)
        ]
        transfers = [OpenStream(server, opened, one) for server, one in enumerate(streams)]
        self._link.carry(transfers, "begin the interval", is_wanted)
        self._packed_rows = []

    def last_interval(self) -> Open:
        """The last `Open` that the first server received."""
        self._link.reach(1)
        fetch = self._fetch(0, "course", None)
        self._link.carry([fetch], "send their current interval")
        return msgspec.msgpack.decode(fetch.value, type=Open)

    def standings(self, opened: Open) -> list[bytes]:
        """What each server committed last."""
        self._number = opened.number
        self._link.reach(opened.servers)
        fetches = [self._fetch(server, "standing", None) for server in range(opened.servers)]
        self._link.carry(fetches, "send what they have committed")
        return [fetch.value for fetch in fetches]

    def put_rows(self, tables: ServerTables | None, servers: int) -> list[int]:
        """Send this worker's rows with the next interval. Returns how many bytes each server gets."""
        packed = [tables.pack(parts_of(server, servers)) for server in range(servers)] if tables is not None else []
        self._packed_rows = [own_segment(len(one)) for one in packed]
        for segment, one in zip(self._packed_rows, packed, strict=True):
            segment.buffer[:] = one
        return [len(one) for one in packed]

    def fetch_rows(self, tables: ServerTables) -> None:
        """Fetch all rows."""
        fetches = [self._fetch(server, "tables", None) for server in range(len(self._streams))]
        self._link.carry(fetches, "send their embedding rows")
        for fetch in fetches:
            tables.unpack(fetch.value)

    def fetch_states(self, opened: Open, version: int, mores: Sequence[bytes]) -> None:
        """Fetch the optimizer states. `mores`: what each server has committed beside them."""
        streams = [one.states(version, more) for one, more in zip(self._streams, mores, strict=True)]
        fetches = [self._fetch(server, "states", version, one.write) for server, one in enumerate(streams)]
        self._link.carry(fetches, "send their optimizer states")

    def look(self, version: int) -> bool:
        """Fetch this version; False: a server no longer has it."""
        if self._version_here == version:
            return True
        self._version_here = None
        fetches = self._fetch_weights(version)
        if any(fetch.is_gone for fetch in fetches):
            return False
        self._version_here = version
        return True

    def pull(self) -> tuple[list[Tensor], list[int]]:
        """The newest weights, and for each server the oldest version among its frames."""
        self._version_here = None
        fetches = self._fetch_weights(None)
        return self._entered_memory.weights(0).views, [fetch.oldest for fetch in fetches]

    def read(self) -> None:
        """There is no shared memory."""
        return None

    def stayed(self, version: int) -> bool:
        """Fetched weights are private."""
        return True

    def row(self, held: Lease) -> int:
        return 0

    def send(self, held: Lease) -> None:
        """Send this gradient to the servers; returns when each has all of its chunks."""
        streams = [streams.row(0) for streams in self._streams]
        pushes = [PushStream(server, self._number, self._worker, held, one) for server, one in enumerate(streams)]
        self._link.carry(pushes, f"take the gradient of step {held.step}")

    def are_up(self, servers: int) -> bool:
        """Unknown on this host: another number of servers waits for the next sync point."""
        return False

    def close(self) -> None:
        self._link.close()
        self._private.close()

    def _fetch_weights(self, version: int | None) -> list[FetchStream]:
        streams = [streams.weights(0) for streams in self._streams]
        fetches = [self._fetch(server, "weights", version, one.write) for server, one in enumerate(streams)]
        self._link.carry(fetches, "send their weights")
        return fetches

    def _fetch(
        self, server: int, of: Of, version: int | None, write: Callable[[int, bytes], None] | None = None
    ) -> FetchStream:
        return FetchStream(server, self._number, self._link.ticket(), of, version, write)

    @property
    def _entered_memory(self) -> VersionedMemory:
        assert self._served is not None, "enter comes first"
        return self._served
