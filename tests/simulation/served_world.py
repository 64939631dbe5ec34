"""One simulated run with parameter servers: virtual clock, network and memory, and faults drawn from a seed.

`LeaseTable` and `Shard` are the real ones, the processes around them `served_processes`. A message reaches the process
that is there when it arrives, late, twice or never; but never two processes. Start reading at `run`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from manyhands.parameter_server.protocol.leases import Interval, Rule

from .clock import Clock
from .history import Fault
from .served_history import Died, History
from .served_processes import Memory, Row, Server, Worker

TROUBLE_S = 3.0
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Defects:
    """What is switched off, to show that the checker sees it."""

    deduplication: bool = True
    """Servers know what they have applied."""
    fillings: bool = True
    """Servers compare the number of a row's filling with what was reported to them."""
    expecting: bool = True
    """A new lease table waits for what workers hold."""
    table_state: bool = True
    """A new lease table knows what the one before it had called and leased."""
    leaving: bool = True
    """Who leaves is not waited for."""


def _interval(random: Random, *, whole: bool) -> Interval:
    slices, rows_each = random.randint(1, 4), random.randint(2, 3)
    batch = slices * rows_each
    first, num_rows = random.choice([1, 1, 8]), random.randint(1, 6 * batch)
    return Interval(
        call=1,
        first=first,
        last=first + random.randint(0, 24),
        start_row=random.randrange(num_rows),
        num_rows=num_rows,
        batch_size=batch,
        slices=slices,
        whole=whole,
    )


