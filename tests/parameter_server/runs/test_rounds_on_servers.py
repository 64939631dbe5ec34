"""Rounds that close by quorum and deadline, on a server, against a loop that is written from the formulas."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import cycle, groupby
from typing import Any

import pytest
import torch
from torch import Tensor

import manyhands as mh
from manyhands.errors import SpecError
from manyhands.native import why_not
from manyhands.parallel.averaging.averaging_rules import Rule, combine, nesterov
from manyhands.parallel.averaging.rounds import Quorum
from manyhands.parameter_server.protocol.leases import Interval, LeaseGrant, LeaseTable, LeaseTableState, ServerProgress
from manyhands.parameter_server.protocol.leases import Rule as Admission
from manyhands.parameter_server.protocol.messages import UpdateDone
from tests.parameter_server.runs.local_steps_world import World, gradients, make_model

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")

LR, EVERY = 0.05, 2


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR)


def rounds_of(updates: list[UpdateDone]) -> list[list[UpdateDone]]:
    """A round's updates follow each other."""
    found, rest = [], list(updates)
    while rest:
        found.append(rest[: rest[0].together])
        rest = rest[rest[0].together :]
    assert all({done.together for done in one} == {len(one)} for one in found)
    return found


def by_hand(updates: list[UpdateDone], rule: Rule, outer: str) -> list[Tensor]:
    """From the ranges of local steps in each round, and the version of the weights that each began with."""
    agreed = [torch.cat([param.detach().flatten() for param in make_model().parameters()])]
    velocity = torch.zeros_like(agreed[0])
    for one in rounds_of(updates):
        before = agreed[-1]
        deltas = [moved(agreed[len(agreed) - 1 - done.staleness], done.step) for done in one]
        delta = combine(torch.stack(deltas), rule, [1.0] * len(deltas))
        after = before - delta
        if outer == "nesterov":
            after, velocity = nesterov(before, delta, velocity, lr=0.7, momentum=0.9)
        agreed += [after] * len(one)
    return unflat(agreed[-1])


def unflat(row: Tensor) -> list[Tensor]:
    shapes = [param.shape for param in make_model().parameters()]
    return [part.view(shape) for part, shape in zip(row.split([one.numel() for one in shapes]), shapes, strict=True)]


def moved(start: Tensor, block: int) -> Tensor:
    """How far from its start plain SGD gets in one range of local steps."""
    own = unflat(start)
    for number in range((block - 1) * EVERY + 1, block * EVERY + 1):
        own = [value - LR * grad for value, grad in zip(own, gradients(own, number), strict=True)]
    return start - torch.cat([value.flatten() for value in own])


def play(order: tuple[int | float, ...], **more: Any) -> World:
    words = {"quorum": 2, "deadline_s": 5.0, **more}
    dies = words.pop("dies", {})
    world = World(mh.LocalSGD(every=EVERY, **words), sgd, workers=3, begins_early=True, **dies)
    world.open(12)
    list(world.play(cycle(order)))
    assert sorted(done.step for done in world.updates) == [1, 2, 3, 4, 5, 6], (
        "a range of local steps is lost, or counted twice"
    )
    return world


@pytest.mark.parametrize("way", [{}, {"rule": "median"}, {"rule": "weighted"}, {"outer": "nesterov"}], ids=str)
def test_a_late_worker_is_in_a_later_round_and_is_counted_once(way: dict[str, Any]) -> None:
    """Worker 2 comes when 0 and 1 have begun another round; the round waits for it no longer than the deadline."""
    world = play((0, 1, 4.0, 1.5, 0, 2, 1, 6.0), **way)
    first, second, *_ = rounds_of(world.updates)
    assert len(first) == 2 and [done.staleness for done in first] == [0, 0]
    assert len(second) == 3 and sorted(done.staleness for done in second) == [0, 0, 2]
    expected = by_hand(world.updates, way.get("rule", "mean"), way.get("outer", "mean"))
    torch.testing.assert_close(world.weights(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dies", [{"die_in_rounds": True}, {"die_every": 2}, {"die_every": 3}], ids=str)
def test_a_server_that_dies_in_the_middle_of_a_round_leaves_it_whole(dies: dict[str, Any]) -> None:
    world = play((0, 1, 4.0, 1.5, 0, 2, 1, 6.0), dies=dies, outer="nesterov")
    torch.testing.assert_close(world.weights(), by_hand(world.updates, "mean", "nesterov"), rtol=1e-5, atol=1e-6)


def test_all_who_may_come_are_waited_for_until_the_deadline_and_a_quorum_beyond_it() -> None:
    for order, sizes in (
        ((0, 1, 2), [3, 3]),  # no worker is late
        ((0, 6.0, 1, 2), [2, 2, 2]),  # at the deadline one is there, then a second: with it the round closes
        ((0, 1, 4.0, 2), [3, 3]),  # the third comes before the deadline
    ):
        assert [len(one) for one in rounds_of(play(order).updates)] == sizes, order


def chance(world: World, seed: int) -> Iterator[int | float]:
    """Turns in any order; servers die, and workers but for the first; in the end every worker gets turns."""
    draw = random.Random(seed)
    for _ in range(40):
        if draw.random() < 0.15:
            world.replace(0)
        if draw.random() < 0.05:
            world.lose(draw.choice((1, 2)))
        yield draw.choice((0, 1, 2, 0.3, 3.0))
    yield from (0, 1, 2, 6.0) * 20
    raise AssertionError("all who live wait, and nothing happens any more")


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 13])
def test_rounds_close_and_every_local_step_range_counts_once_under_kills(seed: int) -> None:
    quorum = (1, 2, 3, 0.5)[seed % 4]
    strategy = mh.LocalSGD(every=EVERY, quorum=quorum, deadline_s=5.0, outer="nesterov")
    world = World(strategy, sgd, workers=3, begins_early=True, die_in_rounds=seed % 2 == 0)
    world.open(12)
    list(world.play(chance(world, seed)))
    assert sorted(done.step for done in world.updates) == [1, 2, 3, 4, 5, 6], (
        "a range of local steps is lost, or counted twice"
    )
    torch.testing.assert_close(world.weights(), by_hand(world.updates, "mean", "nesterov"), rtol=1e-5, atol=1e-6)


