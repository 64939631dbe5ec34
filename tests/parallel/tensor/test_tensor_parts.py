"""Sharded tensors do what whole ones do, in any code that uses them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from manyhands.errors import TrainingFailed
from manyhands.parallel.tensor.autograd_collectives import Split, cut, enter, slices_in_order
from manyhands.parallel.tensor.sharded_tensor import ShardedTensor, parted, whole_of
from manyhands.testing import RankPool
from tests.parallel.tensor.tensor_cases import an_axis

ROWS, CLASSES = 4, 7


class Doubled(torch.autograd.Function):
    """A user's function, which knows plain tensors only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def written(x: Tensor) -> Tensor:
    y = x * 1.0
    y[:, 2] += 3.0
    y += torch.ones(CLASSES)
    y.mul_(2.0)
    return y.relu_()


def labels() -> Tensor:
    return torch.tensor([1, 6, -100, 3])


def entropy(x: Tensor, **settings: Any) -> Tensor:
    return functional.cross_entropy(x, labels(), **settings)


def image(x: Tensor) -> Tensor:
    """Rows x classes x 3 x 1."""
    return torch.stack([x, x * 2, x * x], -1)[..., None] if not isinstance(x, ShardedTensor) else _image_in_parts(x)


def _image_in_parts(x: ShardedTensor) -> Tensor:
    return parted(torch.stack([x.part, x.part * 2, x.part * x.part], -1)[..., None], x.division)


# What stays in parts, and what becomes whole.
IN_PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "arithmetic": lambda x: (2 * x - 1) / 3 + x * x - (1 - x) ** 2,
    "one value for all columns": lambda x: x * torch.arange(1.0, ROWS + 1)[:, None] + torch.ones(1),
    "dropout": lambda x: functional.dropout(x, 0.5),
    "rows": lambda x: x[1:3],
    "a mask of rows": lambda x: x[torch.tensor([True, False, True, True])],
    "reshaped rows": lambda x: x.view(2, 2, -1)[0, ..., :].reshape(-1, CLASSES),
    "channels pooled and flattened": lambda x: functional.avg_pool2d(image(x), (3, 1)).flatten(1),
    "channels dropped": lambda x: functional.dropout2d(image(x), 0.5),
    "written": written,
    "half": lambda x: x.bfloat16().float(),
}
WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "a column": lambda x: x[:, 3],
    "by keyword": lambda x: torch.flatten(input=x),
    "concatenated": lambda x: torch.cat([x, torch.ones(ROWS, 1)], 1),
    "transposed": lambda x: x.T @ x,
    "a function of one's own": lambda x: Doubled.apply(x),
    "alpha dropout": lambda x: functional.alpha_dropout(x, 0.5, True),
    "random like it": lambda x: x * torch.rand_like(x),
    "a value for each column": lambda x: x + torch.arange(1.0, CLASSES + 1),
    "cross entropy": entropy,
    "sum": lambda x: entropy(x, reduction="sum"),
    "none": lambda x: entropy(x, reduction="none"),
    "smoothed": lambda x: entropy(x, label_smoothing=0.2),
    "weights by class": lambda x: entropy(x, weight=torch.arange(1.0, CLASSES + 1)),
    "probabilities": lambda x: functional.cross_entropy(x, torch.full((ROWS, CLASSES), 1 / CLASSES)),
    "of pixels": lambda x: functional.cross_entropy(image(x), torch.arange(12).view(ROWS, 3, 1) % CLASSES),
    "module": lambda x: torch.nn.CrossEntropyLoss(ignore_index=6)(x.float(), labels().clamp(min=0)),
}


def use(name: str, x: Tensor, given: Tensor) -> tuple[bool, Tensor, Tensor]:
    """Whether the result is in parts, the result, and the gradient of its leaf."""
    torch.manual_seed(3)
    result = {**IN_PARTS, **WHOLE}[name](x)
    (whole_of(result).square().sum()).backward()
    assert given.grad is not None
    return isinstance(result, ShardedTensor), whole_of(result).detach(), given.grad


def leaf() -> Tensor:
    return torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(1), requires_grad=True)


def use_all(store: str) -> dict[str, tuple[bool, Tensor, Tensor]]:
    found = {}
    with an_axis(store, plane=False) as axis:
        split = Split(axis, 1, slices_in_order(CLASSES, axis.size), "a layer")
        for name in [*IN_PARTS, *WHOLE]:
            given = leaf()
            found[name] = use(name, parted(cut(given * 1.0, split), split), given)
    return found


def test_every_use_gives_what_the_whole_gives(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks(2, use_all, str(tmp_path / "store")):
        for name, (in_parts, result, gradient) in found.items():
            given = leaf()
            _, expected, expected_gradient = use(name, given * 1.0, given)
            torch.testing.assert_close(result, expected, msg=lambda text, name=name: f"{name}: {text}")
            torch.testing.assert_close(gradient, expected_gradient, msg=lambda text, name=name: f"{name}: {text}")
            assert in_parts == (name in IN_PARTS), name


def refuse(store: str) -> list[str]:
    with an_axis(store, plane=False) as axis:
        split = Split(axis, 1, slices_in_order(CLASSES, axis.size), "a layer")
        x = parted(cut(leaf() * 1.0, split), split)
        with pytest.raises(TrainingFailed) as view:
            x[1:3][:, 2] = 1.0
        with pytest.raises(IndexError) as label:
            functional.cross_entropy(x, torch.full((ROWS,), CLASSES))
        assert torch.equal(copy.deepcopy(x), leaf().detach())
        text = repr(x) if axis.rank == 0 else ""  # one rank alone: it waits for no other
        return [str(view.value), str(label.value), text]


def test_what_cannot_be_right_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks(2, refuse, str(tmp_path / "store"))
    assert first[:2] == second[:2]
    assert "__setitem__ writes into a view of what a layer returned" in first[0]
    assert 'rules={"a layer": "whole"}' in first[0]
    assert "Target 7 is out of bounds" in first[1]
    assert "shape=(4, 7), sharded along dim 1 over 2 ranks" in first[2]


def test_what_is_entered_is_let_go_of_with_the_pass() -> None:
    axis: Any = SimpleNamespace(size=2)  # nothing travels forward
    weight = torch.randn(3, 3, requires_grad=True)
    activation = weight * 2
    entered = enter(activation, axis, "layer")
    assert enter(activation, axis, "layer") is entered and torch.equal(entered, activation)
    kept = weakref.ref(activation)
    del activation, entered
    assert kept() is None
