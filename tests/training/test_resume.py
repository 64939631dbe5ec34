"""A run resumes where it stopped, on any number of workers, and no example is lost or taken twice."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.errors import CheckpointCorrupt, CheckpointMismatch, CheckpointSaveFailed, Preempted
from manyhands.events import Resumed
from manyhands.observe.recorder import read_events
from manyhands.testing import RankPool
from manyhands.training.loop.setting_checks import check_length
from manyhands.training.state.training_state import Progress
from tests.stopping import StopAt
from tests.training.workloads import OPTIMIZERS, data, make_trainer, mean_loss, weights_of


class Ledger:
    """Remembers which rows a worker computed in each committed step; rows carry their number in the first feature."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self._step: list[int] = []

    def note(self, batch: Any) -> None:
        self._step += [int(row) for row in batch[0][:, 0].tolist()]

    def after_step(self, trainer: Any, step: int, stats: Any) -> None:
        self.seen += [(step, row) for row in self._step]
        self._step = []


def train_with_ledger(run_dir: str, stop_at: int | None, arguments: dict[str, Any]) -> dict[str, Any]:
    import manyhands as mh

    ledger = Ledger()
    x, y = data(50)
    x = x.clone()
    x[:, 0] = torch.arange(50)

    def loss(model: Any, batch: Any) -> Any:
        ledger.note(batch)
        return mean_loss(model, (batch[0] / 50, batch[1]))

    from tests.training.workloads import MODELS

    trainer = mh.Trainer(
        MODELS["dropout and BatchNorm"],
        loss,
        OPTIMIZERS["AdamW"],
        slices=6,
        hooks=[ledger, StopAt(stop_at)],
        run_dir=run_dir,
        **arguments,
    )
    history: list[dict[str, float]] = []
    stopped = False
    try:
        history = trainer.fit((x, y), epochs=3, batch_size=16)
    except Preempted:
        stopped = True
    return {"seen": ledger.seen, "weights": weights_of(trainer), "stopped": stopped, "history": list(history)}


def test_each_example_is_taken_once_per_epoch_across_stops_and_2_3_1_workers(ranks: RankPool, tmp_path: Path) -> None:
    lives = []
    for workers, stop_at in ((2, 3), (3, 7), (1, None)):
        lives.append(ranks(workers, train_with_ledger, str(tmp_path), stop_at, {"exact": True}, run_dir=tmp_path))
    assert [life[0]["stopped"] for life in lives] == [True, True, False]
    seen = sorted(entry for life in lives for rank in life for entry in rank["seen"])
    steps_per_epoch = 4  # 50 rows in batches of 16, the last one short
    for epoch in range(3):
        rows = [row for step, row in seen if (step - 1) // steps_per_epoch == epoch]
        assert sorted(rows) == list(range(50)), f"epoch {epoch}"
    (undisturbed,) = ranks(
        1, train_with_ledger, str(tmp_path / "other"), None, {"exact": True}, run_dir=tmp_path / "other"
    )
    for name, value in undisturbed["weights"].items():
        assert value.tobytes() == lives[-1][0]["weights"][name].tobytes(), name
    assert json.dumps(lives[-1][0]["history"]) == json.dumps(undisturbed["history"]), "step 3 is not step 3.0"


def two_fits(run_dir: str, stop_at: int | None) -> dict[str, Any]:
    """A script with several calls; every restart runs it from the top."""
    trainer = make_trainer(slices=2, run_dir=run_dir, hooks=[StopAt(stop_at)])
    x, y = data()
    calls: dict[str, Any] = {}
    try:
        calls["first"] = list(trainer.fit((x, y), epochs=1, batch_size=30))
        calls["evaluated"] = trainer.evaluate((x, y))
        calls["predicted"] = trainer.predict(x[:5]).tolist()
        trainer.save(Path(run_dir) / "after-first.safetensors")
        calls["second"] = list(trainer.fit((x, y), epochs=2, batch_size=30))
    except Preempted:
        pass
    calls["step"] = trainer.step
    return calls


def test_calls_that_had_finished_return_what_they_returned_before(ranks: RankPool, tmp_path: Path) -> None:
    before = ranks(2, two_fits, str(tmp_path), 5, run_dir=tmp_path)[0]
    assert "second" not in before
    assert before["step"] == 5
    saved = (tmp_path / "after-first.safetensors").stat().st_mtime_ns
    (after,) = ranks(1, two_fits, str(tmp_path), None, run_dir=tmp_path)
    for call in ("first", "evaluated", "predicted"):
        assert after[call] == before[call], call
    assert after["step"] == 9
    assert len(after["second"]) == 2
    assert (tmp_path / "after-first.safetensors").stat().st_mtime_ns == saved


def fit_some(run_dir: str, arguments: dict[str, Any], steps: int) -> int:
    trainer = make_trainer(run_dir=run_dir, **arguments)
    trainer.fit(data(), steps=steps, batch_size=30)
    return trainer.step


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ({"slices": 2}, {"slices": 3}, "2 slices"),
        ({"seed": 1}, {"seed": 2}, "seed=1"),
        ({"model": "plain"}, {"model": "convolutional"}, "model"),
        ({"exact": True}, {"exact": False}, "exact=True"),
    ],
    ids=["slices", "seed", "model", "exact"],
)
def test_resuming_with_other_settings_is_refused_with_those_the_run_began_with(
    ranks: RankPool, tmp_path: Path, first: dict[str, Any], then: dict[str, Any], message: str
) -> None:
    ranks(1, stop_after_two, str(tmp_path), first, run_dir=tmp_path)
    (text,) = ranks(1, refusal, str(tmp_path), then, run_dir=tmp_path)
    assert message in text


