"""Compression of tensors: `Bf16` halves the bytes of fp32, `Int8` quarters them.

A codec encodes a flat tensor to a flat uint8 tensor whose length is known in advance, so any collective that moves
bytes can carry it. Codecs encode fp32: values of another floating dtype are converted first, decoded values to the
dtype of the output. The same bytes decode to the same values on every rank. NaN and infinity are not hidden. With a
residual (error feedback), `Int8` adds it to the values and stores the new encoding error in it: over many calls no
value is lost, only delayed. Start reading at `Int8.encode`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from manyhands.native import library

__all__ = ["CODECS", "Bf16", "Codec", "Int8", "codec_of"]

# Encoded tensors are padded to this many bytes, so that each of several in one buffer starts at a float32 address.
ALIGNMENT = 4


class Codec(Protocol):
    feeds_back: ClassVar[bool]
    """Whether `encode` takes a residual, which is kept for the whole training."""

    def num_bytes(self, numel: int) -> int: ...
    def encode(self, values: Tensor, out: Tensor, residual: Tensor | None = None) -> None: ...
    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        """With `add`, add the decoded values to `out`."""


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Bf16:
    """fp32 rounded to the nearest bfloat16: all of its range, 8 bits of its precision.

    NaN and infinity are kept; finite values above 3.39e38 become infinity. There is no residual: a rounding error of at
    most 1/256 of each value does not accumulate to an error that affects training.
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
    """Integers from -127 to 127, and one fp32 scale for each block of `BLOCK` values; rounds to the nearest.

    The error of a value is at most half a scale, which is 1/254 of the largest magnitude in its block. A block that
    contains a NaN or an infinity decodes to NaN throughout. A block with no magnitude above 1.5e-36 decodes to zeros.
    """

    feeds_back: ClassVar[bool] = True
    BLOCK = 1024
    # As many values as fit in a core's cache, because each is read several times: a third of the time of running each
    # operation over all of 10 M values before the next operation.
    SPAN = 128 * BLOCK
    # Below it the reciprocal of a scale would be infinite.
    SMALLEST_SCALE = 2.0**-126

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def num_bytes(self, numel: int) -> int:
        return aligned(4 * self._num_blocks(numel) + numel)

    def encode(self, values: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """Encode without changing `values`; `residual` (fp32, same length) becomes the error that is still to be sent.

        The residual of a block that is not finite becomes 0, because its values are unknown.
        """
        values = _as_fp32(values)
        scales, codes = self._parts(out, values.numel())
        if _is_native(values, out, residual):
            residual_address = residual.data_ptr() if residual is not None else 0
            addresses = (values.data_ptr(), residual_address, scales.data_ptr(), codes.data_ptr())
            library.int8_encode(*addresses, values.numel(), self.BLOCK)
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
            self._clear_not_finite(residual, scales)

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
        too_small = scale < self.SMALLEST_SCALE
        scale.masked_fill_(too_small, 0)
        return scale.reciprocal().masked_fill_(too_small, 0)

    def _clear_not_finite(self, residual: Tensor, scales: Tensor) -> None:
        for block in scales.isnan().nonzero().flatten().tolist():
            residual[block * self.BLOCK : (block + 1) * self.BLOCK] = 0

    def _parts(self, data: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """The scales, then the integers."""
        head = 4 * self._num_blocks(numel)
        return data[:head].view(torch.float32), data[head : head + numel].view(torch.int8)

    def _num_blocks(self, numel: int) -> int:
        return -(-numel // self.BLOCK)

    def _spans(self, numel: int) -> Iterator[tuple[int, int, int]]:
        """(start, stop, block size): as many whole blocks as fit in cache; the short last block is a separate span."""
        whole = numel - numel % self.BLOCK
        for start in range(0, whole, self.SPAN):
            yield start, min(start + self.SPAN, whole), self.BLOCK
        if whole < numel:
            yield whole, numel, numel - whole

    def _scratch(self, like: Tensor) -> Tensor:
        if self._buffer.numel() < like.numel() or self._buffer.device != like.device:
            self._buffer = torch.empty(like.numel(), dtype=torch.float32, device=like.device)
        return self._buffer[: like.numel()].view_as(like)


def _is_native(*tensors: Tensor | None) -> bool:
    """Whether the C extension can be used, which reads the memory once instead of several times."""
    return library is not None and all(
        tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors if tensor is not None
    )


def _as_fp32(values: Tensor) -> Tensor:
    if not values.is_floating_point():
        raise TypeError(f"Only floating-point values can be compressed, not {values.dtype}.")
    return values.float()


CODECS: dict[str, type[Codec]] = {"bf16": Bf16, "int8": Int8}
"""By the name of the reducer; `spec.strategy_names` has the same names, and which of them have residuals."""


def codec_of(reducer: str) -> Codec | None:
    """A new one; None for "exact", which sends values as they are."""
    return CODECS[reducer]() if reducer != "exact" else None
