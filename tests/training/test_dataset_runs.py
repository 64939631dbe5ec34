"""Runs on `mh.Dataset`: on 1, 2 and 3 workers, stopped and resumed, and with workers killed -9: the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.errors import CheckpointMismatch, DataError, Preempted
from manyhands.testing import RankPool
from tests.elastic.conftest import Start
from tests.elastic.conftest import elastic as elastic
from tests.elastic.dataset_training import chains, digest, loss, make_trainer, rows, train
from tests.stopping import StopAt

SCRIPT = Path(__file__).parents[1] / "elastic" / "dataset_training.py"
KINDS = ["by position", "forward", "batch, then map", "even batches, then map"]


def stop_and_resume(run_dir: str, stop_at: int | None) -> dict[str, Any]:
    try:
        return train(KINDS, [StopAt(stop_at)], run_dir=run_dir)
    except Preempted:
        return {}


def test_runs_on_datasets_end_in_the_same_bits_on_any_workers_and_after_stops(ranks: RankPool, tmp_path: Path) -> None:
    """Three stops, in the middle of epochs of three of the four chains."""
    for workers, stop_at in ((2, 3), (3, 12), (1, 23), (2, None)):
        found = ranks(workers, stop_and_resume, str(tmp_path), stop_at, run_dir=tmp_path)[0]
    [alone] = ranks(1, stop_and_resume, str(tmp_path / "other"), None, run_dir=tmp_path / "other")
    assert found == alone


@pytest.mark.slow
@pytest.mark.faults
def test_workers_killed_while_they_read_a_dataset_change_nothing(elastic: Start, ranks: RankPool) -> None:
    kinds = KINDS[:2]
    run = elastic({"kinds": kinds, "kills": [[1, 4], [0, 13]]}, "-n", "2", "--elastic", "1:2", script=SCRIPT)
    [alone] = ranks(1, train, kinds, [])
    assert run.wait() == alone
    assert sum("died: SIGKILL" in event.why for event in run.generations()) == 2


@pytest.mark.long
@pytest.mark.faults
@pytest.mark.parametrize("at", [4, 13, 24, 40])
def test_a_run_that_was_killed_is_resumed_on_other_workers(elastic: Start, ranks: RankPool, at: int) -> None:
    run = elastic({"kinds": KINDS, "kills": [[0, at]]}, "-n", "2", "--max-restarts", "0", script=SCRIPT)
    assert run.process.wait(100) != 0
    again = ["--run-dir", str(run.directory), "-n", "3"]
    resumed = elastic({"kinds": KINDS, "kills": []}, *again, script=SCRIPT)
    [alone] = ranks(1, train, KINDS, [])
    assert resumed.wait() == alone


@pytest.mark.long
@pytest.mark.faults
def test_kills_in_every_kind_of_chain(elastic: Start, ranks: RankPool) -> None:
    kills = [[2, 3], [1, 8], [0, 13], [1, 18], [2, 22], [0, 27], [1, 33]]
    run = elastic({"kinds": KINDS, "kills": kills}, "-n", "3", "--elastic", "1:3", script=SCRIPT)
    [alone] = ranks(1, train, KINDS, [])
    assert run.wait() == alone
    assert len(list(run.folder.glob("killed-*"))) >= 5


@pytest.mark.long
@pytest.mark.faults
def test_a_worker_killed_beside_a_process_that_reads_a_stream_changes_nothing(elastic: Start, ranks: RankPool) -> None:
    run = elastic({"kinds": ["forward, ahead"], "kills": [[1, 4]]}, "-n", "2", "--elastic", "1:2", script=SCRIPT)
    [alone] = ranks(1, train, ["forward"], [])
    assert run.wait() == alone


def refused() -> list[str]:
    said = []
    data = mh.Dataset.from_tensor_slices(rows())
    for chain, more in [
        (data.batch(16), {"epochs": 1, "batch_size": 32}),
        (data.batch(16), {"epochs": 1, "batch_per_worker": 8}),
        (data, {"epochs": 1}),
        (data.batch(16).repeat(), {"epochs": 1}),
        (data.batch(16), {"epochs": 1, "validation_split": 0.5}),
        (data.batch(4), {"epochs": 1}),
        (data.batch(16).map(lambda x, y: (x[1:], y[1:])), {"epochs": 1}),
    ]:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            make_trainer().fit(chain, **more)
        said.append(str(caught.value))
    trainer = make_trainer()
    with pytest.raises(DataError, match="no evaluation could end"):
        trainer.evaluate(data.batch(16).repeat())
    trainer.fit(data.shuffle("full").batch(16), steps=2)
    with pytest.raises(CheckpointMismatch, match="were taken in the order"):
        trainer.fit(data.shuffle(3).batch(16), epochs=1)
    return said


def test_what_cannot_work_is_refused_with_what_to_write(ranks: RankPool) -> None:
    [said] = ranks(1, refused)
    parts = [
        "the Dataset makes batches of 16 itself", "the Dataset makes batches of 16 itself", "No batch_size was given",
        "repeats without an end", "validation=data.take(1000)", "cut into 6 slices", "must keep the number of rows",
    ]  # fmt: skip
    for text, part in zip(said, parts, strict=True):
        assert part in text


def evaluate_and_predict() -> tuple[dict[str, float], list[float], dict[str, float], list[float], int]:
    trainer = make_trainer()
    data = mh.Dataset.from_tensor_slices(rows())
    predicted = trainer.predict(data.batch(16))
    own = trainer.evaluate(data.filter(lambda x, y: True).batch(16))
    tensors = trainer.evaluate(rows(), batch_size=16), trainer.predict(rows(), batch_size=16).flatten().tolist()
    history = trainer.fit(data.shuffle("full").batch(16).repeat(), steps=7, validation=data.batch(10))
    return own, predicted.flatten().tolist(), *tensors, len(history)


def test_datasets_are_evaluated_and_predicted_as_tensors_are(ranks: RankPool) -> None:
    [alone] = ranks(1, evaluate_and_predict)
    assert alone[0] == alone[2] and alone[1] == alone[3] and alone[4] == 2
    assert ranks(2, evaluate_and_predict) == [alone, alone]


def own_loop(kind: str) -> str:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 2))
    hands = mh.join(exact=True, slices=6, seed=5)
    model, _ = hands.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in hands.batches(chains()[kind], epochs=1):
        hands.backward(loss(model, batch))
        hands.step()
    return digest(type("T", (), {"model": model}))


def test_a_loop_by_hand_takes_the_same_chains(ranks: RankPool) -> None:
    found = {kind: {tuple(set(ranks(workers, own_loop, kind))) for workers in (1, 2)} for kind in KINDS[:2]}
    assert all(len(digests) == 1 and len(next(iter(digests))) == 1 for digests in found.values())