def stop_after_two(run_dir: str, arguments: dict[str, Any]) -> None:
    trainer = make_trainer(run_dir=run_dir, hooks=[StopAt(2)], **arguments)
    with pytest.raises(Preempted):
        trainer.fit(data(), steps=4, batch_size=30)


def refusal(run_dir: str, arguments: dict[str, Any], kind: type[Exception] = CheckpointMismatch) -> str:
    with pytest.raises(kind) as refused:
        make_trainer(run_dir=run_dir, **arguments).fit(data(), steps=4, batch_size=30)
    return str(refused.value)


def test_a_damaged_newest_checkpoint_is_skipped_with_a_warning(ranks: RankPool, tmp_path: Path) -> None:
    ranks(1, stop_after_two, str(tmp_path), {}, run_dir=tmp_path)
    newest = sorted((tmp_path / "checkpoints").glob("step-*"))[-1]
    shard = next(newest.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-3] ^= 4
    shard.write_bytes(content)
    assert ranks(1, fit_some, str(tmp_path), {}, 4, run_dir=tmp_path) == [4]
    events = [json.loads(line) for line in (tmp_path / "events" / "chief.jsonl").read_text().splitlines()]
    resumed = [event for event in events if event["event"] == "Resumed"][-1]
    assert resumed["step"] == 0
    assert newest.name in resumed["skipped"][0]


def without_manifests(run_dir: Path) -> None:
    for manifest in (run_dir / "checkpoints").glob("step-*/MANIFEST.json"):
        manifest.unlink()


def without_steps(run_dir: Path) -> None:
    for step in (run_dir / "checkpoints").glob("step-*"):
        shutil.rmtree(step)


