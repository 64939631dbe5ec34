"""Factors that are taken from a backward pass: together with what is in `.grad`, they are the gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from manyhands.parallel.factors import Factor, Factoring, blocks_of, fits, product, read, write
from manyhands.parallel.served_rows import RowFiller

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


def twice_with_too_many_rows(net: Net, x: Tensor) -> Tensor:
    long = x.repeat(5, 1)
    return net.first(net.first(net.first(net.first(long)))).square().mean()


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
    ("loss", "factored"),
    [
        (plain, {0: 16, 2: 16}),
        (in_sequences, {0: 16, 2: 16}),
        (expanded, {0: 16, 2: 16}),
        (twice, {0: 32}),
        (twice_with_too_many_rows, {}),
        (in_another_way_as_well, {}),
        (with_a_penalty, {}),
        (computed_again, {0: 16, 2: 16}),
        (computed_again_in_a_backward_of_its_own, {0: 16, 2: 16}),
        (mapped, {}),
        (compiled, {0: 16, 2: 16}),
        (in_half, {}),
        (one_part_frozen, {1: 16}),
    ],
)
def test_what_is_in_the_row_is_the_gradient(loss: Loss, factored: dict[int, int]) -> None:
    net, x = Net(), torch.randn(16, WIDTH)
    loss(net, x).backward()
    params = [param for param in net.parameters() if param.requires_grad]
    expected = [None if param.grad is None else param.grad.clone() for param in params]
    views = [torch.full_like(param, 7.0) for param in params]
    filler = RowFiller(params)
    filler.begin(views, 1, factors=True)
    with filler.in_forward():
        result = loss(net, x)
    filler.backward(result, 0)
    absent = filler.finish()
    filler.close()
    assert filler.factored == factored
    for place, (view, grad) in enumerate(zip(views, expected, strict=True)):
        assert (grad is None) == (place in absent)
        found = _product(view, factored[place]) if place in factored else view.detach()
        torch.testing.assert_close(found, torch.zeros_like(found) if grad is None else grad, rtol=1e-5, atol=1e-7)


def _product(view: Tensor, rows: int) -> Tensor:
    outputs, inputs = read(view.detach(), rows)
    return outputs.t() @ inputs


def test_a_gradient_that_somebody_else_looks_at_is_left_whole() -> None:
    net, x, seen = Net(), torch.randn(16, WIDTH), list[Tensor]()
    net.first.weight.register_hook(seen.append)
    factoring = Factoring(list(net.parameters()))
    with factoring:
        result = plain(net, x)
    factoring.backward(result)
    assert len(seen) == 1 and net.first.weight.grad is not None
    assert not factoring.take(net.first.weight) and factoring.take(net.second.weight)


def test_outside_of_its_contexts_nothing_is_taken() -> None:
    net, x = Net(), torch.randn(16, WIDTH)
    factoring = Factoring(list(net.parameters()))
    plain(net, x).backward()
    with factoring:
        plain(net, x).backward()  # the loss's own
    assert net.first.weight.grad is not None and not factoring.take(net.first.weight)


@given(
    width=st.integers(1, 200),
    height=st.integers(1, 60),
    cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    data=st.data(),
)
def test_blocks_are_the_whole_and_their_products_the_gradient(
    width: int, height: int, cuts: tuple[float, float], data: st.DataObject
) -> None:
    numel = width * height
    start, stop = sorted(int(one * numel) for one in cuts)
    start -= start % 16
    factor = Factor(torch.randn(3, height), torch.randn(3, width))
    whole, room = (factor.outputs.t() @ factor.inputs).flatten(), torch.empty(0)
    made: list[Tensor] = []
    for block in blocks_of(start, stop, width, data.draw(st.integers(1, 2000))):
        assert block.start % 16 == 0 and block.start < block.stop
        room, address = product(factor, block, room)
        offset = (address - room.data_ptr()) // 4
        made.append(room[offset : offset + block.stop - block.start].clone())
    torch.testing.assert_close(torch.cat(made) if made else whole[:0], whole[start:stop])


def test_factors_have_room_where_the_gradient_has_if_they_are_shorter() -> None:
    matrix = torch.empty(8, 8)
    assert fits(matrix, 4) and not fits(matrix, 5) and not fits(matrix, 0) and not fits(matrix, -1)
    assert not fits(torch.empty(8), 1)
    factors = [Factor(torch.randn(1, 8), torch.randn(1, 8)), Factor(torch.randn(2, 8), torch.randn(2, 8))]
    assert write(matrix, factors) == 3
    assert torch.equal(
        read(matrix, 3).inputs, functional.linear(torch.cat([one.inputs for one in factors]), torch.eye(8))
    )
