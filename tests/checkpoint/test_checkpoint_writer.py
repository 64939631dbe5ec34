"""Saving beside training: one at a time, fenced, finite, and nothing old removed before something new is safe."""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from manyhands.checkpoint import newest_valid, take_snapshot_tensors
from manyhands.checkpoint.commit import set_aside
from manyhands.checkpoint.file_ops import FileSystem
from manyhands.checkpoint.retention import expendable, parse_best
from manyhands.errors import SpecError
from tests.checkpoint.checkpoint_cases import leftovers, must_save, save, snapshot, whole_step, writer


def steps(root):
    return sorted(int(name[5:13]) for name in os.listdir(root) if name.startswith("step-"))


class Gate(FileSystem):
    """Holds the first shard until `release` is set."""

    def __init__(self):
        self.reached, self.release = threading.Event(), threading.Event()

    def create(self, path: Path, mode: int = 0o600) -> int:
        self.reached.set()
        assert self.release.wait(10)
        return super().create(path, mode)


def test_a_save_runs_beside_training_and_a_second_one_is_skipped_with_a_reason(tmp_path):
    gate = Gate()
    hand = writer(tmp_path, gate)
    hand.save(snapshot(1), wait=False)
    assert gate.reached.wait(10)
    assert hand.busy
    hand.save(snapshot(2), wait=False)
    (skipped,) = hand.poll()
    assert (skipped.step, skipped.skipped) == (2, "the save before it is still running")
    assert not hand.close(0.01)
    gate.release.set()
    hand.save(snapshot(3), wait=True)
    first, third = hand.poll()
    assert (first.step, third.step) == (1, 3)
    assert third.num_bytes == sum(file.stat().st_size for file in third.path.iterdir() if file.name != "MANIFEST.json")
    assert hand.close(1.0)
    assert steps(tmp_path) == [1, 3]


def test_a_caller_that_sees_a_result_may_save_again_at_once(tmp_path):
    hand = writer(tmp_path, keep_last=1)
    for step in range(1, 20):
        hand.save(snapshot(step), wait=False)
        deadline = time.monotonic() + 60
        while not (results := hand.poll()) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert results[0].path is not None, results
    assert hand.close(1.0)


def test_a_snapshot_reuses_the_memory_of_the_one_before_and_waits_for_its_save(tmp_path):
    gate = Gate()
    hand = writer(tmp_path, gate)
    weights = {"model/layer/weight": torch.full((4, 4), 1.0), "optimizer/momentum": torch.full((16,), 1.5)}
    first = hand.snapshot(weights)
    assert all(first[name].data_ptr() != tensor.data_ptr() for name, tensor in weights.items())
    hand.save(snapshot(1, tensors=first), wait=False)
    assert gate.reached.wait(10)
    weights["model/layer/weight"].fill_(9.0)  # training continues
    threading.Timer(0.1, gate.release.set).start()
    second = hand.snapshot(weights)
    assert not hand.busy
    assert whole_step(tmp_path) == 1
    assert second["model/layer/weight"].data_ptr() == first["model/layer/weight"].data_ptr()
    assert second["model/layer/weight"][0, 0] == 9.0
    hand.close(1.0)


def test_a_snapshot_of_another_shape_gets_new_memory():
    first = take_snapshot_tensors({"a": torch.zeros(3), "b": torch.zeros(2).t()})
    second = take_snapshot_tensors({"a": torch.ones(4), "b": torch.ones(2, dtype=torch.bfloat16)}, reuse=first)
    assert second["a"].tolist() == [1, 1, 1, 1]
    assert second["b"].dtype == torch.bfloat16


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64])
def test_a_model_that_is_not_finite_is_not_saved_and_the_tensor_is_named(tmp_path, bad, dtype):
    must_save(tmp_path, 1)
    values = torch.zeros(70_000)
    values[69_999] = bad
    hand = writer(tmp_path)
    tensors = {"model/fine": torch.ones(3), "model/head/bias": values.to(dtype)}
    hand.save(snapshot(2, tensors=tensors), wait=True)
    (result,) = hand.poll()
    assert "'model/head/bias' contains NaN or infinity" in result.error.what
    assert leftovers(tmp_path) == []
    assert whole_step(tmp_path) == 1


def test_optimizer_state_may_hold_infinity(tmp_path):
    hand = writer(tmp_path)
    hand.save(snapshot(1, tensors={"optimizer/x": torch.tensor([math.inf]), "model/n": torch.tensor([3])}), wait=True)
    assert hand.poll()[0].error is None


def test_a_writer_of_a_lower_generation_is_refused(tmp_path):
    must_save(tmp_path, 1, generation=(2, 1))
    for generation in ((1, 9), (2, 0)):
        refused = save(tmp_path, 2, generation=generation)
        assert "generation 2.1 has already committed" in refused.error.what
        assert leftovers(tmp_path) == []
    assert whole_step(tmp_path) == 1
    must_save(tmp_path, 2, generation=(2, 2))


