"""What servers make of gradients, optimizer by optimizer, and what they find when they take a dead one's place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import manyhands as mh
from manyhands.errors import BadLoss, SpecError, TrainingFailed
from manyhands.native import why_not
from manyhands.parameter_server.worker import direct_linear_gradients
from manyhands.testing import RankPool
from tests.parameter_server.direct import BATCH, SLICES, World, batches_of_two_epochs, data, loss, make_model, train

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}"),
]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, initial_accumulator_value=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.001, momentum=0.5, centered=True),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "FTRL": lambda params: mh.optim.FTRL(params, lr=0.05, l1=0.001),
}


def in_one_process(name: str, clip: float | None) -> dict[str, Any]:
    trainer = mh.Trainer(make_model(), loss, OPTIMIZERS[name], slices=SLICES, clip_norm=clip)
    trainer.fit(data(), epochs=2, batch_size=BATCH)
    return values_of(trainer.model, trainer.optimizer)


def values_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    states = optimizer.state_dict()["state"]
    values = {f"{number} {key}": value for number, state in states.items() for key, value in state.items()}
    return {key: torch.as_tensor(value).numpy().copy() for key, value in {**model.state_dict(), **values}.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_servers_that_die_all_the_time_end_where_one_process_ends(ranks: RankPool, name: str) -> None:
    clip = 1.0 if name in ("AdamW", "NAdam") else None
    model, optimizer, updates = train("sync", OPTIMIZERS[name], clip=clip, servers=2, die_every=5)
    (expected,) = ranks(1, in_one_process, name, clip)
    found = values_of(model, optimizer)
    assert found.keys() == expected.keys()
    assert [key for key in expected if not np.array_equal(expected[key], found[key])] == []
    assert [done.update for done in updates] == [done.step for done in updates] == list(range(1, 15))


def test_one_worker_alone_is_never_stale_in_async_either() -> None:
    _, _, updates = train("async", OPTIMIZERS["SGD"], clip=None, servers=3, die_every=2)
    assert [(done.update, done.staleness) for done in updates] == [(number, 0) for number in range(1, 15)]


def test_gradients_that_are_computed_straight_into_a_row_are_those_that_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    make = direct_linear_gradients.DirectLinearGradients._make
    monkeypatch.setattr(
        direct_linear_gradients.DirectLinearGradients, "_make", lambda *of: make(*of) and not made.append(of[1])
    )
    found = values_of(*train("async", OPTIMIZERS["momentum"], clip=None, servers=2, slices=1, die_every=4)[:2])
    assert set(made) == {4}  # the only matrix that is large enough
    made.clear()
    monkeypatch.setattr(direct_linear_gradients, "MOST_ROWS", 0)
    expected = values_of(*train("async", OPTIMIZERS["momentum"], clip=None, servers=2, slices=1, die_every=4)[:2])
    assert not made
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-5, atol=1e-7, err_msg=key)


def test_a_parameter_is_kept_where_the_user_says() -> None:
    train("sync", OPTIMIZERS["SGD"], clip=None, servers=2, place={"4.*": 1})
    with pytest.raises(SpecError, match="matches no trained parameter"):
        train("sync", OPTIMIZERS["SGD"], clip=None, servers=2, place={"absent.*": 1})
    with pytest.raises(SpecError, match="names a server that does not exist"):
        train("sync", OPTIMIZERS["SGD"], clip=None, servers=2, place={"4.*": 2})


class Remembers(torch.nn.Linear):
    """Keeps all that it has seen in a buffer."""

    def __init__(self) -> None:
        super().__init__(10, 3)
        self.register_buffer("memory", torch.zeros(200_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.memory += 1
        return super().forward(x)


def test_buffers_that_are_too_large_to_travel_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.parameter_server.direct.make_model", Remembers)
    with pytest.raises(TrainingFailed, match=r"changed 0\.8 MB of buffers"):
        train("sync", OPTIMIZERS["SGD"], clip=None, servers=1)


def test_an_optimizer_that_cannot_run_on_a_server_is_refused() -> None:
    with pytest.raises(SpecError, match="LBFGS evaluates the loss several times"):
        train("sync", lambda params: torch.optim.LBFGS(params), clip=None, servers=1)
    with pytest.raises(SpecError, match="The settings of SGD cannot be sent"):
        train("sync", lambda params: with_setting(OPTIMIZERS["SGD"](params), object()), clip=None, servers=1)


class LongNamed(torch.nn.Linear):
    """Its description is as long as that of many thousands of parameters."""

    def __init__(self) -> None:
        super().__init__(10, 3)
        self.register_parameter("n" * 1_100_000, torch.nn.Parameter(torch.zeros(3)))


class Remembering(torch.optim.NAdam):
    """The same of its states."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for state in self.state.values():
            state["said"] = "s" * 300_000


def test_an_interval_too_large_for_a_message_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match=r"What server 0 commits with every update takes .* at most 1\.05 MB"):
        train("sync", lambda params: Remembering(params, lr=0.01), clip=None, servers=1)
    monkeypatch.setattr("tests.parameter_server.direct.make_model", LongNamed)
    with pytest.raises(SpecError, match=r"description of an interval for servers takes 1\.10 MB .* at most 1\.05 MB"):
        train("sync", OPTIMIZERS["SGD"], clip=None, servers=1)


def with_setting(optimizer: torch.optim.Optimizer, value: Any) -> torch.optim.Optimizer:
    optimizer.param_groups[0]["mine"] = value
    return optimizer


def half_frozen() -> torch.nn.Module:
    model = make_model()
    for param in model[0].parameters():  # type: ignore[index]
        param.requires_grad_(False)
    return model


def test_an_optimizer_may_have_parameters_that_are_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.parameter_server.direct.make_model", half_frozen)
    model, _, updates = train("async", OPTIMIZERS["momentum"], clip=None, servers=2, die_every=3, answers=5)
    begun, found = half_frozen().state_dict(), model.state_dict()
    assert torch.equal(found["0.weight"], begun["0.weight"]) and not torch.equal(found["4.weight"], begun["4.weight"])
    assert len(updates) == 3


class WithNothing(torch.nn.Linear):
    """A parameter of it has no elements."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(10, 3)
        self.nothing = torch.nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.nothing.sum()


def test_a_parameter_may_have_no_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.parameter_server.direct.make_model", WithNothing)
    assert len(train("async", OPTIMIZERS["NAdam"], clip=None, servers=2, die_every=3, answers=5)[2]) == 3


def test_a_learning_rate_may_be_a_tensor() -> None:
    def losses(rate: Any) -> list[float]:
        updates = train("async", lambda params: torch.optim.Adam(params, lr=rate), clip=None, servers=1, answers=5)[2]
        assert updates[0].lr == pytest.approx(0.01)
        return [done.loss for done in updates]

    assert losses(torch.tensor(0.01)) == pytest.approx(losses(0.01), rel=1e-3)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_step_whose_weights_are_nothing_is_refused(mode: str) -> None:
    world = World(mode, OPTIMIZERS["SGD"], None, 2, {}, loss_fn=lambda model, batch: (model(batch[0]).sum(), 0.0))
    world.open(0)
    batches = batches_of_two_epochs()
    with pytest.raises(BadLoss, match="The weights of step 1 sum to 0"):
        for _ in range(SLICES + 2):
            reply = world.engine.ask(lambda: 0)
            if reply.work is not None:
                world.engine.compute(batches.at(reply.work.step), reply.work, reply.version)
