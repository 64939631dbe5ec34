"""The coordinator process: the thin shell around `react` and `key_value_store`.

Run as `python -m manyhands.control.coordinator.process` by an agent, which writes one `CoordinatorConfig` to its
standard input and keeps that pipe open: its end means that the agent is gone, and the coordinator exits. It owns two
sockets (ipc for its own host, tcp with CURVE for others), the log that makes generations durable, and the clock. It is
not on the step path: training continues without it, and its successor replays the log under a higher term.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq
from msgspec.structs import replace

from manyhands import signals
from manyhands.comm.transport import Port, open_port
from manyhands.control.coordinator.key_value_store import Client, Stores
from manyhands.control.coordinator.membership_log import MembershipLog
from manyhands.control.membership.elastic import open_generations
from manyhands.control.membership.orders import orders_for
from manyhands.control.membership.react import begin, react, restored
from manyhands.control.membership.state import (
    Membership,
    MembershipSettings,
    Output,
    Persist,
    Refuse,
    ReportReceived,
    SendOrders,
    Ticked,
)
from manyhands.control.messages.agent_messages import FromAgent, HostReport, Orders, Relay, Replay
from manyhands.control.messages.worker_messages import Refusal, StoreReply
from manyhands.control.security.keys import client_curve, server_curve
from manyhands.control.security.rejected_peers import PeerGate

__all__ = ["Coordinator", "CoordinatorConfig", "main", "read_exactly"]

TICK_S = 0.25
MAX_NOTES = 20
MAX_REFUSAL = 500


class CoordinatorConfig(msgspec.Struct, frozen=True, kw_only=True):
    settings: MembershipSettings
    directory: str
    term_floor: int
    """The first term is at least this: generations must never repeat in a run directory."""
    listen: tuple[str, int] | None = None
    key: bytes | None = None
    environment: dict[str, str] = {}
    """What workers of joining hosts inherit. Here, and not in the job, as the job is written to the log."""


class Coordinator:
    def __init__(self, config: CoordinatorConfig) -> None:
        self._environment = config.environment
        self._log = MembershipLog(Path(config.directory) / "membership.log")
        self._state = self._first_state(config)
        self._values = Stores()
        self._keep_stores()
        self._where: dict[str, Client] = {}
        self._lacks_job: set[str] = set()
        self._context: zmq.Context[Any] = zmq.Context()
        self._ports: dict[str, Port[FromAgent]] = {
            "ipc": open_port(self._context, zmq.ROUTER, f"ipc://{config.directory}/coordinator", FromAgent, bind=True)
        }
        self._gate: PeerGate | None = None
        self._notes: list[str] = []
        if config.listen is not None and config.key is not None:
            self._listen(config.listen, config.key)

    def _first_state(self, config: CoordinatorConfig) -> Membership:
        before, now = self._log.last(), time.monotonic()
        if before is None:
            state = begin(config.settings, config.term_floor, now)
        else:
            state = restored(before, before.term + 1, now)
        self._log.append(state)
        return state

    def _listen(self, listen: tuple[str, int], key: bytes) -> None:
        self._gate = PeerGate(self._context, client_curve(key).public)
        endpoint = f"tcp://{listen[0]}:{listen[1]}"
        port: Port[FromAgent] = open_port(
            self._context, zmq.ROUTER, endpoint, FromAgent, bind=True, curve=server_curve(key)
        )
        self._gate.watch(port)
        self._ports["tcp"] = port

    def run(self, lifeline: int) -> None:
        poller = zmq.Poller()
        poller.register(lifeline, zmq.POLLIN)
        for port in self._ports.values():
            poller.register(port.socket, zmq.POLLIN)
        for socket in self._gate.sockets if self._gate else []:
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(round(TICK_S * 1000)))
            if lifeline in ready and not os.read(lifeline, 4096):
                return
            for name, port in self._ports.items():
                for sender, message in port.receive():
                    self._receive((name, sender), message)
            self._forward_notes()
            self._apply(*react(self._state, Ticked(), time.monotonic()))
            self._send_replies(self._values.due(time.monotonic()))

    def close(self) -> None:
        # The last orders ("end") still have to reach the other hosts.
        if self._gate is not None:
            self._gate.close()
        for port in self._ports.values():
            port.close(linger_ms=1000)
        self._context.term()

    def _receive(self, client: Client, message: FromAgent) -> None:
        # Only the local socket may claim to be the coordinator's own host.
        if isinstance(message, HostReport) and not (message.local and client[0] != "ipc"):
            self._where[message.agent] = client
            if message.refusal:
                self._notes.append(f"a host has left: {message.refusal[:MAX_REFUSAL]}")
            (self._lacks_job.discard if message.has_job else self._lacks_job.add)(message.agent)
            self._apply(*react(self._state, ReportReceived(report=message), time.monotonic()))
        elif isinstance(message, Relay) and self._where.get(message.agent) == client:
            self._send_replies(self._values.handle(client, message, time.monotonic()))
        elif isinstance(message, Replay) and self._where.get(message.agent) == client:
            self._values.put_back(message.generation, message.values)
            self._send_replies(self._values.due(time.monotonic()))

    def _apply(self, state: Membership, outputs: list[Output]) -> None:
        self._state = state
        self._keep_stores()
        for output in outputs:
            match output:
                case Persist(state=durable):
                    self._log.append(durable)
                case SendOrders(agent=agent):
                    lacks_job = agent in self._lacks_job
                    orders = orders_for(state, agent, time.monotonic(), with_job=lacks_job)
                    self._send(agent, replace(orders, environment=self._environment) if lacks_job else orders)
                case Refuse(agent=agent, what=what, fix=fix):
                    self._send(agent, Refusal(error="JoinRefused", what=what, fix=fix))

    def _keep_stores(self) -> None:
        roster = self._state.roster
        self._send_replies(self._values.keep(open_generations(roster) if roster else []))

    def _send(self, agent: str, message: Orders | Refusal) -> None:
        where = self._where.get(agent)
        if where is not None:
            self._ports[where[0]].send(message, to=where[1])

    def _send_replies(self, replies: Any) -> None:
        for (name, peer), reply in replies:
            assert isinstance(reply, StoreReply)
            self._ports[name].send(reply, to=peer)

    def _forward_notes(self) -> None:
        """The launching host logs refused joins; they are kept until its first report."""
        if self._gate is None:
            return
        self._notes = [*self._notes, *self._gate.attend()][:MAX_NOTES]
        ours = next((agent for agent, host in self._state.hosts.items() if host.local), None)
        if ours is None or self._state.phase == "ended":
            return
        for note in self._notes:
            self._send(ours, replace(orders_for(self._state, ours, time.monotonic()), note=note))
        self._notes = []


def main() -> None:
    signals.ignore()  # its agent decides when it ends
    lifeline = sys.stdin.fileno()
    size = int.from_bytes(read_exactly(lifeline, 4), "big")
    config = msgspec.msgpack.decode(read_exactly(lifeline, size), type=CoordinatorConfig)
    coordinator = Coordinator(config)
    try:
        coordinator.run(lifeline)
    finally:
        coordinator.close()


def read_exactly(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(fd, size - len(data))
        if not piece:
            sys.exit(0)
        data += piece
    return data


if __name__ == "__main__":
    main()
