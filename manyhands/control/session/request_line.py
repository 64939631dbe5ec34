"""A line to another process: one thread owns the socket, any thread may send through a queue or call and wait.

`post` never blocks: what finds the queue full is dropped. `call` waits for whoever settles its ticket, with a deadline.
What the messages say is the owner's business, which is asked on every turn what is due. In a forked child nothing is
sent and every call refused: the socket belongs to the parent. Start reading at `Line._serve`.
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

from manyhands.comm.transport import Port, open_port
from manyhands.errors import EnvironmentProblem, ManyhandsError

__all__ = ["Line"]

# A turn comes with every message, and at least so often.
TURN_S = 0.1
MAX_QUEUED = 10_000


class Line:
    """To `endpoint`, which answers with what `accepts` names. Sends and receives from `start` on.

    `hear` gets each message, and `due` gives what else to send in this turn; it is told whether something is on its way
    already. Both are called on the line's thread, and must neither block nor raise.
    """

    def __init__(
        self, endpoint: str, accepts: Any, hear: Callable[[Any], None], due: Callable[[bool], Iterable[Any]]
    ) -> None:
        self.is_closing = False
        self._endpoint, self._accepts, self._hear, self._due = endpoint, accepts, hear, due
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
        """Neither closed, nor another process's."""
        return not self.is_closing and os.getpid() == self._pid

    def post(self, message: Any, *, at_once: bool = True) -> None:
        """Without `at_once`: with the next turn."""
        if not self.is_open or len(self._outbox) >= MAX_QUEUED:
            return
        self._outbox.append(message)
        if at_once:
            self._nudge()

    def new_ticket(self) -> int:
        """Above 0, and never the same."""
        return next(self._tickets)

    def call(
        self,
        ticket: int,
        message: Any,
        timeout_s: float,
        what: str,
        in_vain: Callable[[], Exception | None] = lambda: None,
    ) -> Any:
        """Send a message and wait until its ticket is settled. Raises what `in_vain` gives, instead of sending.

        It is asked when the ticket can be settled already: whoever learns later that the call is in vain can end it.
        """
        if not self.is_open:
            raise ManyhandsError("This session is closed, or belongs to the process that forked this one.")
        future: Future[Any] = Future()
        self._waiting[ticket] = future
        try:
            if (why := in_vain()) is not None:
                raise why
            self.post(message)
            return future.result(timeout_s)
        except FutureTimeout:
            raise EnvironmentProblem(f"No answer within {timeout_s:g} s from the agent: {what}.") from None
        finally:
            self._waiting.pop(ticket, None)

    def settle(self, ticket: int, result: Any) -> None:
        """The call with this ticket, if it still waits, returns this, or raises it."""
        future = self._waiting.get(ticket)
        if future is None or future.done():
            return
        future.set_exception(result) if isinstance(result, Exception) else future.set_result(result)

    def end(self, message: Any) -> None:
        """Send what is queued and this, then nothing more."""
        self.post(message)
        self.is_closing = True
        self._nudge()

    def join(self) -> None:
        """After `end`: wait until all is sent, and give back what the line had."""
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
                self._hear(message)
            self._outbox.extend(self._due(bool(self._outbox)))
            while self._outbox:
                port.send(self._outbox.popleft())
        port.close(linger_ms=1000)
        context.term()
