"""Which bytes of an interval's memory belong to which server, in the order in which they travel between hosts.

Both ends compute the same streams from the same interval: the worker over its private memory, the server over the
memory that it updates. Of gradients and weights a server has its chunks; the first one also has batch statistics and
buffers.
"""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.comm.host_memory import Segment
from manyhands.parallel.model.flat_layout import LINE
from manyhands.parameter_server.memory.frames import FrameSpan, SpanStream
from manyhands.parameter_server.memory.optimizer_states import stored_tensors
from manyhands.parameter_server.memory.versioned_memory import VersionedMemory
from manyhands.parameter_server.protocol.chunk_placement import Chunk
from manyhands.parameter_server.protocol.messages import Of

__all__ = ["ServerStreams"]


class ServerStreams:
    """The streams of server `number`, which has these `chunks`."""

    def __init__(
        self, served: VersionedMemory, chunks: Sequence[Chunk], number: int, states: Sequence[str], *, clips: bool
    ) -> None:
        """`states`: those with the shape of the parameters. With `clips`, servers need the norm, so whole gradients."""
        self._served, self._states, self._is_first = served, list(states), number == 0
        self._param_indices = sorted({chunk.place for chunk in chunks})
        self._byte_ranges = _byte_ranges(served, chunks)
        everything = [Chunk(place, 0, param.numel()) for place, param in enumerate(served.params)]
        self._gradient_ranges = _byte_ranges(served, everything) if clips else self._byte_ranges

    def row(self, number: int) -> SpanStream:
        spans = [FrameSpan(self._served.row(number).segment, *byte_range) for byte_range in self._gradient_ranges]
        if self._is_first and (statistics := self._served.statistics(number)) is not None:
            spans.append(_whole(statistics))
        return SpanStream(spans)

    def weights(self, version: int) -> SpanStream:
        return SpanStream(self._weights(version))

    def states(self, version: int, more: bytes) -> SpanStream:
        """With those that `more` lists, which was committed with them."""
        return SpanStream(self._state_spans(version, more))

    def brought(self, brings: Sequence[Of], version: int, more: bytes, tables: Segment | None) -> SpanStream:
        """The initial state of an interval; `tables` has the embedding rows."""
        weights = self._weights(version) if "weights" in brings else []
        states = self._state_spans(version, more) if "states" in brings else []
        return SpanStream([*weights, *states, *([_whole(tables)] if tables is not None else [])])

    def _weights(self, version: int) -> list[FrameSpan]:
        spans = [FrameSpan(self._served.weights(version).segment, *byte_range) for byte_range in self._byte_ranges]
        return [*spans, _whole(self._served.buffers_segment(version))] if self._is_first else spans

    def _state_spans(self, version: int, more: bytes) -> list[FrameSpan]:
        segments = [self._served.states(name, version).segment for name in self._states]
        spans = [FrameSpan(segment, *byte_range) for segment in segments for byte_range in self._byte_ranges]
        return [*spans, *map(_whole, stored_tensors(self._served, version, more, self._param_indices))]


def _whole(segment: Segment) -> FrameSpan:
    return FrameSpan(segment, 0, segment.num_bytes)


def _byte_ranges(served: VersionedMemory, chunks: Sequence[Chunk]) -> list[tuple[int, int]]:
    """Where chunks begin in a region of weights, and how many bytes each has, in whole cache lines."""
    section_of = {place: section for section in served.flat.sections for place in section.members}
    found = []
    for place, start, stop in chunks:
        section = section_of[place]
        first = section.start_byte + (served.flat.starts[place] + start) * section.dtype.itemsize
        found.append((first, -(-(stop - start) * section.dtype.itemsize // LINE) * LINE))
    return found
