"""A worker dies when one server has received its gradient and another has not: its slice is computed again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.data.batches import Batches
from manyhands.data.feeds import BatchSchedule
from manyhands.data.sample_order import Position, SliceDivision
from manyhands.data.sources.as_source import as_source
from manyhands.native import why_not
from manyhands.parameter_server.engine.leased_engine import LeasedEngine
from manyhands.parameter_server.worker.server_connection import PushedGradient
from manyhands.testing import RankPool
from tests.parameter_server.direct import BATCH, OTHER, SLICES, Direct, World, data, loss
from tests.parameter_server.test_overwritten_weights import Beside

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}"),
]

DIES_AT = 3


class Rowed(nn.Module):
    """What its rows are, every gradient depends on; and rows go as soon as a step leaves them alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = mh.nn.Embedding(10, name="words", optimizer=mh.optim.rows.SGD(lr=0.5), keep_steps=1)
        self.out = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        words: Tensor = self.rows((8 * x[:, 0]).long())
        return self.out(x + words)


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class PartialPush(Direct):
    """From some moment on, only the first server receives gradients."""

    is_cut = False

    def tell(self, push: PushedGradient) -> None:
        hearing = self._servers[:1] if self.is_cut else self._servers
        for server in hearing:
            self._deliver(server.take(b"worker", push.filled))
        self._work()

    def bury(self) -> None:
        """Its worker is dead."""
        self.is_cut = False
        for server in self._servers:
            server.set_living_workers([OTHER])


def work(engine: LeasedEngine, batches: Batches) -> int:
    """The step that it has computed a slice of; 0: all synchronise."""
    while (reply := engine.ask(lambda: 0)).work is None:
        if reply.meet is not None:
            return 0
    engine.compute(batches.at(reply.work.step), reply.work, reply.version)
    return reply.work.step


def train_with_a_death(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr("tests.parameter_server.direct.make_model", Rowed)
    monkeypatch.setattr("tests.parameter_server.direct.Direct", PartialPush)
    world, model = World("sync", optimizer, None, 2, {}, Beside(0, 2, object())), Rowed()
    other = world.add_worker(OTHER, model, optimizer(model.parameters()), Beside(1, 2, object()))
    schedule = BatchSchedule(BATCH, SLICES, Position(0, 0, 0), epochs=1)
    batches = Batches(as_source(data()), schedule, 0, SliceDivision(1))
    world.open(0)
    other.open((1, 1, 1), world.interval, None, scheduled=False)
    for engine in (world.engine, other):
        engine.ask(lambda: 0)  # it receives the number of the lease table
    work(other, batches)
    for _ in range(SLICES * DIES_AT - 2):
        work(world.engine, batches)
    world.link.is_cut = True
    assert work(world.engine, batches) == DIES_AT
    world.link.bury()
    assert work(other, batches) == DIES_AT, "it is not computed again"
    while work(other, batches):
        pass
    other.gather_state()
    return model


def in_one_process() -> dict[str, Any]:
    trainer = mh.Trainer(Rowed(), loss, optimizer, slices=SLICES)
    trainer.fit(data(), epochs=1, batch_size=BATCH)
    return values_of(trainer.model)


def values_of(model: nn.Module) -> dict[str, Any]:
    state = model.state_dict()
    rows = state.pop("rows._extra_state")
    return {key: value.numpy().copy() for key, value in {**state, **rows}.items()}


def test_a_slice_that_is_computed_again_sees_no_row_that_has_its_step(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = values_of(train_with_a_death(monkeypatch))
    (expected,) = ranks(1, in_one_process)
    assert found.keys() == expected.keys()
    assert [key for key in expected if not np.array_equal(expected[key], found[key])] == []
