"""Sums between hosts of several ranks each: buckets that leave while backward runs, in an order that all agree on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import FileStore

from manyhands.comm.axis import connect
from manyhands.comm.shared_memory import Plane
from manyhands.data.sample_order import slices_of
from manyhands.native import why_not
from manyhands.parallel.gradients.hierarchical_sum import HostAxis, NodeAllGather
from manyhands.parallel.gradients.shared_memory_sum import SharedMemorySum
from manyhands.parallel.model.flat_layout import lay_out
from manyhands.testing import RankPool

needs_memory = pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")
HERE, HOSTS = 2, 2
SHAPES = [(40, 60), (3,), (1,), (700,), (0,), (1500,), (9, 9)]
NEVER, SOMETIMES = 6, 3  # parameters by place
BUCKET_BYTES = 1024


def test_ranges_cover_every_part_once_from_the_end() -> None:
    tensors = [torch.zeros(shape) for shape in SHAPES]
    flat = lay_out(tensors)
    (section,) = flat.sections
    for world in (1, 2, 3, 200):
        found = flat.stretches(section, world, BUCKET_BYTES)
        covered = [element for bucket in reversed(found) for element in bucket.elements]
        assert covered == list(range(section.numel))
        for bucket in found:
            assert len(bucket.elements) <= BUCKET_BYTES // 4
            assert set(bucket.elements) <= set(section.part(bucket.owner, world))
            ends = [(start, start + max(1, t.numel())) for start, t in zip(flat.starts, tensors, strict=True)]
            own = [i for i, (low, high) in enumerate(ends) if set(range(low, high)) & set(bucket.elements)]
            assert [i for i in own if tensors[i].numel()] == bucket.members


def on_two_hosts(store: str, params: list[nn.Parameter]) -> tuple[int, Plane, SharedMemorySum]:
    from manyhands.training.worker.worker import _current_session

    session = _current_session.get()[0]
    identity, device = session.identity, torch.device("cpu")
    plane = Plane(session.shared_memory("plane", Plane.num_bytes(HERE), HERE), identity.local_rank, HERE, timeout_s=60)
    peers = FileStore(f"{store}{identity.local_rank}", HOSTS)
    axis = connect(peers, identity.host, HOSTS, address="127.0.0.1", device=device, timeout_s=60)
    across = HostAxis(axis, plane)
    return identity.rank, plane, SharedMemorySum(params, plane, session.shared_memory, across, BUCKET_BYTES)


def gradient(step: int, v: int, place: int) -> Tensor | None:
    if place == NEVER or (place == SOMETIMES and (step + v) % 3):
        return None
    return torch.randn(SHAPES[place], generator=torch.Generator().manual_seed(1000 * step + 10 * v + place))


def sum_steps(store: str, slices: int) -> list[list[Any]]:
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    rank, plane, gradients = on_two_hosts(store, params)
    shares = [slices_of(r, HERE * HOSTS, slices) for r in range(HERE * HOSTS)]
    found = []
    for step in range(3):
        gradients.begin(slices, shares, f"step {step}")
        assert not gradients.can_carry(8), "messages go another way"
        for v in shares[rank]:
            gradients.before_backward(v)
            parts = [(gradient(step, v, place), param) for place, param in enumerate(params)]
            torch.stack([(part * param).sum() for part, param in parts if part is not None]).sum().backward()
            gradients.after_backward(v)
        gradients.finish()
        total, there = gradients.total(), set(gradients.present)
        found.append([total[i].numpy().copy() if i in there else None for i in range(len(SHAPES))])
        plane.barrier("next step")
    gradients.close()
    return found


def expected(step: int, slices: int, place: int) -> Tensor | None:
    from manyhands.parallel.gradients.slice_tree import finish

    def add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
        return right if left is None else left if right is None else left + right

    return finish({(0, v): gradient(step, v, place) for v in range(slices)}, slices, add)


@needs_memory
@pytest.mark.parametrize("slices", [2, 4, 7])
def test_many_small_buckets_give_the_sum_along_the_tree(ranks: RankPool, tmp_path: Path, slices: int) -> None:
    """Some ranks without a slice, one slice each, several nodes per rank; gradients that come sometimes, and never."""
    for found in ranks(4, sum_steps, str(tmp_path / "store"), slices, hosts=2):
        for step, totals in enumerate(found):
            for place, total in enumerate(totals):
                right = expected(step, slices, place)
                assert (total is None) == (right is None), (step, place)
                # A part that is not there counts as zeros: 0 + x is x, but -0 becomes 0.
                assert total is None or bool(torch.equal(torch.from_numpy(total), right)), (step, place)


class Meanwhile(torch.autograd.Function):
    """Nothing, but for a call in the middle of backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, "it did not happen while backward was running"
        time.sleep(0.001)


