"""Downpour and asynchronous EASGD against loops that are written from their formulas, in the same order of pushes."""

from __future__ import annotations

import copy
from collections import Counter
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.errors import SpecError
from manyhands.native import why_not
from manyhands.parallel.model.step_buffers import StepBuffers
from manyhands.parameter_server.protocol.leases import Interval
from manyhands.parameter_server.protocol.local_step_ranges import LocalStepRanges
from tests.parameter_server.runs.local_steps_world import World, gradients, make_model

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")

LR = 0.05
ORDER = (0, 1, 1, 2, 0, 2)


def begun() -> list[Tensor]:
    return [param.detach().clone() for param in make_model().parameters()]


def assert_all_close(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def downpour_by_hand(turns: list[tuple[int, range]], pull_every: int) -> list[Tensor]:
    """Adagrad on the server, as in the paper."""
    center = [nn.Parameter(value) for value in begun()]
    server = torch.optim.Adagrad(center, lr=LR)
    copies: dict[int, list[Tensor]] = {}
    steps: Counter[int] = Counter()
    for worker, batches in turns:
        accrued = [torch.zeros_like(value) for value in center]
        for number in batches:
            if steps[worker] % pull_every == 0:
                copies[worker] = [value.detach().clone() for value in center]
            grads = gradients(copies[worker], number)
            accrued = [total + grad for total, grad in zip(accrued, grads, strict=True)]
            copies[worker] = [own - LR * grad for own, grad in zip(copies[worker], grads, strict=True)]
            steps[worker] += 1
        for param, total in zip(center, accrued, strict=True):
            param.grad = total
        server.step()
    return [value.detach() for value in center]


@pytest.mark.parametrize(("push_every", "pull_every"), [(4, 4), (4, 2), (2, 4), (1, 3)])
def test_downpour_ends_where_the_formula_ends_while_servers_die(push_every: int, pull_every: int) -> None:
    strategy = mh.ParameterServer(mode="async", push_every=push_every, pull_every=pull_every)
    world = World(strategy, lambda params: torch.optim.Adagrad(params, lr=LR), workers=3, servers=2, die_every=2)
    world.open(12)
    turns = list(world.play(cycle(ORDER)))
    assert_all_close(world.weights(), downpour_by_hand(turns, pull_every))
    assert len(world.updates) == len(turns) == 12 // push_every
    assert pull_every > push_every or not any(done.staleness for done in world.updates)


def test_a_warm_start_has_one_worker_at_a_time_and_nothing_stale() -> None:
    strategy = mh.ParameterServer(mode="async", push_every=2, pull_every=2, warm_steps=5)
    world = World(strategy, lambda params: torch.optim.SGD(params, lr=LR), workers=3, begins_early=True)
    world.open(12)
    assert len(list(world.play(cycle((0, 1, 2))))) == 6
    assert [done.step for done in world.updates[:3]] == [1, 2, 3]
    assert [done.staleness for done in world.updates] == [0, 0, 0, 0, 1, 2]


def test_one_worker_with_plain_sgd_is_one_process_with_any_periods() -> None:
    """What it pushes is what it has done itself, so its copy is never behind."""
    strategy = mh.ParameterServer(mode="async", push_every=4, pull_every=4)
    world = World(strategy, lambda params: torch.optim.SGD(params, lr=LR), workers=1)
    world.open(12)
    assert len(list(world.play(cycle([0])))) == 3
    weights = begun()
    for number in range(1, 13):
        weights = [value - LR * grad for value, grad in zip(weights, gradients(weights, number), strict=True)]
    assert_all_close(world.weights(), weights)


class Alone:
    """A worker of EASGD by hand: local weights, and momentum."""

    def __init__(self, center: list[Tensor]) -> None:
        self.own = [nn.Parameter(value.clone()) for value in center]
        self.optimizer = torch.optim.SGD(self.own, lr=LR, momentum=0.9)

    def train(self, batches: range) -> None:
        for number in batches:
            for param, grad in zip(self.own, gradients([one.detach() for one in self.own], number), strict=True):
                param.grad = grad
            self.optimizer.step()

    def exchange(self, center: list[Tensor], alpha: float) -> list[Tensor]:
        pulls = [alpha * (own.detach() - its) for own, its in zip(self.own, center, strict=True)]
        with torch.no_grad():
            for own, pull in zip(self.own, pulls, strict=True):
                own.sub_(pull)
        return [its + pull for its, pull in zip(center, pulls, strict=True)]


EASGD = mh.LocalSGD(every=2, outer="elastic", pull=0.9, asynchronous=True)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR, momentum=0.9)


def test_asynchronous_easgd_ends_where_the_formula_ends_while_its_servers_die() -> None:
    world = World(EASGD, momentum, workers=3, servers=2, die_every=2)
    world.open(12)
    turns = list(world.play(cycle(ORDER)))
    assert len({worker for worker, _ in turns}) == 3
    center = begun()
    alone = [Alone(center) for _ in range(3)]
    began: set[int] = set()
    for worker, numbers in turns:
        if worker not in began:  # it comes with the center of that time
            began.add(worker)
            alone[worker] = Alone(center)
        alone[worker].train(numbers)
        center = alone[worker].exchange(center, 0.9 / 3)
    assert_all_close(world.weights(), center)
    for engine, by_hand in zip(world.engines, alone, strict=True):
        assert_all_close(engine._rule.own(), [own.detach() for own in by_hand.own])


