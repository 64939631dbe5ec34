"""Slow workers are named, and with `balance` they get fewer slices; the result stays what it was, bit for bit."""

from __future__ import annotations

import socket
import time
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import manyhands as mh
from manyhands.data.sample_order import SliceDivision
from manyhands.events import Divided, Event, Straggler, Warned
from manyhands.spec.run import TrainSection
from manyhands.testing import RankFailed, RankPool
from manyhands.training.step.stragglers import StragglerTracker
from tests.training.workloads import OPTIMIZERS, data, mean_loss, with_dropout_and_batch_norm
from tests.variants import variants

SLICES, WINDOW = 8, 10
SLICE_S, MORE_S = 0.005, 0.010
FLAGS = {"train.straggler_steps": WINDOW}


class Slow:
    """A slice takes 5 ms; on a worker that is not the chief 15 ms, of which 10 in the phase that is slow there."""

    def __init__(self, phase: str | None) -> None:
        self.phase, self.is_chief = phase, True
        self.slept_s = 0.0

    def pause(self, phase: str) -> None:
        if not self.is_chief and phase == self.phase:
            self._sleep(MORE_S)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self._sleep(SLICE_S)
        self.pause("forward")
        value = mean_loss(model, batch)
        value.register_hook(lambda grad: self.pause("backward"))
        return value

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        self.slept_s += seconds


class Rows(Dataset[Any]):
    """Rows that are read in the thread that runs the steps, a slice at a time."""

    def __init__(self, slow: Slow) -> None:
        self._slow, (self._x, self._y) = slow, data(96)

    def __len__(self) -> int:
        return len(self._x)

    def __getitems__(self, rows: list[int]) -> list[Any]:
        self._slow.pause("load")
        return [(self._x[row], self._y[row]) for row in rows]

    def __getitem__(self, row: int) -> Any:
        raise AssertionError("rows are asked for together")


class Watching:
    """How long a worker was asked to sleep in each step, whichever other processes the machine ran meanwhile."""

    def __init__(self, slow: Slow) -> None:
        self._slow, self._before_s = slow, 0.0
        self.asked_s: list[float] = []

    def after_step(self, trainer: Any, step: int, stats: Any) -> None:
        self.asked_s.append(self._slow.slept_s - self._before_s)
        self._before_s = self._slow.slept_s


def train(phase: str | None, steps: int = 35, **more: Any) -> dict[str, Any]:
    slow = Slow(phase)
    watching = Watching(slow)
    trainer = mh.Trainer(
        with_dropout_and_batch_norm,
        slow.loss,
        OPTIMIZERS["AdamW"],
        hooks=[watching],
        **{"slices": SLICES, "exact": True, **more},
    )
    slow.is_chief = trainer.is_chief
    # 96 rows in batches of 32: no short batch; 90 of them would make one of every third.
    trainer.fit(Rows(slow), steps=steps, batch_size=32)
    return {
        "weights": {name: value.detach().numpy().tobytes() for name, value in trainer.model.state_dict().items()},
        "events": events_of(trainer._run.worker),
        "asked_s": watching.asked_s,
    }


def train_by_hand(phase: str | None, **more: Any) -> dict[str, Any]:
    slow = Slow(phase)
    hands = mh.join(**{"slices": SLICES, "exact": True, **more})
    slow.is_chief = hands.is_chief
    torch.manual_seed(0)
    model = with_dropout_and_batch_norm()
    model, _ = hands.setup(model, OPTIMIZERS["AdamW"](model.parameters()))
    means = []
    for batch in hands.batches(Rows(slow), batch_size=32, steps=30):
        hands.backward(slow.loss(model, batch))
        hands.step()
        if hands.stepped:
            means.append(hands.mean(float(hands.rank)))
    weights = {name: value.detach().numpy().tobytes() for name, value in model.state_dict().items()}
    return {"weights": weights, "events": events_of(hands._worker), "means": means}


def events_of(worker: Any) -> list[Event]:
    return [event for event in worker.session.events if isinstance(event, Straggler | Divided | Warned)]


