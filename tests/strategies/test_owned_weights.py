"""Torch's optimizers without a fused version, each tensor with one owner: the bits of one process, and its state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR

import manyhands as mh
from manyhands.errors import Preempted, TrainingFailed
from manyhands.native import why_not
from manyhands.testing import RankPool
from tests.strategies.test_equivalence import assert_identical
from tests.training.test_resume import StopAt
from tests.training.workloads import CLASSES, FEATURES, data, mean_loss, weights_of
from tests.variants import variants

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")
STEPS = 24
Params = Iterable[nn.Parameter]

OPTIMIZERS: dict[str, Callable[[Params], optim.Optimizer]] = {
    "Adadelta": lambda params: optim.Adadelta(params, lr=0.5, weight_decay=0.01),
    "Adafactor": lambda params: optim.Adafactor(params, lr=0.02),
    "Adamax": lambda params: optim.Adamax(params, lr=0.01, maximize=True),
    "ASGD": lambda params: optim.ASGD(params, lr=0.05, t0=3, lambd=0.01),
    "Muon": lambda params: optim.Muon([param for param in params if param.ndim == 2], lr=0.02),
    "NAdam": lambda params: optim.NAdam(params, lr=0.01, weight_decay=0.01, decoupled_weight_decay=True),
    "RAdam": lambda params: optim.RAdam(params, lr=0.02),
    "Rprop": lambda params: optim.Rprop(params, lr=0.01),
    "ASGD, foreach": lambda params: optim.ASGD(params, lr=0.05, t0=3, lambd=0.01, foreach=True),
    "SGD, foreach": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "Adam, foreach": lambda params: optim.Adam(params, lr=0.01, amsgrad=True, maximize=True, foreach=True),
    "AdamW, torch's fused": lambda params: optim.AdamW(params, lr=0.01, fused=True),
    "AdamW, lr a tensor": lambda params: optim.AdamW(params, lr=torch.tensor(0.01)),
    "Adagrad, foreach": lambda params: optim.Adagrad(params, lr=0.05, initial_accumulator_value=0.1, foreach=True),
    "RMSprop, foreach": lambda params: optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True, foreach=True),
}


class Branching(nn.Module):
    """A layer that one of the examples uses, one that none does, a frozen one, and a bias before BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last = nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Linear(16, CLASSES)
        self.sometimes, self.never, self.frozen = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        special = bool((x[:, 0] > 3).any())
        x = torch.relu(self.frozen(self.norm(self.first(x))))
        if special:
            x = x + self.sometimes(x)
        return self.last(x)


class Stepped:
    """Notes which parameters have a gradient when torch's own `step` is called."""

    def __init__(self) -> None:
        self.places: set[int] = set()

    def begin(self, trainer: mh.Trainer) -> None:
        optimizer = trainer.optimizer
        params = [param for group in optimizer.param_groups for param in group["params"]]
        torchs = optimizer.step

        def step() -> Any:
            self.places |= {place for place, param in enumerate(params) if param.grad is not None}
            return torchs()

        optimizer.step = step  # type: ignore[method-assign]


def train(kind: str, scheduler: Any = None, stop_at: int | None = None, **arguments: Any) -> dict[str, Any]:
    stepped = Stepped()
    trainer = mh.Trainer(
        Branching,
        mean_loss,
        {**OPTIMIZERS, **IN_FULL}[kind],
        slices=6,
        exact=True,
        hooks=[stepped, StopAt(stop_at)],
        scheduler=scheduler,
        **arguments,
    )
    stopped = False
    try:
        trainer.fit(data(72), steps=STEPS, batch_size=36)
    except Preempted:
        stopped = True
    return {"weights": weights_of(trainer), "state": state_of(trainer), "stepped": stepped.places, "stopped": stopped}


def state_of(trainer: mh.Trainer) -> dict[str, Any]:
    """The optimizer's whole state as this rank sees it, in its order."""
    states = trainer.optimizer.state_dict()["state"]
    found = {f"{place} {name}": value for place, state in states.items() for name, value in state.items()}
    return {name: value.numpy().copy() for name, value in found.items() if value is not None}


def train_kwargs(arguments: dict[str, Any]) -> dict[str, Any]:
    return train(**arguments)


def halve(optimizer: optim.Optimizer) -> LRScheduler:
    return StepLR(optimizer, 7, 0.5)


def assert_divided(ranks: RankPool, arguments: dict[str, Any]) -> dict[str, Any]:
    """On 2 and 3 workers as on one, with every tensor stepped by one of them. Returns the optimizer's state."""
    (alone,) = ranks(1, train_kwargs, arguments)
    for world_size in (2, 3):
        results = ranks(world_size, train_kwargs, arguments)
        for result in results:
            assert_identical(alone["weights"], result["weights"])
            assert_identical(alone["state"], result["state"])
        shares = [result["stepped"] for result in results]
        assert set.union(*shares) == alone["stepped"]
        assert sum(map(len, shares)) == len(alone["stepped"]) and sum(map(bool, shares)) > 1
    state: dict[str, Any] = alone["state"]
    return state


