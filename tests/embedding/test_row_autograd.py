"""Rows of a batch: torch's own embedding of the different ids' rows, to the bit, in both directions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from manyhands.embedding.row_autograd import taken
from manyhands.native import why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")


def take_from(rows: Tensor, inverse: Tensor) -> tuple[Tensor, list[Tensor]]:
    found: list[Tensor] = []
    return taken(lambda: functional.embedding(inverse, rows), inverse, len(rows), found.append), found


@pytest.mark.parametrize("shape", [(0,), (40,), (5, 8), (2, 3, 4)])
def test_gradients_are_those_of_torch(shape) -> None:
    inverse, values = torch.randint(0, 7, shape), torch.randn(7, 5)
    rows = values.clone().requires_grad_()
    ours, found = take_from(values, inverse)
    for result in (ours, functional.embedding(inverse, rows)):
        (result.mT * torch.linspace(-3, 1, 5)[:, None]).square().sum().backward()
    assert rows.grad is not None and torch.equal(found[0], rows.grad) and len(found) == 1


def test_a_penalty_on_gradients_reaches_the_rows() -> None:
    values, inverse = torch.randn(4, 3), torch.tensor([[0, 2], [2, 3]])
    result, found = take_from(values, inverse)
    (first,) = torch.autograd.grad(result.pow(3).sum(), result, create_graph=True)
    assert found == [], "`grad` did not ask for the gradients of rows"
    first.sum().backward()
    torch.testing.assert_close(found[0], 6 * values * torch.tensor([1.0, 0.0, 2.0, 1.0])[:, None])


def test_it_can_be_changed_in_place_and_is_gone_after_one_backward() -> None:
    result, found = take_from(torch.ones(2, 3), torch.tensor([0, 1, 1]))
    loss = result.mul_(2).sum()
    loss.backward()
    assert found[0].tolist() == [[2.0] * 3, [4.0] * 3]
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
