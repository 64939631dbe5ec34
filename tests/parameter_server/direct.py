"""Parameter servers and a worker in one process, joined by function calls, so that servers can be replaced at will."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.comm.axis import Axis
from manyhands.comm.host_memory import HostMemory, Segment
from manyhands.comm.peer_waits import Waiting
from manyhands.data.batches import Batches
from manyhands.data.feeds import BatchSchedule
from manyhands.data.sample_order import Position, SliceDivision
from manyhands.data.sources.as_source import as_source
from manyhands.parallel.model.precision import Precision
from manyhands.parallel.model.step_buffers import ForeignState
from manyhands.parameter_server.engine.leased_engine import LeasedEngine, LeaseHolder, Servers
from manyhands.parameter_server.log.log_storage import Backups
from manyhands.parameter_server.log.write_ahead_log import WriteAheadLog
from manyhands.parameter_server.protocol.leases import Interval
from manyhands.parameter_server.protocol.messages import Open, Reply, UpdateApplied, UpdateDone, WorkRequest
from manyhands.parameter_server.server.server import ParameterServerCore
from manyhands.parameter_server.worker.server_access import LocalAccess
from manyhands.parameter_server.worker.server_connection import PushedGradient
from manyhands.strategies.choices import ParameterServer
from manyhands.strategies.engine_parts import ModelSide, Ranks, StepSettings

ROWS, BATCH, SLICES, WORKER, OTHER = 100, 16, 4, 7, 8
Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(10, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Dropout(0.1), nn.Linear(300, 1200), nn.Linear(1200, 3)
    )


def data() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 10, generator=random), torch.randint(0, 3, (ROWS,), generator=random)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


class Direct:
    """A link without sockets."""

    def __init__(self, num_servers: int, new_server: Callable[[int], ParameterServerCore]) -> None:
        self._new_server = new_server
        self._servers = [new_server(number) for number in range(num_servers)]
        self._tickets = itertools.count(1)
        self._applied: dict[int, set[int]] = {}
        self._replies: dict[int, Reply] = {}
        self.waiting = Waiting()

    def replace(self, number: int) -> None:
        """What the server received and did not commit is gone."""
        self._servers[number] = self._new_server(number)

    def close_servers(self) -> None:
        for server in self._servers:
            server.close()

    def open(self, message: Open, is_wanted: Callable[[], bool]) -> None:
        for server in self._servers:
            assert server.take(b"worker", message)

    def follow(self, message: Open) -> None:
        """Servers have it."""

    def ask(self, make: Callable[[int], WorkRequest], unanswered: Callable[[], Iterable[PushedGradient]]) -> Reply:
        for _ in range(4):
            self._servers[0].take(b"worker", make(ticket := next(self._tickets)))
            self._work()
            if ticket in self._replies:
                return self._replies.pop(ticket)
            for push in list(unanswered()):
                self.tell(push)
        raise AssertionError("no answer, however often it is asked")

    def tell(self, push: PushedGradient) -> None:
        for server in self._servers:
            self._deliver(server.take(b"worker", push.filled))
        self._work()

    def forget(self, step: int) -> None:
        """It is not long."""

    def await_applied(self, push: PushedGradient) -> None:
        step = push.filled.held.step
        while len(self._applied.get(step, ())) < len(self._servers):
            self.tell(push)

    def close(self) -> None:
        pass

    def _work(self) -> None:
        for server in [*self._servers[1:], self._servers[0]]:
            while server.has_work:
                self._deliver(server.work())
            if (watermark := server.standing()) is not None:
                self._servers[0].take(b"server", watermark)
        self._deliver(self._servers[0].work())

    def _deliver(self, outbox: list[tuple[bytes, Any]]) -> None:
        for _, message in outbox:
            if isinstance(message, Reply):
                self._replies[message.ticket] = message
            elif isinstance(message, UpdateApplied):
                self._applied.setdefault(message.step, set()).add(message.server)


class World:
    """The memory of a host, servers on it, and one worker; `add_worker` makes others."""

    def __init__(
        self,
        mode: str,
        optimizer: Optimizers,
        clip: float | None,
        servers: int,
        settings: Any,
        axis: Axis | None = None,
        loss_fn: Any = loss,
        logs: Path | None = None,
        backups: Callable[[int], Backups] | None = None,
        slices: int = SLICES,
    ) -> None:
        """With `logs`, a directory for those of servers, which outlives this host; `backups` are each server's."""
        self._mode, self._num_servers, self._settings = mode, servers, settings
        self._optimizer, self._clip, self._place = optimizer, clip, settings.get("place", {})
        self._logs, self._backups, self._slices = logs, backups, slices
        self._host, self._known = HostMemory(), dict[str, int]()
        weakref.finalize(self, self._host.close)
        self.is_async = mode == "async"
        self.link = Direct(servers, self._new_server)
        self.model = make_model()
        self.optimizer = optimizer(self.model.parameters())
        self.engine = self.add_worker(WORKER, self.model, self.optimizer, axis or Axis(0, 1), loss_fn)

    def add_worker(
        self, worker: int, model: nn.Module, optimizer: torch.optim.Optimizer, axis: Axis, loss_fn: Any = loss
    ) -> LeasedEngine:
        engine = LeasedEngine(
            Ranks(axis, lambda: axis),
            ModelSide(loss_fn, Precision("fp32", torch.device("cpu"))),
            StepSettings(clip_norm=self._clip),
            ParameterServer(mode=self._mode, servers=self._num_servers, **self._settings),
            Servers(self.link, LocalAccess(self.link, self._memory), lambda: self._num_servers),  # type: ignore[arg-type]
            LeaseHolder(worker, most_workers=2, training=1, wait_for_chief=lambda what: None),
        )
        model.train()
        engine.setup(model, optimizer)
        return engine

    def _memory(self, name: str, num_bytes: int) -> Segment:
        if name not in self._known:
            self._known[name] = self._host.allot(name, num_bytes)
        return Segment(self._host.fd, num_bytes, self._known[name])

    def _new_server(self, number: int) -> ParameterServerCore:
        theirs = make_model()
        server = ParameterServerCore(
            number,
            theirs,
            self._optimizer(theirs.parameters()),
            None,
            self._memory,
            clip_norm=self._clip,
            place=self._place,
            foreign=ForeignState(),
            log=self._log(number),
        )
        server.set_living_workers([WORKER, OTHER])
        return server

    def _log(self, number: int) -> WriteAheadLog | None:
        if self._logs is None:
            return None
        backups = self._backups(number) if self._backups is not None else None
        return WriteAheadLog(self._logs / f"server-{number}", lambda: 0, backups)

    def open(self, epoch: int) -> None:
        steps = -(-ROWS // BATCH)
        self.interval = Interval(
            call=1,
            first=epoch * steps + 1,
            last=(epoch + 1) * steps,
            start_row=0,
            num_rows=ROWS,
            batch_size=BATCH,
            slices=self._slices,
            whole=self.is_async,
        )
        self.engine.open((1, 1, epoch + 1), self.interval, None, scheduled=False)


def batches_of_two_epochs(slices: int = SLICES) -> Batches:
    schedule = BatchSchedule(BATCH, slices, Position(0, 0, 0), epochs=2)
    return Batches(as_source(data()), schedule, 0, SliceDivision(1))


def train(
    mode: str,
    optimizer: Optimizers,
    *,
    clip: float | None,
    servers: int,
    die_every: int = 0,
    logs: Path | None = None,
    backups: Callable[[int], Backups] | None = None,
    again: bool = False,
    answers: int = 10**9,
    slices: int = SLICES,
    **settings: Any,
) -> tuple[nn.Module, torch.optim.Optimizer, list[UpdateDone]]:
    """Two epochs, or so many `answers` of them; with `die_every`, after as many answers a server is replaced, in turns.

    `again`: as if from a checkpoint of the beginning.
    """
    world = World(mode, optimizer, clip, servers, settings, logs=logs, backups=backups, slices=slices)
    if again:
        world.engine.restore({})
    batches = batches_of_two_epochs(slices)
    updates: list[UpdateDone] = []
    asked = itertools.count(1)
    for epoch in range(2):
        world.open(epoch)
        while True:
            if (number := next(asked)) > answers:
                return world.model, world.optimizer, updates
            if die_every and number % die_every == 0:
                world.link.replace(number // die_every % servers)
            reply = world.engine.ask(lambda: 0)
            updates += reply.done
            if reply.meet is not None:
                break
            if reply.work is not None:
                world.engine.compute(batches.at(reply.work.step), reply.work, reply.version)
        world.engine.gather_state()
    return world.model, world.optimizer, updates
