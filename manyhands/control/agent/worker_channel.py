"""The agent's socket for its workers and servers: welcomes them, relays store requests, receives their reports.

Values that this host's workers set are kept until the generation ends, so that they can be sent again to a restarted
coordinator. Messages of another generation or incarnation are refused and counted; in an elastic run a worker may
send messages for an older generation until it has switched to the newest.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import zmq

from manyhands.comm.transport import Port, open_port
from manyhands.control.agent.host_workers import HostWorkers
from manyhands.control.membership.generations import group_for
from manyhands.control.messages.agent_messages import CheckpointCommit, Relay, Replay
from manyhands.control.messages.worker_messages import (
    Announce,
    Appointed,
    CommitNotice,
    FromWorker,
    Goodbye,
    Heartbeat,
    LiveWorkers,
    MemoryReply,
    MemoryRequest,
    Offer,
    PositionReply,
    PositionRequest,
    Publish,
    Refusal,
    ServersWanted,
    StopRequest,
    StoreReply,
    StoreRequest,
    WorkerHello,
    WorkerPosition,
    WorkerReport,
    WorkerWelcome,
)
from manyhands.control.processes.worker_process import WorkerProcess
from manyhands.control.security.keys import weights_client_curve, weights_server_curve
from manyhands.errors import EnvironmentProblem, ManyhandsError
from manyhands.events import Event

__all__ = ["WorkerChannel"]

MAX_PENDING = 10_000
MAX_KEPT_BYTES = 16 * 2**20
REPLAY_BYTES = 512 * 1024
# A worker switches to an announced generation when its step ends; until then it may have missed the message.
ANNOUNCE_EVERY_S = 1.0


class WorkerChannel:
    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        agent: str,
        *,
        send: Callable[[Any], bool],
        hello: Callable[[WorkerProcess, WorkerHello], None],
        event: Callable[[Event], None],
        key: bytes | None = None,
    ) -> None:
        self.port: Port[FromWorker] = open_port(context, zmq.ROUTER, endpoint, FromWorker, bind=True)
        self.committed: CheckpointCommit | None = None
        self.elsewhere: dict[int, WorkerPosition] = {}
        self.run_call = 0
        """The public call that the members of an elastic run are in."""
        self.stale = 0
        self._agent, self._send, self._hello, self._event = agent, send, hello, event
        self._key = key
        """The run's key, if it has several hosts."""
        self._tickets = itertools.count(1)
        self._pending: dict[int, tuple[bytes, StoreRequest]] = {}
        self._kept: dict[str, dict[str, bytes]] = {}
        """Values by key, by generation."""
        self._kept_bytes = 0
        self._replays: deque[Replay] = deque()

    def new_generation(self, still_used: Collection[str] = ()) -> None:
        """Drop requests and values of generations for which no worker here sends messages any more."""
        self._pending = {ticket: entry for ticket, entry in self._pending.items() if entry[1].generation in still_used}
        self._kept = {name: values for name, values in self._kept.items() if name in still_used}
        self._kept_bytes = sum(len(value) for values in self._kept.values() for value in values.values())
        self.elsewhere = {}

    def attend(self, host_workers: HostWorkers | None) -> bool:
        """Receive messages. True if a worker's state in the run changed, which the coordinator should know at once."""
        changed = False
        self._send_replays()
        for peer, message in self.port.receive():
            worker = host_workers.member(message.generation, message.incarnation) if host_workers is not None else None
            if worker is None:
                self.stale += 1
                continue
            before = worker.generation, worker.offers, worker.call, worker.stranded
            worker.heard(message.generation)
            self._receive(peer, worker, message, host_workers)
            changed = changed or before != (worker.generation, worker.offers, worker.call, worker.stranded)
        return changed

    def _receive(
        self, peer: bytes, worker: WorkerProcess, message: FromWorker, host_workers: HostWorkers | None
    ) -> None:
        match message:
            case WorkerHello():
                worker.greeted, worker.peer = True, peer
                self._hello(worker, message)
            case WorkerReport(step=step, phase=phase, call=call):
                worker.moved(step, phase, call)
            case Offer(call=call):
                worker.offers = call
            case Heartbeat(stranded=stranded):
                worker.offers, worker.stranded = 0, stranded
            case CommitNotice(step=step, path=path):
                self.committed = CheckpointCommit(step=step, path=path[:1000])
            case Publish(event=event):
                self._event(event)
            case PositionRequest(ticket=ticket):
                self.port.send(PositionReply(ticket=ticket, positions=self._positions(host_workers)), to=peer)
            case StoreRequest():
                self._relay(peer, message)
            case MemoryRequest() if host_workers is not None:
                self.port.send(_memory_reply(host_workers, message), to=peer)
            case Goodbye():
                worker.peer = None

    def _positions(self, host_workers: HostWorkers | None) -> dict[int, WorkerPosition]:
        now, here = time.monotonic(), host_workers.workers if host_workers else []
        mine = {
            host_workers.rank_of(worker): WorkerPosition(
                step=worker.step, phase=worker.phase, age_s=now - worker.moved_at
            )
            for worker in here
            if host_workers is not None and worker.step is not None and host_workers.rank_of(worker) >= 0
        }
        return {**self.elsewhere, **mine}

    # ---- the store -------------------------------------------------------------------------------------------

    def _relay(self, peer: bytes, request: StoreRequest) -> None:
        if len(self._pending) >= MAX_PENDING:
            self.port.send(StoreReply(ticket=request.ticket, ok=False, error="too many requests"), to=peer)
            return
        ticket = next(self._tickets)
        self._pending[ticket] = (peer, request)
        self._send_on(ticket, request)

    def _send_on(self, ticket: int, request: StoreRequest) -> None:
        """Relay it to the coordinator; a worker whose request cannot be sent learns of that at once."""
        if not self._send(self._relayed(ticket, request)):
            self.answer(StoreReply(ticket=ticket, ok=False, error="the agent could not send it to the coordinator"))

    def _relayed(self, ticket: int, request: StoreRequest) -> Relay:
        return Relay(**{**msgspec.structs.asdict(request), "ticket": ticket, "agent": self._agent})

    def answer(self, reply: StoreReply) -> None:
        """Forward the coordinator's reply to the worker that made the request."""
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
        """Send a new coordinator the values that were set, in pieces that fit a message, and the pending requests."""
        self._replays.clear()
        for generation, values in self._kept.items():
            self._replay(generation, values)
        self._send_replays()
        for ticket, (_, request) in list(self._pending.items()):
            self._send_on(ticket, request)

    def _replay(self, generation: str, values: dict[str, bytes]) -> None:
        piece: dict[str, bytes] = {}
        size = 0
        for key, value in values.items():
            if size + len(value) > REPLAY_BYTES:
                self._replays.append(Replay(agent=self._agent, generation=generation, values=piece))
                piece, size = {}, 0
            piece[key], size = value, size + len(value) + len(key)
        self._replays.append(Replay(agent=self._agent, generation=generation, values=piece))

    def _send_replays(self) -> None:
        """As many as the queue takes; the others later. Without its value a request waits to its timeout."""
        while self._replays and self._send(self._replays[0]):
            self._replays.popleft()

    # ---- answers ---------------------------------------------------------------------------------------------

    def welcome(self, worker: WorkerProcess, run: str, run_dir: str, stop: str | None) -> None:
        welcome = WorkerWelcome(run=run, run_dir=run_dir, stop=stop, run_call=self.run_call)
        if worker.identity.is_server:
            welcome = msgspec.structs.replace(
                welcome, stop=None
            )  # servers are asked after the workers; see `update_servers`
        if self._key is not None and worker.identity.num_servers:
            client, server = weights_client_curve(self._key), weights_server_curve(self._key)
            if worker.identity.is_server:
                welcome = msgspec.structs.replace(welcome, curve=server, clients=client.public, as_client=client)
            else:
                welcome = msgspec.structs.replace(welcome, curve=client)
        if worker.peer is not None:
            self.port.send(welcome, to=worker.peer)

    def announce(self, host_workers: HostWorkers, now: float) -> None:
        """Send the newest generation to each worker that has not switched to it, again and again until it does."""
        for worker in host_workers.workers:
            news = (host_workers.generation, self.run_call)
            if worker.peer is None or (worker.generation == host_workers.generation and worker.told == news):
                continue
            if worker.told != news or now - worker.told_at >= ANNOUNCE_EVERY_S:
                worker.told, worker.told_at = news, now
                group = group_for(host_workers.plan, worker.identity.incarnation)
                message = Announce(group=group, run_call=self.run_call, last_loss=host_workers.groups.last_loss)
                self.port.send(message, to=worker.peer)

    def update_servers(self, host_workers: HostWorkers, now: float) -> None:
        """Send servers the live workers, and in the end the request to stop: at each change, and again every second.

        The wanted number of servers is sent to workers as well.
        """
        wanted = host_workers.plan.servers
        for process in host_workers.everyone if wanted else []:
            number, at = process.told_servers
            if process.peer is not None and (number != wanted or now - at >= ANNOUNCE_EVERY_S):
                process.told_servers = (wanted, now)
                message = ServersWanted(
                    number=wanted, servers=host_workers.servers_at, backups=host_workers.plan.backups
                )
                self.port.send(message, to=process.peer)
        news = (host_workers.living, host_workers.servers.asked_to_end)
        for server in host_workers.servers.processes:
            if server.peer is None or (server.told == news and now - server.told_at < ANNOUNCE_EVERY_S):
                continue
            server.told, server.told_at = news, now
            if server.was_spare:
                self.port.send(Appointed(server=server.identity.server, listen=server.identity.listen), to=server.peer)
            self.port.send(LiveWorkers(workers=host_workers.living), to=server.peer)
            if host_workers.servers.asked_to_end:
                self.send_stop(server, "end")

    def refuse(self, worker: WorkerProcess, error: ManyhandsError) -> None:
        if worker.peer is not None:
            refusal = Refusal(error=type(error).__name__, what=error.what, where=error.where, fix=list(error.fix))
            self.port.send(refusal, to=worker.peer)

    def send_stop(self, worker: WorkerProcess, kind: str) -> None:
        if worker.peer is not None:
            self.port.send(StopRequest(kind=kind), to=worker.peer)

    def close(self) -> None:
        self.port.close(linger_ms=200)


def _memory_reply(host_workers: HostWorkers, request: MemoryRequest) -> MemoryReply:
    try:
        return MemoryReply(ticket=request.ticket, offset=host_workers.allot(request))
    except EnvironmentProblem as problem:
        return MemoryReply(ticket=request.ticket, error=problem.what, fix=list(problem.fix))
