"""Replicas whose layers are split, or in stages, and which divide what they have of them once more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import manyhands as mh
from manyhands.errors import SpecError
from manyhands.testing import RankPool
from tests.layouts.sharded_cases import refused, train, watched

SPLIT = mh.Mesh(data=2, tensor=2, sharded=True)
STAGED = mh.Mesh(data=2, pipeline=2, sharded=True)


def assert_close(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one["weights"].items():
        assert np.abs(value - other["weights"][name]).max() <= 1e-5 * max(np.abs(value).max(), 1e-3), name
    assert other["evaluation"] == pytest.approx(one["evaluation"], rel=1e-4)


def test_blocks_of_split_layers_come_and_go(ranks: RankPool) -> None:
    """Three slices each, so that replicas add up gradients before they travel; what blocks hand on is in parts."""
    arguments = {"optimizer": "momentum", "clip_norm": 0.5, "slices": 6}
    [alone] = ranks(1, train, "wide", mh.Single(), arguments)
    assert_close(alone, ranks(4, train, "wide", SPLIT, arguments)[0])


@pytest.mark.parametrize(
    ("workers", "strategy"),
    [
        (2, mh.Sharded()),
        pytest.param(4, SPLIT, marks=pytest.mark.long),
        pytest.param(4, STAGED, marks=pytest.mark.long),
    ],
)
def test_states_that_are_there_before_the_first_step_are_divided(ranks: RankPool, workers: int, strategy: Any) -> None:
    [alone] = ranks(1, train, "MLP", mh.Single(), {"optimizer": "Adagrad"})
    assert_close(alone, ranks(workers, train, "MLP", strategy, {"optimizer": "Adagrad"})[0])


@pytest.mark.parametrize("level", ["optimizer", pytest.param("gradients", marks=pytest.mark.long)])
def test_other_levels_have_weights_whole_from_a_steps_begin_to_its_end(ranks: RankPool, level: str) -> None:
    arguments = {"optimizer": "momentum", "clip_norm": 0.5}
    [alone] = ranks(1, train, "wide", mh.Single(), arguments)
    strategy = mh.Mesh(data=2, tensor=2, sharded=level, recompute="blocks")
    assert_close(alone, ranks(4, train, "wide", strategy, arguments)[0])


@pytest.mark.parametrize("axis", ["tensor", pytest.param("pipeline", marks=pytest.mark.long)])
def test_each_of_two_replicas_keeps_half_between_steps(ranks: RankPool, axis: str) -> None:
    whole = ranks(4, watched, mh.Mesh(data=2, **{axis: 2}), "wide")
    parts = ranks(4, watched, mh.Mesh(data=2, **{axis: 2}, sharded=True), "wide")
    # Of all workers together: where a pipeline is cut is measured anew in every run.
    assert sum(one.num_bytes for one in parts) <= 0.55 * sum(one.num_bytes for one in whole)


@pytest.mark.parametrize(
    ("settings", "nearest"),
    [
        ({"sharded": True}, "data=2"),
        ({"data": 2, "sharded": "weights"}, 'sharded="parameters"'),
        ({"data": 2, "sequence": True}, "tensor=2"),
    ],
)
def test_what_cannot_be_divided_is_refused_where_it_is_written(settings: dict[str, Any], nearest: str) -> None:
    with pytest.raises(SpecError) as error:
        mh.Mesh(**settings)
    assert nearest in str(error.value)


def test_an_optimizer_that_looks_at_whole_matrices_is_refused(ranks: RankPool) -> None:
    for error in ranks(4, refused, STAGED, "Adafactor"):
        assert "update each element independently" in error and "sharded=False" in error
