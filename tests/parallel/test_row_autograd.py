"""Taking rows: torch's own embedding, to the bit, in both directions."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from manyhands.native import why_not
from manyhands.parallel.row_autograd import take_rows

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")


@pytest.mark.parametrize("shape", [(0,), (40,), (5, 8), (2, 3, 4)])
def test_rows_and_their_gradients_are_those_of_torch(shape) -> None:
    places, values = torch.randint(0, 7, shape), torch.randn(7, 5)
    found = []
    for take in (take_rows, lambda rows, places: functional.embedding(places, rows)):
        rows = values.clone().requires_grad_()
        taken = take(rows, places)
        (taken.mT * torch.linspace(-3, 1, 5)[:, None]).square().sum().backward()
        found.append((taken.detach(), rows.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_a_gradient_has_gradients() -> None:
    rows, places = torch.randn(4, 3, requires_grad=True), torch.tensor([[0, 2], [2, 3]])
    (first,) = torch.autograd.grad(take_rows(rows, places).pow(3).sum(), rows, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), rows)
    torch.testing.assert_close(second, 6 * rows.detach() * torch.tensor([1.0, 0.0, 2.0, 1.0])[:, None])