class World(Clock):
    def __init__(self, seed: int, defects: Defects) -> None:
        super().__init__()
        self.random, self.defects, self.soon = Random(seed), defects, seed % 3
        self.calm = False
        self.ahead = self.random.choice([0, 0, 1, 3, None, None])
        self.interval = _interval(self.random, whole=self.ahead is None)
        self.rule = Rule(ahead=self.ahead, backups=0 if self.ahead is None else self.random.choice([0, 0, 1, 2]))
        least = 1 if self.ahead is None else self.interval.slices
        self.history = History(
            seed,
            self.interval,
            self.ahead,
            self.rule.backups,
            num_servers=self.random.randint(1, 3),
            num_rows=least + self.random.randint(0, 6),
        )
        self.loss = self.random.choice([0.0, 0.0, 0.1, 0.3])
        self.slow = self.random.choice([0.02, 0.2])
        self.tired = self.random.choice([0.02, 0.1, 0.5])
        self.danger = self.random.choice([0.0, 0.005, 0.02])
        self.rows = [Row() for _ in range(self.history.num_rows)]
        self.memories = [Memory(self) for _ in range(self.history.num_servers)]
        self.servers: dict[int, Server] = {}
        self.workers: dict[int, Worker] = {}
        self.living: set[int] = set()
        """Workers, as far as agents have noticed."""
        self._told = self._incarnations = 0
        for number in range(self.history.num_servers):
            self._start_server(number)
        for _ in range(self.random.randint(1, 5)):
            self._start_worker()
        self._tell_living()

    def note(self, event: Any) -> None:
        self.history.events.append(event)

    # ---- the network ----

    def send(self, target: str, deliver: Callable[[Any], None]) -> None:
        draw, reached = self.random.random, list[Any]()
        if not self.calm and draw() < self.loss:
            return

        def arrive() -> None:
            process = self._process(target)
            if process is not None and process.alive and process in (reached or [process]):
                reached.append(process)
                deliver(process)

        for _ in range(2 if not self.calm and draw() < 0.1 else 1):
            slow = not self.calm and draw() < self.slow
            self.at(draw() * (2.0 if slow else 0.03), arrive)

    def _process(self, name: str) -> Server | Worker | None:
        kind, number = name.split()
        return self.servers.get(int(number)) if kind == "server" else self.workers.get(int(number))

    # ---- processes ----

    def _start_server(self, number: int) -> None:
        if number not in self.servers or not self.servers[number].alive:
            self._incarnations += 1
            self.servers[number] = Server(self, number, self._incarnations)

    def _start_worker(self) -> None:
        self._incarnations += 1
        self.living.add(self._incarnations)
        self.workers[self._incarnations] = Worker(self, self._incarnations)

    def _tell_living(self) -> None:
        self._told += 1
        number, living, first = self._told, tuple(sorted(self.living)), self.servers[0]
        self.at(self.random.random() * 0.1, lambda: first.alive and first.know(number, living))
        self.at(0.3, self._tell_living)

    def dies_here(self, process: Server | Worker) -> bool:
        """Between two things that a process does: in troubled times some die there."""
        if process.alive and not self.calm and self.random.random() < self.danger:
            if isinstance(process, Server):
                self._kill_server(process)
            else:
                self._kill_worker(process)
        return not process.alive

    def _kill_server(self, server: Server) -> None:
        if server.alive:
            self.note(Fault(self.now, f"kill server {server.number}"))
            server.alive = False
            self.at(self.random.uniform(0.05, 1.0), lambda: self._start_server(server.number))

    def _kill_worker(self, worker: Worker) -> None:
        if not worker.alive:
            return
        self.note(Fault(self.now, f"kill worker {worker.number}"))
        self.note(Died(self.now, worker.number))
        worker.die()
        self.at(self.random.uniform(0.02, 0.5), lambda: self.living.discard(worker.number))
        if self.random.random() < 0.8 or not self._present():
            self.at(self.random.uniform(0.1, 1.5), self._start_worker)
        self.gather()

    # ---- sync points ----

    def _present(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.alive and not worker.has_left]

    def gather(self) -> None:
        """A sync point is over when every worker that is there has reached it."""
        for step in {worker.inside for worker in self._present() if worker.inside is not None}:
            if all(worker.inside == step or worker.met >= step for worker in self._present()):
                for worker in self._present():
                    if worker.inside == step:
                        self.at(self.random.random() * 0.1, self._leave(worker, step))

    def _leave(self, worker: Worker, step: int) -> Callable[[], None]:
        def leave() -> None:
            if worker.alive and worker.inside == step:
                worker.leave()

        return leave

    def look_whether_all_is_done(self) -> None:
        last, present = self.interval.last, self._present()
        if self.calm and present and all(worker.met == last for worker in present):
            self.over = all(memory.low == last for memory in self.memories)

    # ---- faults ----

    def trouble(self) -> None:
        for _ in range(self.random.randint(0, 12)):
            self.at(self.random.uniform(0.05, TROUBLE_S), self._one_fault)

    def _one_fault(self) -> None:
        kind = self.random.choice(["worker", "worker", "server", "first", "several", "request", "join", "leave"])
        servers = [server for server in self.servers.values() if server.alive]
        if kind in ("worker", "several"):
            for worker in self.random.sample(self._present(), min(len(self._present()), self.random.randint(1, 2))):
                self._kill_worker(worker)
        if kind in ("server", "several"):
            for server in self.random.sample(servers, min(len(servers), self.random.randint(1, 2))):
                self._kill_server(server)
        if kind == "first":
            self._kill_server(self.servers[0])
        if kind == "request":
            for worker in self._present()[:1]:
                worker.request = self.random.randint(1, 3)
                self.note(Fault(self.now, "request"))
        if kind == "leave" and len(self._present()) > 1:
            worker = self.random.choice(self._present())
            self.note(Fault(self.now, f"worker {worker.number} leaves"))
            self.note(Died(self.now, worker.number))
            worker.break_off()
            self.gather()
        if kind == "join" and len(self._present()) < 6:
            self.note(Fault(self.now, "join"))
            self._start_worker()

    def heal(self) -> None:
        self.calm, self.tired = True, 0.0
        self.look_whether_all_is_done()


def run(seed: int, defects: Defects | None = None) -> History:
    """Play one run to its end, or to the end of all patience after its last fault."""
    world = World(seed, defects or Defects())
    world.trouble()
    world.play(TROUBLE_S + 0.5)
    world.heal()
    world.play(world.now + PATIENCE_S)
    world.history.ended_at = world.now if world.over else None
    return world.history
