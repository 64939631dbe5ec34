"""A server's service for workers that do not share its memory: gradients arrive in frames, weights leave in frames.

Such a gradient goes into a buffer that only this server writes to, in memory that outlives the server, along with how
many bytes have arrived: so a frame that was acknowledged never has to be sent again. What does not fit is counted and
ignored. Start reading at `RemoteWorkerService.take`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from manyhands.parameter_server.memory.frames import FRAME_BYTES, SpanStream, checksum, own_segment
from manyhands.parameter_server.memory.server_streams import ServerStreams
from manyhands.parameter_server.memory.versioned_memory import VersionedMemory
from manyhands.parameter_server.protocol.leases import Lease
from manyhands.parameter_server.protocol.messages import Bring, FrameReply, Got, GradientPart, Open, Want

__all__ = ["IntervalUpload", "RemoteWorkerService"]

_PAGE = 4096


class RemoteWorkerService:
    """Serves the remote workers of one interval, on server `number`."""

    def __init__(
        self,
        number: int,
        opened: Open,
        served: VersionedMemory,
        streams: ServerStreams,
        refused: Counter[str],
        *,
        clips: bool,
    ) -> None:
        """Refused frames are counted in `refused`: "broken", "late", or "repeated"."""
        self._number, self._opened, self._served, self._streams = number, opened, served, streams
        # Servers that clip get whole gradients, so each needs separate buffers; others write to their chunks only.
        self._first_buffer = opened.rows * (1 + number if clips else 1)
        self._buffer_streams: dict[int, SpanStream] = {}
        self._refused = refused
        if opened.away:
            num_bytes = -(-16 * opened.rows // _PAGE) * _PAGE
            self._table = served.segment(f"arrivals {num_bytes} of server {number}", num_bytes)
            for row in range(opened.rows):  # if there is no room for them, nothing has begun yet
                self._buffer_streams[row] = streams.row(self.row(row))

    def row(self, row: int) -> int:
        """The number of the buffer in memory for frames of a lease's buffer `row`."""
        return self._first_buffer + row

    def has(self, row: int, filling: int) -> bool:
        """Whether the whole gradient with this fill id has arrived, and nothing of a later one."""
        return row in self._buffer_streams and self._arrived(row) == (filling, self._buffer_streams[row].num_bytes)

    def take(self, piece: GradientPart) -> Got | None:
        """One frame of a gradient. None: it was broken, and will be sent again."""
        held, stream = piece.held, self._buffer_streams.get(piece.held.row)
        sound = piece.worker in self._opened.away and checksum(held.filling, piece.offset, piece.data) == piece.crc
        if stream is None or not sound or not stream.has(piece.offset, len(piece.data)):
            self._refused["broken"] += 1
            return None
        if held.filling < self._arrived(held.row)[0]:  # the buffer now belongs to another lease
            self._refused["late"] += 1
            return self.enough(held)
        received = self._begin(held)
        if piece.offset != received:
            self._refused["repeated"] += 1
            return self._got(held, received)
        stream.write(piece.offset, piece.data)
        received += len(piece.data)
        self._table.words()[2 * held.row + 1] = received
        return self._got(held, received)

    def enough(self, held: Lease) -> Got:
        """The rest of this gradient is not needed."""
        stream = self._buffer_streams.get(held.row)
        return self._got(held, stream.num_bytes if stream is not None else 0)

    def _begin(self, held: Lease) -> int:
        """How many bytes of this lease's gradient have arrived; 0 if the buffer had another one."""
        filling, received = self._arrived(held.row)
        if filling == held.filling:
            return received
        self._table.words()[2 * held.row + 1] = 0  # first: a server that is killed here has lost nothing
        self._table.words()[2 * held.row] = held.filling
        return 0

    def _arrived(self, row: int) -> tuple[int, int]:
        filling, received = self._table.words()[2 * row : 2 * row + 2]
        return filling, received

    def _got(self, held: Lease, received: int) -> Got:
        return Got(number=self._opened.number, server=self._number, filling=held.filling, received=received)

    # ---- what workers fetch ----

    def give(self, want: Want, newest: int, more: Callable[[], bytes]) -> FrameReply | None:
        """A frame of weights or optimizer states, if this version exists; `more` was committed with the states."""
        version = newest if want.version is None else want.version
        if not self._is_there(want, version, newest):
            return self._part(want, newest, is_there=False)
        stream = self._streams.weights(version) if want.of == "weights" else self._streams.states(version, more())
        if want.offset == stream.num_bytes == 0:
            return self._part(want, version)
        num_bytes = min(FRAME_BYTES, stream.num_bytes - want.offset)
        if not stream.has(want.offset, num_bytes):
            self._refused["broken"] += 1
            return None
        return self._part(want, version, stream.num_bytes, stream.read(want.offset, num_bytes))

    def give_bytes(self, want: Want, value: bytes) -> FrameReply | None:
        if not 0 <= want.offset <= len(value) or want.offset % FRAME_BYTES:
            self._refused["broken"] += 1
            return None
        return self._part(want, 0, len(value), value[want.offset : want.offset + FRAME_BYTES])

    def _is_there(self, want: Want, version: int, newest: int) -> bool:
        # The oldest copy may be being overwritten by an update, or by one that was not committed; so may old states.
        oldest = newest - self._opened.copies + 2 if want.of == "weights" else newest
        return max(oldest, self._opened.version) <= version <= newest

    def _part(
        self, want: Want, version: int, num_bytes: int = 0, data: bytes = b"", *, is_there: bool = True
    ) -> FrameReply:
        return FrameReply(
            number=self._opened.number,
            server=self._number,
            ticket=want.ticket,
            version=version,
            is_there=is_there,
            offset=want.offset,
            num_bytes=num_bytes,
            crc=checksum(want.ticket, want.offset, data),
            data=data,
        )


class IntervalUpload:
    """The initial state of an interval, uploaded by a chief on another host. Lost with its server, and sent again."""

    def __init__(self, number: int, opened: Open, streams: ServerStreams, refused: Counter[str]) -> None:
        self.opened, self._number, self._received, self._refused = opened, number, 0, refused
        num_bytes = opened.tables[number] if opened.tables else 0
        self.tables = own_segment(num_bytes) if num_bytes else None
        self._stream = streams.brought(opened.brings, opened.version, opened.more, self.tables)

    @property
    def is_done(self) -> bool:
        return self._received == self._stream.num_bytes

    def take(self, bring: Bring) -> None:
        sound = checksum(0, bring.offset, bring.data) == bring.crc and self._stream.has(bring.offset, len(bring.data))
        if not sound or bring.offset != self._received:
            self._refused["repeated" if sound else "broken"] += 1
            return
        self._stream.write(bring.offset, bring.data)
        self._received += len(bring.data)

    def got(self) -> Got:
        return Got(number=self.opened.number, server=self._number, filling=0, received=self._received)
