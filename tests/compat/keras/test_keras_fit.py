"""Keras's own `fit` on several workers: weights, history, logs and calls of callbacks are those of Keras alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from manyhands.testing import RankPool
from tests.compat.keras import keras_programs as programs
from tests.strategies.test_equivalence import assert_identical
from tests.training.setup.keras_workloads import run_script, warm_up

PAGE = (Path(__file__).parents[3] / "docs" / "keras.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.S)
QUICK = ("arrays", "callbacks")


@pytest.fixture(autouse=True, scope="module")
def _import_side_by_side(ranks: RankPool) -> None:
    ranks(3, warm_up)  # seconds in each process


@pytest.mark.parametrize(
    "name", [one if one in QUICK else pytest.param(one, marks=pytest.mark.long) for one in sorted(programs.PROGRAMS)]
)
def test_two_workers_train_what_keras_trains_alone(ranks: RankPool, name: str) -> None:
    first, second = ranks(2, programs.compared, name, {"slices": 4})
    assert_identical(first[1], second[1])


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(programs.PROGRAMS))
def test_one_and_three_workers_do_too(ranks: RankPool, name: str) -> None:
    ranks(1, programs.compared, name, {"slices": 4})
    first, *others = ranks(3, programs.compared, name, {"slices": 4})
    for other in others:
        assert_identical(first[1], other[1])


def test_workers_share_the_rows_and_with_exact_the_bits_are_those_of_one(ranks: RankPool) -> None:
    """With dropout, BatchNorm, shuffling and a validation."""
    ((rows, alone),) = ranks(1, programs.shared_rows, {"slices": 4, "exact": True})
    two = ranks(2, programs.shared_rows, {"slices": 4, "exact": True})
    for mine, found in two:
        assert 0 < sum(mine) < sum(rows)
        assert_identical(alone, found)
    assert sum(sum(mine) for mine, _ in two) == sum(rows)


def test_files_are_written_once_and_tensorboard_has_its_tags(ranks: RankPool, tmp_path: Path) -> None:
    chief, other = ranks(2, programs.files_of_the_chief, str(tmp_path))
    assert chief["files"] == ["1.weights.h5", "2.weights.h5", "board", "log.csv", "model.keras"]
    assert (chief["called"], other["called"]) == (["2"], ["0"])
    assert {"epoch_loss", "epoch_accuracy", "epoch_learning_rate", "batch_loss"} <= set(chief["train"])
    assert {"epoch_loss", "epoch_accuracy", "evaluation_loss_vs_iterations"} <= set(chief["validation"])
    assert set(chief["validation values"]) == {"2"}  # one for each epoch
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3


@pytest.mark.long
def test_data_that_keras_does_not_read_trains_like_arrays(ranks: RankPool) -> None:
    for found in ranks(2, programs.other_data):
        assert found < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_is_keras_own(ranks: RankPool, policy: str) -> None:
    """One slice has the bits of Keras; two round gradients in half precision where Keras rounds their sum."""
    ((ours, theirs),) = ranks(1, programs.half_precision, policy)
    assert max(programs.differences(ours, theirs).values()) < 1e-6
    assert (ours["scale"] > 1.0) == (policy == "mixed_float16")
    for ours, theirs in ranks(2, programs.half_precision, policy):
        found = programs.differences(ours, theirs)
        assert found["scale"] == 0.0
        assert max(found.values()) < 0.02


@pytest.mark.long
def test_models_from_files_train_on(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2, programs.from_files, str(tmp_path)) == [True, True]


@pytest.mark.parametrize(
    ("case", "parts"),
    {
        "own step": ["SpecError", "overrides train_step", "compute_loss"],
        "jit": ["SpecError", "jit_compile=False"],
        "masked": ["BadLoss", "mask", "sample_weight="],
        "metric without variables": ["SpecError", "'listed'", "elsewhere than in its variables", "add_variable"],
        "largest": ["SpecError", "'largest'", "two halves"],
        "number per batch": ["SpecError", "'_mean_of_batch'", "one value per example"],
        "own logs": ["SpecError", "compute_metrics", "spread", "keras.metrics.Metric"],
        "sum": ["BadLoss", "two halves", "sum_over_batch_size"],
        "histograms": ["SpecError", "histogram_freq=1", "no histogram_freq="],
    }.items(),
)
def test_what_slices_cannot_compute_is_refused_by_name(ranks: RankPool, case: str, parts: list[str]) -> None:
    (said,) = ranks(1, programs.refused, case)
    assert all(part in said for part in parts), said


@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("compiled in a scope", "outside of the scope"),
        ("trained in a scope", "outside of the scope"),
        ("another scope", "in another scope"),
    ],
)
def test_a_model_of_another_place_is_refused(ranks: RankPool, case: str, part: str) -> None:
    (said,) = ranks(1, programs.wrong_place, case)
    assert said.startswith("UsageError") and part in said, said


def test_generators_of_different_lengths_are_named_on_every_worker(ranks: RankPool) -> None:
    for said in ranks(2, programs.unequal_generators):
        assert said.startswith("DataError: The data of rank 0 ended after 4 batches"), said


def test_weights_that_a_callback_changes_on_one_worker_are_named(ranks: RankPool) -> None:
    for said in ranks(2, programs.changed_on_one_worker):
        assert said.startswith("Diverged: After step 7 the workers' weights"), said


def test_a_model_that_each_worker_trains_a_copy_of_says_so(ranks: RankPool) -> None:
    for said in ranks(2, programs.fitted_after_the_scope):
        assert len(said) == 1 and "each of the 2 workers trains a copy" in said[0], said


def test_outside_of_a_scope_keras_is_untouched(ranks: RankPool) -> None:
    assert ranks(1, programs.untouched) == [True]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_examples_of_the_page_run(ranks: RankPool, number: int, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(EXAMPLES[number])
    ranks(2, run_script, str(tmp_path))
    assert number != 0 or (tmp_path / "model.keras").exists()
