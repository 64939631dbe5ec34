"""A worker whose gradients are wrong: named in the step in which they are looked at, before they count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.errors import Diverged
from manyhands.events import WrongGradientFound
from manyhands.native import why_not
from manyhands.testing import RankPool
from tests.strategies.test_checking import events_of, flip, same
from tests.training.workloads import data, make_trainer, weights_of

PLANES = [
    "gloo",
    pytest.param("auto", marks=pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")),
]


class WrongFrom:
    """From a step on, one rank's gradients of a layer are wrong: always alike, or every time in another place."""

    def __init__(self, rank: int, step: int, kind: str) -> None:
        self.rank, self.step, self.kind, self.times = rank, step, kind, 0

    def before_step(self, trainer: mh.Trainer, step: int) -> None:
        if step == self.step and trainer._run.worker.rank == self.rank:
            trainer.model.get_parameter("0.weight").register_hook(self._spoil)

    def _spoil(self, grad: torch.Tensor) -> torch.Tensor:
        self.times += 1
        grad = grad.clone()
        if self.kind == "large":
            return grad.mul_(1.5)
        flip(grad.view(-1)[self.times :] if self.kind == "fickle" else grad)
        return grad


def train(wrong: tuple[int, int, str] | None = None, **arguments: Any) -> dict[str, Any]:
    hooks = [WrongFrom(*wrong)] if wrong is not None else []
    trainer = make_trainer("dropout and BatchNorm", "AdamW", slices=6, hooks=hooks, **arguments)
    error = ""
    try:
        trainer.fit(data(), steps=12, batch_size=24)
    except Diverged as raised:
        error = str(raised)
    events = list(trainer._run.worker.session.events)
    return {"weights": weights_of(trainer), "moments": {}, "error": error, "events": events, "step": trainer.step}


def audited(wrong: tuple[int, int, str] | None, exact: bool = True) -> dict[str, Any]:
    return train(wrong, audit=True, exact=exact)


def unaudited(wrong: tuple[int, int, str] | None) -> dict[str, Any]:
    return train(wrong, exact=True)


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_looking_changes_nothing(ranks: RankPool, plane: str, world_size: int) -> None:
    (alone,) = ranks(1, unaudited, None)
    for result in ranks(world_size, audited, None, flags={"comm.plane": plane}):
        assert result["error"] == "" and same(result, alone)
        assert not events_of(result, WrongGradientFound)


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_of_three_workers_the_one_with_a_wrong_bit_is_named(ranks: RankPool, plane: str, rank: int) -> None:
    results = ranks(3, audited, (rank, 4, "steady"), flags={"comm.plane": plane})
    for result in results:
        assert f"finds that rank {rank} on " in result["error"]
        assert 3 <= result["step"] < 11, "two of three slices are computed by it, or judged by it"
    (found,) = events_of(results[0], WrongGradientFound)
    assert (found.ranks, found.replaced, found.step) == ([rank], False, results[0]["step"] + 1)


def test_of_two_workers_the_one_that_does_not_repeat_itself_is_named(ranks: RankPool) -> None:
    results = ranks(2, audited, (1, 4, "fickle"))
    assert events_of(results[0], WrongGradientFound)[0].ranks == [1]
    assert all("Computed once more, it seems that rank 1 on " in result["error"] for result in results)
    assert results[0]["step"] == 3, "of two, every slice is computed by it"


def test_of_two_that_repeat_themselves_both_are_named(ranks: RankPool) -> None:
    results = ranks(2, audited, (1, 4, "steady"))
    assert events_of(results[0], WrongGradientFound)[0].ranks in ([0, 1], [1, 0])
    assert all("it cannot be decided which is right" in result["error"] for result in results)


def test_without_exact_large_errors_are_found_and_one_bit_is_not(ranks: RankPool) -> None:
    results = ranks(3, audited, (1, 4, "large"), False)
    assert events_of(results[0], WrongGradientFound)[0].ranks == [1]
    assert all(result["error"] == "" for result in ranks(3, audited, (1, 4, "steady"), False))


def test_unaudited_wrong_gradients_go_into_everybodys_weights(ranks: RankPool) -> None:
    """All copies agree on them, so comparing copies does not help."""
    undisturbed = ranks(3, unaudited, None)
    results = ranks(3, unaudited, (1, 4, "steady"), flags={"train.check_every": 1, "comm.plane": "gloo"})
    assert all(result["error"] == "" and same(result, results[0]) for result in results)
    assert not same(results[0], undisturbed[0])
