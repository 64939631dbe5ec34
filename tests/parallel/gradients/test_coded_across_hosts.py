"""Sums between hosts of several ranks each, through a codec: the same on each, and nothing lost for good."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import FileStore

from manyhands.comm.axis import connect
from manyhands.comm.codecs import Bf16, Int8
from manyhands.comm.shared_memory import Plane
from manyhands.data.sample_order import slices_of
from manyhands.native import why_not
from manyhands.parallel.gradients.hierarchical_sum import HostAxis
from manyhands.parallel.gradients.shared_memory_sum import SharedMemorySum
from manyhands.testing import RankPool

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")
HERE = 2
SHAPES = [(40, 60), (3,), (1,), (700,), (0,), (8, 3, 5, 5), (1500,)]
SOMETIMES, IMAGES, NEVER = 3, 5, 6  # parameters by place; images are stored channels last
CODECS = {"bf16": Bf16, "int8": Int8}


def gradient(step: int, v: int, place: int) -> Tensor | None:
    if place == NEVER or (place == SOMETIMES and step % 3):
        return None
    return torch.randn(SHAPES[place], generator=torch.Generator().manual_seed(1000 * step + 10 * v + place))


def exact_sum(steps: Sequence[int], slices: int, place: int) -> np.ndarray:
    parts = [part for step in steps for v in range(slices) if (part := gradient(step, v, place)) is not None]
    total = torch.stack(parts).double().sum(0) if parts else torch.zeros(SHAPES[place], dtype=torch.float64)
    return total.numpy()


def new_params() -> list[nn.Parameter]:
    formats = {IMAGES: torch.channels_last}
    return [
        nn.Parameter(torch.zeros(shape).contiguous(memory_format=formats.get(place, torch.contiguous_format)))
        for place, shape in enumerate(SHAPES)
    ]


class Host(NamedTuple):
    rank: int
    plane: Plane
    across: HostAxis
    memory: Any


def take_place(store: str) -> Host:
    from manyhands.training.worker.worker import _current_session

    session = _current_session.get()[0]
    identity, device = session.identity, torch.device("cpu")
    plane = Plane(session.shared_memory("plane", Plane.num_bytes(HERE), HERE), identity.local_rank, HERE, timeout_s=60)
    hosts = identity.world_size // HERE
    peers = FileStore(f"{store}{identity.local_rank}", hosts)
    axis = connect(peers, identity.host, hosts, address="127.0.0.1", device=device, timeout_s=60)
    return Host(identity.rank, plane, HostAxis(axis, plane), session.shared_memory)


def run_steps(host: Host, summed: SharedMemorySum, steps: Sequence[int], slices: int) -> list[list[np.ndarray | None]]:
    world = HERE * host.across.axis.size
    shares, found = [slices_of(r, world, slices) for r in range(world)], []
    places = [next(p for p in range(len(SHAPES)) if SHAPES[p] == tuple(param.shape)) for param in summed.params]
    for step in steps:
        summed.begin(slices, shares, f"step {step}")
        for v in shares[host.rank]:
            summed.before_backward(v)
            parts = [(gradient(step, v, place), param) for place, param in zip(places, summed.params, strict=True)]
            torch.stack([(part * param).sum() for part, param in parts if part is not None]).sum().backward()
            summed.after_backward(v)
        summed.finish()
        total, there = summed.total(), set(summed.present)
        found.append([total[i].numpy().copy() if i in there else None for i in range(len(places))])
        host.plane.barrier("next step")
    return found


class Given(NamedTuple):
    grads: list[list[np.ndarray | None]]
    rows: dict[int, np.ndarray]
    bytes_sent: int


def sum_steps(store: str, codec: str, steps: Sequence[int], slices: int, before: Given | None) -> Given:
    host = take_place(store)
    summed = SharedMemorySum(new_params(), host.plane, host.memory, host.across, 2048, codec=CODECS[codec]())
    assert summed.coded is not None
    if before is not None:
        summed.coded.restore(None, {place: torch.from_numpy(rows) for place, rows in before.rows.items()})
    grads = run_steps(host, summed, steps, slices)
    rows = {place: values.numpy() for place, values in summed.coded.gather_residuals().items()}
    summed.close()
    return Given(grads, rows, summed.bytes_sent)


def assert_same(left: list[list[np.ndarray | None]], right: list[list[np.ndarray | None]]) -> None:
    for mine, theirs in zip(left, right, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert (a is None) == (b is None)
            assert a is None or b is None or a.tobytes() == b.tobytes()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("hosts", "slices"), [(2, 4), (2, 7), (2, 2), (3, 6), (3, 4)])
def test_every_rank_gets_the_same_bits_close_to_the_sum(
    ranks: RankPool, tmp_path: Path, codec: str, hosts: int, slices: int
) -> None:
    """One slice for each rank, several, hosts without any."""
    steps = range(1, 5)
    first, *others = ranks(hosts * HERE, sum_steps, str(tmp_path / "store"), codec, steps, slices, None, hosts=hosts)
    for other in others:
        assert_same(first.grads, other.grads)
        assert not other.rows, "rank 0 has all of them"
    for step, grads in zip(steps, first.grads, strict=True):
        for place, grad in enumerate(grads):
            assert (grad is None) == (gradient(step, 0, place) is None)
            if grad is not None and grad.size:
                error = np.abs(grad - exact_sum([step], slices, place)).max()
                assert error < 0.15, place
                assert error > 0 or grad.size < 10, "it went through the codec"


@pytest.mark.parametrize("hosts", [2, 3])
def test_what_is_not_sent_stays_in_the_residual_and_nothing_is_lost(
    ranks: RankPool, tmp_path: Path, hosts: int
) -> None:
    """Also to a parameter that has a gradient in every third step only, and one that never has."""
    steps, slices = range(8), 2 * hosts
    first, *_ = ranks(hosts * HERE, sum_steps, str(tmp_path / "store"), "int8", steps, slices, None, hosts=hosts)
    for place, rows in first.rows.items():
        assert rows.shape == (hosts, *SHAPES[place])
        sent = sum((grads[place] for grads in first.grads if grads[place] is not None), np.zeros(SHAPES[place]))
        residual = rows.astype(np.float64).sum(0)
        np.testing.assert_allclose(
            sent + residual, exact_sum(steps, slices, place), rtol=0, atol=1e-4, err_msg=str(place)
        )
    assert not first.rows[NEVER].any()
    assert all(row.any() for row in first.rows[SOMETIMES])


@pytest.mark.parametrize("hosts", [2, 3])
def test_a_stop_changes_nothing(ranks: RankPool, tmp_path: Path, hosts: int) -> None:
    slices, world = 2 * hosts, hosts * HERE
    whole = ranks(world, sum_steps, str(tmp_path / "a"), "int8", range(6), slices, None, hosts=hosts)[0]
    begun = ranks(world, sum_steps, str(tmp_path / "b"), "int8", range(3), slices, None, hosts=hosts)[0]
    for after in ranks(world, sum_steps, str(tmp_path / "c"), "int8", range(3, 6), slices, begun, hosts=hosts):
        assert_same(whole.grads[3:], after.grads)


def hand_over(store: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """To sums of fewer parameters, in another order, of which ranks have other parts."""
    host = take_place(store)
    params = new_params()
    summed = SharedMemorySum(params, host.plane, host.memory, host.across, 2048, codec=Int8())
    run_steps(host, summed, range(4), 4)
    assert summed.coded is not None
    before = summed.coded.gather_residuals()
    kept = [IMAGES, 0, SOMETIMES]

    def other_memory(name: str, num_bytes: int) -> Any:
        return host.memory(f"other {name}", num_bytes)

    fewer = SharedMemorySum([params[i] for i in kept], host.plane, other_memory, host.across, 2048, codec=Int8())
    assert fewer.coded is not None
    fewer.coded.succeed(summed.coded)
    after = fewer.coded.gather_residuals()
    chief = host.rank == 0
    return [before[i].numpy() for i in kept if chief], [after[i].numpy() for i in range(len(kept)) if chief]


def test_sums_of_other_parameters_keep_the_residuals_of_those_before(ranks: RankPool, tmp_path: Path) -> None:
    before, after = ranks(4, hand_over, str(tmp_path / "store"), hosts=2)[0]
    assert len(before) == 3
    for old, new in zip(before, after, strict=True):
        assert old.any() and old.tobytes() == new.tobytes()


def test_a_host_sends_its_sum_once(ranks: RankPool, tmp_path: Path) -> None:
    """With any number of workers: together they send each value once to the other host, in a byte or two."""
    values = sum(int(np.prod(shape)) for shape in SHAPES)
    for codec, num_bytes in (("bf16", 2), ("int8", 1)):
        found = ranks(4, sum_steps, str(tmp_path / codec), codec, range(2), 4, None, hosts=2)
        sent = sum(given.bytes_sent for given in found[:HERE])
        assert num_bytes * values <= sent < 1.1 * num_bytes * values
