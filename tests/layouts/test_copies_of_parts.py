"""What several workers have of a divided model is compared: replicas' parts, and weights that all of one keep whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.errors import Diverged
from manyhands.parallel.replicas.divergence import odd_parts
from manyhands.testing import RankPool
from tests.layouts.layout_cases import data_for, make_trainer


class Changes:
    """Changes a weight on one rank between two steps, as a flipped bit would."""

    def __init__(self, rank: int, name: str) -> None:
        self._rank, self._name = rank, name

    def before_step(self, trainer: mh.Trainer, step: int) -> None:
        if step == 3 and trainer._run.worker.rank == self._rank:
            with torch.no_grad():
                dict(trainer.model.named_parameters())[self._name].view(-1)[0].add_(1.0)


def train(strategy: Any, model: str, changed: tuple[int, str] | None) -> tuple[str, list[str]]:
    """What it ended with, and its warnings."""
    warnings: list[str] = []
    trainer = make_trainer(model, strategy, hooks=[Changes(*changed)] if changed else [])
    trainer._run.worker.events.warn = warnings.append
    try:
        trainer.fit(data_for(model), steps=4, batch_size=16, checkpoint=mh.Checkpoints(every_steps=2))
    except Diverged as diverged:
        return str(diverged), warnings
    return "", warnings


CHECKED = {"train.check_every": 1}


def test_replicas_whose_parts_differ_end_the_run_and_the_parameter_is_named(ranks: RankPool) -> None:
    for ended, _ in ranks(2, train, mh.Mesh(data=2), "MLP", (1, "3.weight"), flags=CHECKED):
        assert "After step 3 copies of model/3.weight are not the same" in ended
        assert "since step 2, when all were equal" in ended and "step-00000002 is the newest now" in ended


def test_workers_of_one_replica_whose_weights_diverge_are_reported(ranks: RankPool) -> None:
    (ended, warnings), _ = ranks(2, train, mh.TensorParallel(2), "MLP", (1, "3.bias"), flags=CHECKED)
    assert ended == "" and any("model/3.bias is not the same on ranks 0 and 1" in text for text in warnings), warnings


@pytest.mark.long
@pytest.mark.parametrize("model", ["MLP", "CNN", "tied transformer", "U-Net"])
@pytest.mark.parametrize(
    "strategy", [mh.Mesh(data=2, tensor=2), mh.Mesh(data=2, pipeline=2), mh.Mesh(tensor=2, pipeline=2)]
)
def test_undisturbed_copies_are_the_same(ranks: RankPool, strategy: Any, model: str) -> None:
    for ended, warnings in ranks(4, train, strategy, model, None, flags=CHECKED):
        assert ended == "" and not any("is not the same on ranks" in text for text in warnings), warnings


def test_parts_are_compared_among_those_who_have_them() -> None:
    assert odd_parts([{"a": 1, "b": 2}, {"a": 1, "c": 3}, {"b": 2, "c": 4}]) == {"c": [1, 2]}
