"""Batches of elements that differ in length: each tensor is padded at its end, as in tf.data's `padded_batch`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from manyhands.data.pipeline.elements import as_tensor, check_alike, stack_leaves
from manyhands.data.sources.columns import is_array
from manyhands.errors import DataError

__all__ = ["padded"]


def padded(values: Sequence[Any], shapes: Any = None, fill: Any = None) -> Any:
    """As `stacked`, with tensors padded to `shapes`; where that is None, to the longest of these values.

    `shapes` and `fill` have the structure of an element; one fill value is for all of its parts.
    """
    check_alike(values)
    first = values[0]
    if isinstance(first, dict):
        return {
            key: padded([value[key] for value in values], _part(shapes, key), _part(fill, key, alone=True))
            for key in first
        }
    if isinstance(first, tuple):
        return tuple(
            padded([value[n] for value in values], _part(shapes, n), _part(fill, n, alone=True))
            for n in range(len(first))
        )
    if not (is_array(first) or isinstance(first, list)):
        return stack_leaves(values)
    tensors = [as_tensor(value) for value in values]
    found = [one for one in tensors if one is not None]
    if len(found) < len(tensors):
        raise DataError(
            f"padded_batch pads numbers, and an element has {values[tensors.index(None)]!r:.60}.",
            where="padded_batch",
            fix=["a map before it that makes numbers of text", "batch(...), if nothing differs in length"],
        )
    return _pad(found, shapes, 0 if fill is None else fill.item() if hasattr(fill, "item") else fill)


def _part(given: Any, key: Any, *, alone: bool = False) -> Any:
    if given is None or (alone and not isinstance(given, tuple | dict)):
        return given
    try:
        return given[key]
    except (KeyError, IndexError, TypeError):
        raise DataError(
            f"padded_shapes or padding_values has nothing for part {key!r} of an element.",
            where="padded_batch",
            fix=["one entry for each part, such as padded_shapes=([None], []) for (tokens, label)", "no padded_shapes"],
        ) from None


def _pad(tensors: list[torch.Tensor], shape: Sequence[int | None] | None, fill: Any) -> torch.Tensor:
    dims = tensors[0].ndim
    if any(tensor.ndim != dims for tensor in tensors) or (shape is not None and len(shape) != dims):
        asked = "" if shape is None else f", and padded_shapes has {len(shape)}"
        raise DataError(
            f"Elements of one batch have {sorted({tensor.ndim for tensor in tensors})} dimensions{asked}.",
            where="padded_batch",
            fix=["elements with the same number of dimensions"],
        )
    longest = [max(tensor.shape[dim] for tensor in tensors) for dim in range(dims)]
    wanted = [n if shape is None or shape[dim] in (None, -1) else int(shape[dim] or 0) for dim, n in enumerate(longest)]
    if any(n > size for n, size in zip(longest, wanted, strict=True)):
        raise DataError(
            f"An element of size {longest} does not fit into padded_shapes {wanted}.",
            where="padded_batch",
            fix=["None in place of a size, to pad to the longest of a batch", "a map that cuts longer elements"],
        )
    # Elements of a file may be whole numbers in one row and fractions in the next.
    dtype = functools.reduce(torch.promote_types, (one.dtype for one in tensors))
    value = torch.tensor(fill)
    if not (dtype.is_floating_point or dtype.is_complex) and value.to(dtype).to(value.dtype) != value:
        raise DataError(
            f"padding_values has {fill!r}, which elements of {str(dtype).removeprefix('torch.')} cannot hold.",
            where="padded_batch",
            fix=["a value of the elements' type", "a map before it that makes them floats"],
        )
    batch = torch.full((len(tensors), *wanted), fill, dtype=dtype)
    for row, tensor in enumerate(tensors):
        part = batch[row]
        for dim, n in enumerate(tensor.shape):
            part = part.narrow(dim, 0, n)
        part.copy_(tensor)
    return batch
