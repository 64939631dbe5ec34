"""Workers that were given other rows than the first one stop before the first step, and say which rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

import manyhands as mh
from manyhands.data.data_agreement import RowSample, sample_of
from manyhands.data.sources.as_source import as_source
from manyhands.testing import RankPool


def rows(seed: int | None) -> Any:
    draw = torch.Generator().manual_seed(seed) if seed is not None else None
    return torch.randn(40, 3, generator=draw), torch.arange(40)


class Own(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> Any:
        raise AssertionError("a Dataset's own code must not run for a comparison")


def data_of(kind: str, rank: int) -> Any:
    torch.manual_seed(rank)  # what every process does by itself in a script without a seed
    x, y = rows(0)
    return {
        "without a seed": lambda: rows(None),
        "a part per worker": lambda: (x[rank::2], y[rank::2]),
        "one column": lambda: {"x": x, "y": y.roll(rank)},
        "other columns": lambda: (x, y) if rank else (x, y, y),
        "other rows": lambda: random_split(TensorDataset(x, y), [30, 10])[0],
        "of any data": lambda: random_split(Own(), [30, 10])[0],  # type: ignore[arg-type]
        "Dataset": lambda: mh.Dataset.from_tensor_slices(rows(None)).batch(4),
        "the same": lambda: Subset(Subset(TensorDataset(x, y), range(1, 40)), list(range(3, 20))),
        "rounded elsewhere": lambda: (x * (1 + 1e-6 * rank), torch.full((40,), torch.nan)),
    }[kind]()


def check(kind: str) -> str:
    hands = mh.join(slices=2)
    model = torch.nn.Linear(3, 1)
    hands.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        next(iter(hands.batches(data_of(kind, hands.rank), batch_size=4, steps=1)))
    except mh.ManyhandsError as error:
        return str(error)
    except AssertionError as error:
        return f"read: {error}"
    return "trains"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("without a seed", "in column 0 on rank 0"),
        ("a part per worker", "in column 0 on rank 0"),
        ("one column", "a row has 0 in column 1 on rank 0, 39 on rank 1"),
        ("other columns", "rank 0 has 3 columns, rank 1 has 2"),
        ("other rows", "The workers were given different data: a row has"),
        ("of any data", "rank 0 and rank 1 selected different rows"),
        ("Dataset", "in column 0 on rank 0"),
        ("the same", "trains"),
        ("rounded elsewhere", "trains"),
    ],
)
def test_other_rows_on_another_worker_are_refused(ranks: RankPool, kind: str, said: str) -> None:
    for found in ranks(2, check, kind):
        assert said in found, found
        assert said == "trains" or "torch.manual_seed(0)" in found


def test_every_kind_of_tensor_can_be_sampled() -> None:
    columns = [torch.zeros(5, 2, dtype=kind) for kind in (torch.bool, torch.bfloat16, torch.complex64, torch.uint8)]
    columns += [torch.zeros(5), torch.zeros(5, 0), torch.zeros(5, 3, 4, 9)]
    sample = sample_of(as_source(tuple(columns)).reader)  # type: ignore[union-attr]
    assert [one.shape[1] for one in sample.values] == [2, 2, 4, 2, 1, 0, 64]
    assert not sample_of(as_source(Subset(TensorDataset(torch.zeros(5)), [0, -1])).reader).values  # type: ignore[union-attr]
    assert sample_of(as_source(Own()).reader) == RowSample()  # type: ignore[union-attr]
