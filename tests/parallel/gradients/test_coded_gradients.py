"""Sums of gradients that travel in fewer bytes, over real ranks: the same on each, and nothing lost for good."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import FileStore

from manyhands.comm.axis import connect
from manyhands.comm.codecs import Bf16, Int8
from manyhands.data.sample_order import slices_of
from manyhands.parallel.gradients.network_sum import GradientSum
from manyhands.testing import RankPool

SHAPES = [(3,), (40, 60), (1,), (7, 5), (1500,), (0,)]
SOMETIMES, NEVER, DOUBLE = 3, 4, 1  # parameters by place: used in some steps, in none, of fp64
SLICES = 5
CODECS = {"bf16": Bf16, "int8": Int8}
ROOM = 16


def gradient(step: int, v: int, place: int) -> torch.Tensor | None:
    """What slice `v` of a step contributes to a parameter; a pure function, so that tests know the exact sum."""
    if place == NEVER or (place == SOMETIMES and (step % 3 or v < 3)):
        return None
    generator = torch.Generator().manual_seed(1000 * step + 10 * v + place)
    return torch.randn(SHAPES[place], generator=generator)


def exact_sum(steps: Sequence[int], place: int) -> torch.Tensor:
    total = torch.zeros(SHAPES[place], dtype=torch.float64)
    for step in steps:
        for v in range(SLICES):
            part = gradient(step, v, place)
            total += 0 if part is None else part
    return total


class Given(NamedTuple):
    """What a rank saw: each step's sums (None for no gradient) and messages, and what is left for others to restore."""

    grads: list[list[np.ndarray | None]]
    messages: list[list[bytes]]
    bytes_sent: int
    order: list[int] | None
    rows: dict[int, np.ndarray]


def sum_steps(store: str, codec: str, steps: Sequence[int], before: Given | None, slices: int = SLICES) -> Given:
    from manyhands.training.worker.worker import _current_session

    identity, device = _current_session.get()[0].identity, torch.device("cpu")
    rank, world = identity.rank, identity.world_size
    axis = connect(FileStore(store, world), rank, world, address="127.0.0.1", device=device, timeout_s=60)
    dtypes = [torch.float64 if place == DOUBLE else torch.float32 for place in range(len(SHAPES))]
    params = [nn.Parameter(torch.zeros(s, dtype=d)) for s, d in zip(SHAPES, dtypes, strict=True)]
    summed = GradientSum(params, axis, 2048, CODECS[codec]())
    if before is not None:
        summed.restore(before.order, {place: torch.from_numpy(rows) for place, rows in before.rows.items()})
    shares = [slices_of(r, world, slices) for r in range(world)]
    grads, messages = [], []
    for step in steps:
        summed.begin(slices, shares, f"step {step}")
        carries = world > 1 and summed.can_carry(ROOM)
        for v in shares[rank]:
            summed.before_backward(v)
            if carries and v == shares[rank][-1]:
                summed.carry(bytes([rank, step, 255]))
            parts = [(gradient(step, v, place), param) for place, param in enumerate(params)]
            torch.stack([(part * param).sum().double() for part, param in parts if part is not None]).sum().backward()
            summed.after_backward(v)
        summed.finish()
        grads.append([None if param.grad is None else param.grad.numpy().copy() for param in params])
        messages.append(summed.carried() if carries else [])
    rows = {place: values.numpy() for place, values in summed.gather_residuals().items()}
    summed.close()
    return Given(grads, messages, summed.bytes_sent, summed.settled_order, rows)


def same(left: Any, right: Any) -> bool:
    if left is None or right is None:
        return left is right
    return bool(left.tobytes() == right.tobytes())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("world_size", "slices"), [(2, 2), (2, 5), (3, 5), (3, 2), (4, 4), (5, 7)])
def test_every_rank_gets_the_same_bits_close_to_the_sum(
    ranks: RankPool, tmp_path: Path, codec: str, world_size: int, slices: int
) -> None:
    steps = range(1, 5)
    first, *others = ranks(world_size, sum_steps, str(tmp_path / "store"), codec, steps, None, slices)
    for other in others:
        for mine, theirs in zip(first.grads, other.grads, strict=True):
            assert all(same(a, b) for a, b in zip(mine, theirs, strict=True))
    for step, grads, messages in zip(steps, first.grads, first.messages, strict=True):
        for place, grad in enumerate(grads):
            parts = [part for v in range(slices) if (part := gradient(step, v, place)) is not None]
            assert (grad is None) == (not parts)
            if parts and grad is not None and grad.size:
                error = np.abs(grad - torch.stack(parts).double().sum(0).numpy()).max()
                assert error < (1e-12 if place == DOUBLE else 0.15 if codec == "int8" else 0.1), place
                assert place == DOUBLE or error > 0 or grad.size < 10, "it went through the codec"
        if slices >= world_size:
            assert messages == [bytes([rank, step, 255]).ljust(ROOM, b"\0") for rank in range(world_size)]
        else:
            assert not messages


def given_so_far(lives: Sequence[Given], place: int) -> torch.Tensor:
    total = torch.zeros(SHAPES[place], dtype=torch.float64)
    for life in lives:
        for grads in life.grads:
            total += 0 if grads[place] is None else torch.from_numpy(grads[place])
    return total


