"""What a user of the trainer sees: hooks, schedules, stopping, evaluation, and errors that say what to type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.errors import BadLoss, DataError, DataFetchFailed, NonFinite, SpecError, TrainingFailed
from manyhands.testing import RankPool
from tests.training.workloads import MODELS, OPTIMIZERS, accuracy, data, make_trainer, mean_loss, weights_of


class Diary:
    def __init__(self, chief_only: bool = False) -> None:
        self.chief_only = chief_only
        self.lines: list[Any] = []

    def begin(self, trainer: Any) -> None:
        self.lines.append("begin")

    def before_step(self, trainer: Any, step: int) -> None:
        self.lines.append(("before", step))

    def after_step(self, trainer: Any, step: int, stats: Any) -> None:
        self.lines.append(("after", step, round(stats.loss, 6), sorted(stats.seconds)))

    def after_epoch(self, trainer: Any, epoch: int, results: Any) -> None:
        self.lines.append(("epoch", epoch, sorted(results)))

    def end(self, trainer: Any, error: Any) -> None:
        self.lines.append(("end", type(error).__name__))


def keep_diaries() -> tuple[list[Any], list[Any]]:
    everyone, chief = Diary(), Diary(chief_only=True)
    make_trainer(hooks=[everyone, chief], slices=2).fit(data(), epochs=1, batch_size=45, validation=data(20))
    return everyone.lines, chief.lines


def test_hooks_run_once_per_committed_step_and_on_the_chief_only_where_asked(ranks: RankPool) -> None:
    (first, first_chief), (second, second_chief) = ranks(2, keep_diaries)
    assert first == second == first_chief
    assert second_chief == []
    phases = ["backward", "forward", "load", "reduce", "update"]
    assert [line[:2] if isinstance(line, tuple) else line for line in first] == [
        "begin", ("before", 1), ("after", 1), ("before", 2), ("after", 2), ("epoch", 0), ("end", "NoneType"),
    ]  # fmt: skip
    assert first[2][3] == phases
    assert first[5][2] == ["epoch", "loss", "lr", "step", "val_accuracy", "val_loss"]


def rates(scheduler_every: str) -> list[float]:
    trainer = make_trainer(
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
        scheduler_every=scheduler_every,
        slices=2,
    )
    trainer.fit(data(), epochs=2, batch_size=45)
    return [group["lr"] for group in trainer.optimizer.param_groups]


def test_the_learning_rate_follows_its_schedule_by_step_or_by_epoch(ranks: RankPool) -> None:
    assert ranks(2, rates, "step") == [[0.1 * 0.5**4]] * 2
    assert ranks(2, rates, "epoch") == [[0.1 * 0.5**2]] * 2


def stop_early() -> list[dict[str, float]]:
    trainer = mh.Trainer(MODELS["plain"], mean_loss, lambda p: torch.optim.SGD(p, lr=0.0), slices=2)
    return trainer.fit(data(), epochs=20, batch_size=45, validation=data(30), early_stop=mh.EarlyStop(patience=2))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: mh.EarlyStop(mode="minimum"), "mode is 'minimum'"),
        (lambda: mh.EarlyStop(patience=0), "patience is 0"),
        (lambda: mh.Checkpoints(every_s=-1), "every_s is -1"),
    ],
)
def test_when_to_stop_and_save_is_checked_where_it_is_said(wrong, said) -> None:
    with pytest.raises(SpecError, match=said):
        wrong()


@pytest.mark.parametrize(
    ("metric", "metrics", "validated", "fix"),
    [("acuracy", ["accuracy"], True, "metric='accuracy'"), ("val_loss", [], False, "metric='loss'")],
)
def test_early_stopping_by_a_result_that_no_epoch_has_is_refused(metric, metrics, validated, fix) -> None:
    from manyhands.training.trainer import _check_early_stop

    with pytest.raises(SpecError) as refused:
        _check_early_stop(mh.EarlyStop(metric=metric), ["loss", *metrics] if validated else [])
    assert refused.value.fix[0] == fix
    _check_early_stop(mh.EarlyStop(metric="val_loss"), ["loss"])
    _check_early_stop(mh.EarlyStop(metric="loss"), [])


def test_training_stops_when_validation_no_longer_improves(ranks: RankPool) -> None:
    assert [len(history) for history in ranks(2, stop_early)] == [3, 3]


class StopsAfter:
    chief_only = True

    def after_step(self, trainer: Any, step: int, stats: Any) -> None:
        if step == 3:
            trainer.request_stop()


def asked_to_stop() -> int:
    trainer = make_trainer(slices=2, hooks=[StopsAfter()])
    trainer.fit(data(), epochs=5, batch_size=30)
    return trainer.step


def test_a_hook_of_the_chief_alone_stops_every_worker_at_the_same_step(ranks: RankPool) -> None:
    assert ranks(2, asked_to_stop) == [4, 4]


def evaluate_and_predict(rows: int) -> dict[str, Any]:
    trainer = make_trainer(slices=2)
    x, y = data(rows)
    return {
        "evaluation": trainer.evaluate((x, y), batch_size=7),
        "predictions": trainer.predict(x, batch_size=7).tolist(),
        "by hand": {
            "loss": float(mean_loss(trainer.model.eval(), (x, y)).detach()),
            "accuracy": float(accuracy(trainer.model, (x, y)).mean()),
        },
        "outputs": trainer.model(x).tolist(),
    }


@pytest.mark.parametrize("rows", [1, 2, 23])
def test_evaluation_counts_every_example_once_and_predictions_keep_their_order(ranks: RankPool, rows: int) -> None:
    for result in ranks(3, evaluate_and_predict, rows):
        assert result["evaluation"] == pytest.approx(result["by hand"], rel=1e-6)
        assert len(result["predictions"]) == rows
        for row, expected in zip(result["predictions"], result["outputs"], strict=True):
            assert row == pytest.approx(expected, rel=1e-5, abs=1e-6)


def edit_by_hand() -> tuple[float, dict[str, Any]]:
    trainer = make_trainer(slices=2)
    trainer.fit(data(), steps=1, batch_size=30)
    with trainer.editing() as model:
        for param in model.parameters():
            param.add_(torch.rand_like(param))  # different on every worker
        model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    trainer.fit(data(), steps=2, batch_size=30)
    return float((model[0].weight - before).abs().max()), weights_of(trainer)


def test_weights_edited_by_hand_stay_equal_and_frozen_ones_stay_put(ranks: RankPool) -> None:
    first, second = ranks(2, edit_by_hand)
    assert first[0] == second[0] == 0.0
    for name, value in first[1].items():
        assert value.tobytes() == second[1][name].tobytes(), name


def save_and_load(path: str) -> bool:
    trainer = make_trainer(slices=2)
    trainer.fit(data(), steps=3, batch_size=30)
    trainer.save(path)
    before = weights_of(trainer)
    with trainer.editing() as model:
        for param in model.parameters():
            param.zero_()
    trainer.load(path)
    return all(before[name].tobytes() == value.tobytes() for name, value in weights_of(trainer).items())


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_saved_weights_load_on_every_worker(ranks: RankPool, tmp_path: Path, name: str) -> None:
    assert ranks(2, save_and_load, str(tmp_path / name)) == [True, True]


# Errors: each says what, and what to type instead.


def raises(kind: str, case: str) -> str:
    cases = {
        "not a scalar": lambda: _fit(loss=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1], reduction="none")),
        "a number": lambda: _fit(loss=lambda m, b: 3.0),
        "no gradient": lambda: _fit(loss=lambda m, b: mean_loss(m, b).detach()),
        "NaN": lambda: _fit(loss=lambda m, b: mean_loss(m, b) * (float("nan") if _third() else 1.0), check_loss=False),
        "batch below V": lambda: make_trainer(slices=8).fit(data(), epochs=1, batch_size=4),
        "no batch size": lambda: make_trainer().fit(data(), epochs=1),
        "epochs and steps": lambda: make_trainer().fit(data(), epochs=1, steps=2, batch_size=8),
        "metric of the wrong shape": lambda: _metric(),
        "no loss": lambda: mh.Trainer(MODELS["plain"], None, OPTIMIZERS["SGD"]),
        "no such strategy": lambda: mh.Trainer(MODELS["plain"], mean_loss, OPTIMIZERS["SGD"], "mirored"),
        "no such precision": lambda: make_trainer(precision="fp23"),
        "a foreign optimizer": lambda: mh.Trainer(
            nn.Linear(12, 4), mean_loss, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        ).fit(data(), steps=1, batch_size=8),
        "a dataset that raises": lambda: make_trainer(slices=2).fit(Broken(), epochs=1, batch_size=10),
    }
    with pytest.raises(tuple(KINDS.values())) as raised:
        cases[case]()
    assert type(raised.value) is KINDS[kind], f"{type(raised.value).__name__}: {raised.value}"
    return str(raised.value)


KINDS = {kind.__name__: kind for kind in (BadLoss, NonFinite, DataError, DataFetchFailed, SpecError, TrainingFailed)}


def _fit(**arguments: Any) -> None:
    made = {"model": MODELS["plain"], "optimizer": OPTIMIZERS["SGD"], "slices": 2, **arguments}
    mh.Trainer(**made).fit(data(), steps=4, batch_size=30)


_calls = 0


def _third() -> bool:
    global _calls
    _calls += 1
    return _calls % 6 == 5


def _metric() -> None:
    trainer = mh.Trainer(
        MODELS["plain"], mean_loss, OPTIMIZERS["SGD"], metrics={"acc": lambda m, b: accuracy(m, b).mean()}
    )
    trainer.evaluate(data())


class Broken(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> Any:
        if row == 31:
            raise OSError("picture 31 is damaged")
        x, y = data(40)
        return x[row], y[row]


@pytest.mark.parametrize(
    ("case", "kind", "texts"),
    [
        ("not a scalar", "BadLoss", ["shape (15,)", "(sum, weight)"]),
        ("a number", "BadLoss", ["a float"]),
        ("no gradient", "BadLoss", ["no gradient", ".detach()"]),
        ("NaN", "NonFinite", ["step 3", "parameter"]),
        ("batch below V", "DataError", ["4", "8", "batch_size=8"]),
        ("no batch size", "DataError", ["batch_size=256"]),
        ("epochs and steps", "DataError", ["epochs=3"]),
        ("metric of the wrong shape", "TrainingFailed", ["'acc'", "one value per example"]),
        ("no loss", "SpecError", ["loss=lambda"]),
        ("no such strategy", "SpecError", ["mirored", 'strategy="mirrored"']),
        ("no such precision", "SpecError", ["fp23", "bf16"]),
        ("a foreign optimizer", "SpecError", ["not the model's"]),
        ("a dataset that raises", "DataFetchFailed", ["31", "damaged"]),
    ],
)
def test_a_mistake_gets_an_error_that_says_what_and_what_to_type(
    ranks: RankPool, case: str, kind: str, texts: list[str]
) -> None:
    (text,) = ranks(1, raises, kind, case)
    for part in texts:
        assert part in text, text


def keep_what_was_good(path: str) -> list[str]:
    from manyhands.checkpoint import newest_valid

    with pytest.raises(NonFinite):
        mh.Trainer(
            MODELS["plain"], poisoned_from_step_4, OPTIMIZERS["SGD"], slices=1, run_dir=path, check_loss=False
        ).fit(data(), steps=8, batch_size=30, checkpoint=mh.Checkpoints(every_steps=1))
    found = newest_valid(Path(path) / "checkpoints")
    assert found is not None
    return [str(found.step)]


_poison = 0


def poisoned_from_step_4(model: nn.Module, batch: Any) -> torch.Tensor:
    global _poison
    _poison += 1
    loss = mean_loss(model, batch)
    return loss * float("nan") if _poison >= 4 else loss


def test_nan_ends_the_run_and_the_last_good_checkpoint_stays(ranks: RankPool, tmp_path: Path) -> None:
    ((step,),) = ranks(1, keep_what_was_good, str(tmp_path), run_dir=tmp_path)
    assert step in ("1", "2", "3")
