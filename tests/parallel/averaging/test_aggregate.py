"""Averaging rules against their formulas, written once more in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from manyhands.parallel.averaging.averaging_rules import (
    combine,
    elastic_center,
    mean,
    median,
    mix,
    nesterov,
    trimmed_mean,
    weighted_mean,
)


def rows(count: int, length: int = 50) -> torch.Tensor:
    return torch.randn(count, length, dtype=torch.float64, generator=torch.Generator().manual_seed(count))


def close(ours: torch.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_rules_are_their_formulas(count: int) -> None:
    values, weights = rows(count), [float(i + 1) for i in range(count)]
    array = values.numpy()
    close(mean(values), array.mean(axis=0))
    close(weighted_mean(values, weights), np.average(array, axis=0, weights=weights))
    close(median(values), np.median(array, axis=0))
    for rule, expected in (("mean", array.mean(axis=0)), ("median", np.median(array, axis=0))):
        close(combine(values, rule, weights), expected)  # type: ignore[arg-type]
    close(combine(values, "weighted", weights), np.average(array, axis=0, weights=weights))
    close(combine(values, "trimmed", weights, 0.3), trimmed_mean(values, 0.3).numpy())


@pytest.mark.parametrize(
    ("count", "trim", "gone"), [(5, 0.2, 1), (5, 0.45, 2), (3, 0.01, 1), (2, 0.4, 0), (10, 0.3, 3)]
)
def test_a_trimmed_mean_leaves_out_both_ends(count: int, trim: float, gone: int) -> None:
    values = rows(count)
    kept = np.sort(values.numpy(), axis=0)[gone : count - gone]
    close(trimmed_mean(values, trim), kept.mean(axis=0))


@pytest.mark.parametrize("rule", ["median", "trimmed"])
def test_one_worker_that_is_far_off_moves_a_robust_rule_little_and_the_mean_far(rule: str) -> None:
    values = rows(5)
    honest = values.clone()
    values[2] = 1e9
    spread = float(honest.abs().max())
    assert float(combine(values, rule, [1.0] * 5).abs().max()) <= spread  # type: ignore[arg-type]
    assert float(mean(values).abs().min()) > 1e8


def test_a_row_without_weight_does_not_count_were_it_nan() -> None:
    values = rows(3)
    values[1] = float("nan")
    close(weighted_mean(values, [1.0, 0.0, 3.0]), (values[0].numpy() + 3 * values[2].numpy()) / 4)


def test_the_order_of_addition_is_that_of_the_rows() -> None:
    values = torch.tensor([[1e8], [1.0], [-1e8]])
    assert mean(values).item() == float((np.float32(1e8) + np.float32(1)) - np.float32(1e8)) / 3


def test_the_outer_nesterov_step_is_that_of_sgd_with_the_same_settings() -> None:
    outer, velocity = rows(1)[0], torch.zeros(50, dtype=torch.float64)
    expected = torch.nn.Parameter(outer.clone())
    sgd = torch.optim.SGD([expected], lr=0.7, momentum=0.9, nesterov=True)
    theta, v = outer.numpy().copy(), np.zeros(50)
    for number in range(4):
        delta = rows(number + 2)[0]
        outer, velocity = nesterov(outer, delta, velocity, lr=0.7, momentum=0.9)
        expected.grad = delta.clone()
        sgd.step()
        v = 0.9 * v + delta.numpy()
        theta = theta - 0.7 * (delta.numpy() + 0.9 * v)
        close(outer, theta)
        close(outer, expected.detach().numpy())
        close(velocity, v)


def test_without_momentum_and_with_lr_1_the_outer_step_is_the_mean_of_the_weights() -> None:
    outer, workers = rows(1)[0], rows(4)
    moved, _ = nesterov(outer, mean(outer - workers), torch.zeros_like(outer), lr=1.0, momentum=0.0)
    close(moved, workers.numpy().mean(axis=0))


def test_the_center_after_all_workers_at_once_has_moved_by_the_sum_of_their_pulls() -> None:
    center, workers, alpha = rows(1)[0], rows(3), 0.2
    expected = center.numpy() + alpha * (workers.numpy() - center.numpy()).sum(axis=0)
    close(elastic_center(center, mean(center - workers), alpha, 3), expected)


def test_mixing_keeps_a_part_of_the_workers_own_weights() -> None:
    local, outer = rows(2)
    close(mix(local, outer, 0.25), 0.25 * local.numpy() + 0.75 * outer.numpy())
