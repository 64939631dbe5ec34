"""A 64-bit hash of tensors: equal for equal bits, on every CPU, with the C extension or without.

Fast enough to hash a whole model now and then (native/digest.c hashes memory about as fast as it can be read), and
certain to detect any single changed word. Not cryptographic: it is no defence against an attacker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.native import library

__all__ = ["digest", "fingerprint", "states_of"]

_LANES = 16
_ROWS_AT_A_TIME = 2**14
_WORD = 2**64 - 1


def digest(tensor: Tensor) -> int:
    """The hash of the values in their logical order: the memory format does not matter."""
    values = tensor.detach().cpu().contiguous()
    if library is not None:
        return int(library.digest(values.data_ptr(), values.nbytes))
    return _digest(values.reshape(-1).view(torch.uint8).numpy() if values.numel() else np.empty(0, np.uint8))


def _digest(memory: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    """native/digest.c in numpy, if there is no extension: a sum per lane, and a sum of its running sums."""
    num_bytes = len(memory)
    padded = np.pad(memory, (0, -num_bytes % (8 * _LANES))).view("<u8").reshape(-1, _LANES)
    sums, sums_of_sums = np.zeros(_LANES, np.uint64), np.zeros(_LANES, np.uint64)
    for start in range(0, len(padded), _ROWS_AT_A_TIME):
        rows = padded[start : start + _ROWS_AT_A_TIME]
        so_far = sums + np.cumsum(rows, axis=0, dtype=np.uint64)
        sums_of_sums += so_far.sum(axis=0, dtype=np.uint64)
        sums = so_far[-1]
    whole = num_bytes
    for lane, (total, sum_of_sums) in enumerate(zip(sums.tolist(), sums_of_sums.tolist(), strict=True)):
        mixed = (total + lane) * 0x9E3779B97F4A7C15 & _WORD
        mixed = (mixed ^ mixed >> 29 ^ sum_of_sums) * 0xBF58476D1CE4E5B9 & _WORD
        whole = (whole + (mixed ^ mixed >> 32)) & _WORD
    return whole


def fingerprint(tensors: Iterable[tuple[str, Tensor]], plain: Iterable[object] = ()) -> int:
    """The hash of named tensors, in the order given, and of plain values that are part of the same state."""
    whole = hashlib.blake2b(digest_size=8)
    for name, tensor in tensors:
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {digest(tensor)}\n".encode())
    for value in plain:
        whole.update(f"{value!r}\n".encode())
    return int.from_bytes(whole.digest(), "little")


def states_of(optimizer: Optimizer, names: Mapping[int, str]) -> list[tuple[str, Tensor]]:
    """The optimizer's tensors, in the order of its parameters (`names` by the parameter's id)."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [
        (f"{names.get(id(param), str(index))}/{name}", value)
        for index, param in enumerate(params)
        for name, value in sorted(optimizer.state.get(param, {}).items())
        if isinstance(value, Tensor)
    ]
