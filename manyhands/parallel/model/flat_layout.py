"""Tensors one after the other in a stretch of memory, by type: where each lies, and which part is whose.

Pure arithmetic over shapes; `views` alone makes tensors. Each tensor starts on a cache line, and so does each rank's
part of every type, so that no two ranks ever write to the same line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.comm.host_memory import Segment

__all__ = ["LINE", "Flat", "Section", "Stretch", "in_memory_order", "lay_out"]

LINE = 64


class Section(NamedTuple):
    """All tensors of one type."""

    dtype: torch.dtype
    start_byte: int
    numel: int
    """Elements, with the gaps between tensors."""
    members: list[int]
    """Places of its tensors in the list."""

    def part(self, rank: int, world: int) -> range:
        """The elements that this rank sums and updates."""
        lines = self.numel * self.dtype.itemsize // LINE
        each = LINE // self.dtype.itemsize
        return range(lines * rank // world * each, lines * (rank + 1) // world * each)


class Stretch(NamedTuple):
    """Some of one rank's part of a section."""

    owner: int
    elements: range
    members: list[int]
    """Places of the tensors that have elements in it, in order."""


class Flat(NamedTuple):
    sections: list[Section]
    starts: list[int]
    """Where each tensor begins, in elements of its section."""
    num_bytes: int

    def stretches(self, section: Section, world: int, most_bytes: int) -> list[Stretch]:
        """All of a section, from its end to its beginning: backward comes to the last tensors first."""
        most = max(LINE, most_bytes // LINE * LINE) // section.dtype.itemsize
        found = []
        for owner in reversed(range(world)):
            part = section.part(owner, world)
            for stop in range(part.stop, part.start, -most):
                elements = range(max(part.start, stop - most), stop)
                found.append(Stretch(owner, elements, self._within(section, elements)))
        return found

    def _within(self, section: Section, elements: range) -> list[int]:
        starts = [self.starts[place] for place in section.members]
        ends = [*starts[1:], section.numel]
        spans = zip(section.members, starts, ends, strict=True)
        return [place for place, start, end in spans if max(start, elements.start) < min(end, elements.stop)]

    def span(self, place: int, numel: int, elements: range) -> range:
        """Where among `elements`, of which the tensor at `place` has some of its `numel`, they are."""
        start = self.starts[place]
        return range(max(start, elements.start), min(start + numel, elements.stop))

    def views(self, tensors: Sequence[Tensor], segment: Segment) -> list[Tensor]:
        """A tensor over the segment for each of `tensors`, like it in shape and, where it has no gaps, in strides.

        Each has a storage of its own, exactly as long as itself: whoever saves one of them saves no more than that.
        """
        found: list[Tensor] = list(tensors)
        for section in self.sections:
            for place in section.members:
                like = tensors[place]
                offset = section.start_byte + self.starts[place] * section.dtype.itemsize
                if like.numel() == 0:
                    found[place] = torch.empty_like(like, device="cpu")
                    continue
                flat = torch.frombuffer(segment.buffer, dtype=section.dtype, count=like.numel(), offset=offset)
                found[place] = flat.as_strided(like.shape, strides(like))
        return found


def lay_out(tensors: Sequence[Tensor]) -> Flat:
    by_type: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        by_type.setdefault(tensor.dtype, []).append(place)
    sections, starts, end = [], [0] * len(tensors), 0
    for dtype, members in by_type.items():
        count, each = 0, LINE // dtype.itemsize
        for place in members:
            starts[place] = count
            count += -(-tensors[place].numel() // each) * each
        sections.append(Section(dtype, end, count, members))
        end += count * dtype.itemsize
    return Flat(sections, starts, max(end, LINE))


def strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own where it fills its memory (channels_last does), else those of a row-major one."""
    return torch.empty_like(tensor, device="meta").stride()


def in_memory_order(tensor: Tensor) -> Tensor:
    """Its elements, one after the other as they lie there; it has no gaps."""
    return tensor.as_strided((tensor.numel(),), (1,))