def saved(world: World) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """What each worker's part of a checkpoint is; a real one has them together, as all ranks of it gather."""
    for engine in world.engines:
        engine.gather_state()
    return [copy.deepcopy(engine.state()) for engine in world.engines], world.weights()


def resumed(states: list[dict[str, Any]], weights: list[Tensor]) -> World:
    world = World(EASGD, momentum, workers=3)
    workers = [state["workers"][0] for state in states]
    for engine in world.engines:
        with torch.no_grad():
            for param, value in zip(engine.model.parameters(), weights, strict=True):
                param.copy_(value)
        engine.restore({**states[0], "workers": workers})
    return world


def test_a_resumed_run_is_the_same_bit_for_bit() -> None:
    """Each worker with its own weights and momentum."""
    world = World(EASGD, momentum, workers=3)
    world.open(6)
    assert len(list(world.play(cycle(ORDER)))) == 3
    again = resumed(*saved(world))
    again.done = world.done
    world.open(6)
    again.open(6)
    assert list(world.play(cycle(ORDER))) == list(again.play(cycle(ORDER)))
    assert all(torch.equal(a, b) for a, b in zip(world.weights(), again.weights(), strict=True))


def test_clipping_is_that_of_each_local_step() -> None:
    strategy = mh.ParameterServer(mode="async", push_every=3, pull_every=3)
    world = World(strategy, lambda params: torch.optim.SGD(params, lr=LR), workers=1, clip=0.1)
    world.open(3)
    assert len(list(world.play(cycle([0])))) == 1
    moved = torch.cat([(a - b).flatten() for a, b in zip(world.weights(), begun(), strict=True)])
    assert 0 < moved.norm() <= 3 * LR * 0.1 * 1.001


def test_local_step_ranges_are_a_few_batches_each() -> None:
    ranges = LocalStepRanges(every=3, first=11, last=17, update=4)
    assert [list(ranges.batches(number)) for number in (4, 5, 6)] == [[11, 12, 13], [14, 15, 16], [17]]
    by_batch = {"call": 1, "first": 11, "last": 17, "start_row": 0, "num_rows": 100, "batch_size": 8, "slices": 1}
    interval = ranges.interval(Interval(**by_batch, whole=True))
    assert (interval.first, interval.last) == (4, 6)
    assert [interval.rows(number) for number in (4, 5, 6)] == [24, 24, 8]


def test_statistics_of_several_slices_join_to_those_of_one() -> None:
    for momentum_ in (0.1, None):
        layer = nn.BatchNorm1d(3, momentum=momentum_)
        buffers = StepBuffers(layer)
        buffers.begin(3, 2)
        made = []
        for v in range(3):
            buffers.enter(v)
            layer(torch.randn(8, 3))
            made.append(buffers.apart(buffers.leave(v)))
            buffers.put_back()
        buffers.commit(made, apart=True)
        expected = [layer.running_mean.clone(), layer.running_var.clone(), layer.num_batches_tracked.clone()]
        buffers.put_back()
        buffers.commit([buffers.joined(made)], apart=True)
        torch.testing.assert_close([layer.running_mean, layer.running_var, layer.num_batches_tracked], expected)


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        ({"mode": "sync", "push_every": 2}, "every slice is pushed", 'mode="async"'),
        ({"push_every": 0}, "push_every is 0", "push_every=1"),
        ({"mode": "ssp", "warm_steps": 9}, "ssp needs no warm-up", "warm_steps=0"),
        ({"pull_every": True}, "pull_every is True", "pull_every=1"),
        ({"local_lr": 0.1}, "local_lr is 0.1", "no local_lr="),
    ],
)
def test_periods_that_make_no_sense_are_refused(words: dict[str, Any], what: str, fix: str) -> None:
    with pytest.raises(SpecError, match=what) as refused:
        mh.ParameterServer(**words)
    assert fix in refused.value.fix


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        ({"outer": "mean"}, "asynchronous is for elastic averaging", 'outer="elastic"'),
        ({"outer": "elastic", "rule": "median"}, "nothing to combine", 'rule="mean"'),
        ({"outer": "elastic", "fragments": 2}, "fragments is 2", "no fragments="),
        ({"outer": "elastic", "reducer": "bf16"}, "reducer is 'bf16'", "no reducer="),
    ],
)
def test_what_needs_all_workers_at_once_is_refused_with_asynchronous_averaging(
    words: dict[str, Any], what: str, fix: str
) -> None:
    with pytest.raises(SpecError, match=what) as refused:
        mh.LocalSGD(asynchronous=True, **words)
    assert fix in refused.value.fix


def test_embeddings_on_servers_are_refused_with_local_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.parameter_server.runs.local_steps_world.make_model",
        lambda: nn.Sequential(mh.nn.Embedding(4, name="rows"), nn.Linear(4, 3)),
    )
    with pytest.raises(SpecError, match="where local steps cannot change them"):
        World(EASGD, momentum, workers=1)
