"""A worker's lines to the parameter servers: what is not answered is said again, so a server may die at any moment.

One thread. Whoever waits here reads what all servers say. Start reading at `Link.ask`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import zmq

from manyhands.comm.peer_waits import Waiting
from manyhands.comm.transport import Curve, Port, open_port
from manyhands.errors import PeerLost, PeerTimeout
from manyhands.parameter_server.memory.compatibility import refusal
from manyhands.parameter_server.protocol.messages import (
    Applied,
    ApplyRows,
    Ask,
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
    Rows,
)
from manyhands.parameter_server.worker.stream_transfers import Talk

__all__ = ["Link", "Pushed"]

SAY_AGAIN_S = 0.25
# Frames that are slow to arrive are not sent again and again.
SAY_AGAIN_AT_MOST_S = 2.0
# A server that dies is started again within seconds; one that cannot be ends the run, which its agent sees to.
PATIENCE_S = 600.0


class Pushed(NamedTuple):
    """A gradient, as servers are told of it."""

    filled: Filled
    pieces: Sequence[Sequence[RowGradients]] = ()
    """For each server, gradients of rows that are its own; empty where there are none."""


class Link:
    def __init__(self, endpoint: Callable[[int], str], identity: bytes, curve: Curve | None = None) -> None:
        """`endpoint(n)` is where server n listens, and `curve` has the keys for those that are on other hosts."""
        self._endpoint, self._identity, self._curve = endpoint, identity, curve
        self._context: zmq.Context[Any] = zmq.Context()
        self._poller = zmq.Poller()
        self._ports: list[Port[FromServer]] = []
        self._tickets = itertools.count(1)
        self._number: Number = (0, 0, 0)
        self._opened: set[int] = set()
        self._reply: Reply | None = None
        self._applied: dict[int, set[int]] = {}
        self._asked: set[int] = set()
        self._rows: dict[int, Rows] = {}
        self._talks: Sequence[Talk] = ()
        self.waiting = Waiting()
        """Where waiting for servers is added up."""

    def open(self, message: Open | OpenRows, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Have every server begin this course; returns when each has said so. `PeerLost` when it `is_wanted` no more:
        then some server has left, or never comes.
        """
        self.reach(message.servers)
        self._number, self._opened, self._applied = message.number, set(), {}

        def say() -> None:
            _insist(is_wanted)
            for server in set(range(message.servers)) - self._opened:
                self._ports[server].send(message)

        self._await(lambda: len(self._opened) == message.servers, say, "begin a course")

    def follow(self, message: Open | OpenRows) -> None:
        """Another worker has had it opened."""
        self.reach(message.servers)
        self._number, self._applied = message.number, {}

    def ticket(self) -> int:
        """A number that this worker has not used."""
        return next(self._tickets)

    def carry(self, talks: Sequence[Talk], what: str, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Have each of these come to its end, as long as it `is_wanted`."""
        began = heard = time.monotonic()
        self._talks, patience_s = talks, SAY_AGAIN_S
        while going := [talk for talk in talks if not talk.is_done]:
            _insist(is_wanted)
            for talk in going:
                for message in talk.due():
                    self._ports[talk.server].send(message)
            if self._hear(patience_s):
                heard, patience_s = time.monotonic(), max(SAY_AGAIN_S, patience_s / 2)
            elif (silent_s := time.monotonic() - heard) > PATIENCE_S:
                raise PeerTimeout(f"The parameter servers did not {what} within {PATIENCE_S:g} s.")
            elif silent_s >= patience_s:
                patience_s = min(2 * patience_s, SAY_AGAIN_AT_MOST_S)
                for talk in going:
                    talk.again()
        self._talks = ()
        self.waiting.seconds += time.monotonic() - began

    def ask(
        self,
        make: Callable[[int], Ask],
        unanswered: Callable[[], Iterable[Pushed]] = tuple,
        patience_s: float = PATIENCE_S,
    ) -> Reply:
        """Ask the first server for work. `make(ticket)` is called each time that it is said.

        No answer counts but that to the last ticket: what an ask does not name, this worker does not have.
        """
        ticket, self._reply = 0, None

        def say() -> None:
            nonlocal ticket
            if ticket:
                for push in unanswered():
                    self.tell(push)
            ticket = next(self._tickets)
            self._ports[0].send(make(ticket))

        def answered() -> bool:
            return self._reply is not None and self._reply.ticket == ticket

        self._await(answered, say, "give out work", patience_s)
        assert self._reply is not None
        return self._reply

    def tell(self, push: Pushed) -> None:
        """Tell every server of a gradient."""
        for server in range(len(self._ports)):
            self.tell_one(server, push)

    def tell_one(self, server: int, push: Pushed) -> None:
        port, pieces = self._ports[server], push.pieces[server] if push.pieces else ()
        for piece in pieces:
            port.send(piece)
        port.send(msgspec.structs.replace(push.filled, pieces=len(pieces)) if pieces else push.filled)

    def look_up(self, asked: Sequence[tuple[int, Lookup]]) -> list[Rows]:
        """Rows from servers, in the order of the questions."""
        self._asked, self._rows = {question.ticket for _, question in asked}, {}

        def say() -> None:
            for server, question in asked:
                if question.ticket not in self._rows:
                    self._ports[server].send(question)

        self._await(lambda: len(self._rows) == len(asked), say, "look up rows")
        return [self._rows[question.ticket] for _, question in asked]

    def forget(self, step: int) -> None:
        """All steps to this one are known to be applied: nobody will ask who has said so."""
        self._applied = {one: servers for one, servers in self._applied.items() if one > step}

    def await_applied(self, push: Pushed) -> None:
        """Returns when every server has applied the step."""
        step, everyone, first = push.filled.held.step, len(self._ports), True

        def say() -> None:
            nonlocal first
            if not first:
                self.tell(push)
            first = False

        self._await(lambda: len(self._applied.get(step, ())) == everyone, say, f"apply step {step}")
        del self._applied[step]

    def apply_rows(self, step: int, shares: Mapping[int, Sequence[RowGradients | ApplyRows]]) -> None:
        """Returns when each of these servers has applied its share of a step."""

        def say() -> None:
            for server in shares.keys() - self._applied.get(step, set()):
                for message in shares[server]:
                    self._ports[server].send(message)

        self._await(lambda: shares.keys() <= self._applied.get(step, set()), say, f"apply rows of step {step}")
        self._applied.pop(step, None)

    def close(self) -> None:
        for port in self._ports:
            port.close()
        self._context.destroy(linger=0)

    def reach(self, num_servers: int) -> None:
        """Have a line to each of so many."""
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

    def _await(
        self, answered: Callable[[], bool], say: Callable[[], None], what: str, patience_s: float = PATIENCE_S
    ) -> None:
        began = time.monotonic()
        self._hear(0.0)  # what has come meanwhile
        while not answered():
            say()
            until = time.monotonic() + SAY_AGAIN_S
            while not answered() and (left := until - time.monotonic()) > 0:
                self._hear(left)
            if time.monotonic() - began > patience_s:
                raise PeerTimeout(f"The parameter servers did not {what} within {patience_s:g} s.")
        self.waiting.seconds += time.monotonic() - began

    def _hear(self, timeout_s: float) -> bool:
        """Whether anything came that a talk had waited for."""
        self._poller.poll(max(0, round(timeout_s * 1000)))
        answered = False
        for server, port in enumerate(self._ports):
            for _, message in port.receive():
                for talk in (one for one in self._talks if one.server == server):
                    answered |= talk.hear(message)
                match message:
                    case _ if message.number != self._number:
                        continue
                    case Opened():
                        self._opened.add(message.server)
                    case Refused():
                        raise refusal(message)
                    case Reply():
                        self._reply = message
                    case Rows() if message.ticket in self._asked:
                        self._rows[message.ticket] = message
                    case Applied():
                        self._applied.setdefault(message.step, set()).add(message.server)
        return answered


def _insist(is_wanted: Callable[[], bool]) -> None:
    if not is_wanted():
        raise PeerLost("Fewer servers are wanted than were to begin, and some of them are not there: others begin.")