def of_kind(events: list[Event], kind: type[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def check_that_it_is_named(chief: dict[str, Any], other: dict[str, Any], phase: str) -> None:
    first = next(event for event in of_kind(chief["events"], Straggler) if event.rank == 1)
    assert (first.phase, first.step % WINDOW, first.is_over) == (phase, 1, False)
    assert first.factor > 1.25
    assert first.waiting > 0
    assert not of_kind(chief["events"], Divided)
    assert other["events"] == [], "it is the chief that reports"


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["load", "backward"])
def test_a_worker_that_is_three_times_as_slow_is_named_with_its_phase(ranks: RankPool, phase: str) -> None:
    check_that_it_is_named(*ranks(2, train, phase, 2 * WINDOW + 1, flags=FLAGS), phase)


@pytest.mark.slow
@pytest.mark.parametrize("plane", variants(["auto", "gloo"], "auto"))
def test_slices_move_to_the_faster_worker_and_the_result_stays_the_same(ranks: RankPool, plane: str) -> None:
    flags = {**FLAGS, "comm.plane": plane}
    (alone,) = ranks(1, train, None)
    even = ranks(2, train, "forward", flags=flags)
    check_that_it_is_named(*even, "forward")
    balanced = ranks(2, train, "forward", flags={**flags, "train.balance": True})
    for result in (*even, *balanced):
        assert result["weights"] == alone["weights"]
    divided = of_kind(balanced[0]["events"], Divided)
    assert divided[0].step % WINDOW == 1
    assert divided[0].slices[0] > divided[0].slices[1] >= 1
    assert sum(divided[0].slices) == SLICES
    # The slowest worker's part of a step, before slices moved and afterwards.
    before = max(median(result["asked_s"][: divided[0].step]) for result in balanced)
    after = max(median(result["asked_s"][divided[0].step + 1 :]) for result in balanced)
    assert after < 0.85 * before


def train_on_hosts(phase: str | None) -> dict[str, Any]:
    return train(phase, strategy="mirrored")


def train_in_many_slices(phase: str | None, strategy: str = "mirrored") -> dict[str, Any]:
    return train(phase, slices=16, strategy=strategy)


@pytest.mark.long
def test_slices_move_between_hosts(ranks: RankPool) -> None:
    (alone,) = ranks(1, train_in_many_slices, None)
    results = ranks(
        4,
        train_in_many_slices,
        "forward",
        "mirrored",
        flags={**FLAGS, "train.balance": True},
        hosts=2,
    )
    assert [result["weights"] == alone["weights"] for result in results] == [True] * 4
    assert of_kind(results[0]["events"], Divided)[0].slices[0] > 4


@pytest.mark.slow
def test_a_slow_worker_on_another_host_says_what_that_is_called(ranks: RankPool) -> None:
    chief, _ = ranks(2, train_on_hosts, "forward", flags=FLAGS, hosts=2)
    first = next(event for event in of_kind(chief["events"], Straggler) if event.rank == 1)
    assert first.host == socket.gethostname()


def train_in_mesh(slow_ranks: tuple[int, ...]) -> list[Event]:
    slow = Slow("forward")
    trainer = mh.Trainer(
        lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)),
        slow.loss,
        OPTIMIZERS["SGD"],
        strategy=mh.Mesh(data=2, tensor=2),
    )
    worker = trainer._run.worker
    slow.is_chief = worker.rank not in slow_ranks
    trainer.fit(data(96), steps=2 * WINDOW + 1, batch_size=32)
    return events_of(worker)


@pytest.mark.long
def test_in_a_mesh_a_slow_replica_is_named_by_one_of_its_ranks(ranks: RankPool) -> None:
    chief, *_ = ranks(4, train_in_mesh, (2, 3), flags=FLAGS)
    assert {event.rank for event in of_kind(chief, Straggler) if not event.is_over} == {2}


