"""The same training through shared memory and over Gloo: the same bits, for every optimizer and its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.native import why_not
from manyhands.testing import RankPool
from tests.strategies.test_equivalence import CASES, assert_identical, train_kwargs
from tests.variants import variants

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")
OVER_GLOO = {"comm.plane": "gloo"}


@pytest.mark.parametrize(
    "case",
    variants(
        CASES,
        "AdamW with a bias before BatchNorm, and dropout",
        "fp16 with loss scaling",
        "LBFGS",
        "fewer examples than workers in the last batch",
    ),
)
def test_shared_memory_gives_the_bits_that_gloo_gives(ranks: RankPool, case: str) -> None:
    arguments = {"slices": 5, **CASES[case]}
    for world_size in (2, 3):
        over_gloo = ranks(world_size, train_kwargs, arguments, flags=OVER_GLOO)
        for result in ranks(world_size, train_kwargs, arguments):
            assert_identical(over_gloo[0], result)


class Odd(nn.Module):
    """A tied weight, a frozen one, one that some rows do not use, one that none does, and a large one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.tied = nn.Linear(8, 8), nn.Linear(8, 8)
        self.tied.weight = self.first.weight
        self.sometimes, self.never = nn.Linear(8, 8), nn.Linear(8, 8)
        self.large = nn.Linear(8, 70_000)
        self.last = nn.Linear(8, 3)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.tied(torch.tanh(self.first(x))))
        if float(x.detach().sum()) > 0:
            x = x + self.sometimes(x)
        return self.last(x) + 1e-3 * self.large(x).mean(1, keepdim=True)


def train_oddly(kind: str) -> dict[str, Any]:
    """Several groups, a schedule, weights edited and a layer thawed between two fits."""
    makers = {
        "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05, initial_accumulator_value=0.1),
        "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, centered=True),
        "Adadelta": lambda groups: torch.optim.Adadelta(groups, lr=0.5),
    }
    model = Odd()
    weights = [param for name, param in model.named_parameters() if name.endswith("weight")]
    biases = [param for name, param in model.named_parameters() if name.endswith("bias")]
    trainer = mh.Trainer(
        model,
        lambda m, batch: nn.functional.cross_entropy(m(batch[0]), batch[1]),
        lambda params: makers[kind]([{"params": weights}, {"params": biases, "lr": 0.02}]),
        "mirrored",
        slices=6,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
    )
    generator = torch.Generator().manual_seed(5)
    data = torch.randn(48, 8, generator=generator), torch.randint(0, 3, (48,), generator=generator)
    trainer.fit(data, epochs=2, batch_size=12)
    with trainer.editing() as edited:
        edited.first.weight.mul_(0.5)
        edited.last.bias.requires_grad_(True)
    trainer.fit(data, epochs=1, batch_size=12)
    with trainer.editing() as edited:
        edited.first.bias.add_(0.25)
    trainer.fit(data, epochs=1, batch_size=12)
    state = trainer.optimizer.state_dict()["state"]
    return {
        "weights": {name: value.numpy().copy() for name, value in trainer.model.state_dict().items()},
        "state": {
            f"{index} {name}": value.numpy().copy()
            for index, values in state.items()
            for name, value in values.items()
            if value is not None
        },
    }


@pytest.mark.parametrize("kind", variants(["SGD", "Adagrad", "RMSprop", "Adadelta"], "RMSprop"))
def test_odd_models_and_weights_changed_by_hand_end_the_same_way(ranks: RankPool, kind: str) -> None:
    (alone,) = ranks(1, train_oddly, kind)
    for flags in ({}, OVER_GLOO):
        for result in ranks(3, train_oddly, kind, flags=flags):
            assert_identical(alone, result)


# Small buckets, so that gradients leave in many of them.
ON_TWO_HOSTS = {"train.strategy": "mirrored", "comm.bucket_bytes": 4096}


@pytest.mark.parametrize(
    "case",
    variants(["momentum, Nesterov and weight decay", "clipping", "fp16 with loss scaling", "LBFGS"], "clipping"),
)
def test_shared_memory_inside_two_hosts_gives_the_bits_of_one(ranks: RankPool, case: str) -> None:
    arguments = {"slices": 7, **CASES[case]}
    on_one = ranks(2, train_kwargs, arguments)
    for flags in (ON_TWO_HOSTS, {**ON_TWO_HOSTS, **OVER_GLOO}):
        for result in ranks(4, train_kwargs, arguments, flags=flags, hosts=2):
            assert_identical(on_one[0], result)


@pytest.mark.long
def test_odd_models_on_two_hosts_end_the_same_way(ranks: RankPool) -> None:
    (alone,) = ranks(1, train_oddly, "RMSprop")
    for result in ranks(4, train_oddly, "RMSprop", flags=ON_TWO_HOSTS, hosts=2):
        assert_identical(alone, result)


class Shrink:
    """A hook that changes weights by hand, as some do."""

    def __init__(self, politely: bool) -> None:
        self._politely = politely

    def after_step(self, trainer: mh.Trainer, step: int, stats: Any) -> None:
        if self._politely:
            with trainer.editing() as model:
                model.weight.mul_(0.5)
        else:
            with torch.no_grad():
                trainer.model.get_parameter("weight").mul_(0.5)


def train_and_shrink(politely: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    trainer = mh.Trainer(
        model,
        lambda m, x: m(x).square().mean(),
        lambda p: torch.optim.SGD(p, lr=0.1),
        slices=2,
        hooks=[Shrink(politely)],
    )
    try:
        trainer.fit(torch.ones(8, 4), steps=3, batch_size=4)
    except mh.errors.TrainingFailed as error:
        return str(error)
    return model.weight.detach().numpy().copy()


def test_weights_changed_by_hand_are_refused_where_they_would_change_once_per_worker(ranks: RankPool) -> None:
    (alone,) = ranks(1, train_and_shrink, False)
    for text in ranks(2, train_and_shrink, False):
        assert "Weights were changed outside of a step" in text and "trainer.editing()" in text
    for result in ranks(2, train_and_shrink, True):
        assert_identical(alone, result)
