"""Where an agent talks with its workers: greets them, relays their store requests, and hears where they are.

Values that this host's workers set are kept until the generation ends, so that a restarted coordinator can be given
them again. Messages of another generation or incarnation are refused and counted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from manyhands.comm.transport import Port, open_port
from manyhands.control.crew import Crew
from manyhands.control.messages import (
    Commit,
    Committed,
    FromWorker,
    Goodbye,
    Hello,
    MemoryReply,
    MemoryRequest,
    PositionReply,
    Publish,
    Refusal,
    Relay,
    Replay,
    Report,
    StopRequest,
    StoreReply,
    StoreRequest,
    Welcome,
    WhereIsEveryone,
    WorkerPosition,
)
from manyhands.control.workers import Worker
from manyhands.errors import EnvironmentProblem, ManyhandsError
from manyhands.events import Event

__all__ = ["Desk"]

MAX_PENDING = 10_000
MAX_KEPT_BYTES = 16 * 2**20
REPLAY_BYTES = 512 * 1024


class Desk:
    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        agent: str,
        *,
        send: Callable[[Any], Any],
        hello: Callable[[Worker, Hello], None],
        event: Callable[[Event], None],
    ) -> None:
        self.port: Port[FromWorker] = open_port(context, zmq.ROUTER, endpoint, FromWorker, bind=True)
        self.committed: Commit | None = None
        self.elsewhere: dict[int, WorkerPosition] = {}
        self.stale = 0
        self._agent, self._send, self._hello, self._event = agent, send, hello, event
        self._tickets = itertools.count(1)
        self._pending: dict[int, tuple[bytes, StoreRequest]] = {}
        self._kept: dict[str, bytes] = {}
        self._kept_bytes = 0

    def new_generation(self) -> None:
        self._pending.clear()
        self._kept.clear()
        self._kept_bytes = 0
        self.elsewhere = {}

    def attend(self, crew: Crew | None) -> None:
        for peer, message in self.port.receive():
            worker = _member(crew, message.generation, message.incarnation)
            if worker is None:
                self.stale += 1
            else:
                self._take(peer, worker, message, crew)

    def _take(self, peer: bytes, worker: Worker, message: FromWorker, crew: Crew | None) -> None:
        match message:
            case Hello():
                worker.greeted, worker.peer = True, peer
                self._hello(worker, message)
            case Report(step=step, phase=phase):
                worker.moved(step, phase)
            case Committed(step=step, path=path):
                self.committed = Commit(step=step, path=path[:1000])
            case Publish(event=event):
                self._event(event)
            case WhereIsEveryone(ticket=ticket):
                self.port.send(PositionReply(ticket=ticket, positions=self._positions(crew)), to=peer)
            case StoreRequest():
                self._relay(peer, message)
            case MemoryRequest() if crew is not None:
                self.port.send(_allotted(crew, message), to=peer)
            case Goodbye():
                worker.peer = None

    def _positions(self, crew: Crew | None) -> dict[int, WorkerPosition]:
        now, here = time.monotonic(), crew.workers if crew else []
        mine = {
            worker.seat.rank: WorkerPosition(step=worker.step, phase=worker.phase, age_s=now - worker.moved_at)
            for worker in here
            if worker.step is not None
        }
        return {**self.elsewhere, **mine}

    # ---- the store -------------------------------------------------------------------------------------------

    def _relay(self, peer: bytes, request: StoreRequest) -> None:
        if len(self._pending) >= MAX_PENDING:
            self.port.send(StoreReply(ticket=request.ticket, ok=False, error="too many requests"), to=peer)
            return
        ticket = next(self._tickets)
        self._pending[ticket] = (peer, request)
        self._send(self._relayed(ticket, request))

    def _relayed(self, ticket: int, request: StoreRequest) -> Relay:
        return Relay(**{**msgspec.structs.asdict(request), "ticket": ticket, "agent": self._agent})

    def answer(self, reply: StoreReply) -> None:
        """The coordinator's reply, on to the worker that asked."""
        peer, request = self._pending.pop(reply.ticket, (None, None))
        if peer is None or request is None:
            return
        if reply.ok:
            self._keep(request, reply)
        self.port.send(msgspec.structs.replace(reply, ticket=request.ticket), to=peer)

    def _keep(self, request: StoreRequest, reply: StoreReply) -> None:
        key = request.keys[0]
        if request.op in ("set", "add"):
            value = request.value if request.op == "set" else str(reply.number).encode()
            if self._kept_bytes + len(value) <= MAX_KEPT_BYTES:
                self._kept_bytes += len(value) - len(self._kept.get(key, b""))
                self._kept[key] = value
        elif request.op == "delete":
            self._kept_bytes -= len(self._kept.pop(key, b""))

    def resend(self, generation: str) -> None:
        """To a new coordinator: what was set, in pieces that fit a message, and what is still asked."""
        piece: dict[str, bytes] = {}
        size = 0
        for key, value in self._kept.items():
            if size + len(value) > REPLAY_BYTES:
                self._send(Replay(agent=self._agent, generation=generation, values=piece))
                piece, size = {}, 0
            piece[key], size = value, size + len(value) + len(key)
        self._send(Replay(agent=self._agent, generation=generation, values=piece))
        for ticket, (_, request) in self._pending.items():
            self._send(self._relayed(ticket, request))

    # ---- answers ---------------------------------------------------------------------------------------------

    def welcome(self, worker: Worker, run: str, run_dir: str, stop: str | None) -> None:
        if worker.peer is not None:
            self.port.send(Welcome(run=run, run_dir=run_dir, stop=stop), to=worker.peer)

    def refuse(self, worker: Worker, error: ManyhandsError) -> None:
        if worker.peer is not None:
            refusal = Refusal(error=type(error).__name__, what=error.what, where=error.where, fix=list(error.fix))
            self.port.send(refusal, to=worker.peer)

    def tell_stop(self, worker: Worker, kind: str) -> None:
        if worker.peer is not None:
            self.port.send(StopRequest(kind=kind), to=worker.peer)

    def close(self) -> None:
        self.port.close(linger_ms=200)


def _member(crew: Crew | None, generation: str, incarnation: int) -> Worker | None:
    if crew is None or crew.generation != generation:
        return None
    return next((worker for worker in crew.workers if worker.seat.incarnation == incarnation), None)


def _allotted(crew: Crew, asked: MemoryRequest) -> MemoryReply:
    try:
        return MemoryReply(ticket=asked.ticket, offset=crew.memory.allot(asked.name, asked.num_bytes, asked.ranks))
    except EnvironmentProblem as problem:
        return MemoryReply(ticket=asked.ticket, error=problem.what, fix=list(problem.fix))
