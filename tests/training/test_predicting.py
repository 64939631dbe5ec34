"""`predict` and `evaluate` on any number of workers, also where some have no row, for every kind of output."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import manyhands as mh
from manyhands.errors import DataError, Preempted
from manyhands.testing import RankPool
from manyhands.training.step import evaluation, output_structure
from tests.stopping import StopAt
from tests.training.workloads import CLASSES, FEATURES, OPTIMIZERS, accuracy, data, mean_loss


class Pair(NamedTuple):
    logits: Tensor
    hidden: Tensor


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor | None = None


ARRANGED = {
    "a tensor": lambda a, b: a,
    "a dict": lambda a, b: {"b": b, "a": a},
    "a tuple": lambda a, b: (a, b),
    "a list": lambda a, b: [a, b],
    "nested": lambda a, b: {"outer": [(a,), {"inner": b}], "again": a},
    "a named tuple": Pair,
    "a dataclass": Output,
    "part of a dataclass": lambda a, b: Output(a),
    "an ordered dict": lambda a, b: OrderedDict(z=a, a=b),
    "numbered": lambda a, b: {1: a, 0: b},
}


class Arranging(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(FEATURES, CLASSES), kind

    def forward(self, x: Tensor) -> Any:
        out = self.layer(x)
        return ARRANGED[self.kind](out, out[:, :2])


def make(kind: str, **arguments: Any) -> mh.Trainer:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return mean_loss(lambda x: pytree.tree_leaves(model(x))[0], batch)  # type: ignore[arg-type]

    return mh.Trainer(lambda: Arranging(kind), loss, OPTIMIZERS["SGD"], slices=2, **arguments)


def predict(rows: int) -> dict[str, bool]:
    """For each arrangement, whether predictions are what the model returns for all rows at once."""
    found = {}
    trainer, (x, _) = make("a tensor"), data(rows)
    for kind in ARRANGED:
        trainer.model.kind = kind  # type: ignore[assignment]
        predicted = trainer.predict(x)
        with torch.no_grad():
            found[kind] = same(predicted, trainer.model.eval()(x))
    return found


def same(a: Any, b: Any) -> bool:
    (left, one), (right, other) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    equal = [torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in zip(left, right, strict=True)]
    return type(a) is type(b) and one == other and all(equal)


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_outputs_keep_their_arrangement_where_a_worker_has_no_row(ranks: RankPool, rows: int) -> None:
    # One batch of at most 256 rows: two of three workers have none of it.
    assert ranks(3, predict, rows) == [dict.fromkeys(ARRANGED, True)] * 3


def evaluate(rows: int) -> tuple[dict[str, float], dict[str, float]]:
    trainer = mh.Trainer(
        nn.Linear(FEATURES, CLASSES), mean_loss, OPTIMIZERS["SGD"], metrics={"accuracy": accuracy}, slices=2
    )
    x, y = data(rows)
    with trainer.editing():
        by_hand = {
            "loss": float(mean_loss(trainer.model, (x, y))),
            "accuracy": float(accuracy(trainer.model, (x, y)).mean()),
        }
    return trainer.evaluate((x, y)), by_hand


@pytest.mark.parametrize("rows", [1, 40])
def test_metrics_are_the_same_on_a_worker_without_rows(ranks: RankPool, rows: int) -> None:
    for found, by_hand in ranks(3, evaluate, rows):
        assert found == pytest.approx(by_hand, rel=1e-6)


def nothing() -> list[str]:
    found, trainer = [], make("a dict")
    for call in (trainer.predict, trainer.evaluate):
        with pytest.raises(DataError) as refused:
            call((torch.empty(0, FEATURES), torch.empty(0, dtype=torch.long)))
        found.append(str(refused.value))
    return found


def test_data_without_rows_is_refused(ranks: RankPool) -> None:
    for texts in ranks(2, nothing):
        assert all("no rows" in text for text in texts), texts


def predict_then_fit(run_dir: str, kind: str, stop_at: int | None) -> str:
    trainer = make(kind, run_dir=run_dir, hooks=[StopAt(stop_at)])
    found = repr(trainer.predict(data(30)[0]))
    with contextlib.suppress(Preempted):
        trainer.fit(data(), epochs=1, batch_size=30)
    return found


@pytest.mark.parametrize("kind", ["nested", "a named tuple", "a dataclass", "numbered"])
def test_a_restarted_script_gets_the_same_predictions_in_the_same_arrangement(
    ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    (before,) = ranks(1, predict_then_fit, str(tmp_path), kind, 2, run_dir=tmp_path)
    assert ranks(2, predict_then_fit, str(tmp_path), kind, None, run_dir=tmp_path) == [before, before]


def test_predictions_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    evaluation.to_file(tmp_path / "p.safetensors", {"a": torch.ones(2), "b": (torch.zeros(2),)})
    found = evaluation.from_file(
        tmp_path / "p.safetensors", {"dict": {"a": {"tensor": 0}, "b": {"tuple": [{"tensor": 1}]}}}
    )
    assert same(found, {"a": torch.ones(2), "b": (torch.zeros(2),)})


def test_a_class_that_others_cannot_find_is_named() -> None:
    class Local(NamedTuple):
        a: Tensor

    with pytest.raises(DataError, match="Local"):
        output_structure.describe(pytree.tree_flatten(Local(torch.ones(2)))[1])


@pytest.mark.parametrize("name", ["os:system", "os:PathLike", "no.such.module:Thing", "subprocess:Popen"])
def test_a_forged_name_is_refused_and_calls_nothing(name: str) -> None:
    with pytest.raises(DataError):
        output_structure.rebuild([name, None, [None]])
