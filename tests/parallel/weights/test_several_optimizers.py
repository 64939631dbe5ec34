"""One optimizer per part of a model: each trains its own part, and together they are saved and resumed as one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from manyhands.errors import SpecError
from manyhands.parallel.model.per_part_optimizers import SeveralOptimizers, divide_parameters

MAKERS = {
    "one": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "two": lambda params: torch.optim.AdamW([{"params": params[:1], "lr": 0.5}, {"params": params[1:]}], lr=0.01),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


def several(model: Net) -> SeveralOptimizers:
    return SeveralOptimizers({name: MAKERS[name](params) for name, params in divide_parameters(model, MAKERS).items()})


def step(model: Net, *optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(torch.ones(3, 4)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def test_each_part_is_trained_by_its_own_rule_through_a_resume_and_a_schedule() -> None:
    model, plain = Net(), Net()
    optimizer = several(model)
    apart = [MAKERS["one"](list(plain.one.parameters())), MAKERS["two"](list(plain.two.parameters()))]
    for number in range(4):
        step(model, optimizer)
        step(plain, *apart)
        saved, optimizer = optimizer.state_dict(), several(model)
        optimizer.load_state_dict(saved)
        if number == 1:
            for group in [*optimizer.param_groups, *(group for one in apart for group in one.param_groups)]:
                group["lr"] *= 0.5
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name


def test_parts_that_are_not_there_and_parameters_without_an_optimizer_are_refused() -> None:
    with pytest.raises(SpecError, match="'tow', which is no part"):
        divide_parameters(Net(), {"one": None, "tow": None})
    with pytest.raises(SpecError, match=r"two\.weight is trained, but no optimizer"):
        divide_parameters(Net(), {"one": None})
    model = Net()
    model.two.requires_grad_(False)
    assert list(divide_parameters(model, {"one": None})) == ["one"]
