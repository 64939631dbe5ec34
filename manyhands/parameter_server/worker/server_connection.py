"""A worker's connections to the parameter servers: what is not answered is sent again, so a server may die at any time.

One thread. A call that waits reads the messages of all servers. Start reading at `ServerConnection.ask`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import zmq

from manyhands.comm.peer_waits import Waiting, waits_for_peers
from manyhands.comm.transport import Curve, Port, open_port
from manyhands.errors import PeerLost, PeerTimeout
from manyhands.parameter_server.memory.compatibility import refusal
from manyhands.parameter_server.protocol.messages import (
    ApplyRows,
    Filled,
    FromServer,
    Lookup,
    Number,
    Open,
    Opened,
    OpenRows,
    Refused,
    Reply,
    RowGradients,
    RowsReply,
    UpdateApplied,
    WorkRequest,
)
from manyhands.parameter_server.worker.stream_transfers import StreamTransfer

__all__ = ["PushedGradient", "ServerConnection"]

SAY_AGAIN_S = 0.25
# The wait doubles up to this, so that frames that are slow to arrive are not sent many times.
SAY_AGAIN_AT_MOST_S = 2.0
# A dead server is restarted within seconds; if it cannot be, its agent ends the run.
PATIENCE_S = 600.0


class PushedGradient(NamedTuple):
    """A gradient that servers are notified of."""

    filled: Filled
    pieces: Sequence[Sequence[RowGradients]] = ()
    """For each server, gradients of its embedding rows; empty where there are none."""


class ServerConnection:
    def __init__(self, endpoint: Callable[[int], str], identity: bytes, curve: Curve | None = None) -> None:
        """`endpoint(n)` is the address of server n, and `curve` has the keys for servers on other hosts."""
        self._endpoint, self._identity, self._curve = endpoint, identity, curve
        self._context: zmq.Context[Any] = zmq.Context()
        self._poller = zmq.Poller()
        self._ports: list[Port[FromServer]] = []
        self._tickets = itertools.count(1)
        self._number: Number = (0, 0, 0)
        self._opened: set[int] = set()
        self._reply: Reply | None = None
        self._applied: dict[int, set[int]] = {}
        self._lookup_tickets: set[int] = set()
        self._rows: dict[int, RowsReply] = {}
        self._transfers: Sequence[StreamTransfer] = ()
        self.waiting = Waiting()
        """Adds up the time spent waiting for servers."""

    def open(self, message: Open | OpenRows, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Have every server begin this interval; returns when each has confirmed. `PeerLost` once it `is_wanted` no
        longer: then a server has left, or will never start.
        """
        self.reach(message.servers)
        self._number, self._opened, self._applied = message.number, set(), {}

        def send() -> None:
            _check_wanted(is_wanted)
            for server in set(range(message.servers)) - self._opened:
                self._ports[server].send(message)

        self._await(lambda: len(self._opened) == message.servers, send, "begin the interval")

    def follow(self, message: Open | OpenRows) -> None:
        """Another worker has opened it."""
        self.reach(message.servers)
        self._number, self._applied = message.number, {}

    def ticket(self) -> int:
        """A number that this worker has not used."""
        return next(self._tickets)

    @waits_for_peers
    def carry(
        self, transfers: Sequence[StreamTransfer], what: str, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Run these transfers until all are complete, as long as they are wanted."""
        began = last_answer = time.monotonic()
        self._transfers, patience_s = transfers, SAY_AGAIN_S
        while unfinished := [transfer for transfer in transfers if not transfer.is_done]:
            _check_wanted(is_wanted)
            for transfer in unfinished:
                for message in transfer.due():
                    self._ports[transfer.server].send(message)
            if self._receive(patience_s):
                last_answer, patience_s = time.monotonic(), max(SAY_AGAIN_S, patience_s / 2)
            elif (silent_s := time.monotonic() - last_answer) > PATIENCE_S:
                raise PeerTimeout(f"The parameter servers did not {what} within {PATIENCE_S:g} s.")
            elif silent_s >= patience_s:
                patience_s = min(2 * patience_s, SAY_AGAIN_AT_MOST_S)
                for transfer in unfinished:
                    transfer.again()
        self._transfers = ()
        self.waiting.seconds += time.monotonic() - began

    def ask(
        self,
        make: Callable[[int], WorkRequest],
        unanswered: Callable[[], Iterable[PushedGradient]] = tuple,
        patience_s: float = PATIENCE_S,
    ) -> Reply:
        """Request work from the first server. `make(ticket)` is called for each message.

        Only the answer to the last ticket counts: a lease that the request does not list, this worker does not have.
        """
        ticket, self._reply = 0, None

        def send() -> None:
            nonlocal ticket
            if ticket:
                for push in unanswered():
                    self.tell(push)
            ticket = next(self._tickets)
            self._ports[0].send(make(ticket))

        def answered() -> bool:
            return self._reply is not None and self._reply.ticket == ticket

        self._await(answered, send, "assign work", patience_s)
        assert self._reply is not None
        return self._reply

    def tell(self, push: PushedGradient) -> None:
        """Notify every server of a gradient."""
        for server in range(len(self._ports)):
            self.tell_one(server, push)

    def tell_one(self, server: int, push: PushedGradient) -> None:
        port, pieces = self._ports[server], push.pieces[server] if push.pieces else ()
        for piece in pieces:
            port.send(piece)
        port.send(msgspec.structs.replace(push.filled, pieces=len(pieces)) if pieces else push.filled)

    def look_up(self, lookups: Sequence[tuple[int, Lookup]]) -> list[RowsReply]:
        """Rows from servers, in the order of the requests."""
        self._lookup_tickets, self._rows = {lookup.ticket for _, lookup in lookups}, {}

        def send() -> None:
            for server, lookup in lookups:
                if lookup.ticket not in self._rows:
                    self._ports[server].send(lookup)

        self._await(lambda: len(self._rows) == len(lookups), send, "look up embedding rows")
        return [self._rows[lookup.ticket] for _, lookup in lookups]

    def forget(self, step: int) -> None:
        """All steps up to this one are known to be applied: their confirmations are no longer needed."""
        self._applied = {one: servers for one, servers in self._applied.items() if one > step}

    def await_applied(self, push: PushedGradient) -> None:
        """Returns when every server has applied the step."""
        step, everyone, first = push.filled.held.step, len(self._ports), True

        def send() -> None:
            nonlocal first
            if not first:
                self.tell(push)
            first = False

        self._await(lambda: len(self._applied.get(step, ())) == everyone, send, f"apply step {step}")
        del self._applied[step]

    def apply_rows(self, step: int, shares: Mapping[int, Sequence[RowGradients | ApplyRows]]) -> None:
        """Returns when each of these servers has applied its share of a step."""

        def send() -> None:
            for server in shares.keys() - self._applied.get(step, set()):
                for message in shares[server]:
                    self._ports[server].send(message)

        self._await(lambda: shares.keys() <= self._applied.get(step, set()), send, f"apply rows of step {step}")
        self._applied.pop(step, None)

    def close(self) -> None:
        for port in self._ports:
            port.close()
        self._context.destroy(linger=0)

    def reach(self, num_servers: int) -> None:
        """Connect to exactly this many servers."""
        while len(self._ports) > num_servers:
            port = self._ports.pop()
            self._poller.unregister(port.socket)
            port.close()
        for server in range(len(self._ports), num_servers):
            at = self._endpoint(server)
            curve = self._curve if at.startswith("tcp:") else None
            port = open_port(self._context, zmq.DEALER, at, FromServer, identity=self._identity, curve=curve)
            self._poller.register(port.socket, zmq.POLLIN)
            self._ports.append(port)

    @waits_for_peers
    def _await(
        self, answered: Callable[[], bool], send: Callable[[], None], what: str, patience_s: float = PATIENCE_S
    ) -> None:
        began = time.monotonic()
        self._receive(0.0)  # messages that have already arrived
        while not answered():
            send()
            until = time.monotonic() + SAY_AGAIN_S
            while not answered() and (left := until - time.monotonic()) > 0:
                self._receive(left)
            if time.monotonic() - began > patience_s:
                raise PeerTimeout(f"The parameter servers did not {what} within {patience_s:g} s.")
        self.waiting.seconds += time.monotonic() - began

    def _receive(self, timeout_s: float) -> bool:
        """Whether anything arrived that a transfer was waiting for."""
        self._poller.poll(max(0, round(timeout_s * 1000)))
        answered = False
        for server, port in enumerate(self._ports):
            for _, message in port.receive():
                for transfer in (one for one in self._transfers if one.server == server):
                    answered |= transfer.hear(message)
                match message:
                    case _ if message.number != self._number:
                        continue
                    case Opened():
                        self._opened.add(message.server)
                    case Refused():
                        raise refusal(message)
                    case Reply():
                        self._reply = message
                    case RowsReply() if message.ticket in self._lookup_tickets:
                        self._rows[message.ticket] = message
                    case UpdateApplied():
                        self._applied.setdefault(message.step, set()).add(message.server)
        return answered


def _check_wanted(is_wanted: Callable[[], bool]) -> None:
    if not is_wanted():
        raise PeerLost("The run was scaled to fewer servers before all had begun: it continues with those that remain.")
