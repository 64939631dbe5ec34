"""What ordinary Keras programs do not use works as with Keras alone, or is refused by name; nothing is left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from manyhands.testing import RankPool
from tests.compat.keras import corner_programs as programs
from tests.compat.keras.keras_programs import both, differences
from tests.training.setup.keras_workloads import warm_up

QUICK = ("generator_in_calls", "single_batches")


@pytest.fixture(autouse=True, scope="module")
def _import_side_by_side(ranks: RankPool) -> None:
    ranks(2, warm_up)


def compared(name: str) -> float:
    ours, theirs = both(programs.PROGRAMS[name], slices=4)
    found = differences(ours, theirs)
    assert max(found.values()) < 1e-5, found
    return max(found.values())


@pytest.mark.parametrize(
    "name", [one if one in QUICK else pytest.param(one, marks=pytest.mark.long) for one in sorted(programs.PROGRAMS)]
)
def test_two_workers_do_what_keras_does_alone(ranks: RankPool, name: str) -> None:
    ranks(2, compared, name)


@pytest.mark.parametrize(
    ("case", "parts"),
    {
        "several steps in fit": ["SpecError", "steps_per_execution is 4", "must be 1"],
        "several steps in evaluate": ["SpecError", "steps_per_execution is 4"],
        "several steps in predict": ["SpecError", "steps_per_execution is 4"],
        "own train step": ["SpecError", "train_step of the model", "was replaced", "compute_loss"],
        "callback with a train step": ["SpecError", "train_step", "maybe in a callback", "keras.metrics.Metric"],
        "callback with a train function": ["SpecError", "train_function", "maybe in a callback"],
        "own function": ["SpecError", "overrides make_train_function"],
        "own test logs": ["SpecError", "test_step of Own", "mine", "get_metrics_result"],
        "prediction of a batch": ["SpecError", "(5, 3) for", "predict_step"],
        "sum over slices of one row": ["BadLoss", "of 2 rows", "sum_over_batch_size"],
        "weights that differ later": ["BadLoss", "two halves"],
        "loss of some rows": ["BadLoss", "two halves"],
        "evaluated sum": ["SpecError", "'loss'", "two halves"],
        "step in a step": ["UsageError", "train_on_batch", "inside of a step of fit"],
    }.items(),
)
def test_what_replaces_or_evades_the_step_of_slices_is_refused(ranks: RankPool, case: str, parts: list[str]) -> None:
    (said,) = ranks(1, programs.refused, case)
    assert all(part in said for part in parts), said


@pytest.mark.parametrize(
    ("case", "part"),
    {
        "unseeded": "DataError: The workers read different data after 1 batches",
        "ends in validation": "DataError: The data of rank 0 ended after 4 batches",
        "ends in evaluate": "DataError: The data of rank 0 ended after 4 batches",
        "ends in predict": "DataError: The data of rank 0 ended after 4 batches",
        "unseeded in evaluate": "DataError: The workers read different data after 0 batches",
    }.items(),
)
def test_generators_that_differ_between_workers_are_named_on_all_of_them(ranks: RankPool, case: str, part: str) -> None:
    for said in ranks(2, programs.other_batches, case):
        assert said.startswith(part), said


@pytest.mark.parametrize("workers", [1, 2])
def test_a_weight_that_a_layer_assigns_has_the_value_of_slice_0_and_is_named_once(
    ranks: RankPool, workers: int
) -> None:
    chief, *_ = found = ranks(workers, programs.own_state)
    for value, wanted, _ in found:
        np.testing.assert_allclose(value, wanted, atol=1e-6)
    assert len(chief[2]) == 1
    assert "mean" in chief[2][0] and "slices=4" in chief[2][0]


def test_tensorboard_counts_batches_over_the_whole_training(ranks: RankPool, tmp_path: Path) -> None:
    """Where Keras's has its points, with TensorFlow."""
    chief, _ = ranks(2, programs.summaries_of_batches, str(tmp_path))
    assert chief == {"batch_loss": [4, 8, 12, 16], "batch_steps_per_second": [4, 8, 12, 16]}


def test_attributes_that_cannot_be_saved_are_named_also_of_callbacks_of_the_chief(ranks: RankPool) -> None:
    (said,) = ranks(1, programs.unsaved_attributes)
    assert len(said) == 2
    assert all("stream (Generator), rule (Rule) cannot be saved" in one for one in said), said
