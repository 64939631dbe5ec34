"""Where an agent talks with its workers: greets them, relays their store requests, and hears where they are.

Values that this host's workers set are kept until the generation ends, so that a restarted coordinator can be given
them again. Messages of another generation or incarnation are refused and counted; in an elastic run a worker may
still speak for an older generation than the newest, until it has gone over.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import zmq

from manyhands.comm.transport import Port, open_port
from manyhands.control.agent.host_workers import Crew
from manyhands.control.membership.generations import group_for
from manyhands.control.messages.agent_messages import Commit, Relay, Replay
from manyhands.control.messages.worker_messages import (
    Announce,
    Appointed,
    Committed,
    FromWorker,
    Goodbye,
    Heartbeat,
    Hello,
    Living,
    MemoryReply,
    MemoryRequest,
    Offer,
    PositionReply,
    Publish,
    Refusal,
    Report,
    ServersWanted,
    StopRequest,
    StoreReply,
    StoreRequest,
    Welcome,
    WhereIsEveryone,
    WorkerPosition,
)
from manyhands.control.processes.worker_process import Worker
from manyhands.control.security.keys import weights_client_curve, weights_server_curve
from manyhands.errors import EnvironmentProblem, ManyhandsError
from manyhands.events import Event

__all__ = ["Desk"]

MAX_PENDING = 10_000
MAX_KEPT_BYTES = 16 * 2**20
REPLAY_BYTES = 512 * 1024
# A worker that was told of a new generation goes over when its step ends; until then it may have missed the message.
ANNOUNCE_EVERY_S = 1.0


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
        key: bytes | None = None,
    ) -> None:
        self.port: Port[FromWorker] = open_port(context, zmq.ROUTER, endpoint, FromWorker, bind=True)
        self.committed: Commit | None = None
        self.elsewhere: dict[int, WorkerPosition] = {}
        self.run_call = 0
        """The public call that the members of an elastic run are in."""
        self.stale = 0
        self._agent, self._send, self._hello, self._event = agent, send, hello, event
        self._key = key
        """The run's, where it has several hosts."""
        self._tickets = itertools.count(1)
        self._pending: dict[int, tuple[bytes, StoreRequest]] = {}
        self._kept: dict[str, dict[str, bytes]] = {}
        """By generation."""
        self._kept_bytes = 0

    def new_generation(self, still_spoken_for: Collection[str] = ()) -> None:
        """What was asked and set in generations that nobody here speaks for any more is over."""
        self._pending = {
            ticket: entry for ticket, entry in self._pending.items() if entry[1].generation in still_spoken_for
        }
        self._kept = {name: values for name, values in self._kept.items() if name in still_spoken_for}
        self._kept_bytes = sum(len(value) for values in self._kept.values() for value in values.values())
        self.elsewhere = {}

    def attend(self, crew: Crew | None) -> bool:
        """True when a worker's place in the run changed, so that the coordinator should hear of it at once."""
        changed = False
        for peer, message in self.port.receive():
            worker = crew.member(message.generation, message.incarnation) if crew is not None else None
            if worker is None:
                self.stale += 1
                continue
            before = worker.generation, worker.offers, worker.call, worker.stranded
            worker.heard(message.generation)
            self._take(peer, worker, message, crew)
            changed = changed or before != (worker.generation, worker.offers, worker.call, worker.stranded)
        return changed

    def _take(self, peer: bytes, worker: Worker, message: FromWorker, crew: Crew | None) -> None:
        match message:
            case Hello():
                worker.greeted, worker.peer = True, peer
                self._hello(worker, message)
            case Report(step=step, phase=phase, call=call):
                worker.moved(step, phase, call)
            case Offer(call=call):
                worker.offers = call
            case Heartbeat(stranded=stranded):
                worker.offers, worker.stranded = 0, stranded
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
            crew.rank_of(worker): WorkerPosition(step=worker.step, phase=worker.phase, age_s=now - worker.moved_at)
            for worker in here
            if crew is not None and worker.step is not None and crew.rank_of(worker) >= 0
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
        key, kept = request.keys[0], self._kept.setdefault(request.generation, {})
        if request.op in ("set", "add"):
            value = request.value if request.op == "set" else str(reply.number).encode()
            if self._kept_bytes + len(value) <= MAX_KEPT_BYTES:
                self._kept_bytes += len(value) - len(kept.get(key, b""))
                kept[key] = value
        elif request.op == "delete":
            self._kept_bytes -= len(kept.pop(key, b""))

    def resend(self) -> None:
        """To a new coordinator: what was set, in pieces that fit a message, and what is still asked."""
        for generation, values in self._kept.items():
            self._replay(generation, values)
        for ticket, (_, request) in self._pending.items():
            self._send(self._relayed(ticket, request))

    def _replay(self, generation: str, values: dict[str, bytes]) -> None:
        piece: dict[str, bytes] = {}
        size = 0
        for key, value in values.items():
            if size + len(value) > REPLAY_BYTES:
                self._send(Replay(agent=self._agent, generation=generation, values=piece))
                piece, size = {}, 0
            piece[key], size = value, size + len(value) + len(key)
        self._send(Replay(agent=self._agent, generation=generation, values=piece))

    # ---- answers ---------------------------------------------------------------------------------------------

    def welcome(self, worker: Worker, run: str, run_dir: str, stop: str | None) -> None:
        welcome = Welcome(run=run, run_dir=run_dir, stop=stop, run_call=self.run_call)
        if worker.seat.is_server:
            welcome = msgspec.structs.replace(welcome, stop=None)  # it is asked after the workers; see `tell_servers`
        if self._key is not None and worker.seat.num_servers:
            client, server = weights_client_curve(self._key), weights_server_curve(self._key)
            if worker.seat.is_server:
                welcome = msgspec.structs.replace(welcome, curve=server, clients=client.public, as_client=client)
            else:
                welcome = msgspec.structs.replace(welcome, curve=client)
        if worker.peer is not None:
            self.port.send(welcome, to=worker.peer)

    def announce(self, crew: Crew, now: float) -> None:
        """The newest generation, to each worker that does not speak for it yet; again until it does."""
        for worker in crew.workers:
            news = (crew.generation, self.run_call)
            if worker.peer is None or (worker.generation == crew.generation and worker.told == news):
                continue
            if worker.told != news or now - worker.told_at >= ANNOUNCE_EVERY_S:
                worker.told, worker.told_at = news, now
                group = group_for(crew.plan, worker.seat.incarnation)
                message = Announce(group=group, run_call=self.run_call, last_loss=crew.groups.last_loss)
                self.port.send(message, to=worker.peer)

    def tell_servers(self, crew: Crew, now: float) -> None:
        """Who lives, and in the end that they should end: at each change, and again every second.

        How many servers there should be, workers are told as well.
        """
        wanted = crew.plan.servers
        for process in crew.everyone if wanted else []:
            number, at = process.told_servers
            if process.peer is not None and (number != wanted or now - at >= ANNOUNCE_EVERY_S):
                process.told_servers = (wanted, now)
                told = ServersWanted(number=wanted, servers=crew.servers_at, backups=crew.plan.backups)
                self.port.send(told, to=process.peer)
        news = (crew.living, crew.servers.asked_to_end)
        for server in crew.servers.processes:
            if server.peer is None or (server.told == news and now - server.told_at < ANNOUNCE_EVERY_S):
                continue
            server.told, server.told_at = news, now
            if server.was_spare:
                self.port.send(Appointed(server=server.seat.server, listen=server.seat.listen), to=server.peer)
            self.port.send(Living(workers=crew.living), to=server.peer)
            if crew.servers.asked_to_end:
                self.tell_stop(server, "end")

    def refuse(self, worker: Worker, error: ManyhandsError) -> None:
        if worker.peer is not None:
            refusal = Refusal(error=type(error).__name__, what=error.what, where=error.where, fix=list(error.fix))
            self.port.send(refusal, to=worker.peer)

    def tell_stop(self, worker: Worker, kind: str) -> None:
        if worker.peer is not None:
            self.port.send(StopRequest(kind=kind), to=worker.peer)

    def close(self) -> None:
        self.port.close(linger_ms=200)


def _allotted(crew: Crew, asked: MemoryRequest) -> MemoryReply:
    try:
        return MemoryReply(ticket=asked.ticket, offset=crew.allot(asked))
    except EnvironmentProblem as problem:
        return MemoryReply(ticket=asked.ticket, error=problem.what, fix=list(problem.fix))
