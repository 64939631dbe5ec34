"""Layout of tensors in one block of memory, by dtype: where each tensor is, and which part each rank updates.

Arithmetic over shapes; only `views` makes tensors. Each tensor starts on a cache line, and so does each rank's part of
every dtype, so that no two ranks ever write to the same line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.comm.host_memory import Segment

__all__ = ["LINE", "Flat", "FlatRange", "Section", "in_memory_order", "lay_out"]

LINE = 64


class Section(NamedTuple):
    """All tensors of one dtype."""

    dtype: torch.dtype
    start_byte: int
    numel: int
    """Elements, with the gaps between tensors."""
    members: list[int]
    """Indices of its tensors in the list."""

    def part(self, rank: int, world: int) -> range:
        """The elements that this rank sums and updates."""
        lines = self.numel * self.dtype.itemsize // LINE
        each = LINE // self.dtype.itemsize
        return range(lines * rank // world * each, lines * (rank + 1) // world * each)


class FlatRange(NamedTuple):
    """A range of elements within one rank's part of a section."""

    owner: int
    elements: range
    members: list[int]
    """Indices of the tensors that have elements in it, in order."""


class Flat(NamedTuple):
    sections: list[Section]
    starts: list[int]
    """Where each tensor begins, in elements of its section."""
    num_bytes: int

    def stretches(self, section: Section, world: int, most_bytes: int) -> list[FlatRange]:
        """All of a section, from its end to its beginning: backward computes the last tensors' gradients first."""
        most = max(LINE, most_bytes // LINE * LINE) // section.dtype.itemsize
        found = []
        for owner in reversed(range(world)):
            part = section.part(owner, world)
            for stop in range(part.stop, part.start, -most):
                elements = range(max(part.start, stop - most), stop)
                found.append(FlatRange(owner, elements, self._within(section, elements)))
        return found

    def _within(self, section: Section, elements: range) -> list[int]:
        starts = [self.starts[index] for index in section.members]
        ends = [*starts[1:], section.numel]
        spans = zip(section.members, starts, ends, strict=True)
        return [index for index, start, end in spans if max(start, elements.start) < min(end, elements.stop)]

    def span(self, index: int, numel: int, elements: range) -> range:
        """Which of `elements` belong to the tensor with this index, which has `numel` elements."""
        start = self.starts[index]
        return range(max(start, elements.start), min(start + numel, elements.stop))

    def views(self, tensors: Sequence[Tensor], segment: Segment) -> list[Tensor]:
        """A view of the segment for each of `tensors`, with its shape and, if it has no gaps, its strides.

        Each has a separate storage, exactly as long as the tensor: `torch.save` of one of them saves no more than that.
        """
        found: list[Tensor] = list(tensors)
        for section in self.sections:
            for index in section.members:
                like = tensors[index]
                offset = section.start_byte + self.starts[index] * section.dtype.itemsize
                if like.numel() == 0:
                    found[index] = torch.empty_like(like, device="cpu")
                    continue
                flat = torch.frombuffer(segment.buffer, dtype=section.dtype, count=like.numel(), offset=offset)
                found[index] = flat.as_strided(like.shape, strides(like))
        return found


def lay_out(tensors: Sequence[Tensor]) -> Flat:
    by_type: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_type.setdefault(tensor.dtype, []).append(index)
    sections, starts, end = [], [0] * len(tensors), 0
    for dtype, members in by_type.items():
        count, each = 0, LINE // dtype.itemsize
        for index in members:
            starts[index] = count
            count += -(-tensors[index].numel() // each) * each
        sections.append(Section(dtype, end, count, members))
        end += count * dtype.itemsize
    return Flat(sections, starts, max(end, LINE))


def strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's strides if it has no gaps (channels_last has none), else those of a row-major tensor."""
    return torch.empty_like(tensor, device="meta").stride()


def in_memory_order(tensor: Tensor) -> Tensor:
    """Its elements as a flat tensor in memory order; it must have no gaps."""
    return tensor.as_strided((tensor.numel(),), (1,))
