"""Which part of a tensor a rank has, where a model is divided over several: ranges of some of its dims.

A share says where its values lie in the whole, so a checkpoint holds whole tensors whatever the layout was, and every
layout can be made of them. Pure: who sends what to whom is others' business. Start reading at `Share`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import msgspec
import torch
from torch import Tensor

__all__ = ["Share", "even_ranges"]

Range = tuple[int, int]
"""From, and up to but not with."""


class Share(msgspec.Struct, frozen=True):
    """What a rank has of a tensor whose whole has `shape`: of each dim in `cuts` these ranges, one after the other."""

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, tuple[Range, ...]], ...] = ()
    """In the order of the dims; a dim that is not named is there in full."""

    @property
    def is_whole(self) -> bool:
        return not self.cuts

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of what this rank has."""
        sizes = list(self.shape)
        for dim, ranges in self.cuts:
            sizes[dim] = sum(stop - start for start, stop in ranges)
        return tuple(sizes)

    def fits(self, tensor: Tensor) -> bool:
        """Whether it is a whole to cut this out of; some of an optimizer's states are not, such as counts."""
        return tuple(tensor.shape) == self.shape

    def cut(self, tensor: Tensor) -> Tensor:
        """This share of the whole, in memory of its own."""
        for dim, ranges in self.cuts:
            tensor = torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in ranges], dim)
        return tensor.clone() if self.is_whole else tensor.contiguous()

    def paste_(self, tensor: Tensor, part: Tensor) -> None:
        """Write this share's values to their place in the whole."""
        for target, source in self._blocks():
            tensor[target].copy_(part[source])

    def within(self, outer: Share) -> Share:
        """The same share of the whole that `outer` is a share of, for one that was cut out of what `outer` is."""
        assert self.shape == outer.local_shape, "cut out of something else"
        cuts = dict(outer.cuts)
        for dim, ranges in self.cuts:
            cuts[dim] = tuple(_looked_up(ranges, cuts.get(dim, ((0, outer.shape[dim]),)))) or ((0, 0),)
        return Share(outer.shape, tuple(sorted(cuts.items())))

    def _blocks(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Each rectangle of the share: where it is in the whole, and in the part."""
        per_dim = [[(slice(None), slice(None))] for _ in self.shape]
        for dim, ranges in self.cuts:
            per_dim[dim] = list(_placed(ranges))
        for combination in product(*per_dim):
            yield tuple(place for place, _ in combination), tuple(own for _, own in combination)


def whole(tensor: Tensor) -> Share:
    return Share(tuple(tensor.shape))


def even_ranges(size: int, parts: int) -> list[Range]:
    """As `torch.chunk` cuts it, but for empty parts at the end, which are there: all but the last of one size."""
    step = -(-size // parts)
    return [(min(i * step, size), min((i + 1) * step, size)) for i in range(parts)]


def _looked_up(ranges: Sequence[Range], outer: Sequence[Range]) -> Iterator[Range]:
    """Where these ranges of what lies in `outer`, one after the other, are in the whole."""
    for start, stop in ranges:
        begin = 0
        for first, last in outer:
            low, high = max(start - begin, 0), min(stop - begin, last - first)
            if low < high:
                yield first + low, first + high
            begin += last - first


def _placed(ranges: Sequence[Range]) -> Iterator[tuple[slice, slice]]:
    begin = 0
    for start, stop in ranges:
        yield slice(start, stop), slice(begin, begin + stop - start)
        begin += stop - start
