"""Keras 3 models on the torch backend: trained in training mode, with their own loss, optimizer and metrics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyhands.testing import RankPool
from tests.strategies.test_equivalence import assert_identical, largest_difference
from tests.training.setup import keras_workloads as workloads

PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.fixture(autouse=True, scope="module")
def _import_side_by_side(ranks: RankPool) -> None:
    ranks(3, workloads.warm_up)  # seconds in each process


@pytest.mark.parametrize("kind", ["compiled", "own loss", "subclassed"])
def test_two_and_three_workers_end_where_one_process_ends(ranks: RankPool, kind: str) -> None:
    (alone,) = ranks(1, train, {"kind": kind, "slices": 6})
    for world_size in (2, 3):
        results = ranks(world_size, train, {"kind": kind, "slices": 6})
        for other in results[1:]:
            assert_identical(results[0], other)
        assert largest_difference(alone["weights"], results[0]["weights"]) <= 1e-6
        assert results[0]["evaluation"] == pytest.approx(alone["evaluation"], rel=1e-6)
    assert kind != "compiled" or {"loss", "accuracy"} == alone["evaluation"].keys()
    assert kind != "compiled" or alone["iterations"] == 8


@pytest.mark.parametrize("strategy", [pytest.param("central_storage", marks=pytest.mark.long), "sharded"])
def test_workers_that_share_or_shard_weights_end_there_too(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    """And the file has whole weights, with the whole state of the optimizer."""
    (alone,) = ranks(1, workloads.trained_and_saved, str(tmp_path / "alone.keras"), {"slices": 6})
    found = ranks(2, workloads.trained_and_saved, str(tmp_path / "two.keras"), {"slices": 6, "strategy": strategy})
    for one in found:
        assert one["evaluation"] == pytest.approx(alone["evaluation"], rel=1e-6)
        assert largest_difference(alone["file"], one["file"]) <= 1e-6


def test_exact_gives_the_same_bits_for_every_number_of_workers(ranks: RankPool) -> None:
    (alone,) = ranks(1, train, {"slices": 5, "exact": True, "clip_norm": 1.0})
    for world_size in (2, 3):
        for result in ranks(world_size, train, {"slices": 5, "exact": True, "clip_norm": 1.0}):
            assert_identical(alone, result)


@pytest.mark.parametrize("kind", ["compiled", "subclassed", "inside torch"])
def test_dropout_and_batch_norm_are_active_in_training_and_off_elsewhere(ranks: RankPool, kind: str) -> None:
    for seen in ranks(2, workloads.seen_modes, kind):
        assert seen["modes"] == {"fit": {True}, "evaluate": {False}, "predict": {False}, "plain call": {False}}
        assert seen["changed"] == {name for name in seen["all"] if "seed_generator" not in name}
        assert any("moving_variance" in name for name in seen["changed"])
        assert seen["same evaluation"]


def test_a_loop_of_the_users_own_trains_like_the_trainer(ranks: RankPool) -> None:
    trained = ranks(2, train, {"slices": 6})[0]["weights"]
    for looped in ranks(2, workloads.own_loop):
        assert_identical({name: trained[name] for name in looped}, looped)


def test_moving_averages_are_what_keras_gets_from_one_slice_after_the_other(ranks: RankPool) -> None:
    for found in ranks(2, workloads.moving_averages, 3):
        for ours, theirs in zip(found["ours"], found["keras"], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["trainable=False", "training=False"])
def test_a_frozen_body_keeps_its_moving_averages_as_in_a_loop_by_hand(ranks: RankPool, kind: str) -> None:
    for found in ranks(2, workloads.frozen_norm, kind):
        for ours, by_hand in zip(found["ours"], found["by hand"], strict=True):
            np.testing.assert_allclose(ours, by_hand, rtol=1e-5, atol=1e-6)


def test_every_slice_of_every_step_draws_its_own_mask_on_any_worker(ranks: RankPool) -> None:
    (alone,) = ranks(1, workloads.masks, 2, 4)
    assert len({mask.tobytes() for _, mask in alone}) == 8
    spread = [entry for rank in ranks(2, workloads.masks, 2, 4) for entry in rank]
    assert sorted((row, mask.tobytes()) for row, mask in spread) == sorted((row, mask.tobytes()) for row, mask in alone)


def test_regularisers_weights_and_clipping_count_as_in_keras_itself(ranks: RankPool) -> None:
    for found in ranks(2, workloads.regularised_step):
        np.testing.assert_allclose(found["ours"], found["keras"], rtol=2e-6, atol=1e-7)


def test_a_run_resumes_on_another_number_of_workers_with_the_optimizers_own_state(
    ranks: RankPool, tmp_path: Path
) -> None:
    (whole,) = ranks(1, workloads.resumed, str(tmp_path / "whole"), None, run_dir=tmp_path / "whole")
    ranks(2, workloads.resumed, str(tmp_path / "cut"), 5, run_dir=tmp_path / "cut")
    for result in ranks(3, workloads.resumed, str(tmp_path / "cut"), None, run_dir=tmp_path / "cut"):
        assert_identical(whole, result)
    assert whole["optimizer"]["adam/iteration"] == 12
    assert whole["lr"] == pytest.approx(0.01 * 0.5 ** (11 / 5), rel=1e-5)  # Keras's schedule, at the last step


@pytest.mark.parametrize("suffix", ["keras", "h5"])
def test_keras_files_load_train_and_save(ranks: RankPool, tmp_path: Path, suffix: str) -> None:
    (found,) = ranks(1, workloads.from_file, str(tmp_path), suffix)
    assert set(found.values()) == {True}, found


@pytest.mark.parametrize(
    ("case", "parts"),
    {
        "sum": ["SpecError", "reduction='sum'", "sum_over_batch_size"],
        "metric": ["SpecError", "'auc'", "trainer.predict"],
        "weighted metric": ["SpecError", "weighted_metrics"],
        "loss scale": ["SpecError", 'precision="fp16"'],
        "ema": ["SpecError", "use_ema=False"],
        "unbuilt": ["SpecError", "not built", "keras.Input"],
        "own step": ["SpecError", "train_step", "loss=lambda"],
        "not compiled": ["SpecError", "No loss was given"],
        "masked": ["BadLoss", "mask", "their number"],
        "code in .keras": ["SpecError", "cannot load", "arbitrary code"],
        "code in .h5": ["SpecError", "cannot load", "arbitrary code"],
        "no file": ["SpecError", "nowhere.keras"],
        "other file": ["SpecError", "weights.bin", "model.keras"],
    }.items(),
)
def test_what_would_come_out_wrong_is_refused_with_the_reason(ranks: RankPool, case: str, parts: list[str]) -> None:
    (said,) = ranks(1, workloads.refused, case)
    assert all(part in said for part in parts), said


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_examples_of_the_page_run(ranks: RankPool, number: int, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(EXAMPLES[number])
    ranks(1, workloads.run_script, str(tmp_path))


def train(arguments: dict[str, Any]) -> dict[str, Any]:
    return workloads.train(**arguments)
