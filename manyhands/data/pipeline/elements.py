"""Elements of a chain: their values, what they are called for randomness, and how several become a batch.

An element is a value and its *example*: a number that says which example it is, at any position. It is the row
of the source, mixed with the repetition or the file where a row number alone would not be unique. Random functions are
keyed by it (`Keyed`). Values are tensors, numbers, text, or tuples and dicts of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

from manyhands.data.randomness import randomness, seed_all
from manyhands.data.sample_order import mix_all
from manyhands.data.sources.columns import is_array
from manyhands.errors import DataError

__all__ = [
    "Element",
    "Keyed",
    "as_tensor",
    "check_alike",
    "copied",
    "row_of",
    "same_rows",
    "stack_leaves",
    "stacked",
    "structure",
]


class Element(NamedTuple):
    value: Any
    example: int


class Keyed:
    """A user function whose draws from `random`, `numpy` and `torch` depend on (seed, stage, epoch, example) only."""

    def __init__(self, function: Callable[..., Any], seed: int, stage: int) -> None:
        self._function, self._seed, self._stage = function, seed, stage

    def each(self, elements: Sequence[Element], epoch: int) -> list[Any]:
        """The results, in order. The generators are saved and restored once for all."""
        if not elements:
            return []
        results = []
        with randomness(0):
            for value, example in elements:
                seed_all(mix_all(self._seed, self._stage, epoch, example) >> 1)
                results.append(self._call(value, example))
        return results

    def __call__(self, element: Element, epoch: int) -> Any:
        return self.each([element], epoch)[0]

    def _call(self, value: Any, example: int) -> Any:
        try:
            return self._function(*value) if isinstance(value, tuple) else self._function(value)
        except Exception as error:
            name = getattr(self._function, "__qualname__", type(self._function).__name__)
            error.add_note(f"in {name}, for example {example}")
            raise


def structure(visit: Callable[..., Any], value: Any, *more: Any) -> Any:
    """The same tuples and dicts with `visit` of every leaf; `more` are values of the same structure."""
    if isinstance(value, dict):
        return {key: structure(visit, item, *(one[key] for one in more)) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [structure(visit, *group) for group in zip(value, *more, strict=True)]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return visit(value, *more)


def row_of(batch: Any, row: int) -> Any:
    """One row of a batch; a tensor without dimensions stays a tensor, text in a list is text."""
    return structure(lambda column: column[row], batch)


def same_rows(batch: Any, rows: int, size: int) -> Any:
    """The batch, if it has as many rows as the batch that it was made of."""
    if rows == size:
        return batch
    raise DataError(
        f"A function after batch() must keep the number of rows, but it returned {rows} for a batch of {size}: which "
        "rows a step uses could not be known.",
        where="map after batch",
        fix=[
            "a function that keeps the number of rows",
            ".unbatch().batch(...) after it",
            "filter(...) before batch()",
        ],
    )


def copied(value: Any) -> Any:
    """A copy that user code may change in place."""
    return structure(
        lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf.copy() if is_array(leaf) else leaf, value
    )


def stacked(values: Sequence[Any]) -> Any:
    """A batch: tensors of one shape, numbers and lists of numbers become a tensor, text a list.

    Tuples and dicts are kept.
    """
    check_alike(values)
    return structure(lambda *leaves: stack_leaves(leaves), *values)


def stack_leaves(leaves: Sequence[Any]) -> Any:
    """One column of a batch."""
    first = leaves[0]
    if is_array(first) or isinstance(first, np.generic | list):
        found = [as_tensor(leaf) for leaf in leaves]
        tensors = [one for one in found if one is not None]
        if len(tensors) < len(found):  # text, and what else no tensor holds
            return list(leaves)
        shapes = {tuple(tensor.shape) for tensor in tensors}
        if len(shapes) > 1:
            raise DataError(
                f"Elements of one batch differ in shape: {', '.join(str(list(one)) for one in sorted(shapes)[:4])}.",
                where="batch",
                fix=["padded_batch(...)", "a map before batch() that makes them alike, such as mh.images.resize"],
            )
        stacked_tensors: torch.Tensor = default_collate(tensors)  # in a loader process, into the memory that is sent
        return stacked_tensors
    if isinstance(first, bool | int):
        return torch.tensor(leaves)
    # Python floats are doubles because Python has no other float; models use float32.
    return torch.tensor(leaves, dtype=torch.float32) if isinstance(first, float) else list(leaves)


def as_tensor(leaf: Any) -> torch.Tensor | None:
    """A tensor, array, number, or a list of these of one shape, as a tensor; None for text and other values."""
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "biufc":
        return None
    if not isinstance(leaf, list):
        return torch.as_tensor(leaf) if is_array(leaf) or isinstance(leaf, np.generic | int | float) else None
    if leaf and not isinstance(leaf[0], int | float):
        parts = [as_tensor(one) for one in leaf]
        tensors = [one for one in parts if one is not None]
        alike = len(tensors) == len(parts) and len({one.shape for one in tensors}) == 1
        return torch.stack(tensors) if alike else None
    try:
        return torch.tensor(leaf)  # whole numbers, or float32
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def check_alike(values: Sequence[Any]) -> None:
    """`DataError` if the values are not of one structure."""
    first = values[0]
    for value in values:
        same = type(value) is type(first) or not (isinstance(first, dict | tuple) or isinstance(value, dict | tuple))
        if same and isinstance(first, dict):
            same = value.keys() == first.keys()
        if not same or (isinstance(first, tuple) and len(value) != len(first)):
            raise DataError(
                f"Elements of one batch differ in structure: {_shape_of(first)} and {_shape_of(value)}.",
                where="batch",
                fix=["a map before batch() that returns the same fields for every element"],
            )


def _shape_of(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict of {sorted(map(str, value))}"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
