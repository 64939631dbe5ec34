"""Tensors as fewer bytes, and back: `Bf16` halves fp32, `Int8` quarters it.

Flat tensors in, one flat uint8 tensor of a length that is known beforehand out, so that it travels through any
collective that moves bytes. What is encoded is fp32: values of another floating dtype are converted first, and
decoded ones converted to the dtype asked for. The same bytes decode to the same values on every rank. What is not
finite stays visible. Given a residual, `Int8` adds it to the values and leaves in it what these bytes do not tell
("error feedback"): over many calls nothing is lost, only late. Start reading at `Int8.encode`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from manyhands.native import library

__all__ = ["Bf16", "Codec", "Int8"]

# Every encoded tensor is a whole number of these, so that several of them in a row all begin where a float32 may.
ALIGNMENT = 4


class Codec(Protocol):
    feeds_back: ClassVar[bool]
    """Whether `encode` wants a residual that lives as long as the training."""

    def num_bytes(self, numel: int) -> int: ...
    def encode(self, values: Tensor, out: Tensor, residual: Tensor | None = None) -> None: ...
    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """With `add`, to what is there."""


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Bf16:
    """fp32 rounded to the nearest bfloat16: all of its range, 8 bits of its precision.

    NaN and infinity arrive as they were sent; finite values above 3.39e38 arrive as infinity. It keeps no residual:
    a rounding error of at most 1/256 of each value does not add up to anything that training notices.
    """

    feeds_back: ClassVar[bool] = False

    def num_bytes(self, numel: int) -> int:
        return aligned(2 * numel)

    def encode(self, values: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        assert residual is None
        self._halves(out, values.numel()).copy_(_as_fp32(values))

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        halves = self._halves(data, out.numel())
        if not add:
            out.copy_(halves)
        elif out.dtype == torch.float32 and _is_native(out, data):
            library.bf16_add(halves.data_ptr(), out.data_ptr(), out.numel())
        else:
            out.add_(halves)

    def _halves(self, data: Tensor, numel: int) -> Tensor:
        return data[: 2 * numel].view(torch.bfloat16)


class Int8:
    """Whole numbers from -127 to 127, and one fp32 scale for each block of `BLOCK` values; rounds to the nearest.

    A value is off by at most half a scale, which is 1/254 of the largest value in its block. A block with a NaN or an
    infinity in it decodes to NaN throughout. A block that holds nothing above 1.5e-36 decodes to zeros.
    """

    feeds_back: ClassVar[bool] = True
    BLOCK = 1024
    # As many values as stay in a core's cache while they are read a few times over: a third of the time of doing each
    # operation on 10 M values before the next.
    SPAN = 128 * BLOCK
    # Below it the reciprocal of a scale would be infinite.
    SMALLEST_SCALE = 2.0**-126

    def __init__(self) -> None:
        self._room = torch.empty(0)

    def num_bytes(self, numel: int) -> int:
        return aligned(4 * self._num_blocks(numel) + numel)

    def encode(self, values: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """`values` stay as they are; `residual`, of the same length and fp32, becomes what is still to be told.

        Of a block that is not finite nothing is owed afterwards: there is no telling what its values were.
        """
        values = _as_fp32(values)
        scales, codes = self._parts(out, values.numel())
        if _is_native(values, out, residual):
            owed = residual.data_ptr() if residual is not None else 0
            places = (values.data_ptr(), owed, scales.data_ptr(), codes.data_ptr())
            library.int8_encode(*places, values.numel(), self.BLOCK)
            return
        for start, stop, block in self._spans(values.numel()):
            wanted = values[start:stop].view(-1, block)
            if residual is not None:
                wanted = residual[start:stop].view(-1, block).add_(wanted)
            scale = scales[start // self.BLOCK :][: len(wanted)].view(-1, 1)
            steps = self._scratch(wanted)
            torch.mul(wanted, self._find_scale(wanted, scale), out=steps).round_()
            codes[start:stop].view(-1, block).copy_(steps)
            if residual is not None:
                wanted.sub_(steps.mul_(scale))
        if residual is not None:
            self._forgive(residual, scales)

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        scales, codes = self._parts(data, out.numel())
        if out.dtype == torch.float32 and _is_native(out, data):
            library.int8_decode(scales.data_ptr(), codes.data_ptr(), out.data_ptr(), out.numel(), self.BLOCK, add)
            return
        for start, stop, block in self._spans(out.numel()):
            wanted, steps = out[start:stop].view(-1, block), codes[start:stop].view(-1, block)
            values = wanted if out.dtype == torch.float32 and not add else self._scratch(wanted)
            values.copy_(steps).mul_(scales[start // self.BLOCK :][: len(wanted)].view(-1, 1))
            if values is not wanted:
                wanted.add_(values) if add else wanted.copy_(values)

    def _find_scale(self, wanted: Tensor, scale: Tensor) -> Tensor:
        """Each block's largest magnitude / 127, into `scale`; NaN for a block that is not finite. Returns 1 / scale."""
        torch.amax(wanted, 1, keepdim=True, out=scale)
        torch.maximum(scale, wanted.amin(1, keepdim=True).neg_(), out=scale)
        scale.mul_(1 / 127)
        scale.add_(scale * 0)  # infinity times 0 is NaN, as NaN is
        nothing = scale < self.SMALLEST_SCALE
        scale.masked_fill_(nothing, 0)
        return scale.reciprocal().masked_fill_(nothing, 0)

    def _forgive(self, residual: Tensor, scales: Tensor) -> None:
        for number in scales.isnan().nonzero().flatten().tolist():
            residual[number * self.BLOCK : (number + 1) * self.BLOCK] = 0

    def _parts(self, data: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """The scales, then the whole numbers."""
        head = 4 * self._num_blocks(numel)
        return data[:head].view(torch.float32), data[head : head + numel].view(torch.int8)

    def _num_blocks(self, numel: int) -> int:
        return -(-numel // self.BLOCK)

    def _spans(self, numel: int) -> Iterator[tuple[int, int, int]]:
        """(start, stop, size of its blocks): whole blocks, as many as stay in cache; the short last one by itself."""
        whole = numel - numel % self.BLOCK
        for start in range(0, whole, self.SPAN):
            yield start, min(start + self.SPAN, whole), self.BLOCK
        if whole < numel:
            yield whole, numel, numel - whole

    def _scratch(self, like: Tensor) -> Tensor:
        if self._room.numel() < like.numel() or self._room.device != like.device:
            self._room = torch.empty(like.numel(), dtype=torch.float32, device=like.device)
        return self._room[: like.numel()].view_as(like)


def _is_native(*tensors: Tensor | None) -> bool:
    """Whether the C extension can do it: one pass over memory instead of several."""
    return library is not None and all(
        tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors if tensor is not None
    )


def _as_fp32(values: Tensor) -> Tensor:
    if not values.is_floating_point():
        raise TypeError(f"Only floating-point values can be sent as fewer bytes, not {values.dtype}.")
    return values.float()
