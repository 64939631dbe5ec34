"""Which bytes of a course's memory belong to which server, in the order in which they travel between hosts.

Both ends make the same of the same course: the worker over memory of its own, the server over that which it updates.
Of a row and of the weights a server has its chunks; the first one also has batch statistics and buffers.
"""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.comm.host_memory import Segment
from manyhands.parallel.model.flat_layout import LINE
from manyhands.parameter_server.memory.frames import Span, Stream
from manyhands.parameter_server.memory.optimizer_states import stored_tensors
from manyhands.parameter_server.memory.versioned_memory import ServedMemory
from manyhands.parameter_server.protocol.chunk_placement import Chunk
from manyhands.parameter_server.protocol.messages import Of

__all__ = ["Streams"]


class Streams:
    """Of server `number`, which has these `chunks`."""

    def __init__(
        self, served: ServedMemory, chunks: Sequence[Chunk], number: int, states: Sequence[str], *, clips: bool
    ) -> None:
        """`states`: those as long as the parameters. Who `clips` needs the norm of all, and so gets whole gradients."""
        self._served, self._states, self._is_first = served, list(states), number == 0
        self._places = sorted({chunk.place for chunk in chunks})
        self._stretches = _stretches(served, chunks)
        everything = [Chunk(place, 0, param.numel()) for place, param in enumerate(served.params)]
        self._of_rows = _stretches(served, everything) if clips else self._stretches

    def row(self, number: int) -> Stream:
        spans = [Span(self._served.row(number).segment, *stretch) for stretch in self._of_rows]
        if self._is_first and (statistics := self._served.statistics(number)) is not None:
            spans.append(_whole(statistics))
        return Stream(spans)

    def weights(self, version: int) -> Stream:
        return Stream(self._weights(version))

    def states(self, version: int, more: bytes) -> Stream:
        """With `more`, which was committed with them and says what else there is."""
        return Stream(self._state_spans(version, more))

    def brought(self, brings: Sequence[Of], version: int, more: bytes, tables: Segment | None) -> Stream:
        """What a course begins with; in `tables` are rows of embeddings."""
        weights = self._weights(version) if "weights" in brings else []
        states = self._state_spans(version, more) if "states" in brings else []
        return Stream([*weights, *states, *([_whole(tables)] if tables is not None else [])])

    def _weights(self, version: int) -> list[Span]:
        spans = [Span(self._served.weights(version).segment, *stretch) for stretch in self._stretches]
        return [*spans, _whole(self._served.buffers_segment(version))] if self._is_first else spans

    def _state_spans(self, version: int, more: bytes) -> list[Span]:
        segments = [self._served.states(name, version).segment for name in self._states]
        spans = [Span(segment, *stretch) for segment in segments for stretch in self._stretches]
        return [*spans, *map(_whole, stored_tensors(self._served, version, more, self._places))]


def _whole(segment: Segment) -> Span:
    return Span(segment, 0, segment.num_bytes)


def _stretches(served: ServedMemory, chunks: Sequence[Chunk]) -> list[tuple[int, int]]:
    """Where chunks begin in a region of weights, and how many bytes each has, in whole cache lines."""
    section_of = {place: section for section in served.flat.sections for place in section.members}
    found = []
    for place, start, stop in chunks:
        section = section_of[place]
        first = section.start_byte + (served.flat.starts[place] + start) * section.dtype.itemsize
        found.append((first, -(-(stop - start) * section.dtype.itemsize // LINE) * LINE))
    return found
