"""Garbage is collected between steps, by all workers after the same ones, and never inside one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.testing import RankPool
from manyhands.training.step.garbage_collection import GarbageCollection
from tests.training.workloads import OPTIMIZERS, data, mean_loss


class Knot:
    """A reference cycle that holds a tensor, of a kind that only the collector frees."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.me = tensor, self


class Record:
    """A loss that leaves knots, and a hook that notes after which steps the collector ran, and what it is like."""

    def __init__(self, per_slice: int) -> None:
        self.per_slice = per_slice
        self.collected: list[int] = []
        self.enabled: set[tuple[str, bool]] = set()
        self.in_steps = self.most_alive = 0
        self._alive: weakref.WeakSet[Knot] = weakref.WeakSet()
        self._in_step = False

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self._in_step = True
        self.enabled.add(("loss", gc.isenabled()))
        value = mean_loss(model, batch)
        for _ in range(self.per_slice):
            self._alive.add(Knot(value))
        self.most_alive = max(self.most_alive, len(self._alive))
        self._in_step = False
        return value

    def after_step(self, trainer: Any, step: int, stats: Any) -> None:
        self.enabled.add(("hook", gc.isenabled()))
        if "gc" in stats.seconds:
            self.collected.append(step)

    def ran(self, phase: str, info: dict[str, int]) -> None:
        self.in_steps += self._in_step and phase == "start"


def test_garbage_of_local_steps_does_not_pile_up() -> None:
    garbage, alive, most = GarbageCollection(manage=True), weakref.WeakSet[Knot](), 0
    garbage.begin()
    for _ in range(60):
        garbage.hold()
        for _ in range(100):
            alive.add(Knot(torch.ones(1)))
        most = max(most, len(alive))
        garbage.let_go()
    garbage.end()
    assert most < 2000


def train(per_slice: int, steps: int = 60, *, disabled: bool = False, only_chief: bool = False) -> dict[str, Any]:
    record = Record(per_slice)
    trainer = mh.Trainer(nn.Linear(12, 4), record.loss, OPTIMIZERS["SGD"], hooks=[record], slices=3, check_loss=False)
    if only_chief and not trainer.is_chief:
        record.per_slice = 0
    before = gc.get_threshold()
    gc.callbacks.append(record.ran)
    if disabled:
        gc.disable()
    try:
        trainer.fit(data(48), steps=steps, batch_size=24)
        after = {"enabled": gc.isenabled(), "frozen": gc.get_freeze_count(), "as before": gc.get_threshold() == before}
    finally:
        gc.callbacks.remove(record.ran)
        gc.enable()
    names = ("collected", "enabled", "in_steps", "most_alive")
    return {name: getattr(record, name) for name in names} | {"after": after}


AS_BEFORE = {"enabled": True, "frozen": 0, "as before": True}


def test_the_collector_never_runs_inside_a_step_and_is_back_between_them(ranks: RankPool) -> None:
    (found,) = ranks(1, train, 50)
    assert found["enabled"] == {("loss", False), ("hook", True)}
    assert found["in_steps"] == 0
    assert found["collected"], "150 knots a step are soon enough to collect"
    assert found["after"] == AS_BEFORE


def test_a_model_that_leaves_cycles_holds_no_more_of_them_than_python_would(ranks: RankPool) -> None:
    (found,) = ranks(1, train, 5, 300)  # 4500 in all, each with another graph
    assert 0 < len(found["collected"]) < 100
    # Python begins to collect when 700 objects are new. Ours comes at the end of that step or the next.
    assert found["most_alive"] < gc.get_threshold()[0] + 40


def test_all_workers_collect_after_the_same_steps(ranks: RankPool) -> None:
    results = ranks(3, train, 60)
    assert results[0]["collected"]
    assert [result["collected"] for result in results] == [results[0]["collected"]] * 3
    assert [result["in_steps"] for result in results] == [0, 0, 0]


