"""Pipelines on real ranks end where one process ends: losses, gradients of every step, weights, buffers, evaluation."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from manyhands.errors import SpecError
from manyhands.parallel.pipeline.schedule import make_schedule
from manyhands.parallel.pipeline.timeline import play
from manyhands.testing import RankPool
from tests.parallel.pipeline.pipelines import CASES, Case, count_activations, train_alone, train_pipelined
from tests.variants import variants

LONG = pytest.mark.long

# The last step has fewer rows, in slices of two sizes; the one before has fewer slices.
PLAN = ((24, 4), (12, 2), (11, 4))


@functools.cache
def alone(name: str) -> dict[str, Any]:
    return train_alone(CASES[name], PLAN)


def assert_same(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for step, expected in enumerate(alone["steps"]):
        assert sum(rank["steps"][step]["loss"] for rank in ranks) == pytest.approx(expected["loss"], rel=1e-5)
        found: dict[str, Any] = {}
        for rank in ranks:
            found |= rank["steps"][step]["grads"]
        assert found.keys() == expected["grads"].keys()
        scale = max(np.abs(grad).max() for grad in expected["grads"].values())
        for name, grad in expected["grads"].items():
            np.testing.assert_allclose(found[name], grad, rtol=1e-5, atol=1e-6 * scale, err_msg=f"step {step} {name}")
    weights: dict[str, Any] = {}
    for rank in ranks:
        weights |= rank["weights"]
    for name, value in alone["weights"].items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    for rank in ranks:
        np.testing.assert_allclose(rank["evaluation"], alone["evaluation"], rtol=1e-5)


@pytest.mark.parametrize(
    ("world", "schedule", "options"),
    [
        (2, "gpipe", {}),
        pytest.param(2, "1f1b", {}, marks=LONG),
        (2, "1f1b", {"recompute": True}),
        pytest.param(2, "interleaved", {}, marks=LONG),
        pytest.param(2, "zero_bubble", {}, marks=LONG),
        pytest.param(2, "zero_bubble", {"recompute": True}, marks=LONG),
        pytest.param(4, "1f1b", {}, marks=LONG),
        pytest.param(4, "zero_bubble", {"chunks": 1}, marks=LONG),
        (4, "zero_bubble", {}),
        (4, "interleaved", {"chunks": 3}),
    ],
    ids=str,
)
def test_a_sequential_trains_as_in_one_process(
    ranks: RankPool, tmp_path: Path, world: int, schedule: str, options: dict[str, Any]
) -> None:
    case = CASES["sequential"]
    found = ranks(world, train_pipelined, str(tmp_path / "store"), world, case, PLAN, schedule, options)
    assert_same(found, alone("sequential"))
    timelines = [play(make_schedule(schedule, world, count, options.get("chunks"))) for _, count in PLAN]
    for rank, one in enumerate(found):
        assert one["alive"] == max(timeline.most_alive[rank] for timeline in timelines)
        ran = dict.fromkeys(span.op for span in one["spans"])
        assert list(ran) == [span.op for span in timelines[-1].spans[rank] if span.op in ran]
        assert len(one["spans"]) == len(ran)


@pytest.mark.parametrize("name", ["dicts", "half frozen"])
@pytest.mark.parametrize(
    ("schedule", "options"), [("interleaved", {"chunks": 4, "recompute": True}), ("zero_bubble", {})], ids=str
)
def test_stages_of_one_rank_hand_on_values_of_any_form(name: str, schedule: str, options: dict[str, Any]) -> None:
    assert_same([train_pipelined("", 1, CASES[name], PLAN, schedule, options)], alone(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", variants(["unet", "gpt2", "towers"], "towers"))
def test_a_model_of_any_form_trains_as_in_one_process(ranks: RankPool, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    schedule = "1f1b" if name == "towers" else "zero_bubble"
    found = ranks(2, train_pipelined, str(tmp_path / "store"), 2, case, PLAN, schedule, {})
    assert_same(found, alone(name))
    assert bool(found[0]["tied"]) == (name == "gpt2")


@pytest.mark.parametrize("schedule", variants(["gpipe", "1f1b", "interleaved", "zero_bubble"], "1f1b", "zero_bubble"))
def test_activations_are_kept_as_long_as_the_schedule_says(ranks: RankPool, tmp_path: Path, schedule: str) -> None:
    found = ranks(4, count_activations, str(tmp_path / "store"), 4, schedule, 6)
    expected = play(make_schedule(schedule, 4, 6)).most_alive
    assert found == [(most, 0) for most in expected]


class Pair:
    """Of no kind that anybody could look into."""

    def __init__(self, one: Tensor, other: Tensor) -> None:
        self.one, self.other = one, other


class Splits(nn.Linear):
    def forward(self, x: Tensor) -> Pair:  # type: ignore[override]
        return Pair(super().forward(x), x)


class Joins(nn.Linear):
    def forward(self, pair: Pair) -> Tensor:  # type: ignore[override]
        return super().forward(pair.one.relu() + pair.other)


def test_what_hides_its_tensors_is_refused_between_stages_of_one_rank_too() -> None:
    case = Case(lambda: nn.Sequential(Splits(4, 4), Joins(4, 2)), lambda *_: (torch.randn(4, 4), torch.zeros(4).long()))
    with pytest.raises(SpecError, match="hands on a Pair"):
        train_pipelined("", 1, case, [(4, 2)], "zero_bubble", {})
