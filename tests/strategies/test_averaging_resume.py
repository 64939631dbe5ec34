"""Local SGD runs stop within a round and resume, with as many workers, or with others."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import manyhands as mh
from manyhands.checkpoint.reader import load, newest_valid
from manyhands.checkpoint.state_packing import unpack
from manyhands.errors import CheckpointMismatch, Preempted
from manyhands.testing import RankPool
from tests.training.test_resume import StopAt
from tests.training.workloads import data, make_trainer, weights_of

WAYS: dict[str, dict[str, Any]] = {
    "DiLoCo": {"every": 4, "outer": "nesterov"},
    "EASGD": {"every": 2, "outer": "elastic"},
    "pairs": {"every": 2, "peers": "pairs"},
    "streaming": {"every": 6, "fragments": 2, "overlap": 3, "outer": "nesterov"},
}


def stopped_at(run_dir: str, way: dict[str, Any], stop_at: int | None) -> dict[str, Any]:
    strategy = mh.LocalSGD(**way)
    trainer = make_trainer(
        "dropout and BatchNorm", "AdamW", strategy=strategy, slices=6, run_dir=run_dir, hooks=[StopAt(stop_at)]
    )
    history: list[dict[str, float]] = []
    with contextlib.suppress(Preempted):
        history = trainer.fit(data(), epochs=2, batch_size=12)
    return {"weights": weights_of(trainer), "history": list(history), "step": trainer.step}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_stopped_within_a_round_ends_where_it_would_have(ranks: RankPool, tmp_path: Path, way: str) -> None:
    whole = ranks(2, stopped_at, str(tmp_path / "whole"), WAYS[way], None, run_dir=tmp_path / "whole")
    first = ranks(2, stopped_at, str(tmp_path / "cut"), WAYS[way], 5, run_dir=tmp_path / "cut")
    assert [one["step"] for one in first] == [5, 5]
    second = ranks(2, stopped_at, str(tmp_path / "cut"), WAYS[way], None, run_dir=tmp_path / "cut")
    for before, after in zip(whole, second, strict=True):
        assert after["history"] == before["history"]
        for name, value in before["weights"].items():
            assert value.tobytes() == after["weights"][name].tobytes(), name


def start_and_stop(run_dir: str, way: dict[str, Any]) -> dict[str, Any]:
    """The state that a run resumes with, before it takes another step."""
    trainer = make_trainer("dropout and BatchNorm", "AdamW", strategy=mh.LocalSGD(**way), slices=6, run_dir=run_dir)
    trainer._run.ready()
    states = trainer.optimizer.state_dict()["state"]
    return {"weights": weights_of(trainer), "first moments": [states[i]["exp_avg"].numpy().copy() for i in states]}


def test_with_another_number_of_workers_all_start_from_the_mean(ranks: RankPool, tmp_path: Path) -> None:
    way = WAYS["DiLoCo"]
    ranks(2, stopped_at, str(tmp_path), way, 6, run_dir=tmp_path)
    newest = newest_valid(tmp_path / "checkpoints")
    assert newest is not None
    found = load(newest.path, verify=True)
    two = unpack(found.state["training"], found.tensors)["strategy"]["workers"]
    three = ranks(3, start_and_stop, str(tmp_path), way, run_dir=tmp_path)
    for rank, started in enumerate(three):
        trained = [value for name, value in started["weights"].items() if "running" not in name and "num" not in name]
        for place, value in enumerate(trained):
            mean = sum(worker["weights"][place].double().numpy() for worker in two) / 2
            np.testing.assert_allclose(value, mean, rtol=1e-6)
        moments = two[rank % 2]["optimizer"]
        for place, value in enumerate(started["first moments"]):
            np.testing.assert_array_equal(value, moments[place]["exp_avg"].numpy())
    (done, *_) = ranks(3, stopped_at, str(tmp_path), way, None, run_dir=tmp_path)
    assert done["step"] == 16


def other_way(run_dir: str, way: dict[str, Any] | None) -> str:
    strategy = mh.LocalSGD(**way) if way else None
    with pytest.raises(CheckpointMismatch) as error:
        make_trainer("dropout and BatchNorm", "AdamW", strategy=strategy, slices=6, run_dir=run_dir).fit(
            data(), epochs=2, batch_size=12
        )
    return str(error.value)


@pytest.mark.parametrize("way", [None, {"every": 3, "outer": "nesterov"}], ids=["mirrored", "another period"])
def test_a_run_does_not_resume_in_another_way(ranks: RankPool, tmp_path: Path, way: dict[str, Any] | None) -> None:
    ranks(1, stopped_at, str(tmp_path), WAYS["DiLoCo"], 6, run_dir=tmp_path)
    (error,) = ranks(1, other_way, str(tmp_path), way, run_dir=tmp_path)
    assert "averaging" in error and "--run-dir NEW" in error
