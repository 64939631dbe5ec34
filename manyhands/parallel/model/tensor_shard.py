"""Which shard of a tensor a rank of a sharded model has: ranges of some of its dims.

A shard knows where its values are in the whole tensor, so a checkpoint contains whole tensors for any layout, and can
be loaded with any other. Pure arithmetic: no communication. Start reading at `TensorShard`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import msgspec
import torch
from torch import Tensor

__all__ = ["TensorShard", "even_ranges"]

Range = tuple[int, int]
"""Start, and end (exclusive)."""


class TensorShard(msgspec.Struct, frozen=True):
    """A rank's shard of a tensor that has `shape` as a whole: along each dim in `cuts`, these ranges concatenated."""

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, tuple[Range, ...]], ...] = ()
    """In the order of the dims; a dim that is not listed is not sharded."""

    @property
    def is_whole(self) -> bool:
        return not self.cuts

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this shard."""
        sizes = list(self.shape)
        for dim, ranges in self.cuts:
            sizes[dim] = sum(stop - start for start, stop in ranges)
        return tuple(sizes)

    def fits(self, tensor: Tensor) -> bool:
        """Whether it is a whole tensor that can be sharded so; some optimizer state, such as counts, is not."""
        return tuple(tensor.shape) == self.shape

    def cut(self, tensor: Tensor) -> Tensor:
        """This shard of the whole tensor, as a copy."""
        for dim, ranges in self.cuts:
            tensor = torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in ranges], dim)
        return tensor.clone() if self.is_whole else tensor.contiguous()

    def paste_(self, tensor: Tensor, part: Tensor) -> None:
        """Write this shard's values to their positions in the whole tensor."""
        for target, source in self._blocks():
            tensor[target].copy_(part[source])

    def within(self, outer: TensorShard) -> TensorShard:
        """For a shard of `outer`'s local tensor: the same values as a shard of the whole tensor."""
        assert self.shape == outer.local_shape, "this is not a shard of the outer shard's local tensor"
        cuts = dict(outer.cuts)
        for dim, ranges in self.cuts:
            cuts[dim] = tuple(_in_outer(ranges, cuts.get(dim, ((0, outer.shape[dim]),)))) or ((0, 0),)
        return TensorShard(outer.shape, tuple(sorted(cuts.items())))

    def _blocks(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Each rectangle of the shard: its position in the whole tensor, and in the shard."""
        per_dim = [[(slice(None), slice(None))] for _ in self.shape]
        for dim, ranges in self.cuts:
            per_dim[dim] = list(_slice_pairs(ranges))
        for combination in product(*per_dim):
            yield tuple(target for target, _ in combination), tuple(own for _, own in combination)


def whole(tensor: Tensor) -> TensorShard:
    return TensorShard(tuple(tensor.shape))


def even_ranges(size: int, parts: int) -> list[Range]:
    """Like `torch.chunk`, all but the last of one size, but including empty parts at the end."""
    step = -(-size // parts)
    return [(min(i * step, size), min((i + 1) * step, size)) for i in range(parts)]


def _in_outer(ranges: Sequence[Range], outer: Sequence[Range]) -> Iterator[Range]:
    """Positions in the whole of these ranges, which count over the concatenated ranges of `outer`."""
    for start, stop in ranges:
        begin = 0
        for first, last in outer:
            low, high = max(start - begin, 0), min(stop - begin, last - first)
            if low < high:
                yield first + low, first + high
            begin += last - first


def _slice_pairs(ranges: Sequence[Range]) -> Iterator[tuple[slice, slice]]:
    begin = 0
    for start, stop in ranges:
        yield slice(start, stop), slice(begin, begin + stop - start)
        begin += stop - start