def test_the_last_local_step_ranges_are_not_held_up_by_workers_that_have_none() -> None:
    world = World(mh.LocalSGD(every=3, quorum=3, deadline_s=100.0), sgd, workers=3)
    world.open(12)  # four ranges of local steps for three workers
    list(world.play(cycle((0, 1, 2))))
    assert world.now_s == 0.0
    assert [len(list(group)) for _, group in groupby(world.updates, lambda done: done.together)] == [3, 1]


def test_who_is_awaited_follows_from_what_is_leased() -> None:
    interval = Interval(call=1, first=1, last=3, start_row=0, num_rows=6, batch_size=2, slices=1, whole=True)
    table = LeaseTable(
        interval, Admission(ahead=None), [ServerProgress(0)], num_rows=4, number=1, minutes=LeaseTableState.before(1)
    )
    table.lose([7, 8, 9])
    assert table.awaited() == {7, 8, 9}
    grants = [table.ask(worker, 1, 1, 0, 0, ()) for worker in (7, 8, 9)]
    assert all(isinstance(grant, LeaseGrant) for grant in grants) and table.awaited() == {7, 8, 9}
    table.filled(grants[0].held)  # type: ignore[union-attr]
    assert table.awaited() == {8, 9}
    table.lose([7, 9])
    assert table.awaited() == {7, 9}, "what 8 had is to be handed out again"
    table.expect([9])
    assert table.awaited() == {9}, "no worker gets a lease before 9 has said what it holds"


def test_a_quorum_is_a_number_or_a_part_of_those_who_may_come() -> None:
    def of(least: float) -> list[int]:
        return [Quorum(least=least, deadline_s=1.0).of(num_workers) for num_workers in (1, 2, 3, 4, 8)]

    assert of(3) == [1, 2, 3, 3, 3]
    assert of(0.75) == [1, 2, 3, 3, 6]


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        ({"quorum": 2}, "a round needs both", "quorum=0.75, deadline_s=10"),
        ({"deadline_s": 2.0}, "a round needs both", "quorum=0.75, deadline_s=10"),
        ({"quorum": 0, "deadline_s": 2.0}, "quorum is 0", "quorum=2"),
        ({"quorum": 1.0, "deadline_s": 2.0}, "quorum is 1.0", "quorum=0.75"),
        ({"quorum": 2, "deadline_s": -1.0}, "deadline_s is -1.0", "deadline_s=10"),
        ({"quorum": 2, "deadline_s": 1e6}, "deadline_s is 1000000.0", "deadline_s=10"),
        ({"quorum": 2, "deadline_s": 1.0, "outer": "elastic"}, "elastic lets each keep its own", 'outer="mean"'),
        ({"quorum": 2, "deadline_s": 1.0, "peers": "pairs"}, "peers is 'pairs'", "no peers="),
        ({"quorum": 2, "deadline_s": 1.0, "asynchronous": True}, "no worker waits for another", "asynchronous=False"),
    ],
)
def test_rounds_that_make_no_sense_are_refused(words: dict[str, Any], what: str, fix: str) -> None:
    with pytest.raises(SpecError, match=what) as refused:
        mh.LocalSGD(**words)
    assert fix in refused.value.fix