def only_chief_leaves_knots() -> dict[str, Any]:
    return train(100, only_chief=True)


def test_one_worker_that_needs_a_collection_is_enough(ranks: RankPool) -> None:
    chief, other = ranks(2, only_chief_leaves_knots)
    assert chief["collected"] and chief["collected"] == other["collected"]


def with_the_collector_disabled() -> dict[str, Any]:
    return train(50, disabled=True)


def test_a_collector_that_the_user_has_disabled_stays_so_and_nothing_is_collected(ranks: RankPool) -> None:
    (found,) = ranks(1, with_the_collector_disabled)
    assert found["enabled"] == {("loss", False), ("hook", False)}
    assert found["most_alive"] == 60 * 150
    assert found["after"] == {**AS_BEFORE, "enabled": False}


def test_with_manage_gc_off_python_collects_as_ever(ranks: RankPool) -> None:
    (found,) = ranks(1, train, 50, flags={"train.manage_gc": False})
    assert found["enabled"] == {("loss", True), ("hook", True)}
    assert found["collected"] == [] and found["in_steps"] > 0


def fail() -> tuple[bool, int]:
    def loss(model: nn.Module, batch: Any) -> Any:
        raise RuntimeError("a loss of mine")

    trainer = mh.Trainer(nn.Linear(12, 4), loss, OPTIMIZERS["SGD"])
    with pytest.raises(RuntimeError, match="of mine"):
        trainer.fit(data(48), steps=2, batch_size=24)
    return gc.isenabled(), gc.get_freeze_count()


def test_the_collector_is_back_after_a_failure(ranks: RankPool) -> None:
    assert ranks(1, fail) == [(True, 0)]


def loop_of_ones_own() -> tuple[set[tuple[str, bool]], bool, int]:
    hands = mh.join(slices=2)
    model = nn.Linear(12, 4)
    hands.setup(model, OPTIMIZERS["SGD"](model.parameters()))
    seen = set()
    for batch in hands.batches(data(48), batch_size=24, steps=4):
        seen.add(("forward", gc.isenabled()))
        hands.backward(mean_loss(model, batch))
        hands.step()
        if hands.stepped:
            seen.add(("stepped", gc.isenabled()))
    return seen, gc.isenabled(), gc.get_freeze_count()


def test_in_a_loop_of_the_users_own_the_collector_is_back_once_a_step_is_done(ranks: RankPool) -> None:
    assert ranks(1, loop_of_ones_own) == [({("forward", False), ("stepped", True)}, True, 0)]


# Without a training.


@pytest.fixture
def thresholds() -> Iterator[tuple[int, int, int]]:
    usual = gc.get_threshold()
    yield usual
    gc.unfreeze()
    gc.set_threshold(*usual)
    gc.enable()


def test_between_steps_there_is_as_much_room_as_ever(thresholds: tuple[int, int, int]) -> None:
    garbage = GarbageCollection(manage=True)
    garbage.hold()
    left = [Knot(torch.empty(0)) for _ in range(2 * thresholds[0])]
    assert garbage.wanted
    garbage.release()
    assert gc.get_threshold()[0] >= len(left) + thresholds[0]
    garbage.hold()
    assert gc.get_threshold() == thresholds
    garbage.end()
    assert gc.get_threshold() == thresholds


def test_what_the_user_sets_between_steps_stays(thresholds: tuple[int, int, int]) -> None:
    garbage = GarbageCollection(manage=True)
    garbage.hold()
    garbage.release()
    gc.set_threshold(5000, 20, 20)
    garbage.hold()
    garbage.end()
    assert gc.get_threshold() == (5000, 20, 20)


def test_what_the_user_has_frozen_stays_frozen(thresholds: tuple[int, int, int]) -> None:
    gc.freeze()
    garbage = GarbageCollection(manage=True)
    garbage.begin()
    garbage.end()
    assert gc.get_freeze_count() > 0
