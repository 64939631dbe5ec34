"""Exchange of rows and metadata between workers, and its encoding.

The transport is anything with `all_gather_bytes`. Values are msgpack with arrays as an extension type: no pickle, so
that nothing in a message is executed. Used for files that no host has completely (`file_source`) and to check that all
workers were given the same data (`data_agreement`).
"""

from __future__ import annotations

import json
import math
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from manyhands.errors import DataError

__all__ = ["RowExchange", "decode", "encode"]

_ARRAY = 1


class RowExchange(Protocol):
    """Connects all workers of a generation.

    Every worker makes the same calls in the same order, from the thread that runs the steps; so an implementation
    may be a plain collective.
    """

    def all_gather_bytes(self, name: str, data: bytes) -> list[bytes]:
        """Every worker's `data`, by rank."""


def encode(value: Any) -> bytes:
    """None, booleans, numbers, text, bytes, lists, dicts and numpy arrays of numbers."""
    return msgspec.msgpack.encode(value, enc_hook=_encode_array)


def decode(data: bytes) -> Any:
    """The inverse of `encode`; tuples become lists, arrays are read-only. Raises `DataError` for anything else."""
    try:
        return msgspec.msgpack.decode(data, ext_hook=_decode_array)
    except (msgspec.DecodeError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"Rows sent by another worker cannot be read: {error}.") from error


def _encode_array(value: object) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":
        raise TypeError(f"{type(value).__name__} cannot be sent between workers")
    header = json.dumps([value.dtype.str, list(value.shape)]).encode()
    return msgspec.msgpack.Ext(
        _ARRAY, len(header).to_bytes(4, "little") + header + np.ascontiguousarray(value).tobytes()
    )


def _decode_array(code: int, data: memoryview) -> npt.NDArray[Any]:
    if code != _ARRAY:
        raise ValueError(f"extension {code} is unknown")
    start = 4 + int.from_bytes(data[:4], "little")
    name, shape = json.loads(bytes(data[4:start]))
    dtype = np.dtype(name)
    if dtype.kind not in "biufc" or len(data) - start != dtype.itemsize * math.prod(shape):
        raise ValueError(f"an array of {name} {shape} does not fit its {len(data) - start} bytes")
    return np.frombuffer(data, dtype, offset=start).reshape(shape)