@pytest.mark.parametrize("worlds", [(2, 2), (3, 2), (2, 3), (3, 1, 2)], ids=str)
def test_sums_and_residuals_add_up_on_any_number_of_ranks(
    ranks: RankPool, tmp_path: Path, worlds: tuple[int, ...]
) -> None:
    """A parameter that only some steps use is among them: its residual waits for it."""
    lives: list[Given] = []
    for number, world_size in enumerate(worlds):
        steps = range(1 + 8 * number, 9 + 8 * number)
        store, before = str(tmp_path / f"store{number}"), lives[-1] if lives else None
        lives.append(ranks(world_size, sum_steps, store, "int8", steps, before)[0])
        for place in range(len(SHAPES)):
            if place == DOUBLE:
                continue
            residuals = torch.tensor(lives[-1].rows[place]).double().sum(0) if place in lives[-1].rows else 0
            wanted = exact_sum(range(1, 9 + 8 * number), place)
            torch.testing.assert_close(given_so_far(lives, place) + residuals, wanted, rtol=0, atol=1e-4)
    residuals = [np.abs(rows).max() for rows in lives[0].rows.values() if rows.size]
    assert max(residuals) > 1e-3, "there is a residual, or this shows nothing"


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_number_of_ranks_resumes_bit_by_bit(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    whole = ranks(world_size, sum_steps, str(tmp_path / "whole"), "int8", range(1, 9), None)[0]
    first = ranks(world_size, sum_steps, str(tmp_path / "first"), "int8", range(1, 5), None)[0]
    second = ranks(world_size, sum_steps, str(tmp_path / "second"), "int8", range(5, 9), first)[0]
    for expected, found in zip(whole.grads, [*first.grads, *second.grads], strict=True):
        assert all(same(a, b) for a, b in zip(expected, found, strict=True))
    for place, rows in whole.rows.items():
        np.testing.assert_array_equal(second.rows[place], rows)


def test_bytes_sent_are_a_half_and_a_quarter(ranks: RankPool, tmp_path: Path) -> None:
    values = sum(int(np.prod(shape)) for place, shape in enumerate(SHAPES) if place != DOUBLE)
    doubles = 8 * int(np.prod(SHAPES[DOUBLE]))
    for codec, size in (("bf16", 2.0), ("int8", 1.0)):
        sent = ranks(2, sum_steps, str(tmp_path / codec), codec, range(1, 3), None)[0].bytes_sent
        assert 0 < sent - doubles - size * values < 400, codec


def overflow(store: str, world: int) -> list[tuple[bool, bool]]:
    """Whether each step's gradient is finite, and what is left of it for the next."""
    from manyhands.training.worker.worker import _current_session

    identity, device = _current_session.get()[0].identity, torch.device("cpu")
    axis = connect(FileStore(store, world), identity.rank, world, address="127.0.0.1", device=device, timeout_s=60)
    param = nn.Parameter(torch.zeros(5003))  # neither 2 nor 3 ranks divide it evenly
    summed = GradientSum([param], axis, 2**20, Int8())
    found = []
    for step in range(3):  # the first ends with new buckets
        summed.begin(world, [range(rank, rank + 1) for rank in range(world)], f"step {step}")
        summed.before_backward(identity.rank)
        factor = float("inf") if step == 1 and identity.rank == 1 else 0.3
        (param * factor).sum().backward()
        summed.after_backward(identity.rank)
        summed.finish()
        assert param.grad is not None
        are_finite = all(bool(residual.isfinite().all()) for residual in summed.residuals().values())
        found.append((bool(param.grad.isfinite().all()), are_finite))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_infinity_reaches_every_rank_and_is_forgotten_with_the_step(
    ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    found = ranks(world_size, overflow, str(tmp_path / "store"), world_size)
    assert found == [[(True, True), (False, True), (True, True)]] * world_size


def frozen(store: str) -> tuple[float, list[int] | None, list[int] | None]:
    """One parameter fewer is trained from some step on; then the residuals of the others are carried over."""
    from manyhands.training.worker.worker import _current_session

    identity, device = _current_session.get()[0].identity, torch.device("cpu")
    axis = connect(FileStore(store, 2), identity.rank, 2, address="127.0.0.1", device=device, timeout_s=60)
    params = [nn.Parameter(torch.zeros(300)) for _ in range(3)]
    summed = GradientSum(params, axis, 2048, Int8())
    summed.begin(2, [range(1), range(1, 2)], "step 1")
    summed.before_backward(identity.rank)
    sum((param * torch.linspace(0, 1, 300)).sum() for param in params).backward()
    summed.after_backward(identity.rank)
    summed.finish()
    fewer = GradientSum(params[1:], axis, 2048, Int8())
    fewer.succeed(summed)
    alike = GradientSum(params[::-1], axis, 2048, Int8())
    alike.succeed(summed)
    residuals, kept = summed.residuals(), fewer.residuals()
    assert all(torch.equal(residuals[place + 1], kept[place]) for place in (0, 1))
    assert all(torch.equal(residuals[2 - place], values) for place, values in alike.residuals().items())
    alike.scale_residuals(0.5)
    assert all(torch.equal(residuals[2 - place] / 2, values) for place, values in alike.residuals().items())
    return float(residuals[1].abs().max()), fewer.settled_order, alike.settled_order


def test_residuals_follow_the_parameters(ranks: RankPool, tmp_path: Path) -> None:
    for largest, order_of_fewer, order_of_all in ranks(2, frozen, str(tmp_path / "store")):
        assert largest > 0
        assert order_of_fewer is None
        assert order_of_all is not None
        assert sorted(order_of_all) == [0, 1, 2]
