"""In async a worker reads weights where servers keep them; one that they overtake computes with a copy instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from manyhands.comm.axis import Axis
from manyhands.data.batches import Batches
from manyhands.data.feeds import BatchSchedule
from manyhands.data.sample_order import Position, SliceDivision
from manyhands.data.sources.as_source import as_source
from manyhands.native import why_not
from manyhands.parameter_server.engine.leased_engine import LeasedEngine
from manyhands.parameter_server.protocol.leases import Interval
from tests.parameter_server.direct import OTHER, ROWS, WORKER, World, data, loss, make_model

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")

BATCH, SLICES = 4, 2
COPIES = 5
"""Of two workers: version n is written over with n + 5, so that four updates after it are too many."""


class Beside(Axis):
    """One of two workers of one process: the first has spoken before the second one asks."""

    said: dict[str, bytes] = {}

    def all_gather_bytes(self, name: str, data: bytes) -> list[bytes]:
        if name == "workers":
            return [msgspec.msgpack.encode((worker, False)) for worker in (WORKER, OTHER)]
        if self.rank == 0:
            self.said[name] = data
        return [self.said[name], b""]

    def broadcast_(self, tensors: Any, name: str, *, source: int = 0) -> None:
        """They begin with the same weights."""


class Two:
    """A worker, and another one that makes updates while the first is in the middle of a slice."""

    def __init__(self) -> None:
        self._meanwhile: Callable[[], None] | None = None
        self.slices = 0
        world = World("async", _optimizer, None, 1, {}, Beside(0, 2, object()), self._loss)
        model = make_model()
        self._other = world.add_worker(OTHER, model, _optimizer(model.parameters()), Beside(1, 2, object()))
        self._worker, self.model = world.engine, world.model
        schedule = BatchSchedule(BATCH, SLICES, Position(0, 0, 0), epochs=1)
        self._batches = Batches(as_source(data()), schedule, 0, SliceDivision(1))
        interval = Interval(
            call=1,
            first=1,
            last=ROWS // BATCH,
            start_row=0,
            num_rows=ROWS,
            batch_size=BATCH,
            slices=SLICES,
            whole=True,
        )
        for engine in (self._worker, self._other):
            engine.open((1, 1, 1), interval, None, scheduled=False)
        for engine in (self._worker, self._other):
            engine.ask(lambda: 0)  # it receives the number of the lease table

    def step_while(self, updates: int) -> tuple[int, int]:
        """How many slices the worker computes, and how stale its update is, if the other one makes so many."""
        before = self.slices
        self._meanwhile = lambda: [self._step(self._other) for _ in range(updates)] and None
        self._step(self._worker)
        last = self._other.ask(lambda: 0).done[-1]
        return self.slices - before, last.staleness

    def step_without_it(self) -> None:
        """The other one computes as long as it gets leases."""
        while (reply := self._other.ask(lambda: 0)).work is not None:
            self._other.compute(self._batches.at(reply.work.step), reply.work, reply.version)

    def receive(self) -> list[int]:
        """The updates that the worker had not received."""
        received: list[int] = []
        while (reply := self._worker.ask(lambda: 0)).work is None:
            received += [done.update for done in reply.done]
        return received + [done.update for done in reply.done]

    def _step(self, engine: LeasedEngine) -> None:
        reply = engine.ask(lambda: 0)
        assert reply.work is not None
        engine.compute(self._batches.at(reply.work.step), reply.work, reply.version)

    def _loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.slices += 1
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return loss(model, batch)


def _optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def test_a_worker_that_is_overtaken_computes_once_more_and_then_makes_copies_until_it_is_not() -> None:
    two = Two()
    assert two.step_while(0) == (SLICES, 0)
    assert two.step_while(COPIES - 2) == (SLICES, COPIES - 2), "its weights are still there"
    assert two.step_while(0) == (SLICES, 0)  # with a copy, as one update more would have been too many
    assert two.step_while(COPIES - 1) == (2 * SLICES, 0), "written over: the second time with the newest"
    assert two.step_while(COPIES - 1) == (SLICES, COPIES - 1), "a copy stays as it is, however stale"
    assert two.step_while(0) == (SLICES, 0)
    assert two.step_while(COPIES - 1) == (2 * SLICES, 0), "in place again"


def test_a_worker_that_is_slow_to_receive_updates_misses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("memory.versioned_memory", "server.lease_service"):
        monkeypatch.setattr(f"manyhands.parameter_server.{module}.JOURNAL_LENGTH", 8)
    monkeypatch.setattr("manyhands.parameter_server.server.lease_service.MAX_TOLD", 3)
    two = Two()
    two.step_without_it()
    assert two.receive() == list(range(1, 8)), "as many as are kept, but for one that may be under way"
    assert two.step_while(2) == (SLICES, 2), "and there is work again"