@pytest.mark.parametrize("kind", variants(OPTIMIZERS, "Adafactor", "Muon", "RAdam", "AdamW, lr a tensor"))
def test_tensors_with_one_owner_each_get_the_bits_of_one_process(ranks: RankPool, kind: str) -> None:
    state = assert_divided(ranks, {"kind": kind, "scheduler": halve})
    if kind == "RAdam":
        assert state["0 step"] == STEPS and 0 < state["6 step"] < STEPS  # some states are made later than others


def cycle(optimizer: optim.Optimizer) -> LRScheduler:
    """Changes the momentum as well as the learning rate."""
    return OneCycleLR(optimizer, 0.05, total_steps=STEPS)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"kind": "Adafactor", "clip_norm": 0.05}, marks=pytest.mark.long),
        {"kind": "NAdam", "precision": "fp16", "clip_norm": 0.5},
        pytest.param({"kind": "SGD, foreach", "scheduler": cycle}, marks=pytest.mark.long),
    ],
    ids=["clipping", "loss scaling", "a momentum that is scheduled"],
)
def test_clipping_scaling_and_schedules_are_those_of_one_process(ranks: RankPool, arguments: dict[str, Any]) -> None:
    assert_divided(ranks, arguments)


@pytest.mark.parametrize("kind", variants(["Adafactor", "ASGD", "Muon"], "Adafactor"))
def test_a_run_resumes_with_2_then_1_then_2_workers(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    (whole,) = ranks(1, train_kwargs, {"kind": kind, "scheduler": halve})
    for workers, stop_at in ((2, 5), (1, 13), (2, None)):
        arguments = {"kind": kind, "scheduler": halve, "stop_at": stop_at, "run_dir": str(tmp_path)}
        life = ranks(workers, train_kwargs, arguments, run_dir=tmp_path)
        assert [result["stopped"] for result in life] == [stop_at is not None] * workers
    for result in life:
        assert_identical(whole["weights"], result["weights"])
        assert_identical(whole["state"], result["state"])


class LengthOfAll(optim.Adadelta):
    """Looks at all tensors at once, as Prodigy does."""

    def step(self, closure: Any = None) -> Any:
        grads = [param.grad for group in self.param_groups for param in group["params"] if param.grad is not None]
        self.param_groups[0]["lr"] = 1.0 / (1.0 + sum(float(grad.norm()) for grad in grads))
        return super().step(closure)


def shorten_all(optimizer: optim.Optimizer, *_: Any) -> None:
    torch.nn.utils.clip_grad_norm_([param for group in optimizer.param_groups for param in group["params"]], 0.01)


def watched(params: Params) -> optim.Optimizer:
    optimizer = optim.Adadelta(params)
    optimizer.register_step_pre_hook(shorten_all)
    return optimizer


IN_FULL: dict[str, Callable[[Params], optim.Optimizer]] = {"a subclass": LengthOfAll, "hooks around steps": watched}


@pytest.mark.parametrize("kind", variants(IN_FULL, "a subclass"))
def test_what_may_look_at_several_tensors_runs_in_full_on_every_worker(ranks: RankPool, kind: str) -> None:
    (alone,) = ranks(1, train_kwargs, {"kind": kind})
    for result in ranks(2, train_kwargs, {"kind": kind}):
        assert_identical(alone, result)


def train_late_group_and_touch(politely: bool) -> Any:
    """A group that comes later, weights changed by hand, and states that are loaded while workers share them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    trainer = mh.Trainer(model, lambda m, x: m(x).square().mean(), optim.NAdam(model[0].parameters(), lr=0.1), slices=2)
    rows = torch.ones(8, 4)
    trainer.fit(rows, steps=2, batch_size=4)
    trainer.optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.05})
    before = trainer.optimizer.state_dict()
    before["state"] = {place: {n: v.clone() for n, v in state.items()} for place, state in before["state"].items()}
    trainer.fit(rows, steps=2, batch_size=4)
    trainer.optimizer.load_state_dict(before)
    if politely:
        with trainer.editing() as edited:
            edited[0].weight.mul_(0.5)
    else:
        with torch.no_grad():
            model[0].weight.mul_(0.5)
    try:
        trainer.fit(rows, steps=2, batch_size=4)
    except TrainingFailed as error:
        return str(error)
    return {"weights": weights_of(trainer), "state": state_of(trainer)}


def test_late_groups_loaded_states_and_edits_are_those_of_one_process(ranks: RankPool) -> None:
    (alone,) = ranks(1, train_late_group_and_touch, True)
    for result in ranks(2, train_late_group_and_touch, True):
        assert_identical(alone, result)
    for text in ranks(2, train_late_group_and_touch, False):
        assert "Weights were changed outside of a step" in text and "trainer.editing()" in text