@pytest.mark.slow
def test_slices_move_in_a_loop_of_the_users_own_too(ranks: RankPool) -> None:
    (alone,) = ranks(1, train_by_hand, None)
    results = ranks(2, train_by_hand, "forward", flags={**FLAGS, "train.balance": True})
    assert [result["weights"] == alone["weights"] for result in results] == [True, True]
    moved = of_kind(results[0]["events"], Divided)[0]
    # The mean of the ranks, weighted by the rows that each of them had: with even shares, a half.
    assert results[0]["means"] == results[1]["means"]
    assert results[0]["means"][: moved.step] == [0.5] * moved.step
    assert results[0]["means"][moved.step] == moved.slices[1] / SLICES


def test_balance_says_when_there_is_nothing_to_move(ranks: RankPool) -> None:
    chief, _ = ranks(2, train, None, 2, flags={"train.balance": True, "train.slices": 2})
    assert any("nothing to move" in warned.text for warned in of_kind(chief["events"], Warned))


def test_balance_refuses_data_that_belongs_to_workers(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match=r"DataError.*function of the worker"):
        ranks(1, fit_balanced, rows_of_slices, 0)
    with pytest.raises(RankFailed, match=r"DataError.*slices of one worker only"):
        ranks(1, fit_balanced, rows_forever, 1)


def rows_of_slices(context: Any) -> Any:
    return {v: data(8) for v in context.slices}


def rows_forever() -> Any:
    while True:
        yield from zip(*data(8), strict=True)


def fit_balanced(rows: Any, num_workers: int) -> None:
    trainer = mh.Trainer(nn.Linear(12, 4), mean_loss, OPTIMIZERS["SGD"], balance=True, slices=2)
    trainer.fit(rows, steps=1, batch_size=4, num_workers=num_workers)


# What a window decides, without workers.

EVEN = (range(4), range(4, 8))


def row(forward_s: float) -> tuple[float, ...]:
    return (0.0, forward_s, 0.0, 0.0, 0.001, 0.0)


def fed(pacing: StragglerTracker, *windows: tuple[float, float]) -> list[Any]:
    """Feed it windows in which both workers take so long for a slice; what it says after each."""
    verdicts = []
    for costs in windows:
        found = None
        for _ in range(WINDOW + 2):
            shares = pacing.division.shares(SLICES)
            times = [row(cost * len(share)) for cost, share in zip(costs, shares, strict=True)]
            found = pacing.add(shares, SLICES, times) or found
        verdicts.append(found)
        pacing._window.clear()
    return verdicts


def new_pacing(**settings: Any) -> StragglerTracker:
    return StragglerTracker(TrainSection(straggler_steps=WINDOW, **settings), 2)


def test_a_slow_worker_is_named_again_only_when_something_changes() -> None:
    pacing = new_pacing()
    first, same, much, over = fed(pacing, (0.1, 0.2), (0.1, 0.22), (0.1, 0.4), (0.1, 0.1))
    assert [(slow.rank, slow.phase) for slow in first.slow] == [(1, "forward")]
    assert same is None
    assert much.slow[0].factor == pytest.approx(4, rel=0.05)
    assert [slow.rank for slow in over.keeps_up] == [1] and not over.slow


def test_a_division_changes_with_the_times_and_starts_even_with_other_workers() -> None:
    pacing = new_pacing(balance=True)
    moved, still, back = fed(pacing, (0.1, 0.3), (0.1, 0.3), (0.1, 0.1))
    assert (moved.parts, still, back.parts) == ((6, 2), None, (4, 4))
    fed(pacing, (0.1, 0.3))
    assert pacing.division == SliceDivision(2, (6, 2))
    pacing.regrouped(3)
    assert pacing.division == SliceDivision(3)


def test_what_cannot_be_compared_is_not() -> None:
    pacing = new_pacing(straggler_factor=1.01)
    for _ in range(3 * WINDOW):  # a worker that has just joined knows no times; others do
        assert pacing.add(EVEN, SLICES, [row(0.1), (0.0,) * 6]) is None
        assert pacing.add(EVEN, SLICES, ()) is None
    for _ in range(3 * WINDOW):  # short batches, which the next step reports
        assert pacing.add((range(1), range(1, 2)), SLICES, [row(0.1), row(0.9)]) is None
