"""The first promise: every number of workers ends where one process with the same slices ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from manyhands.testing import RankPool
from tests.training.workloads import train
from tests.variants import variants


def largest_difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Relative to the largest value of each tensor."""
    return max(float(np.abs(a[n] - b[n]).max() / max(np.abs(a[n]).max(), 1e-12)) for n in a if a[n].size)


def assert_identical(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_identical(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            assert_identical(left, right)
    elif isinstance(a, np.ndarray):
        assert a.tobytes() == b.tobytes()
    else:
        assert a == b


CASES: dict[str, dict[str, Any]] = {
    "SGD": {},
    "momentum, Nesterov and weight decay": {"optimizer": "momentum"},
    "AdamW with a bias before BatchNorm, and dropout": {"model": "dropout and BatchNorm", "optimizer": "AdamW"},
    "convolutions with BatchNorm": {"model": "convolutional", "optimizer": "momentum"},
    "clipping": {"clip_norm": 0.05, "optimizer": "momentum"},
    "a weighted loss": {"weighted": True, "optimizer": "AdamW"},
    "bf16": {"precision": "bf16", "optimizer": "AdamW"},
    "fp16 with loss scaling": {"precision": "fp16", "optimizer": "AdamW"},
    "LBFGS": {"optimizer": "LBFGS", "fit": {"epochs": 1}},
    "slices that do not divide by the workers": {"slices": 7, "fit": {"batch_size": 28}},
    "fewer examples than workers in the last batch": {"rows": 49, "fit": {"batch_size": 24}},
}


@pytest.mark.parametrize(
    "case",
    variants(
        CASES,
        "momentum, Nesterov and weight decay",
        "convolutions with BatchNorm",
        "a weighted loss",
        "bf16",
        "LBFGS",
        "slices that do not divide by the workers",
    ),
)
def test_two_and_three_workers_end_where_one_process_ends(ranks: RankPool, case: str) -> None:
    arguments = {"slices": 6, **CASES[case]}
    (alone,) = ranks(1, train_kwargs, arguments)
    for world_size in (2, 3):
        results = ranks(world_size, train_kwargs, arguments)
        for other in results[1:]:
            assert_identical(results[0], other)
        assert largest_difference(alone["weights"], results[0]["weights"]) <= 1e-6
        assert results[0]["evaluation"] == pytest.approx(alone["evaluation"], rel=1e-6)
        assert results[0]["steps"] == alone["steps"]


@pytest.mark.parametrize(
    "model", variants(["plain", "dropout and BatchNorm", "convolutional"], "dropout and BatchNorm")
)
def test_exact_gives_the_same_bits_for_every_number_of_workers(ranks: RankPool, model: str) -> None:
    arguments = {"slices": 5, "exact": True, "model": model, "optimizer": "AdamW", "clip_norm": 1.0}
    (alone,) = ranks(1, train_kwargs, arguments)
    for world_size in (2, 3):
        for result in ranks(world_size, train_kwargs, arguments):
            assert_identical(alone, result)


def test_accumulation_is_slices_above_the_number_of_workers(ranks: RankPool) -> None:
    (alone,) = ranks(1, train_kwargs, {"accumulate": 6, "optimizer": "momentum"})
    two = ranks(2, train_kwargs, {"accumulate": 3, "optimizer": "momentum"})[0]
    assert_identical(alone["weights"], two["weights"])


def test_without_dropout_or_batch_statistics_slices_do_not_matter(ranks: RankPool) -> None:
    (whole,) = ranks(1, train_kwargs, {"slices": 1, "weighted": True})
    (cut,) = ranks(1, train_kwargs, {"slices": 6, "weighted": True})
    assert largest_difference(whole["weights"], cut["weights"]) <= 1e-5


def test_one_worker_with_one_slice_is_the_plain_pytorch_loop(ranks: RankPool) -> None:
    (ours,), (plain,) = ranks(1, train_kwargs, {"slices": 1, "optimizer": "momentum"}), ranks(1, plain_loop)
    assert_identical(ours["weights"], plain)


def train_kwargs(arguments: dict[str, Any]) -> dict[str, Any]:
    return train(**arguments)


def plain_loop() -> dict[str, np.ndarray]:
    """What `train` does, by hand: same initial weights, same order of rows."""
    import torch

    from manyhands.data.sample_order import order
    from tests.training.workloads import MODELS, OPTIMIZERS, data, mean_loss

    torch.manual_seed(0)
    model = MODELS["plain"]().train()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    x, y = data()
    for epoch in range(2):
        for start in range(0, len(x), 24):
            rows = torch.from_numpy(order(len(x), 0, epoch, start, min(start + 24, len(x))))
            optimizer.zero_grad()
            mean_loss(model, (x[rows], y[rows])).backward()
            optimizer.step()
    return {name: value.numpy() for name, value in model.state_dict().items()}
