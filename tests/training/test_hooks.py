"""Hooks around validations, at checkpoints and at failures: on every worker, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.testing import RankPool
from tests.training.workloads import data, make_trainer


class Diary:
    def __init__(self, chief_only: bool = False, fails_at: int = 0) -> None:
        self.chief_only, self._fails_at = chief_only, fails_at
        self.lines: list[Any] = []

    def after_step(self, trainer: Any, step: int, stats: Any) -> None:
        if step == self._fails_at:
            raise ValueError("enough")

    def before_validation(self, trainer: Any) -> None:
        self.lines.append(("before validation", trainer.step))

    def after_validation(self, trainer: Any, results: dict[str, float]) -> None:
        self.lines.append(("after validation", trainer.step, sorted(results)))
        if self.chief_only:
            results.clear()  # a copy: no other worker's history may differ

    def after_epoch(self, trainer: Any, epoch: int, results: dict[str, float]) -> None:
        self.lines.append(("epoch", epoch, sorted(results)))

    def on_checkpoint(self, trainer: Any, step: int, path: str) -> None:
        assert Path(path).is_dir()
        self.lines.append(("checkpoint", step, Path(path).parent == trainer.run_dir / "checkpoints"))

    def on_failure(self, trainer: Any, error: Exception) -> None:
        self.lines.append(("failure", type(error).__name__))

    def end(self, trainer: Any, error: Any) -> None:
        self.lines.append(("end", type(error).__name__))


def keep_diaries(strategy: str = "mirrored") -> tuple[list[Any], list[Any]]:
    everyone, chief = Diary(), Diary(chief_only=True)
    trainer = make_trainer(hooks=[everyone, chief], slices=2, strategy=strategy)
    trainer.fit(
        data(), epochs=2, batch_size=15, validation=data(20), checkpoint=mh.Checkpoints(every_steps=4, keep_last=20)
    )
    return everyone.lines, chief.lines


@pytest.mark.parametrize("strategy", ["mirrored", pytest.param("local_sgd", marks=pytest.mark.long)])
def test_hooks_see_validations_and_checkpoints_on_every_worker_once(ranks: RankPool, strategy: str) -> None:
    (first, first_chief), (second, second_chief) = ranks(2, keep_diaries, strategy)
    assert first == second == first_chief
    assert second_chief == []
    validation = [
        [("before validation", step), ("after validation", step, ["accuracy", "loss"]), ("epoch", epoch, EPOCH)]
        for epoch, step in enumerate((6, 12))
    ]
    rest = [line for line in first if line[0] not in ("checkpoint", "end")]
    assert rest == [*validation[0], *validation[1]]
    # One that is due while another is being written is left out; no hook sees one twice, or misses the first or last.
    seen = [line[1] for line in first if line[0] == "checkpoint"]
    assert seen == sorted(set(seen)) and {0, 12} <= set(seen) <= {0, 4, 8, 12}
    assert first[0] == ("checkpoint", 0, True) and first[-1] == ("end", "NoneType")


EPOCH = ["epoch", "loss", "lr", "step", "val_accuracy", "val_loss"]


def fail() -> tuple[list[Any], list[str]]:
    diary, clumsy = Diary(fails_at=3), Clumsy()
    try:
        make_trainer(hooks=[diary, clumsy], slices=1).fit(data(), epochs=1, batch_size=15)
    except ValueError as error:
        return diary.lines, error.__notes__
    raise AssertionError("the hook's exception is the caller's")


class Clumsy:
    def on_failure(self, trainer: Any, error: Exception) -> None:
        raise OSError("no network")


def test_hooks_see_a_failure_before_the_end_and_none_of_them_can_hide_it(ranks: RankPool) -> None:
    [(lines, notes)] = ranks(1, fail)
    assert lines[-2:] == [("failure", "ValueError"), ("end", "ValueError")]
    assert notes == ["A hook's on_failure raised OSError: no network"]


def test_a_stop_on_request_is_no_failure(ranks: RankPool) -> None:
    [lines] = ranks(1, stop_on_request)
    assert lines[-1] == ("end", "Preempted") and "failure" not in [line[0] for line in lines]
    assert [line[1] for line in lines if line[0] == "checkpoint"] == [0, 3]


def stop_on_request() -> list[Any]:
    diary = Diary()
    trainer = make_trainer(hooks=[diary, Leaving()], slices=1)
    with pytest.raises(mh.errors.Preempted):
        trainer.fit(data(), epochs=1, batch_size=15)
    return diary.lines


class Leaving:
    def before_step(self, trainer: Any, step: int) -> None:
        if step == 3:
            trainer._run.worker.session.stop_requested = "preempt"
