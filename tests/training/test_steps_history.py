"""`fit` by steps: validation, early stopping, the best checkpoint and history, the same on any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.checkpoint.reader import scan
from manyhands.errors import Preempted
from manyhands.testing import RankPool
from tests.stopping import StopAt
from tests.training.workloads import MODELS, OPTIMIZERS, accuracy, data, make_trainer, mean_loss

HELD_OUT = 30


def by_steps(fits: list[dict[str, Any]]) -> list[list[dict[str, float]]]:
    trainer = make_trainer(slices=6, exact=True)
    x, y = data()
    found = []
    for fit in fits:
        fit = {"batch_size": 12, "validation": data(HELD_OUT), **fit}
        found.append([dict(row) for row in trainer.fit((x, y), **fit)])
    return found


# 90 rows in batches of 12 are 8 steps an epoch. The second fit begins inside the first epoch.
FITS = [
    {"steps": 3, "train_metrics": 20},
    {"steps": 9, "validate_every": 4},
    {"steps": 2, "validation": None},
]


def test_a_fit_by_steps_has_the_same_rows_on_1_2_and_3_workers(ranks: RankPool) -> None:
    (alone,) = ranks(1, by_steps, FITS)
    assert [[int(row["step"]) for row in rows] for rows in alone] == [[3], [7, 11, 12], [14]]
    assert [[int(row["epoch"]) for row in rows] for rows in alone] == [[0], [0, 1, 1], [0]]
    assert set(alone[0][0]) == {"epoch", "step", "loss", "lr", "accuracy", "val_loss", "val_accuracy"}
    assert set(alone[2][0]) == {"epoch", "step", "loss", "lr"}
    for workers in (2, 3):
        for rows in ranks(workers, by_steps, FITS):
            assert rows == alone


def with_losses(fit: dict[str, Any]) -> dict[str, Any]:
    """The loss of every step, and what a plain loop finds on validation and training rows at the end."""
    losses: list[tuple[int, float, int]] = []

    class Watch:
        def after_step(self, trainer: Any, step: int, stats: Any) -> None:
            losses.append((step, stats.loss, stats.rows))

    trainer = make_trainer(slices=2, hooks=[Watch()])
    rows = trainer.fit(data(), batch_size=40, validation=data(HELD_OUT), **fit)
    trainer.model.eval()
    with torch.no_grad():
        right = accuracy(trainer.model, data()).mean()
        loss = mean_loss(trainer.model, data(HELD_OUT))
    return {"rows": list(rows), "losses": losses, "right": float(right), "loss": float(loss)}


def test_a_row_has_the_mean_training_loss_since_the_last_and_metrics_as_a_plain_loop_finds_them(
    ranks: RankPool,
) -> None:
    (found,) = ranks(1, with_losses, {"steps": 5, "validate_every": 2, "train_metrics": 90})
    before = 0
    for row in found["rows"]:
        since = [(loss, rows) for step, loss, rows in found["losses"] if before < step <= row["step"]]
        before = row["step"]
        assert row["loss"] == pytest.approx(sum(a * b for a, b in since) / sum(b for _, b in since))
    assert before == 5
    assert found["rows"][-1]["accuracy"] == pytest.approx(found["right"])  # drawn were all 90 rows
    assert found["rows"][-1]["val_loss"] == pytest.approx(found["loss"])


def by_the_clock() -> list[int]:
    rows = make_trainer(slices=2).fit(
        data(), steps=4, batch_size=12, validation=data(HELD_OUT), validate_every_s=1e-9,
        checkpoint=mh.Checkpoints(every_steps=2),
    )  # fmt: skip
    return [int(row["step"]) for row in rows]


def test_the_chiefs_clock_has_all_workers_validate_after_the_same_steps_also_where_they_save(ranks: RankPool) -> None:
    assert ranks(2, by_the_clock) == [[1, 2, 3, 4]] * 2


def no_number(model: Any, batch: Any) -> torch.Tensor:
    return torch.full((len(batch[0]),), torch.nan)


def stopped_early(metric: str) -> list[dict[str, float]]:
    metrics = {"accuracy": accuracy, "no_number": no_number}
    trainer = mh.Trainer(MODELS["plain"], mean_loss, lambda p: torch.optim.SGD(p, lr=0.0), slices=2, metrics=metrics)
    return trainer.fit(
        data(), steps=100, batch_size=12, validation=data(HELD_OUT), validate_every=3,
        early_stop=mh.EarlyStop(metric=metric, patience=2),
    )  # fmt: skip


@pytest.mark.parametrize(("metric", "steps"), [("loss", [3, 6, 9]), ("no_number", [3, 6])])
def test_a_fit_by_steps_stops_early_and_so_does_one_by_what_is_no_number(ranks: RankPool, metric, steps) -> None:
    for rows in ranks(2, stopped_early, metric):
        assert [row["step"] for row in rows] == steps


def keep_the_best(run_dir: str, rates: list[float]) -> None:
    """Steps with the given learning rates: what is better than what follows from that."""
    factors = [*rates, *([0.0] * 20)]
    trainer = mh.Trainer(
        MODELS["plain"],
        mean_loss,
        OPTIMIZERS["SGD"],
        slices=2,
        run_dir=run_dir,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factors[step]),
    )
    trainer.fit(
        data(), steps=len(rates), batch_size=45, validation=data(), validate_every=2,
        checkpoint=mh.Checkpoints(keep_last=1, keep_best="loss"),
    )  # fmt: skip


def test_the_checkpoint_that_is_kept_is_that_of_the_best_validation(ranks: RankPool, tmp_path: Path) -> None:
    rates = [1.0, 1.0, 1.0, 1.0, -9.0, -9.0, -9.0, -9.0]  # better until step 4, then worse
    ranks(2, keep_the_best, str(tmp_path), rates, run_dir=tmp_path)
    kept = {one.manifest.step: one.manifest.results for one in scan(tmp_path / "checkpoints") if one.manifest}
    assert sorted(kept) == [4, 8]
    assert kept[4]["loss"] < kept[8]["loss"]


def stopped(run_dir: str, stop_at: int | None) -> list[dict[str, float]]:
    trainer = make_trainer(slices=6, run_dir=run_dir, hooks=[StopAt(stop_at)], exact=True)
    try:
        rows = trainer.fit(data(), steps=11, batch_size=12, validation=data(HELD_OUT), validate_every=3)
    except Preempted:
        return []
    return [dict(row) for row in rows]


def test_a_fit_by_steps_that_was_stopped_has_the_same_history_in_the_end(ranks: RankPool, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (undisturbed,) = ranks(1, stopped, str(other), None, run_dir=other)
    assert [row["step"] for row in undisturbed] == [3, 6, 9, 11]
    for workers, stop_at in ((2, 4), (3, 6), (1, None)):
        found = ranks(workers, stopped, str(tmp_path / "run"), stop_at, run_dir=tmp_path / "run")
    assert found[0] == undisturbed


def ends_early(run_dir: str) -> list[dict[str, float]]:
    trainer = make_trainer(slices=2, run_dir=run_dir)
    early = mh.EarlyStop(patience=1, min_delta=9.0)
    asked = {"validate_every": 2, "early_stop": early, "validation": data(HELD_OUT)}
    rows = trainer.fit(data(), steps=20, batch_size=12, **asked)
    return [*map(dict, rows), {"step": trainer.step}]


def test_a_fit_that_has_stopped_early_does_not_train_on_when_the_run_is_resumed(
    ranks: RankPool, tmp_path: Path
) -> None:
    """A run that ends after its first call, and is not finished, is resumed in that call."""
    (before,) = ranks(1, ends_early, str(tmp_path), run_dir=tmp_path)
    (after,) = ranks(1, ends_early, str(tmp_path), run_dir=tmp_path)
    assert [row["step"] for row in before] == [row["step"] for row in after] == [2, 4, 4]


def under(strategy: str) -> list[dict[str, float]]:
    made = {
        "mirrored": lambda: mh.Mirrored(),
        "sharded": lambda: mh.Sharded(),
        "tensor": lambda: mh.Mesh(tensor=2),
        "pipeline": lambda: mh.Mesh(pipeline=2),
        "averaging": lambda: mh.LocalSGD(every=4),
    }[strategy]()
    trainer = make_trainer(slices=2, strategy=made)
    asked = {"validate_every": 3, "train_metrics": 20, "early_stop": mh.EarlyStop(patience=2, min_delta=9.0)}
    return [dict(row) for row in trainer.fit(data(), steps=20, batch_size=30, validation=data(HELD_OUT), **asked)]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["sharded", "tensor", "pipeline", "averaging"])
def test_other_strategies_have_the_rows_of_one_worker(ranks: RankPool, strategy: str) -> None:
    """But averaging, which trains something else: there all workers have the same."""
    (alone,) = ranks(1, under, "mirrored")
    first, second = ranks(2, under, strategy)
    assert first == second
    assert [row["step"] for row in first] == [3, 6, 9]
    for mine, other in zip(first, alone, strict=True):
        assert set(mine) == set(other)
        assert strategy == "averaging" or mine == pytest.approx(other, rel=1e-4)
