"""A loop of the user's own ends where the trainer ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import manyhands as mh
from manyhands.errors import UsageError
from manyhands.testing import RankPool
from tests.training.workloads import (
    MODELS,
    OPTIMIZERS,
    accuracy,
    data,
    make_trainer,
    mean_loss,
    weighted_loss,
    weights_of,
)


def by_hand(rows: int, weighted: bool, model_name: str, own_zero_grad: bool) -> dict[str, Any]:
    hands = mh.join(slices=6, clip_norm=1.0)
    torch.manual_seed(0)
    model = MODELS[model_name]()
    model, optimizer = hands.setup(model, OPTIMIZERS["AdamW"](model.parameters()))
    means, updates, bodies = [], 0, 0
    for batch in hands.batches(data(rows), batch_size=24, epochs=2):
        bodies += 1
        if own_zero_grad:
            optimizer.zero_grad()
        if weighted:
            hands.backward(*weighted_loss(model, batch))
        else:
            hands.backward(mean_loss(model, batch))
        hands.step()
        if hands.stepped:
            updates += 1
            means.append(hands.mean(float(hands.rank)))
    return {
        "weights": {name: value.numpy().copy() for name, value in model.state_dict().items()},
        "updates": updates,
        "bodies": bodies,
        "means": means,
        "steps": hands.steps_done,
        "loss": hands.loss,
        "evaluation": hands.evaluate(data(rows), mean_loss, metrics={"accuracy": accuracy}),
        "gathered": [part.tolist() for part in hands.gather(torch.full((hands.rank + 1,), hands.rank))],
        "sum": hands.reduce(torch.tensor([1.0, 2.0])).tolist(),
    }


SCRIPT = """
import torch, manyhands as mh
model = torch.nn.Linear(4, 1)
hands = mh.join(slices=2)
model, optimizer = hands.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
for batch in hands.batches((torch.randn(8, 4), torch.randn(8, 1)), batch_size=4, epochs=1):
    value = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    hands.backward(value)
    hands.step()
    if hands.stepped:
        hands.log(mean=hands.mean(value), loss=value)
"""


def test_the_loop_of_the_guide_ends_without_a_complaint_of_python_or_torch(tmp_path: Path) -> None:
    # Not in a function: at the end of the process its variables are torn down with the modules they need.
    (tmp_path / "loop.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "loop.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert "Exception ignored" not in done.stderr
    (events,) = tmp_path.glob("runs/*/events/chief.jsonl")
    assert '"event":"Logged"' in events.read_text()


def by_trainer(rows: int, weighted: bool, model_name: str) -> dict[str, np.ndarray]:
    trainer = make_trainer(model=model_name, optimizer="AdamW", weighted=weighted, slices=6, clip_norm=1.0)
    trainer.fit(data(rows), epochs=2, batch_size=24)
    return weights_of(trainer)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_loop_by_hand_ends_where_the_trainer_ends(ranks: RankPool, world_size: int, weighted: bool) -> None:
    (expected,) = ranks(1, by_trainer, 50, weighted, "dropout and BatchNorm")
    for result in ranks(world_size, by_hand, 50, weighted, "dropout and BatchNorm", True):
        for name, value in expected.items():
            np.testing.assert_allclose(result["weights"][name], value, rtol=1e-6, atol=1e-7, err_msg=name)
        assert result["steps"] == 6
        assert result["sum"] == [1.0 * world_size, 2.0 * world_size]
        assert result["gathered"] == [[r] * (r + 1) for r in range(world_size)]


def test_loops_may_differ_in_length_and_a_worker_without_a_slice_joins_every_collective(ranks: RankPool) -> None:
    results = ranks(3, by_hand, 49, False, "plain", False)
    # 49 rows: the last batch has one row, hence one slice, and two of three workers have none.
    assert [result["updates"] for result in results] == [6, 4, 4]
    assert [result["steps"] for result in results] == [6, 6, 6]
    assert results[0]["means"][:2] == pytest.approx([1.0, 1.0])
    assert results[0]["means"][2] == 0.0
    assert len({result["loss"] for result in results}) == 1


def half_then_rest(run_dir: str, stop_after: int | None) -> tuple[bool, int, dict[str, Any]]:
    hands = mh.join(slices=6, run_dir=run_dir, checkpoint=mh.Checkpoints(every_steps=1))
    torch.manual_seed(0)
    model = MODELS["plain"]()
    model, _ = hands.setup(model, OPTIMIZERS["momentum"](model.parameters()))
    resumed = hands.resume()
    for batch in hands.batches(data(), batch_size=30, epochs=2):
        hands.backward(mean_loss(model, batch))
        hands.step()
        if hands.stepped and hands.steps_done == stop_after:
            break
        if hands.stepped and hands.every(2):
            hands.log(loss=hands.loss)
            hands.save()
    return resumed, hands.steps_done, {name: value.numpy().copy() for name, value in model.state_dict().items()}


def test_a_loop_by_hand_resumes_on_another_number_of_workers(ranks: RankPool, tmp_path: Path) -> None:
    (undisturbed,) = ranks(1, half_then_rest, str(tmp_path / "a"), None, run_dir=tmp_path / "a")
    first = ranks(2, half_then_rest, str(tmp_path / "b"), 4, run_dir=tmp_path / "b")[0]
    assert first[:2] == (False, 4)
    rest = ranks(3, half_then_rest, str(tmp_path / "b"), None, run_dir=tmp_path / "b")[0]
    assert rest[:2] == (True, 6)
    for name, value in undisturbed[2].items():
        np.testing.assert_allclose(rest[2][name], value, rtol=1e-6, atol=1e-7, err_msg=name)


def until_one_stops(stops: int) -> tuple[int, int, bool]:
    hands = mh.join(slices=4)
    torch.manual_seed(0)
    model = MODELS["plain"]()
    hands.setup(model, OPTIMIZERS["SGD"](model.parameters()))
    for batch in hands.batches(data(), batch_size=30, epochs=3):
        hands.backward(mean_loss(model, batch))
        hands.step()
        if hands.stepped and hands.every(3) and hands.rank == stops:
            hands.request_stop()
    reached = hands.steps_done
    for batch in hands.batches(data(), batch_size=30, steps=2):
        hands.backward(mean_loss(model, batch))
        hands.step()
    return reached, hands.steps_done, hands.stepped


def test_a_worker_ends_the_loop_of_all_after_the_next_step(ranks: RankPool) -> None:
    assert ranks(2, until_one_stops, 1) == [(4, 6, True)] * 2


def forget(what: str) -> str:
    hands = mh.join(slices=2)
    model = MODELS["plain"]()
    if what == "setup":
        with pytest.raises(UsageError) as raised:
            next(iter(hands.batches(data(), batch_size=30, epochs=1)))
        return str(raised.value)
    hands.setup(model, OPTIMIZERS["SGD"](model.parameters()))
    with pytest.raises(UsageError) as raised:
        for batch in hands.batches(data(), batch_size=30, epochs=1):
            if what == "backward":
                hands.step()
            elif what == "twice":
                hands.backward(mean_loss(model, batch))
                hands.backward(mean_loss(model, batch))
            elif what == "step":
                hands.backward(mean_loss(model, batch))
    return str(raised.value)


@pytest.mark.parametrize("what", ["setup", "backward", "step", "twice"])
def test_a_forgotten_call_is_named(ranks: RankPool, what: str) -> None:
    (text,) = ranks(1, forget, what)
    assert what in text