def wait_inside_backward(store: str, backwards: bool) -> int:
    """In the middle of backward, wait until buckets of the later layers have arrived from the other host.

    Every rank waits there, so all of that happened between ranks none of which had finished its backward. It is the
    half that one rank of each host owns; how many of them had arrived is returned.
    """
    layers = [nn.Parameter(torch.zeros(32, 32)) for _ in range(8)]
    rank, plane, gradients = on_two_hosts(store, layers[::-1] if backwards else layers)
    departures = gradients._departures
    assert departures is not None
    shares = [range(r, r + 1) for r in range(4)]
    half, arrived = len(departures.order) // 2, 0
    for step in range(2):
        gradients.begin(4, shares, f"step {step}")

        def others_have_deposited() -> None:
            until(lambda: plane.all_posted(departures._base + half))

        def they_have_arrived() -> None:
            nonlocal arrived
            gone = departures.buckets[: departures._departed]
            early = [mine.transfer for mine in gone if mine.number < half]
            until(lambda: all(isinstance(one, NodeAllGather) and one.pending.done for one in early))
            arrived = len(early)

        waits = step > 0 or not backwards  # the first step expects them from the end, and learns
        gradients.before_backward(rank)
        x = torch.ones(1, 32, requires_grad=True)
        for number, layer in enumerate(layers):
            if waits and number == 1:
                x = Meanwhile.apply(x, they_have_arrived)
            if waits and number == 2:
                x = Meanwhile.apply(x, others_have_deposited)
            x = x @ (layer + torch.eye(32))
        x.sum().backward()
        gradients.after_backward(rank)
        gradients.finish()
        plane.barrier("next step")
    gradients.close()
    return arrived


@needs_memory
@pytest.mark.parametrize("backwards", [False, True], ids=["declared in order", "declared in reverse"])
def test_buckets_arrive_while_backward_still_runs(ranks: RankPool, tmp_path: Path, backwards: bool) -> None:
    arrived = ranks(4, wait_inside_backward, str(tmp_path / "store"), backwards, hosts=2)
    assert arrived == ([16, 0, 16, 0] if backwards else [0, 16, 0, 16])


def twice(store: str) -> str:
    """A re-entrant checkpoint around each of two uses: the second gradient comes after the first has left."""
    from torch.utils.checkpoint import checkpoint

    params = [nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))]
    rank, plane, gradients = on_two_hosts(store, params)
    plane.barrier("opened")  # the memory ends with its maker
    gradients.begin(4, [range(r, r + 1) for r in range(4)], "step 0")
    gradients.before_backward(rank)
    x = torch.ones(8, requires_grad=True)
    for _ in range(2):
        x = checkpoint(lambda x: x * params[1], x, use_reentrant=True)
    try:
        x.sum().backward()
        gradients.after_backward(rank)
    except Exception as error:
        return str(error)
    return ""


@needs_memory
def test_a_gradient_in_two_instalments_is_an_error(ranks: RankPool, tmp_path: Path) -> None:
    for text in ranks(4, twice, str(tmp_path / "store"), hosts=2):
        assert "received gradients twice" in text and "use_reentrant=False" in text
