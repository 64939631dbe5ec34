"""A simulated agent: starts what is planned, kills what is not, announces generations, reports its host's state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from manyhands.control.messages.agent_messages import HostPlan, HostReport, MemberReport, Orders
from manyhands.control.messages.failure import WorkerEnd

from .history import Started
from .workers import Worker, number

if TYPE_CHECKING:
    from .world import World

REPORT_EVERY_S = 1.0
HEARTBEAT_S = 3.0
"""A worker whose heart has not beaten for so long is killed."""
GRACE_S = 5.0
ALONE_S = 15.0
"""An agent that has received nothing from the coordinator for so long ends its workers and itself."""


class Agent:
    def __init__(self, world: World, name: str, slots: int, begins_in_s: float = 0.0) -> None:
        self._world, self.name, self.slots = world, name, slots
        self.workers: dict[int, Worker] = {}
        self.run_call = 0
        self.wanted: int | None = None
        self.stopping = False
        self.gone = False
        self._leaving = False
        self._ever: set[int] = set()
        self._plan: HostPlan | None = None
        self._generation: str | None = None
        self._seen = (0, 0)
        self._heard_at = world.now + begins_in_s
        self._dirty = False
        world.at(begins_in_s, self._every_second)

    # ---- reporting ----

    def _every_second(self) -> None:
        if self.gone:
            return
        if self.name != "a" and self._world.now - self._heard_at > ALONE_S:
            self._world.history.hosts_lost = True
            self.vanish()
            return
        for worker in self.workers.values():
            if worker.alive and worker.hanging:
                self._world.at(HEARTBEAT_S, lambda worker=worker: worker.hanging and worker.die())
        self._report()
        self._world.at(REPORT_EVERY_S, self._every_second)

    def report_soon(self) -> None:
        if not self._dirty and not self.gone:
            self._dirty = True
            self._world.at(0.01, self._report_change)

    def _report_change(self) -> None:
        self._dirty = False
        if not self.gone:
            self._report()

    def _report(self) -> None:
        clear = not any(worker.alive for worker in self.workers.values())
        report = HostReport(
            run="r",
            agent=self.name,
            host=self.name,
            slots=self.slots,
            term=self._seen[0],
            versions={},
            data_address="",
            local=self.name == "a",
            master=("a", 1),
            generation=self._generation,
            members={incarnation: self._word(worker) for incarnation, worker in self.workers.items()},
            clear=clear,
            leaving=self._leaving,
            stop="preempt" if self.stopping else None,
            stop_signal=15 if self.stopping else 0,
            workers_wanted=self.wanted,
        )
        self._world.send(self.name, "a", lambda: self._world.coordinator.receive(report))
        if self._leaving and clear:
            self.gone = True

    def _word(self, worker: Worker) -> MemberReport:
        end, status, code = None, worker.status, worker.exit_code if worker.status == "done" else None
        if not worker.alive and self._plan is not None and worker.incarnation in self._plan.dismissed:
            code, status = -9 if status == "failed" else 0, "left"
        if status == "failed":
            end = WorkerEnd(rank=worker.slot, host=self.name, pid=worker.incarnation, kind="signal", signal=9)
        return MemberReport(
            status=status,
            pid=worker.incarnation,
            ended=not worker.alive,
            generation=worker.generation,
            call=worker.call if worker.generation and worker.level else 0,
            offers=worker.offers if not worker.generation else 0,
            stranded=worker.stranded,
            exit_code=code,
            step=worker.step if worker.generation and worker.level else None,
            end=end,
        )

    def saw_end(self, worker: Worker) -> None:
        self.report_soon()
        self._world.at(0.001, self._fill)

    # ---- obeying ----

    def obey(self, orders: Orders) -> None:
        if self.gone or (orders.term, orders.revision) < self._seen:
            return
        self._seen, self._heard_at = (orders.term, orders.revision), self._world.now
        if orders.stop is not None:
            self.stop()
        match orders.do:
            case "run":
                assert orders.plan is not None
                self._run(orders.plan, orders.run_call)
            case "stop":
                assert orders.generation is not None
                self._generation, self._plan = orders.generation, None
                self._kill(list(self.workers.values()))
                self.report_soon()
            case "end":
                self._kill(list(self.workers.values()))
                self.gone = True
                if self.name == "a":
                    self._world.over = True

    def _kill(self, workers: list[Worker]) -> None:
        for worker in workers:
            worker.die()

    def _run(self, plan: HostPlan, run_call: int) -> None:
        if self._generation is None or number(plan.generation) > number(self._generation):
            self._generation = plan.generation
            self.report_soon()
        planned = {worker.incarnation: worker for worker in plan.workers}
        self._plan = plan
        if self._world.defects.fencing:
            for name, worker in self.workers.items():
                if name not in planned and (name not in plan.dismissed or not worker.generation):
                    self._world.at(self._world.random.random() * 0.3, worker.die)
                elif name in plan.dismissed:
                    self._world.at(GRACE_S, worker.die)
        self.workers = {n: w for n, w in self.workers.items() if w.alive or n in planned or n in plan.dismissed}
        self._fill()
        for worker in self.workers.values():
            worker.announce(plan)
        if run_call != self.run_call:
            self.run_call = run_call
            for worker in self.workers.values():
                worker.offer()

    def _fill(self) -> None:
        """Start who is planned and never was, once the process before in its slot is gone."""
        if self._plan is None or self.gone or self._leaving or self.stopping:
            return
        taken = {worker.slot for worker in self.workers.values() if worker.alive}
        for planned in self._plan.workers:
            if planned.incarnation not in self._ever and planned.slot not in taken:
                self._start(planned.incarnation, planned.slot, joining=planned.joining, attempt=self._plan.attempt)

    def _start(self, incarnation: int, slot: int, *, joining: bool, attempt: int) -> None:
        self._ever.add(incarnation)
        self._world.note(Started(self._world.now, incarnation, slot, self.name))
        worker = Worker(self._world, self, slot, incarnation, joining=joining, attempt=attempt)
        self.workers[incarnation] = worker
        if self._plan is not None:
            worker.announce(self._plan)
        self.report_soon()

    # ---- going ----

    def stop(self) -> None:
        """The run is asked to end: workers have a grace time to commit."""
        if not self.stopping:
            self.stopping = True
            self.report_soon()
            for worker in list(self.workers.values()):
                worker.asked_to_stop()
            self._world.at(GRACE_S, lambda: self._kill(list(self.workers.values())))

    def leave(self) -> None:
        """As on SIGTERM: its workers are dismissed, or killed when they take too long."""
        self._leaving = True
        self.report_soon()
        self._world.at(GRACE_S, lambda: self._kill(list(self.workers.values())))

    def vanish(self) -> None:
        """Killed: its guard kills the workers, and no process sends a message."""
        self.gone = True
        self._kill(list(self.workers.values()))
