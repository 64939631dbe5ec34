"""The check that all workers were given the same data, before they train on it.

Every worker runs the user's script, so all of them should have made the same data. Random data without a seed, or a
part per worker (`x[rank::2]`), has the same kind and number of rows everywhere, so a few rows are compared as well:
where no code of the user's has to run, in tensors and arrays, also through torch's `Subset`. Values are compared with
a tolerance, because hosts with different processors round differently. Start reading at `agree`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from manyhands.data.row_exchange import RowExchange, decode, encode
from manyhands.data.sources.columns import ColumnTable
from manyhands.data.sources.row_source import DatasetReader, Reader
from manyhands.errors import DataError

__all__ = ["RowSample", "agree", "difference", "sample_of", "sample_of_batch"]

ROWS, VALUES = 16, 64
"""How many rows are compared, and how many values of each column of a row."""
RELATIVE, ABSOLUTE = 1e-3, 1e-6

Rows = npt.NDArray[np.int64]

_THE_SAME = (
    "the same data on every worker; manyhands divides the rows among them",
    "lambda context: ... for data per slice",
)


class RowSample(NamedTuple):
    selection: str = ""
    """A digest of the numbers by which a `Subset` selects rows."""
    values: Sequence[npt.NDArray[Any]] = ()
    """For each column, the first values of some rows."""


def agree(exchange: RowExchange, kind: str, num_rows: int | None, sample: RowSample) -> None:
    """Refuse data that differs between workers in its kind, order or length, or in the sampled rows."""
    mine = encode([kind, num_rows, sample.selection, list(sample.values)])
    answers = [decode(data) for data in exchange.all_gather_bytes("data/agree", mine)]
    if any(answer[:2] != answers[0][:2] for answer in answers):
        seen = "; ".join(f"rank {rank}: {kind}, {rows} rows" for rank, (kind, rows, *_) in enumerate(answers))
        raise DataError(f"The workers were given different data: {seen}.", fix=list(_THE_SAME))
    first, *others = (RowSample(*rest) for _, _, *rest in answers)
    for rank, other in enumerate(others, 1):
        if text := difference(first, other):
            raise DataError(
                f"The workers were given different data: {text.format(rank=rank)}.",
                fix=[
                    "torch.manual_seed(0), numpy.random.seed(0) before the data is made: all workers run the script",
                    "random_split(data, sizes, generator=torch.Generator().manual_seed(0))",
                    *_THE_SAME,
                ],
            )


def sample_of(reader: Reader) -> RowSample:
    """Of rows spread over the data. Empty where reading them would run the user's code."""
    data, selections = reader.dataset if isinstance(reader, DatasetReader) else reader, hashlib.blake2b(digest_size=8)
    rows: Rows | None = None
    while type(data) is Subset:
        chosen = _numbers(data.indices)
        if chosen is None:
            return RowSample()
        selections.update(chosen.tobytes())
        rows = chosen[_spread(len(chosen)) if rows is None else rows]
        data = data.dataset
    selected = selections.hexdigest() if rows is not None else ""
    if type(data) is TensorDataset:
        data = ColumnTable(list(data.tensors))
    if not isinstance(data, ColumnTable) or (rows is not None and (rows < 0).any()):  # from the end, as in a list
        return RowSample(selected)
    found: list[npt.NDArray[Any]] = []
    _each_tensor(data.take(_spread(data.num_rows) if rows is None else rows), lambda leaf: found.append(_values(leaf)))
    return RowSample(selected, found)


def sample_of_batch(columns: Sequence[Tensor]) -> RowSample:
    """Of rows spread over a batch, for data that is read in batches."""
    return RowSample("", [_values(one[torch.from_numpy(_spread(len(one))).to(one.device)]) for one in columns])


def difference(first: RowSample, other: RowSample) -> str:
    """What differs, of rank 0 and of {rank}; empty if nothing does."""
    if len(first.values) != len(other.values):
        return f"rank 0 has {len(first.values)} columns, rank {{rank}} has {len(other.values)}"
    for column, (here, there) in enumerate(zip(first.values, other.values, strict=True)):
        if here.shape != there.shape:
            return f"column {column} has rows of {here[0].size} numbers on rank 0, of {there[0].size} on rank {{rank}}"
        close = np.isclose(here, there, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True)
        if not close.all():
            row, value = np.argwhere(~close)[0]
            seen, other_seen = f"{here[row, value]:.6g}", f"{there[row, value]:.6g}"
            return f"a row has {seen} in column {column} on rank 0, {other_seen} on rank {{rank}}"
    return "" if first.selection == other.selection else "rank 0 and rank {rank} selected different rows"


def _spread(num_rows: int) -> Rows:
    return np.unique(np.linspace(0, num_rows - 1, min(num_rows, ROWS)).astype(np.int64))


def _numbers(indices: Sequence[int]) -> Rows | None:
    try:
        numbers = np.asarray(indices, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        return None
    return numbers if numbers.ndim == 1 and len(numbers) else None


def _each_tensor(batch: Any, use: Any) -> None:
    if isinstance(batch, Tensor):
        use(batch)
    elif isinstance(batch, dict):
        for value in batch.values():
            _each_tensor(value, use)
    elif isinstance(batch, tuple | list):
        for value in batch:
            _each_tensor(value, use)


def _values(leaf: Tensor) -> npt.NDArray[Any]:
    dense = leaf.detach().to("cpu")
    dense = dense.to_dense() if dense.layout != torch.strided else dense
    dense = dense.dequantize() if dense.is_quantized else dense
    dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return dense[:, None].flatten(1)[:, :VALUES].to(torch.float64).numpy()  # reshape(n, -1) refuses empty rows
