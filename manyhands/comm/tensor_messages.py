"""Tensors, and plain values with tensors in them, as frames of raw bytes.

A value is numbers, text, bytes, lists, tuples, dicts with text keys, and dense tensors anywhere in it. Nothing is
pickled, and input is not trusted: sizes are checked against shapes before a tensor is made. Start reading at `pack`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from manyhands.comm.transport import MAX_FRAME_BYTES, MAX_FRAMES, MAX_MESSAGE_BYTES, Frame
from manyhands.errors import UsageError

__all__ = [
    "Placeholder",
    "check_size",
    "check_tensor",
    "dtype_name",
    "pack",
    "raw_bytes",
    "tensor_bytes",
    "tensor_from",
    "unpack",
]

# Leaves space for what a process that forwards a message adds to its header.
MAX_HEADER_BYTES = MAX_MESSAGE_BYTES // 4
MAX_DIMS = 64

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
    )
}  # fmt: skip

_TENSOR, _TUPLE, _PLACEHOLDER = 1, 2, 3

# ---- tensors ---------------------------------------------------------------------------------------------------


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_tensor(tensor: Tensor, what: str) -> Tensor:
    """Raise a `UsageError` that names `what`, if the tensor cannot be sent."""
    if dtype_name(tensor) not in DTYPES or tensor.layout != torch.strided or tensor.device.type == "meta":
        raise UsageError(f"{what} is a tensor of {tensor.dtype}, {tensor.layout}, {tensor.device}: it cannot be sent.")
    if tensor.nbytes > MAX_FRAME_BYTES:
        raise UsageError(
            f"{what} is a tensor of {tensor.nbytes / 1e9:.1f} GB; the limit is {MAX_FRAME_BYTES / 1e9:.1f} GB.",
            fix=["several smaller tensors"],
        )
    return tensor


def raw_bytes(tensor: Tensor) -> memoryview:
    """A tensor's elements in order; copied only if the tensor is not contiguous in host memory."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().data if plain.numel() else memoryview(b"")


def tensor_bytes(shape: Sequence[int], dtype: str) -> int:
    """Size of a tensor; `ValueError` if there can be no such tensor."""
    if dtype not in DTYPES or len(shape) > MAX_DIMS or any(dim < 0 for dim in shape):
        raise ValueError(f"no tensor is {dtype[:20]}{list(shape[:MAX_DIMS])}")
    # Even a tensor without elements has strides, which must fit into 63 bits.
    if math.prod(max(1, dim) for dim in shape) >= 2**58:
        raise ValueError(f"no tensor is as large as {list(shape)}")
    return math.prod(shape) * DTYPES[dtype].itemsize


def tensor_from(data: Frame, shape: Sequence[int], dtype: str) -> Tensor:
    """A tensor with its own memory; `ValueError` unless `data` has exactly its size."""
    if tensor_bytes(shape, dtype) != len(data):
        raise ValueError(f"{len(data)} bytes are not a {dtype}{list(shape)}")
    if not len(data):
        return torch.empty(tuple(shape), dtype=DTYPES[dtype])
    return torch.frombuffer(bytearray(data), dtype=DTYPES[dtype]).reshape(tuple(shape))


# ---- values ----------------------------------------------------------------------------------------------------


class Placeholder(msgspec.Struct, frozen=True):
    """A reference, within a value, to something that only the receiver has."""

    kind: str
    number: int
    name: str


def pack(value: Any, what: str) -> list[Frame]:
    """A value as frames; `UsageError` that names `what`, if part of it cannot be sent."""
    buffers: list[Frame] = []
    try:
        tree = msgspec.msgpack.encode(_plain(value, what, buffers))
    except RecursionError as error:
        raise UsageError(f"{what} is nested too deeply to be sent.") from error
    except OverflowError as error:
        raise UsageError(f"{what} contains an integer of more than 64 bits.", fix=["text, or a float"]) from error
    check_size(None, [tree, *buffers], what)
    return [tree, *buffers]


def check_size(header: Any, frames: Sequence[Frame], what: str) -> None:
    """`UsageError` if the message is so large that the receiver would drop it without an error."""
    num_bytes = len(msgspec.msgpack.encode(header))
    if len(frames) >= MAX_FRAMES:
        raise UsageError(
            f"{what} contains {len(frames)} tensors; a message carries at most {MAX_FRAMES - 2}.",
            fix=["torch.stack, or torch.cat, to combine them"],
        )
    if num_bytes > MAX_HEADER_BYTES or len(frames[0]) > MAX_FRAME_BYTES:
        raise UsageError(
            f"{what} takes {max(num_bytes, len(frames[0])) / 1e6:.1f} MB beside its tensors.",
            fix=["one tensor instead of many numbers", "shorter names, and fewer of them"],
        )


def _plain(value: Any, what: str, buffers: list[Frame]) -> Any:
    if value is None:
        return None
    if isinstance(value, np.generic):
        value = value.item()
    kinds: tuple[type[Any], ...] = (bool, int, float, str, bytes)
    for kind in kinds:
        if isinstance(value, kind):
            return kind(value)  # never an instance of a subclass
    if isinstance(value, Tensor):
        return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode(_put(value, what, buffers)))
    if isinstance(value, Placeholder):
        return msgspec.msgpack.Ext(_PLACEHOLDER, msgspec.msgpack.encode([value.kind, value.number, value.name]))
    if isinstance(value, list | tuple):
        items = [_plain(item, f"{what}[{index}]", buffers) for index, item in enumerate(value)]
        return items if isinstance(value, list) else msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode(items))
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, f"{what}[{key!r}]", buffers) for key, item in value.items()}
    raise UsageError(
        f"{what} is a {type(value).__name__}, which cannot be sent to another process.",
        fix=["numbers, text, bytes, tensors, lists, tuples and dicts with text keys"],
    )


def _put(tensor: Tensor, what: str, buffers: list[Frame]) -> list[Any]:
    buffers.append(raw_bytes(check_tensor(tensor, what)))
    return [dtype_name(tensor), list(tensor.shape), len(buffers) - 1]


class _Unpacking(NamedTuple):
    """Not a function inside `unpack`: it would refer to itself, and keep the frames until garbage is collected."""

    frames: Sequence[Frame]
    fill: Callable[[Placeholder], Any]

    def extension(self, code: int, data: memoryview) -> Any:
        if code == _TENSOR:
            name, shape, index = msgspec.msgpack.decode(data, type=tuple[str, list[int], int])
            if not 0 <= index < len(self.frames) - 1:
                raise ValueError("a tensor without its bytes")
            return tensor_from(self.frames[1 + index], shape, name)
        if code == _TUPLE:
            return tuple(msgspec.msgpack.decode(data, type=list, ext_hook=self.extension))
        if code == _PLACEHOLDER:
            return self.fill(Placeholder(*msgspec.msgpack.decode(data, type=tuple[str, int, str])))
        raise ValueError(f"extension {code} is unknown")


def unpack(frames: Sequence[Frame], fill: Callable[[Placeholder], Any] = lambda found: found) -> Any:
    """The packed value, with `fill(placeholder)` for every placeholder; `ValueError` if the frames are no value."""

    if not frames:
        raise ValueError("no frame")
    try:
        return msgspec.msgpack.decode(frames[0], ext_hook=_Unpacking(frames, fill).extension)
    except (RecursionError, TypeError) as error:  # TypeError: an unhashable key
        raise ValueError(f"not a value: {error}") from error
