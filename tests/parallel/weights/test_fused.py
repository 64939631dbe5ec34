"""Fused optimizers against torch's own, over 100 steps: the same to rounding, and to the bit where no root is taken."""

from __future__ import annotations

import copy
import struct
from typing import Any

import pytest
import torch
from torch import nn

from manyhands.launcher.worker_process.lazy_compiler import load_compiler_late
from manyhands.native import library, why_not
from manyhands.parallel.gradients.slice_tree import program
from manyhands.parallel.weights.fused_update import Fused, ParameterRange, cut, fusible, pack_pieces, run_update
from manyhands.parallel.weights.local_update import LocalUpdate

load_compiler_late()  # as every worker does: a plain optimizer would load all of torch's compiler
pytestmark = pytest.mark.skipif(library is None, reason=f"NOT SHOWN HERE: {why_not()}")

CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01, "maximize": True}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.4, 0.9)}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.3}),
    (torch.optim.RMSprop, {"lr": 0.01}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
]


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(1)
    conv = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return [
        nn.Parameter(torch.randn(67, 129)),
        *conv.parameters(),
        nn.Parameter(torch.randn(())),
        nn.Parameter(torch.empty(0)),
    ]


def give_gradients(step: int, *lists: list[nn.Parameter]) -> None:
    """The third parameter has none in two of three steps; one arrives in another memory order than its parameter's."""
    generator = torch.Generator().manual_seed(step)
    for places in zip(*lists, strict=True):
        grad = torch.randn(places[0].shape, generator=generator)
        for param in places:
            param.grad = grad.clone()
    if step % 3:
        for params in lists:
            params[2].grad = None


def train(optimizer: torch.optim.Optimizer, update: Any, params: list[nn.Parameter], steps: range) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 30, 0.5)
    for step in steps:
        give_gradients(step, params)
        update()
        schedule.step()


@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda value: str(getattr(value, "__name__", value)))
def test_a_hundred_steps_end_where_torchs_end(kind: Any, options: dict[str, Any], recwarn: Any) -> None:
    theirs, ours = parameters(), parameters()
    groups = [[{"params": params[:2]}, {"params": params[2:], "lr": 0.02}] for params in (theirs, ours)]
    torchs, fused = (kind(group, **options) for group in groups)
    assert fusible(fused, ours) == ""
    train(torchs, lambda: torchs.step(), theirs, range(100))
    train(fused, Fused(fused).apply, ours, range(100))
    for right, found in zip(theirs, ours, strict=True):
        if kind is torch.optim.SGD:
            assert torch.equal(right, found)
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)
    assert_same_state(fused.state_dict(), torchs.state_dict())
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


def assert_same_state(found: dict[str, Any], right: dict[str, Any]) -> None:
    assert found["param_groups"] == right["param_groups"]
    assert found["state"].keys() == right["state"].keys()
    for index, values in right["state"].items():
        assert found["state"][index].keys() == values.keys()
        for name, value in values.items():
            torch.testing.assert_close(found["state"][index][name], value, rtol=1e-4, atol=1e-6)


def test_states_that_torch_made_are_taken_over_and_given_back() -> None:
    theirs, ours = parameters(), parameters()
    right, mixed = torch.optim.AdamW(theirs, lr=0.01), torch.optim.AdamW(ours, lr=0.01)
    fused = Fused(mixed)
    for step in range(12):
        give_gradients(step, theirs, ours)
        right.step()
        if step == 6:
            mixed.load_state_dict(copy.deepcopy(mixed.state_dict()))
        mixed.step() if step % 4 == 0 else fused.apply()
        fused.adopt() if step % 4 == 0 else None
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert_same_state(mixed.state_dict(), right.state_dict())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda params: torch.optim.SGD(params, lr=0.1, foreach=True), "foreach=True"),
        (lambda params: torch.optim.Adadelta(params), "Adadelta has no fused version"),
        (lambda params: type("Mine", (torch.optim.SGD,), {})(params, lr=0.1), "Mine has no fused version"),
        (lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1)), "is a tensor"),
    ],
)
def test_what_is_not_fused_says_why(make: Any, why: str) -> None:
    params = parameters()
    assert why in fusible(make(params), params)