def without_checkpoints(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")


def without_records_of_them(run_dir: Path) -> None:
    without_steps(run_dir)
    shutil.rmtree(run_dir / "events")


@pytest.mark.forged_record  # a run that is asked to start over takes its first steps again
@pytest.mark.parametrize(
    "damage", [without_manifests, without_steps, without_checkpoints, without_records_of_them], ids=lambda f: f.__name__
)
def test_a_run_whose_checkpoints_are_gone_stops_instead_of_starting_over(
    ranks: RankPool, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    ranks(1, stop_after_two, str(tmp_path), {}, run_dir=tmp_path)
    damage(tmp_path)
    (text,) = ranks(1, refusal, str(tmp_path), {}, CheckpointCorrupt, run_dir=tmp_path)
    assert str(tmp_path / "checkpoints") in text
    assert "  try: " in text
    assert ranks(1, start_over, str(tmp_path), run_dir=tmp_path) == [4]


def start_over(run_dir: str) -> int:
    trainer = make_trainer(run_dir=run_dir)
    trainer.fit(data(), steps=4, batch_size=30, resume="never")
    return trainer.step


def test_a_newest_checkpoint_that_is_gone_is_reported(ranks: RankPool, tmp_path: Path) -> None:
    ranks(1, stop_after_two, str(tmp_path), {}, run_dir=tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000002")
    assert ranks(1, fit_some, str(tmp_path), {}, 4, run_dir=tmp_path) == [4]
    [resumed] = [one for one in read_events(tmp_path / "events" / "chief.jsonl") if isinstance(one, Resumed)]
    assert resumed.step == 0
    assert "step-00000002, which was committed last, is gone" in resumed.skipped[0]


def test_a_missing_record_of_a_finished_call_is_refused_by_name(ranks: RankPool, tmp_path: Path) -> None:
    ranks(1, two_fits, str(tmp_path), 5, run_dir=tmp_path)
    (tmp_path / "calls" / "0002-evaluate.json").unlink()
    (text,) = ranks(1, refused_calls, str(tmp_path), run_dir=tmp_path)
    assert "0002-evaluate.json" in text


def refused_calls(run_dir: str) -> str:
    with pytest.raises(CheckpointCorrupt) as refused:
        two_fits(run_dir, None)
    return str(refused.value)


@pytest.mark.parametrize(
    ("progress", "asked", "said"),
    [
        ({"epoch": 4, "step": 8}, {"epochs": 2}, "has done 4 epochs (8 steps) of this call already, but epochs=2"),
        ({"epoch": 4, "step": 9, "row": 20}, {"epochs": 4}, "4 epochs and a part of the next (9 steps)"),
        ({"step": 9, "row": 20, "call_step": 1}, {"steps": 7}, "has done 8 steps of this call already, but steps=7"),
    ],
)
def test_a_run_that_has_done_more_than_is_asked_for_says_so(progress, asked, said) -> None:
    with pytest.raises(CheckpointMismatch) as refused:
        check_length(Progress(**progress), asked.get("epochs"), asked.get("steps"))
    assert said in refused.value.what
    assert refused.value.fix[0].endswith("to end it there")


@pytest.mark.parametrize(
    ("progress", "asked"),
    [
        ({"epoch": 4, "step": 8}, {"epochs": 4}),
        ({"epoch": 4, "step": 9, "row": 20}, {"epochs": 5}),
        ({"step": 3, "row": 20, "call_step": 3}, {"epochs": 0}),
        ({"step": 3, "row": 20}, {"steps": 3}),
    ],
)
def test_a_run_that_has_done_what_is_asked_for_and_no_more_ends_well(progress, asked) -> None:
    check_length(Progress(**progress), asked.get("epochs"), asked.get("steps"))


def for_epochs(run_dir: str, epochs: int, stop_at: int | None) -> Any:
    trainer = make_trainer(slices=2, run_dir=run_dir, hooks=[StopAt(stop_at)])
    try:
        return [row["step"] for row in trainer.fit(data(), epochs=epochs, batch_size=45)]
    except (Preempted, CheckpointMismatch) as error:
        return type(error).__name__


def test_fewer_epochs_than_are_done_change_nothing_of_the_run(ranks: RankPool, tmp_path: Path) -> None:
    asked = ((5, 6), (2, None), (3, None))
    found = [ranks(1, for_epochs, str(tmp_path), *one, run_dir=tmp_path)[0] for one in asked]
    assert found == ["Preempted", "CheckpointMismatch", [2, 4, 6]]
    assert not (tmp_path / "calls").exists() or len(list((tmp_path / "calls").iterdir())) == 1


class FullFrom:
    """From this step on the disk takes nothing larger than a few bytes: what a full one does, without root."""

    def __init__(self, step: int) -> None:
        self._step = step

    def before_step(self, trainer: Any, step: int) -> None:
        if step == self._step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))


def fill_the_disk(run_dir: str, save_every: int | None) -> tuple[str, int]:
    import manyhands as mh

    trainer = make_trainer(run_dir=run_dir, hooks=[FullFrom(2)])
    try:
        with pytest.raises(CheckpointSaveFailed) as failed:
            trainer.fit(data(), steps=4, batch_size=30, checkpoint=mh.Checkpoints(every_steps=save_every, every_s=None))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return str(failed.value), trainer.step


@pytest.mark.parametrize("save_every", [None, 1])
def test_training_continues_on_a_full_disk_but_a_missing_last_checkpoint_is_a_failure(
    ranks: RankPool, tmp_path: Path, save_every: int | None
) -> None:
    ((text, step),) = ranks(1, fill_the_disk, str(tmp_path), save_every, run_dir=tmp_path)
    assert step == 4
    assert "checkpoint of step 4 was not saved" in text
    assert ranks(1, fit_some, str(tmp_path), {}, 4, run_dir=tmp_path) == [4], "with room again, it trains on"
