"""Workers of async push factors of gradients; servers make the product on its way into the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from manyhands.native import why_not
from manyhands.parallel import factors
from manyhands.parallel.served_course import Ongoing
from manyhands.parallel.served_messages import Filled
from manyhands.strategies import served_courses
from tests.served.direct import train

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}"),
]

Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, int]]:
    """What servers hear of factors. Matrices are small here, and blocks smaller: one is several, and ends in a row."""
    monkeypatch.setattr(factors, "LEAST_BYTES", 2**12)
    monkeypatch.setattr("manyhands.parallel.served_part.BLOCK_NUMEL", 5000)
    heard: list[dict[int, int]] = []
    original = Ongoing.fill

    def fill(self: Ongoing, sender: bytes, message: Filled) -> Any:
        heard.append(message.factored)
        return original(self, sender, message)

    monkeypatch.setattr(Ongoing, "fill", fill)
    return heard


def weights(optimizer: Optimizers, **settings: Any) -> list[torch.Tensor]:
    model, made, _ = train("async", optimizer, clip=None, slices=1, **settings)
    states = [value for state in made.state_dict()["state"].values() for value in state.values()]
    return [value.clone() for value in [*model.state_dict().values(), *states] if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda params: torch.optim.SGD(params, lr=0.01),
        lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda params: torch.optim.RMSprop(params, lr=1e-4, eps=1e-3),
    ],
    ids=["SGD", "momentum", "RMSprop"],
)
def test_servers_that_die_all_the_time_make_of_factors_what_they_make_of_gradients(
    optimizer: Optimizers, pushed: list[dict[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = weights(optimizer, servers=3, die_every=4)
    assert any(pushed) and all(set(one) <= {0, 4} for one in pushed)  # not the last: it has as many outputs as nothing
    monkeypatch.setattr(served_courses, "WORKERS_PER_FACTORING_SERVER", 0)
    pushed.clear()
    expected = weights(optimizer, servers=3, die_every=4)
    assert not any(pushed)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "clip", "slices", "mode"),
    [
        (torch.optim.SGD, 1.0, 1, "async"),  # the norm is of whole gradients
        (torch.optim.NAdam, None, 1, "async"),  # which runs as it is, on gradients
        (torch.optim.SGD, None, 4, "async"),  # gradients that are summed
        (torch.optim.SGD, None, 1, "sync"),  # where bits count
    ],
)
def test_where_gradients_themselves_are_needed_they_are_pushed(
    optimizer: Callable[..., torch.optim.Optimizer],
    clip: float | None,
    slices: int,
    mode: str,
    pushed: list[dict[int, int]],
) -> None:
    train(mode, lambda params: optimizer(params, lr=0.01), clip=clip, servers=2, slices=slices)
    assert pushed and not any(pushed)


@pytest.mark.parametrize("factored", [{99: 1}, {-1: 1}, {1: 1}, {0: 10**6}, {0: 0}, {0: -4}])
def test_factors_that_cannot_be_are_not_used(factored: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    original, broken = Ongoing.fill, list[bool]()

    def fill(self: Ongoing, sender: bytes, message: Filled) -> Any:
        if not broken:
            broken.append(True)
            assert original(self, sender, msgspec.structs.replace(message, factored=factored)) == []
            assert not self.has_due
        return original(self, sender, message)

    monkeypatch.setattr(Ongoing, "fill", fill)
    _, _, told = train("async", lambda params: torch.optim.SGD(params, lr=0.01), clip=None, servers=2, slices=1)
    assert broken and [done.step for done in told] == list(range(1, 15))
