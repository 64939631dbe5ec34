"""A connection to another process: one thread owns the socket; any thread may queue a message, or call and wait.

`post` never blocks: if the queue is full, the message is dropped. `call` waits, with a deadline, until `settle` is
called with its ticket. The owner of the connection decides what the messages mean; on every turn of the thread its
`due` supplies more messages to send. In a forked child nothing is sent and every call is refused, because the socket
belongs to the parent. Start reading at `RequestLine._serve`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import zmq

from manyhands.comm.peer_waits import waits_for_peers
from manyhands.comm.transport import MAX_MESSAGE_BYTES, Port, open_port
from manyhands.errors import EnvironmentProblem, ManyhandsError

__all__ = ["RequestLine"]

# The thread takes a turn with every message, and at least this often.
TURN_S = 0.1
MAX_QUEUED = 10_000


class RequestLine:
    """Connects to `endpoint`, which sends messages of the types in `accepts`. Sends and receives from `start` on.

    `receive` is called with each message; `due` returns what else to send in this turn, and its argument says whether
    messages are queued already. Both are called on the connection's thread, and must neither block nor raise.
    """

    def __init__(
        self, endpoint: str, accepts: Any, receive: Callable[[Any], None], due: Callable[[bool], Iterable[Any]]
    ) -> None:
        self.is_closing = False
        self._endpoint, self._accepts, self._receive, self._due = endpoint, accepts, receive, due
        self._pid = os.getpid()
        self._tickets = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._outbox: deque[Any] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="manyhands-session", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """False once closed, and in a forked child."""
        return not self.is_closing and os.getpid() == self._pid

    def post(self, message: Any, *, at_once: bool = True) -> bool:
        """Queue a message; False if it is dropped. Without `at_once` the thread sends it in its next turn."""
        if not self.is_open or len(self._outbox) >= MAX_QUEUED:
            return False
        self._outbox.append(message)
        if at_once:
            self._nudge()
        return True

    def new_ticket(self) -> int:
        """Above 0 and unique."""
        return next(self._tickets)

    @waits_for_peers
    def call(
        self,
        ticket: int,
        message: Any,
        timeout_s: float,
        what: str,
        hopeless: Callable[[], Exception | None] = lambda: None,
    ) -> Any:
        """Send a message and wait until its ticket is settled. If `hopeless` returns an error, raise that instead.

        `hopeless` is called after the ticket is registered, so that a thread that finds out later that no reply can
        come is able to settle the ticket.
        """
        if not self.is_open:
            raise ManyhandsError("This session is closed, or belongs to the process that forked this one.")
        future: Future[Any] = Future()
        self._waiting[ticket] = future
        try:
            if (why := hopeless()) is not None:
                raise why
            if not self.post(message):
                raise _unsent(message)
            return future.result(timeout_s)
        except FutureTimeout:
            raise EnvironmentProblem(f"No answer within {timeout_s:g} s from the agent: {what}.") from None
        finally:
            self._waiting.pop(ticket, None)

    def settle(self, ticket: int, result: Any) -> None:
        """Make the call with this ticket, if it still waits, return `result`, or raise it if it is an exception."""
        future = self._waiting.get(ticket)
        if future is None or future.done():
            return
        future.set_exception(result) if isinstance(result, Exception) else future.set_result(result)

    def end(self, message: Any) -> None:
        """Send what is queued and then this message; accept nothing more."""
        self.post(message)
        self.is_closing = True
        self._nudge()

    def join(self) -> None:
        """After `end`: wait until all is sent, and release the resources."""
        self._thread.join(5.0)
        os.close(self._wake)

    def _nudge(self) -> None:
        with contextlib.suppress(BlockingIOError):  # The counter is full: the thread will wake anyway.
            os.eventfd_write(self._wake, 1)

    def _serve(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        port: Port[Any] = open_port(context, zmq.DEALER, self._endpoint, self._accepts)
        poller = zmq.Poller()
        poller.register(port.socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while not (self.is_closing and not self._outbox):
            ready = dict(poller.poll(round(TURN_S * 1000)))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            for _, message in port.receive():
                self._receive(message)
            self._outbox.extend(self._due(bool(self._outbox)))
            while self._outbox:
                self._send(port, self._outbox.popleft())
        port.close(linger_ms=1000)
        context.term()

    def _send(self, port: Port[Any], message: Any) -> None:
        """The caller that waits for the answer to a message that cannot be sent would wait in vain."""
        ticket = getattr(message, "ticket", 0)
        if not port.send(message) and ticket:
            self.settle(ticket, _unsent(message))


def _unsent(message: Any) -> EnvironmentProblem:
    why = f"it is larger than {MAX_MESSAGE_BYTES} bytes, or {MAX_QUEUED} messages wait to be sent"
    return EnvironmentProblem(f"A {type(message).__name__} could not be sent to the agent: {why}.")
