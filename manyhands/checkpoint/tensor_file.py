"""Reads and writes one safetensors file, without a second copy in memory and without trusting the file.

Writing streams each tensor's bytes through the hash into the file. Reading checks the header against fixed limits
before anything is mapped. The caller decides which tensors go into which file. Start reading at `tensor_chunks` and
`read_header`.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from manyhands.checkpoint.format import DTYPE_BYTES, MAX_NAME_CHARS, MAX_TENSORS_PER_SHARD, is_possible
from manyhands.errors import CheckpointCorrupt, CheckpointSaveFailed

__all__ = [
    "describe",
    "empty_tensor",
    "file_order",
    "map_tensors",
    "open_regular",
    "read_header",
    "read_tensors",
    "tensor_chunks",
]

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.complex64: "C64", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip

# Small enough to stay in the cache between hashing and writing, large enough that Python's overhead is negligible.
CHUNK_BYTES = 2**20
MAX_HEADER_BYTES = 64 * 2**20
MAX_METADATA_BYTES = 2**20


def describe(name: str, tensor: Tensor) -> tuple[str, list[int]]:
    """The file's dtype and shape of a tensor; CheckpointSaveFailed if safetensors cannot store it."""
    if tensor.dtype not in _DTYPES or tensor.layout != torch.strided or tensor.device.type == "meta":
        raise CheckpointSaveFailed(
            f"Tensor {name!r} is {tensor.dtype} ({tensor.layout}, on {tensor.device}); safetensors cannot store it.",
            fix=["save it as a dense tensor of a smaller type; complex128 as torch.view_as_real(tensor)"],
        )
    if name == "__metadata__" or len(name) > MAX_NAME_CHARS:
        raise CheckpointSaveFailed(f"A tensor cannot have the name {name[:80]!r} ({len(name)} characters).")
    return _DTYPES[tensor.dtype], list(tensor.shape)


def empty_tensor(dtype: str, shape: Sequence[int]) -> Tensor:
    """An uninitialised tensor of this dtype and shape, as a file describes them."""
    [kind] = [one for one, code in _DTYPES.items() if code == dtype]
    return torch.empty(tuple(shape), dtype=kind)


def file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Widest first, so that every tensor starts at a multiple of its item size."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def tensor_chunks(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    bring: Callable[[str], Tensor] | None = None,
) -> Iterator[memoryview]:
    """The bytes of a safetensors file of `tensors`, in chunks.

    With `bring`, `tensors` only give shapes and types, and `bring(name)` returns the values, called in file order.
    """
    described = {name: describe(name, tensor) for name, tensor in tensors.items()}
    order = file_order(tensors)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        dtype, shape = described[name]
        begin, end = end, end + math.prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    raw = msgspec.json.encode(header)
    raw += b" " * (-len(raw) % 8)
    yield memoryview(len(raw).to_bytes(8, "little") + raw)
    for name in order:
        yield from _pieces(_raw_bytes(bring(name) if bring is not None else tensors[name]))


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def _raw_bytes(tensor: Tensor) -> memoryview:
    # A tensor is copied only if it is on another device, strided or lazily conjugated, and only one at a time.
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().data if plain.numel() else memoryview(b"")


def open_regular(path: Path) -> int:
    """Open a plain file for reading; CheckpointCorrupt with its name if it is missing, a link, a pipe or a device."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise CheckpointCorrupt(f"{path} is missing.") from error
    except OSError as error:
        why = "a symbolic link" if path.is_symlink() else f"not readable: {error.strerror}"
        raise CheckpointCorrupt(f"{path} is {why}.") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointCorrupt(f"{path} is not a regular file.")
    return fd


def read_header(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Name -> (dtype, shape) of a safetensors file; CheckpointCorrupt unless its parts fit the file exactly."""
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        length = int.from_bytes(os.read(fd, 8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointCorrupt(f"{path} announces a header of {length} bytes in a file of {size}.")
        raw = os.read(fd, length)
    finally:
        os.close(fd)
    try:
        # Before parsing: a hundred thousand small objects take seconds.
        if (count := raw.count(b'"data_offsets"')) > MAX_TENSORS_PER_SHARD:
            raise ValueError(f"{count} tensors, but the limit is {MAX_TENSORS_PER_SHARD}")
        return _check_header(json.loads(raw, object_pairs_hook=_no_duplicates), size - 8 - length)
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointCorrupt(f"{path} has a header that cannot be used: {error}.") from error


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("the same name twice")
    return found


class _TensorRange(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _check_header(header: Any, data_bytes: int) -> dict[str, tuple[str, list[int]]]:
    if not isinstance(header, dict):
        raise ValueError("not an object")
    metadata = msgspec.convert(header.pop("__metadata__", {}), dict[str, str])
    if sum(len(key) + len(value) for key, value in metadata.items()) > MAX_METADATA_BYTES:
        raise ValueError(f"metadata of more than {MAX_METADATA_BYTES} bytes")
    entries = msgspec.convert(header, dict[str, _TensorRange])
    position = 0
    # In file order every tensor must begin where the previous one ends, and the last must end with the file.
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if len(name) > MAX_NAME_CHARS:
            raise ValueError(f"a name of {len(name)} characters")
        if not is_possible(entry.dtype, entry.shape):
            raise ValueError(f"tensor {name!r} is a {entry.dtype[:20]!r} of shape {entry.shape[:64]}")
        if begin != position or end - begin != math.prod(entry.shape) * DTYPE_BYTES[entry.dtype]:
            raise ValueError(f"tensor {name!r} claims bytes {begin} to {end}, but starts at {position}")
        position = end
    if position != data_bytes:
        raise ValueError(f"tensors end at byte {position} of {data_bytes}")
    return {name: (entry.dtype, entry.shape) for name, entry in entries.items()}


def map_tensors(path: Path, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file whose header was checked, or those in `names`.

    The data is mapped, not read: pages are loaded on use and shared between processes, writes stay private.
    """
    try:
        with safe_open(str(path), framework="pt", device="cpu") as opened:
            return {name: opened.get_tensor(name) for name in names or opened.keys()}
    except (SafetensorError, ValueError, OverflowError) as error:  # the last two: for numbers that torch refuses
        raise CheckpointCorrupt(f"{path} is not a safetensors file: {error}.") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of any safetensors file, after a check of its header. A foreign file has no checksum of its data."""
    read_header(path)
    return map_tensors(path)
