"""The look at a loss before the first step: who says what it finds, and that training does not notice it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.errors import TrainingFailed
from manyhands.testing import RankPool
from tests.training.workloads import MODELS, data, mean_loss, weights_of


def summed(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def warnings_of(strategy: Any, batch_size: int) -> list[str]:
    trainer = mh.Trainer(MODELS["plain"], summed, lambda p: torch.optim.SGD(p, lr=0.001), strategy, slices=2)
    said: list[str] = []
    trainer._run.worker.events.emit_own = lambda event: said.append(getattr(event, "text", ""))  # type: ignore[method-assign]
    for _ in range(2):
        trainer.fit(data(), steps=2, batch_size=batch_size)
    return [text for text in said if "It is a sum" in text]


@pytest.mark.parametrize("strategy", ["mirrored", "local_sgd", "central_storage"])
def test_one_worker_says_once_what_the_loss_is(ranks: RankPool, strategy: str) -> None:
    first, second = ranks(2, warnings_of, strategy, 20)
    assert (len(first), len(second)) == (1, 0)
    assert "losses.mean()" in first[0]


def test_the_only_worker_with_enough_rows_looks_at_them(ranks: RankPool) -> None:
    first, second = ranks(2, warnings_of, "mirrored", 7)
    assert (first, len(second)) == ([], 1)


@pytest.mark.long
def test_a_loss_is_not_checked_where_a_forward_pass_takes_all_workers(ranks: RankPool) -> None:
    assert ranks(2, warnings_of, mh.Sharded("parameters"), 20) == [[], []]


def trained(check_loss: bool) -> Any:
    torch.manual_seed(1)
    trainer = mh.Trainer(
        MODELS["dropout and BatchNorm"],
        mean_loss,
        lambda p: torch.optim.Adam(p, lr=0.01),
        slices=2,
        check_loss=check_loss,
        precision="bf16",
    )
    trainer.fit(data(), epochs=1, batch_size=30)
    return weights_of(trainer), torch.rand(3).tolist()


def test_training_ends_with_the_same_bits_whether_it_is_looked_at_or_not(ranks: RankPool) -> None:
    (looked, drawn), _ = ranks(2, trained, True)
    (plain, drawn_then), _ = ranks(2, trained, False)
    assert drawn == drawn_then
    assert all((looked[name] == plain[name]).all() for name in plain)


def with_a_scalar_metric() -> str:
    stepped: list[int] = []

    class Counting:
        def after_step(self, trainer: Any, step: int, stats: Any) -> None:
            stepped.append(step)

    metrics = {"accuracy": lambda model, batch: (model(batch[0]).argmax(1) == batch[1]).float().mean()}
    trainer = mh.Trainer(
        MODELS["plain"], mean_loss, lambda p: torch.optim.SGD(p, lr=0.1), metrics=metrics, hooks=[Counting()]
    )
    with pytest.raises(TrainingFailed, match="'accuracy' returned a tensor of shape"):
        trainer.fit(data(), epochs=1, batch_size=30, validation=data())
    return f"{stepped}"


def test_a_metric_that_is_one_number_fails_before_the_first_step(ranks: RankPool) -> None:
    assert ranks(1, with_a_scalar_metric) == ["[]"]
