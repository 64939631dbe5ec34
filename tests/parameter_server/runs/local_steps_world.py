"""Servers and several workers that train on ranges of batches, in one process and in an order that a test says.

Links are function calls, so that servers can be replaced and every message be said twice. `by_hand` is the reference: a
loop over the same ranges in the same order, written from the formulas, that knows nothing of servers.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from manyhands.comm.axis import Axis
from manyhands.comm.host_memory import HostMemory, Segment
from manyhands.comm.peer_waits import Waiting
from manyhands.data.batches import Batches
from manyhands.data.feeds import BatchSchedule
from manyhands.data.sample_order import Position, SliceDivision, order
from manyhands.data.sources.as_source import as_source
from manyhands.launcher.worker_process.lazy_compiler import load_compiler_late
from manyhands.parallel.model.precision import Precision
from manyhands.parallel.model.step_buffers import ForeignState
from manyhands.parameter_server.engine.leased_engine import LeaseHolder, Servers
from manyhands.parameter_server.engine.local_steps_engine import LocalStepsEngine, way_of
from manyhands.parameter_server.protocol.leases import Interval, Lease
from manyhands.parameter_server.protocol.local_step_ranges import LocalStepRanges
from manyhands.parameter_server.protocol.messages import Open, Reply, UpdateApplied, UpdateDone, WorkRequest
from manyhands.parameter_server.server.server import ParameterServerCore
from manyhands.parameter_server.worker.server_access import LocalAccess
from manyhands.parameter_server.worker.server_connection import PushedGradient
from manyhands.strategies.choices import LocalSGD, ParameterServer
from manyhands.strategies.engine_parts import ModelSide, Ranks, StepSettings

load_compiler_late()  # as every worker does: a plain optimizer would load all of torch's compiler

ROWS, BATCH, SEED, FIRST_WORKER = 96, 8, 5, 10
Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def data() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 6, generator=random), torch.randint(0, 3, (ROWS,), generator=random)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    """Batch 1 is the first."""
    epoch, start = divmod((number - 1) * BATCH, ROWS)
    rows = torch.from_numpy(order(ROWS, SEED, epoch, start, start + BATCH))
    x, y = data()
    return x[rows], y[rows]


class FakeAxis(Axis):
    """One of several ranks that take turns: rank 0 opens an interval, and the others receive it."""

    said: dict[str, bytes]

    def __init__(self, rank: int, size: int, said: dict[str, bytes]) -> None:
        self.rank, self.size, self.said = rank, size, said
        self.waiting = Waiting()

    def all_gather_bytes(self, name: str, data: bytes) -> list[bytes]:
        if name == "workers":
            return [msgspec.msgpack.encode((FIRST_WORKER + rank, False)) for rank in range(self.size)]
        if self.rank == 0:
            self.said[name] = data
        return [self.said[name]]

    def broadcast_(self, tensors: Iterable[Tensor], name: str, *, source: int = 0) -> None:
        """All have made the same."""

    def barrier(self, name: str) -> None: ...

    def close(self) -> None: ...


class NoAnswer(Exception):
    """Not now."""


class Line:
    """A worker's link. What it pushes is on its way when its turn has come."""

    def __init__(self, world: World, sender: bytes) -> None:
        self._world, self._sender = world, sender
        self._tickets = itertools.count(1)
        self.replies: list[Reply] = []
        self.applied: dict[int, set[int]] = {}
        self.waiting = Waiting()
        self._pushed: PushedGradient | None = None

    def open(self, message: Open, is_wanted: Callable[[], bool]) -> None:
        for server in self._world.servers:
            assert server.take(self._sender, message)

    def follow(self, message: Open) -> None: ...

    def ask(self, make: Callable[[int], WorkRequest], unanswered: Callable[[], Iterable[PushedGradient]]) -> Reply:
        self.replies.clear()
        self._world.servers[0].take(self._sender, make(next(self._tickets)))
        self._world.work()
        if not self.replies:
            raise NoAnswer
        return self.replies[-1]

    def tell(self, push: PushedGradient) -> None:
        self._pushed = push

    def await_applied(self, push: PushedGradient) -> None:
        """Others take their turns meanwhile."""

    def push(self) -> None:
        self.say_again()
        self._world.replace_one()
        self._world.work()

    def say_again(self) -> None:
        assert self._pushed is not None
        for server in self._world.servers:
            for _ in range(2):  # every message may be sent again
                self._world.deliver(server.take(self._sender, self._pushed.filled))

    @property
    def is_waiting(self) -> bool:
        if self._pushed is None:
            return False
        return len(self.applied.get(self._pushed.filled.held.step, ())) < len(self._world.servers)

    def close(self) -> None: ...


