"""Gradients that are computed into a row of memory, and those that cannot be: the row has them all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from manyhands.parameter_server.worker import direct_linear_gradients
from manyhands.parameter_server.worker.gradient_writer import GradientWriter

WIDTH = 320  # 400 KB: large enough to be worth it


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def plain(net: Net, x: Tensor) -> Tensor:
    return net(x).square().mean()


def in_sequences(net: Net, x: Tensor) -> Tensor:
    return net(x.view(2, -1, WIDTH)).square().mean()


def expanded(net: Net, x: Tensor) -> Tensor:
    return net(x).sum()  # whose gradient is one number, seen many times


def twice(net: Net, x: Tensor) -> Tensor:
    return net.first(net.first(x)).square().mean()


def with_many_rows(net: Net, x: Tensor) -> Tensor:
    return net(x.repeat(5, 1)).square().mean()


def in_another_way_as_well(net: Net, x: Tensor) -> Tensor:
    return (net.first(x) + x @ net.first.weight).square().mean()


def with_a_penalty(net: Net, x: Tensor) -> Tensor:
    seen = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(net(seen).square().mean(), seen, create_graph=True)
    return net(x).square().mean() + slope.square().sum()


def computed_again(net: Net, x: Tensor) -> Tensor:
    return checkpoint(net, x, use_reentrant=False).square().mean()


def computed_again_in_a_backward_of_its_own(net: Net, x: Tensor) -> Tensor:
    return checkpoint(net, x.clone().requires_grad_(), use_reentrant=True).square().mean()


def mapped(net: Net, x: Tensor) -> Tensor:
    return torch.vmap(net)(x).square().mean()


def compiled(net: Net, x: Tensor) -> Tensor:
    return torch.compile(net, backend="eager")(x).square().mean()


def in_half(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net(x).float().square().mean()


def one_part_frozen(net: Net, x: Tensor) -> Tensor:
    net.first.weight.requires_grad_(False)
    return plain(net, x)


Loss = Callable[[Net, Tensor], Tensor]


@pytest.mark.parametrize(
    ("loss", "straight_ones"),
    [
        (plain, {0, 2}),
        (in_sequences, {0, 2}),
        (expanded, {0, 2}),
        (twice, set()),
        (with_many_rows, set()),
        (in_another_way_as_well, {0}),
        (with_a_penalty, set()),
        (computed_again, {0, 2}),
        (computed_again_in_a_backward_of_its_own, {0, 2}),
        (mapped, set()),
        (compiled, {0, 2}),
        (in_half, set()),
        (one_part_frozen, {1}),
    ],
)
def test_what_is_in_the_row_is_the_gradient(
    loss: Loss, straight_ones: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = Net(), torch.randn(16, WIDTH)
    loss(net, x).backward()
    params = [param for param in net.parameters() if param.requires_grad]
    expected = [None if param.grad is None else param.grad.clone() for param in params]
    views = [torch.full_like(param, 7.0) for param in params]
    made: set[int] = set()
    make = direct_linear_gradients.DirectLinearGradients._make
    monkeypatch.setattr(
        direct_linear_gradients.DirectLinearGradients, "_make", lambda *of: make(*of) and (made.add(of[1]) or True)
    )
    filler = GradientWriter(params)
    filler.begin(views, 1, straight=True)
    with filler.in_forward():
        result = loss(net, x)
    filler.backward(result, 0)
    absent = filler.finish()
    filler.close()
    assert made == straight_ones
    for place, (view, grad) in enumerate(zip(views, expected, strict=True)):
        assert (grad is None) == (place in absent)
        found = view.detach()
        torch.testing.assert_close(found, torch.zeros_like(found) if grad is None else grad, rtol=1e-5, atol=1e-7)


def test_a_gradient_with_a_hook_is_passed_to_it() -> None:
    net, x, seen = Net(), torch.randn(16, WIDTH), list[Tensor]()
    net.first.weight.register_hook(seen.append)
    params = list(net.parameters())
    views = [torch.zeros_like(param) for param in params]
    filler = GradientWriter(params)
    filler.begin(views, 1, straight=True)
    with filler.in_forward():
        result = plain(net, x)
    filler.backward(result, 0)
    filler.finish()
    filler.close()
    assert len(seen) == 1 and torch.equal(seen[0], views[0].detach())
