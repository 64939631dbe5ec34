"""Pipelines on real ranks end where one process ends: losses, gradients of every step, weights, buffers, evaluation."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyhands.testing import RankPool
from tests.parallel.pipelines import CASES, train_alone, train_pipelined

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
        (2, "1f1b", {}),
        (2, "1f1b", {"recompute": True}),
        (2, "interleaved", {}),
        (2, "zero_bubble", {}),
        (2, "zero_bubble", {"recompute": True}),
        (4, "1f1b", {}),
        (4, "zero_bubble", {"chunks": 1}),
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet", "gpt2", "towers"])
def test_a_model_of_any_form_trains_as_in_one_process(ranks: RankPool, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    schedule = "1f1b" if name == "towers" else "zero_bubble"
    found = ranks(2, train_pipelined, str(tmp_path / "store"), 2, case, PLAN, schedule, {}, deadline_s=110.0)
    assert_same(found, alone(name))
    assert bool(found[0]["tied"]) == (name == "gpt2")
