"""FTRL against the formulas, and as an optimizer like any other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.errors import SpecError
from manyhands.testing import RankPool
from tests.ftrl_formulas import FORMULAS, weight_after

STEPS = 120
SETTINGS = {
    "plain": {},
    "l1 and l2": {"l1": 0.5, "l2": 0.3},
    "shrinkage": {"l1": 0.1, "l2": 0.1, "l2_shrinkage": 0.05},
    "another power": {"l1": 0.2, "lr_power": -0.7, "beta": 0.4, "initial_accumulator": 0.2},
}


@pytest.mark.parametrize("convention", FORMULAS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_weights_follow_the_formula(convention, settings) -> None:
    draw = np.random.default_rng(0)
    start = np.where(draw.random(40) < 0.3, 0.0, draw.normal(size=40))
    gradients = draw.normal(size=(STEPS, 40)) + 0.2
    gradients[:, ::7] *= 0.01
    param = nn.Parameter(torch.tensor(start))
    optimizer = mh.optim.FTRL([param], lr=0.3, convention=convention, **settings)
    for row in gradients:
        param.grad = torch.tensor(row)
        optimizer.step()
    expected = [weight_after(convention, w, list(g), 0.3, settings) for w, g in zip(start, gradients.T, strict=True)]
    np.testing.assert_allclose(param.detach().numpy(), expected, rtol=1e-9, atol=1e-12)
    if settings.get("l1", 0) >= 0.5:
        assert 0 < np.count_nonzero(param.detach().numpy() == 0) < 40, "L1 gives exact zeros, and not only zeros"


def test_the_conventions_differ_by_a_factor_in_l2() -> None:
    """A configuration from TensorFlow has half the l2 that the paper's convention needs."""
    found = []
    for convention, l2 in (("paper", 0.8), ("tensorflow", 0.4)):
        param = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        optimizer = mh.optim.FTRL([param], lr=0.1, l2=l2, beta=1.0, initial_accumulator=0.0, convention=convention)
        for step in range(10):
            param.grad = torch.sin(torch.arange(5.0, dtype=torch.float64) + step)
            optimizer.step()
        found.append(param.detach())
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)


@pytest.mark.parametrize("convention", FORMULAS)
def test_sparse_gradients_touch_their_rows_only_and_do_there_what_dense_ones_do(convention) -> None:
    tables = [nn.Embedding(30, 4, sparse=sparse) for sparse in (True, False)]
    tables[1].load_state_dict(tables[0].state_dict())
    untouched = tables[0].weight.detach()[20:].clone()
    optimizers = [mh.optim.FTRL(t.parameters(), lr=0.1, l1=0.01, l2=0.1, convention=convention) for t in tables]
    for step in range(20):
        ids = torch.randint(0, 20, (12,), generator=torch.Generator().manual_seed(step))
        for table, optimizer in zip(tables, optimizers, strict=True):
            optimizer.zero_grad()
            table(ids).pow(2).sum().backward()
            optimizer.step()
    touched = tables[0].weight.detach()[:20]
    if convention == "paper":  # in the other one, a gradient of zero changes a weight that z does not account for
        torch.testing.assert_close(touched, tables[1].weight.detach()[:20])
    assert torch.equal(tables[0].weight.detach()[20:], untouched)


def test_a_rate_of_nothing_changes_nothing() -> None:
    param = nn.Parameter(torch.zeros(3))
    optimizer = mh.optim.FTRL([param], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step)  # warms up from 0
    for expected in (0.0, -0.05):
        param.grad = torch.ones(3)
        optimizer.step()
        schedule.step()
        torch.testing.assert_close(param.detach(), torch.full((3,), expected))


def test_state_goes_through_a_dictionary() -> None:
    def train(steps: range, state: dict | None = None, weights: torch.Tensor | None = None):
        param = nn.Parameter(torch.ones(6) if weights is None else weights.clone())
        optimizer = mh.optim.FTRL([param], lr=0.2, l1=0.05)
        if state is not None:
            optimizer.load_state_dict(state)
        for step in steps:
            param.grad = torch.cos(torch.arange(6.0) * step)
            optimizer.step()
        return param.detach(), optimizer.state_dict()

    whole, _ = train(range(10))
    weights, state = train(range(5))
    assert torch.equal(train(range(5, 10), state, weights)[0], whole)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "lr is 0"),
        ({"l1": -1.0}, "l1 is -1"),
        ({"l2": float("nan")}, "l2 is nan"),
        ({"lr_power": 0.5}, "-lr_power is -0.5"),
        ({"convention": "keras"}, "there are paper and tensorflow"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, message) -> None:
    with pytest.raises(SpecError, match=message):
        mh.optim.FTRL([nn.Parameter(torch.zeros(1))], **settings)


def wide_model() -> nn.Module:
    model = nn.Linear(60, 1)
    nn.init.zeros_(model.weight)
    return model


def train_clicks() -> tuple[np.ndarray, int]:
    """A wide model with mostly irrelevant inputs, which L1 finds."""
    generator = torch.Generator().manual_seed(1)
    x = (torch.rand(2048, 60, generator=generator) < 0.2).float()
    y = (x[:, :5].sum(1) > 1).float()
    trainer = mh.Trainer(
        wide_model,
        lambda model, batch: nn.functional.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1]),
        lambda params: mh.optim.FTRL(params, lr=0.5, l1=4.0),
        "mirrored",
        slices=6,
        exact=True,
        seed=3,
    )
    trainer.fit((x, y), epochs=6, batch_size=66)
    weights = trainer.model.weight.detach().numpy().ravel().copy()
    return weights, int((weights == 0).sum())


def test_any_number_of_workers_ends_with_the_same_bits_and_zeros(ranks: RankPool) -> None:
    (alone,) = ranks(1, train_clicks)
    weights, zeros = alone
    assert 15 < zeros <= 55 and (np.abs(weights[:5]) > np.abs(weights[5:]).max()).all()
    for workers in (2, 3):
        for others, _ in ranks(workers, train_clicks):
            assert others.tobytes() == weights.tobytes()