def test_a_stale_writer_held_up_until_its_commit_is_refused_there(tmp_path):
    gate = Gate()
    stale = writer(tmp_path, gate, generation=(1, 1))
    stale.save(snapshot(5), wait=False)
    assert gate.reached.wait(10)
    must_save(tmp_path, 4, generation=(1, 2))
    gate.release.set()
    assert stale.close(10.0)
    assert "generation 1.2 has already committed" in stale.poll()[0].error.what
    assert whole_step(tmp_path) == 4
    assert leftovers(tmp_path) == []


def test_the_last_few_and_the_best_are_kept(tmp_path):
    losses = [0.9, 0.2, 0.5, 0.4, math.nan, 0.3]
    for step, loss in enumerate(losses, start=1):
        must_save(tmp_path, step, keep_last=2, keep_best="loss", results={"loss": loss})
    assert steps(tmp_path) == [2, 5, 6]


def test_a_damaged_or_foreign_directory_is_never_removed(tmp_path):
    os.truncate(must_save(tmp_path, 1) / "MANIFEST.json", 10)
    (tmp_path / "step-00000000").mkdir()
    for step in (2, 3):
        must_save(tmp_path, step, keep_last=1)
    assert steps(tmp_path) == [0, 1, 3]


class ReadsBackWrong(FileSystem):
    """A disk that changes a byte of the state after it was written."""

    def forget_cache(self, path: Path) -> None:
        if path.name == "state.json":
            path.write_bytes(path.read_bytes().replace(b"2", b"3"))


def test_nothing_is_removed_or_committed_when_the_new_checkpoint_does_not_read_back(tmp_path):
    must_save(tmp_path, 1, keep_last=1)
    result = save(tmp_path, 2, files=ReadsBackWrong(), keep_last=1)
    assert "does not read back" in result.error.what
    assert "state.json" in result.error.what
    assert steps(tmp_path) == [1]
    assert whole_step(tmp_path) == 1


def test_a_step_saved_again_is_kept_beside_the_first_until_that_is_old(tmp_path):
    first = must_save(tmp_path, 4)
    os.truncate(first / "state.json", 0)
    again = must_save(tmp_path, 4)
    assert (first.name, again.name) == ("step-00000004", "step-00000004.2")
    assert whole_step(tmp_path) == 4


def test_after_a_return_to_an_earlier_step_the_new_branch_is_the_newest(tmp_path):
    for step in (10, 20, 12):
        must_save(tmp_path, step)
    assert newest_valid(tmp_path).step == 12
    must_save(tmp_path, 13, keep_last=2)
    assert steps(tmp_path) == [12, 13]


@pytest.mark.parametrize(
    ("text", "best"),
    [
        ("loss", ("loss", False)),
        ("val_loss", ("val_loss", False)),
        ("accuracy", ("accuracy", True)),
        ("max:f1", ("f1", True)),
        ("min:x:y", ("x:y", False)),
    ],
)
def test_keep_best_knows_its_direction(text, best):
    assert parse_best(text) == best


@pytest.mark.parametrize("text", ["f1", "most:f1", "min:", "max: ", ":", ""])
def test_keep_best_without_a_direction_is_refused(text):
    with pytest.raises(SpecError, match="keep_best"):
        parse_best(text)


def test_a_trusted_one_stays_however_many_come_after_it(tmp_path):
    hand = writer(tmp_path, keep_last=2)
    for step, trusted in ((0, 0), (5, 0), (10, 0), (15, 0), (20, 12)):
        hand.trusted_step = trusted
        hand.save(snapshot(step), wait=True)
    assert steps(tmp_path) == [10, 15, 20]
    assert hand.close(1.0)


def test_what_is_set_aside_is_no_checkpoint_any_more_but_is_still_there(tmp_path):
    for step in (5, 10, 15):
        must_save(tmp_path, step)
    set_aside(tmp_path, 7, FileSystem())
    assert whole_step(tmp_path) == 5
    assert (tmp_path / "LATEST").read_text().startswith("step-00000005 ")
    assert sorted(path.name for path in tmp_path.glob("*.set-aside")) == [
        "step-00000010.set-aside",
        "step-00000015.set-aside",
    ]
    must_save(tmp_path, 10)
    set_aside(tmp_path, 7, FileSystem())
    assert (tmp_path / "step-00000010.set-aside.2").is_dir()
    assert whole_step(tmp_path) == 5


def test_the_newest_is_never_expendable():
    assert expendable([{"a": 1.0}, {"a": 2.0}, {}], keep_last=0, best=parse_best("max:a")) == [2]
    assert expendable([], keep_last=1, best=None) == []
