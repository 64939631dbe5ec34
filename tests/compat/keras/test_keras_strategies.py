"""Keras's own `fit` where workers share one copy of the weights, or have shards: the same as Keras alone."""

from __future__ import annotations

import numpy as np
import pytest

from manyhands.testing import RankPool
from manyhands.training.setup.keras_optimizer import BY_ELEMENT, BY_TENSOR
from tests.compat.keras import strategy_programs as programs
from tests.strategies.test_equivalence import assert_identical
from tests.training.setup.keras_workloads import warm_up

QUICK = [("sharded", "arrays")]
LONG = [
    (strategy, program)
    for strategy in ("central", "sharded", "sharded optimizer", "mesh", "sharded mesh")
    for program in ("arrays", "batch_norm", "callbacks", "stopped", "streams")
    if (strategy, program) not in QUICK
]


@pytest.fixture(autouse=True, scope="module")
def _import_side_by_side(ranks: RankPool) -> None:
    ranks(2, warm_up)  # seconds in each process


@pytest.mark.parametrize(("strategy", "program"), [*QUICK, *(pytest.param(*o, marks=pytest.mark.long) for o in LONG)])
def test_two_workers_train_what_keras_trains_alone(ranks: RankPool, strategy: str, program: str) -> None:
    first, second = ranks(2, programs.compared_under, strategy, program)
    assert_identical(first[1], second[1])


@pytest.mark.parametrize("strategy", ["central", "sharded"])
def test_a_callback_sees_and_changes_whole_weights_after_an_epoch(ranks: RankPool, strategy: str) -> None:
    chief, other = ranks(2, programs.where_weights_are, strategy)
    rows = 8 if strategy == "central" else 4
    assert (chief["rows after a batch"], chief["rows after an epoch"]) == (rows, 8)
    assert ("shards" in chief["after a batch"]) == (strategy == "sharded")
    for found in (chief, other):
        assert found["iterations"] == 5
        for kept, last, momentum in zip(chief["after an epoch"], found["at the end"], found["momentums"], strict=True):
            np.testing.assert_array_equal(kept, last)
            assert kept.shape == momentum.shape and momentum.any()


@pytest.mark.parametrize(
    ("strategy", "case", "parts"),
    [
        ("tensor", "plain", ["mh.TensorParallel", "whole by every worker", "mh.Sharded"]),
        ("pipeline", "plain", ["mh.PipelineParallel", "stage by stage", "mh.Mirrored"]),
        ("local steps", "plain", ["mh.LocalSGD", "differ in between", "mh.Mirrored"]),
        ("central", "global norm", ["global_clipnorm=1.0", "of all variables"]),
        ("central", "loss scale", ["LossScaleOptimizer", "each variable on its own"]),
        ("central", "own", ["Own", "each variable on its own"]),
        ("sharded", "average", ["use_ema=True", "of all variables"]),
        ("sharded", "norm of a variable", ["Adam", "shard of a parameter"]),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(ranks: RankPool, strategy: str, case: str, parts: list[str]) -> None:
    for said in ranks(2, programs.refused_under, strategy, case):
        assert all(part in said for part in parts), said


def some(names: tuple[str, ...], *quick: str) -> list[object]:
    return [one if one in quick else pytest.param(one, marks=pytest.mark.long) for one in names]


@pytest.mark.parametrize("name", some(BY_TENSOR, "Adam", "Ftrl", "Lamb"))
def test_variables_updated_in_turn_end_where_keras_ends(ranks: RankPool, name: str) -> None:
    (found,) = ranks(1, programs.in_turn, name)
    assert max(found.values()) < 1e-6, found


@pytest.mark.parametrize("name", some(BY_ELEMENT, "AdamW", "Adagrad"))
def test_shards_end_where_the_whole_ends(ranks: RankPool, name: str) -> None:
    (found,) = ranks(1, programs.in_shards, name)
    assert max(found.values()) < 1e-6, found


@pytest.mark.parametrize("name", some(("Adam", "Nadam", "Adafactor"), "Nadam"))
def test_an_optimizer_goes_on_from_its_state(ranks: RankPool, name: str) -> None:
    (found,) = ranks(1, programs.saved_and_loaded, name)
    assert max(found.values()) == 0.0, found