class World:
    def __init__(
        self,
        strategy: ParameterServer | LocalSGD,
        optimizer: Optimizers,
        *,
        workers: int,
        servers: int = 1,
        die_every: int = 0,
        die_in_rounds: bool = False,
        begins_early: bool = False,
        clip: float | None = None,
    ) -> None:
        """With `die_every`, after as many pushes a server that has received one, not applied it, is replaced, in turns;
        with `die_in_rounds`, after every update that leaves more of its round to be counted. With `begins_early` a
        worker trains when it is given work, and pushes when its turn comes; else both when its turn comes."""
        self._strategy, self._make, self._die_every = strategy, optimizer, die_every
        self._die_in_rounds, self._begins_early, self.now_s = die_in_rounds, begins_early, 0.0
        self._living = {FIRST_WORKER + rank for rank in range(workers)}
        self._host, self._known, self._pushes = HostMemory(), dict[str, int](), itertools.count(1)
        weakref.finalize(self, self._host.close)
        self.servers = [self._new_server(number) for number in range(servers)]
        self.lines = [Line(self, f"worker {number}".encode()) for number in range(workers)]
        self.updates: list[UpdateDone] = []
        said: dict[str, bytes] = {}
        self.engines = [self._engine(rank, FakeAxis(rank, workers, said), clip) for rank in range(workers)]
        schedule = BatchSchedule(BATCH, 1, Position(SEED, 0, 0), epochs=100)
        self._batches = Batches(as_source(data()), schedule, 0, SliceDivision(1))
        self._intervals = itertools.count(1)
        self.done = 0

    def _engine(self, rank: int, identity: FakeAxis, clip: float | None) -> LocalStepsEngine:
        model, line = make_model(), self.lines[rank]
        engine = LocalStepsEngine(
            Ranks(identity, lambda: Axis(0, 1)),
            ModelSide(loss, Precision("fp32", torch.device("cpu"))),
            StepSettings(clip_norm=clip, seed=SEED),
            self._strategy if isinstance(self._strategy, ParameterServer) else ParameterServer(),
            Servers(line, LocalAccess(line, self._memory), lambda: len(self.servers)),  # type: ignore[arg-type]
            LeaseHolder(FIRST_WORKER + rank, most_workers=8, training=1, wait_for_chief=lambda what: None),
            way=way_of(self._strategy),
        )
        model.train()
        engine.setup(model, self._make(model.parameters()))
        return engine

    def _memory(self, name: str, num_bytes: int) -> Segment:
        if name not in self._known:
            self._known[name] = self._host.allot(name, num_bytes)
        return Segment(self._host.fd, num_bytes, self._known[name])

    def _new_server(self, number: int) -> ParameterServerCore:
        theirs, outer = make_model(), way_of(self._strategy).make_outer
        optimizer = (outer or self._make)(theirs.parameters())
        server = ParameterServerCore(
            number,
            theirs,
            optimizer,
            None,
            self._memory,
            clip_norm=None,
            place={},
            foreign=ForeignState(),
            clock=lambda: self.now_s,
        )
        server.set_living_workers(self._living)
        return server

    def lose(self, worker: int) -> None:
        """Kill it, in the middle of a step or a push."""
        self._living.discard(FIRST_WORKER + worker)
        for server in self.servers:
            server.set_living_workers(self._living)

    def replace(self, server: int) -> None:
        self.servers[server] = self._new_server(server)

    def replace_one(self) -> None:
        if self._die_every and (number := next(self._pushes)) % self._die_every == 0:
            at = number // self._die_every % len(self.servers)
            self.replace(at)

    def work(self) -> None:
        for number in [*range(1, len(self.servers)), 0]:
            while self.servers[number].has_work:
                self.deliver(self.servers[number].work())
                if self._die_in_rounds and self.servers[number]._interval._owed:  # type: ignore[union-attr]
                    self.replace(number)
            server = self.servers[number]
            if (watermark := server.standing()) is not None:
                self.servers[0].take(b"server", watermark)
        self.deliver(self.servers[0].work())

    def deliver(self, outbox: list[tuple[bytes, Any]]) -> None:
        by_name = {f"worker {number}".encode(): line for number, line in enumerate(self.lines)}
        for receiver, message in outbox:
            if isinstance(message, Reply):
                by_name[receiver].replies.append(message)
            elif isinstance(message, UpdateApplied):
                by_name[receiver].applied.setdefault(message.step, set()).add(message.server)

    def open(self, num_batches: int) -> None:
        """An interval of the next so many batches of this epoch."""
        first = self.done + 1
        self._stretches = LocalStepRanges(
            self.engines[0].every, first, self.done + num_batches, self.engines[0].updates + 1
        )
        left = ROWS - self.done * BATCH % ROWS
        by_batch = Interval(
            call=1,
            first=first,
            last=first + num_batches - 1,
            start_row=0,
            num_rows=left,
            batch_size=BATCH,
            slices=1,
            whole=True,
        )
        number, self.done = (1, 1, next(self._intervals)), self.done + num_batches
        for engine in self.engines:
            engine.open(number, self._stretches.interval(by_batch), None, scheduled=False)

    def play(self, order: Iterable[int | float]) -> Iterator[tuple[int, range]]:
        """Workers that have work take turns as in `order` until all synchronise: yields the worker and its batches.

        A number with a point in it is no worker, but seconds that go by.
        """
        work: dict[int, Lease] = {}
        met: set[int] = set()
        for worker in order:
            for _ in range(3):  # a new lease table grants nothing before all have reported
                self._request(work, met)
            if len(met) == len(self._living):
                return
            if isinstance(worker, float):
                self.now_s += worker
            elif worker in work and self._lives(worker):
                if not self._begins_early:
                    self._train(worker, work[worker])
                self.lines[worker].push()
                yield worker, self._stretches.batches(work.pop(worker).step)

    def _request(self, work: dict[int, Lease], met: set[int]) -> None:
        """What workers do that have nothing else to do."""
        for worker, line in enumerate(self.lines):
            if worker in work or worker in met or not self._lives(worker):
                continue
            if line.is_waiting:
                line.say_again()
                self.work()
            elif (reply := self._ask(worker)) is not None and reply.meet is not None:
                met.add(worker)
            elif reply is not None and reply.work is not None:
                work[worker] = reply.work
                if self._begins_early:
                    self._train(worker, reply.work)

    def _lives(self, worker: int) -> bool:
        return FIRST_WORKER + worker in self._living

    def _train(self, worker: int, work: Lease) -> None:
        steps = [self._batches.at(number) for number in self._stretches.batches(work.step)]
        self.engines[worker].train_range(steps, work)

    def _ask(self, worker: int) -> Reply | None:
        try:
            reply = self.engines[worker].ask(lambda: 0)
        except NoAnswer:
            return None
        if worker == 0:
            self.updates += reply.done
        return reply

    def weights(self) -> list[Tensor]:
        """The agreed ones, between intervals."""
        return [param.detach().clone() for param in self.engines[0].model.parameters()]


def gradients(weights: Sequence[Tensor], number: int) -> list[Tensor]:
    """Of one batch, by hand."""
    model = make_model()
    with torch.no_grad():
        for param, value in zip(model.parameters(), weights, strict=True):
            param.copy_(value)
    loss(model, batch_of(number)).backward()  # type: ignore[no-untyped-call]
    return [param.grad for param in model.parameters() if param.grad is not None]
