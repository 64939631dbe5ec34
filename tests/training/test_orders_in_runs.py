"""Runs by weight, by length and of ready batches: stopped within an epoch and resumed on others, the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.data.sources.as_source import as_source
from manyhands.errors import CheckpointMismatch, DataError, Preempted
from manyhands.testing import RankPool
from manyhands.training.loop.setting_checks import same_order
from manyhands.training.state.training_state import Progress
from tests.stopping import StopAt
from tests.training.workloads import data, make_trainer, weights_of

SIZES = (16, 16, 3, 16, 24)


def ready() -> Any:
    x, y = data(75)
    yield from zip(x.split(SIZES), y.split(SIZES), strict=True)


KINDS: dict[str, dict[str, Any]] = {
    "by weight": {"data": data(75), "batch_size": 16, "order": mh.order.Weighted(torch.arange(75) % 5)},
    "by length": {"data": data(75), "batch_size": 16, "order": mh.order.ByLength(torch.arange(75) % 7, window=2)},
    "ready batches": {"data": ready, "batched": True},
}


def train(kind: str, run_dir: str, stop_at: int | None) -> tuple[dict[str, Any], list[Any], dict[str, float]]:
    trainer = make_trainer(
        "dropout and BatchNorm", "AdamW", slices=6, exact=True, run_dir=run_dir, hooks=[StopAt(stop_at)]
    )
    try:
        history = list(trainer.fit(epochs=2, validation=data(20), **KINDS[kind]))
    except Preempted:
        return weights_of(trainer), [], {}
    return weights_of(trainer), history, trainer.evaluate(ready, batched=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_stopped_within_an_epoch_resumes_on_other_workers_to_the_same_bits(
    ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    for workers, stop_at in ((2, 3), (3, None)):
        weights, history, result = ranks(workers, train, kind, str(tmp_path), stop_at, run_dir=tmp_path)[0]
    [(expected, whole, alone)] = ranks(1, train, kind, str(tmp_path / "other"), None, run_dir=tmp_path / "other")
    assert all(weights[name].tobytes() == value.tobytes() for name, value in expected.items())
    assert history == whole and history[-1]["step"] == 10 and result == alone


def test_an_order_cannot_change_within_an_epoch() -> None:
    source = as_source(data(75), order=mh.order.ByLength(torch.arange(75)))
    order = same_order(Progress(), source, 16)
    assert same_order(Progress(row=32, order=order), source, 16) == order
    for other, size in ((source, 8), (as_source(data(75)), 16), (as_source(ready, batched=True), 16)):
        with pytest.raises(CheckpointMismatch, match="32 of its rows were taken in the order") as caught:
            same_order(Progress(row=32, order=order), other, size)
        assert caught.value.fix
        assert same_order(Progress(epoch=1, order=order), other, size) != order


def refused() -> list[str]:
    said = []
    for more in ({"batched": True, "batch_size": 8}, {"batched": False}, {"batched": True, "collate": len}):
        with pytest.raises(DataError) as caught:
            make_trainer(slices=2).fit(ready, epochs=1, **more)
        said.append(caught.value.what)
    return said


def test_what_ready_batches_cannot_be_combined_with_is_refused(ranks: RankPool) -> None:
    [said] = ranks(1, refused)
    assert said[0] == "batch_size is 8, but with batched=True each item of the data is one global batch."
    assert said[1] == "No batch_size was given."
    assert said[2].startswith("collate makes a batch of examples")