def test_other_types_and_hooks_are_not_fused() -> None:
    param = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = torch.optim.SGD([param], lr=0.1)
    assert "float64" in fusible(optimizer, [param])
    single = nn.Parameter(torch.zeros(3))
    hooked = torch.optim.SGD([single], lr=0.1)
    hooked.register_step_post_hook(lambda *_: None)
    assert "hooks" in fusible(hooked, [single])


@pytest.mark.parametrize(
    ("numels", "parts"), [([5], 1), ([1000, 3, 0, 5000], 2), ([16, 16], 4), ([7] * 50, 3), ([0], 2), ([100_003], 5)]
)
def test_cuts_cover_every_element_once_in_parts_of_about_the_same_size(numels: list[int], parts: int) -> None:
    found = cut(numels, parts)
    assert len(found) <= parts
    seen = [(member, i) for part in found for member, start, count in part for i in range(start, start + count)]
    assert seen == [(member, i) for member, numel in enumerate(numels) for i in range(numel)]
    assert all(start % 16 == 0 for part in found for _, start, _ in part)
    largest = max(sum(count for _, _, count in part) for part in found)
    assert largest <= sum(numels) / parts + 32


def test_several_threads_give_the_bits_of_one() -> None:
    found = []
    for threads in (1, 3):
        torch.manual_seed(0)
        torch.set_num_threads(threads)
        params = [nn.Parameter(torch.randn(900, 1000)), nn.Parameter(torch.randn(77))]
        optimizer = torch.optim.AdamW(params)
        fused = Fused(optimizer)
        for _ in range(3):
            for param in params:
                param.grad = torch.full_like(param, 0.1)
            fused.apply()
        fused.close()
        found.append([param.detach().clone() for param in params])
    torch.set_num_threads(1)
    for one, three in zip(*found, strict=True):
        assert torch.equal(one, three)


@pytest.mark.parametrize("options", [{}, {"nesterov": True, "weight_decay": 0.1}], ids=str)
def test_a_large_update_into_another_copy_gives_the_bits_of_one_in_place(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    numel = 2**20 + 21  # enough for stores past the caches, and some left over
    weights, momenta, first, second = (torch.randn(numel) for _ in range(4))
    optimizer = torch.optim.SGD([nn.Parameter(weights)], lr=0.1, momentum=0.9, **options)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"] = momenta
    fused = Fused(optimizer)
    (batch,) = fused.plan_step([0])
    how, along = fused.how(batch, 0.5, 0.7), program([(0, 0), (0, 1)], 2)
    rows = struct.pack("2Q", first.data_ptr(), second.data_ptr())
    new, old = (torch.zeros(numel), torch.zeros(numel)), (weights.clone(), momenta.clone())
    run_update(how, _piece(old, new), rows, along)
    assert torch.equal(old[0], weights) and torch.equal(old[1], momenta)
    run_update(how, _piece(old, old), rows, along)
    fused.close()
    assert torch.equal(new[0], old[0]) and torch.equal(new[1], old[1])
    assert not torch.equal(old[0], weights)


def _piece(old: tuple[torch.Tensor, ...], new: tuple[torch.Tensor, ...]) -> bytes:
    (w, m), (to, kept) = (tuple(tensor.data_ptr() for tensor in copy) for copy in (old, new))
    return pack_pieces([ParameterRange(old[0].numel(), w, to, (m, 0, 0), (kept, 0, 0))])


def test_parameters_that_come_later_are_updated_too() -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([first], lr=0.1, momentum=0.9)
    update = LocalUpdate([first, second], optimizer)
    for step in range(2):
        for param in (first, second):
            param.grad = torch.ones(3)
        update.apply()
        if step == 0:
            assert torch.equal(second, torch.ones(3))
            optimizer.add_param_group({"params": [second], "lr": 0.5})
    update.close()
    assert torch.equal(second, torch.full((3,), 0.5))
