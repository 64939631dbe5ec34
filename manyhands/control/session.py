"""A worker's line to its agent: joining the run, its store, where it stands, and the wish that it stop.

One background thread owns the socket; calls hand it messages through a queue and wait for a reply with a deadline.
`report`, `committed` and `publish` never block. Start reading at `Session.join`.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
import weakref
from collections import deque
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import zmq

from manyhands import errors
from manyhands.comm.segments import Segment
from manyhands.comm.transport import MAX_MESSAGE_BYTES, Port, open_port
from manyhands.control.messages import (
    Committed,
    Goodbye,
    Hello,
    MemoryReply,
    MemoryRequest,
    PositionReply,
    Publish,
    Refusal,
    Report,
    RunFacts,
    StopRequest,
    StoreReply,
    StoreRequest,
    ToWorker,
    Welcome,
    WhereIsEveryone,
    WorkerPosition,
)
from manyhands.errors import EnvironmentProblem, ManyhandsError, PeerTimeout
from manyhands.events import Event
from manyhands.spec.seat import Seat

__all__ = ["RunFacts", "Session", "WorkerPosition", "latest_position", "was_opened"]

JOIN_TIMEOUT_S = 120.0
# The agent clears what it hands out: seconds for many gigabytes.
MEMORY_TIMEOUT_S = 300.0
REPORT_EVERY_S = 0.1
MAX_QUEUED = 10_000
# A value shares its message with a key and a header.
MAX_VALUE_BYTES = MAX_MESSAGE_BYTES - 4096
# The agent answers "too late" itself; this only covers an agent or coordinator that is away.
REPLY_SLACK_S = 5.0

_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_was_opened = False


def latest_position() -> tuple[int | None, int | None, str]:
    """The step at which this process began, and the step and phase where it last was, for its failure record."""
    for session in _open_sessions:
        if session.position is not None:
            return session.first_step, *session.position
    return None, None, ""


def was_opened() -> bool:
    """Whether this process ever had a session, also if it is closed by now."""
    return _was_opened


class Session:
    """Safe from any thread. In a forked child every call but `close` is refused: the socket belongs to the parent."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.run_dir = Path()
        self.run = ""
        self.stop_requested: str | None = None
        self.position: tuple[int, str] | None = None
        self.first_step: int | None = None
        self._pid = os.getpid()
        self._tickets = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._outbox: deque[Any] = deque()
        self._dropped = 0
        self._report_due = False
        self._closing = False
        if seat.memory_fd is not None:
            os.set_inheritable(seat.memory_fd, False)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="manyhands-session", daemon=True)
        self._thread.start()
        _open_sessions.add(self)
        global _was_opened
        _was_opened = True
        atexit.register(self.close)

    def join(self, facts: RunFacts) -> None:
        """Say Hello and wait for Welcome. Raises what the agent answers: `RunDirectoryInUse`, `RunFinished`, ..."""
        hello = Hello(**self._header(), rank=self.seat.rank, pid=os.getpid(), facts=facts)
        welcome = self._call(0, hello, JOIN_TIMEOUT_S, "the agent's welcome")
        self.run, self.run_dir = welcome.run, Path(welcome.run_dir)
        self.stop_requested = self.stop_requested or welcome.stop

    # ---- the store -------------------------------------------------------------------------------------------

    def get(self, key: str, timeout_s: float) -> bytes:
        value: bytes = self._store("get", [key], timeout_s=timeout_s).value
        return value

    def set(self, key: str, value: bytes) -> None:
        if len(value) > MAX_VALUE_BYTES:
            raise ValueError(f"{key}: {len(value)} bytes are more than a store value may have ({MAX_VALUE_BYTES}).")
        self._store("set", [key], value=value)

    def wait(self, keys: list[str], timeout_s: float) -> None:
        self._store("wait", keys, timeout_s=timeout_s)

    def add(self, key: str, amount: int) -> int:
        number: int = self._store("add", [key], amount=amount).number
        return number

    def check(self, keys: list[str]) -> bool:
        return bool(self._store("check", keys).number)

    def delete(self, key: str) -> bool:
        return bool(self._store("delete", [key]).number)

    def _store(self, op: Any, keys: list[str], *, timeout_s: float = 30.0, **fields: Any) -> StoreReply:
        ticket = next(self._tickets)
        request = StoreRequest(**self._header(), ticket=ticket, op=op, keys=keys, timeout_s=timeout_s, **fields)
        reply: StoreReply = self._call(ticket, request, timeout_s + REPLY_SLACK_S, f"{op} {keys[0]}")
        if not reply.ok:
            raise PeerTimeout(f"The run's store: {reply.error}.")
        return reply

    # ---- memory ----------------------------------------------------------------------------------------------

    def shared_memory(self, name: str, num_bytes: int, ranks: int = 0) -> Segment:
        """A region that this host's workers share; `EnvironmentProblem`, for each of them, where there is no room."""
        fd = self.seat.memory_fd
        if fd is None:
            raise EnvironmentProblem("This worker's agent has no memory to share.")
        ticket = next(self._tickets)
        request = MemoryRequest(**self._header(), ticket=ticket, name=name, num_bytes=num_bytes, ranks=ranks)
        reply: MemoryReply = self._call(ticket, request, MEMORY_TIMEOUT_S, f"memory for {name}")
        if reply.error:
            raise EnvironmentProblem(reply.error, fix=reply.fix)
        return Segment(fd, num_bytes, reply.offset)

    # ---- telling ---------------------------------------------------------------------------------------------

    def report(self, step: int, phase: str) -> None:
        """Where this worker is. Sent at most ten times a second; the latest always gets there."""
        first, self.position = self.position is None, (step, phase)
        if first:
            self.first_step = step
            self._post(Report(**self._header(), step=step, phase=phase))
        elif not self._report_due:
            self._report_due = True

    def committed(self, step: int, path: str) -> None:
        self._post(Committed(**self._header(), step=step, path=path))

    def publish(self, event: Event) -> None:
        self._post(Publish(**self._header(), event=event))

    def positions(self, timeout_s: float = 1.0) -> dict[int, WorkerPosition]:
        """Every rank's last report; empty when the agent does not answer in time."""
        ticket = next(self._tickets)
        question = WhereIsEveryone(**self._header(), ticket=ticket)
        try:
            reply: PositionReply = self._call(ticket, question, timeout_s, "positions")
        except ManyhandsError:
            return {}
        return reply.positions

    def close(self) -> None:
        """Send what is queued, say goodbye, and end the thread. Safe to call twice."""
        if self._closing or os.getpid() != self._pid:
            return
        self._flush_report()
        self._post(Goodbye(**self._header()))
        self._closing = True
        self._nudge()
        self._thread.join(5.0)
        _open_sessions.discard(self)
        atexit.unregister(self.close)
        os.close(self._wake)

    # ---- the thread and its queue ----------------------------------------------------------------------------

    def _header(self) -> dict[str, Any]:
        return {"generation": self.seat.generation, "incarnation": self.seat.incarnation}

    def _post(self, message: Any) -> None:
        if self._closing or os.getpid() != self._pid:
            return
        if len(self._outbox) >= MAX_QUEUED:
            self._dropped += 1
            return
        self._outbox.append(message)
        self._nudge()

    def _nudge(self) -> None:
        with contextlib.suppress(BlockingIOError):  # The counter is full: the thread will wake anyway.
            os.eventfd_write(self._wake, 1)

    def _call(self, ticket: int, message: Any, timeout_s: float, what: str) -> Any:
        if self._closing or os.getpid() != self._pid:
            raise ManyhandsError("This session is closed, or belongs to the process that forked this one.")
        future: Future[Any] = Future()
        self._waiting[ticket] = future
        self._post(message)
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            raise EnvironmentProblem(f"No answer within {timeout_s:g} s from the agent: {what}.") from None
        finally:
            self._waiting.pop(ticket, None)

    def _serve(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        port: Port[ToWorker] = open_port(context, zmq.DEALER, self.seat.agent, ToWorker)
        poller = zmq.Poller()
        poller.register(port.socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while not (self._closing and not self._outbox):
            ready = dict(poller.poll(round(REPORT_EVERY_S * 1000)))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            for _, message in port.receive():
                self._take(message)
            self._flush_report()
            while self._outbox:
                port.send(self._outbox.popleft())
        port.close(linger_ms=1000)
        context.term()

    def _flush_report(self) -> None:
        if self._report_due and self.position is not None:
            self._report_due = False
            step, phase = self.position
            self._outbox.append(Report(**self._header(), step=step, phase=phase))

    def _take(self, message: ToWorker) -> None:
        match message:
            case StopRequest(kind=kind):
                self.stop_requested = kind
            case Welcome():
                self._settle(0, message)
            case Refusal():
                self._settle(0, _error(message))
            case StoreReply(ticket=ticket) | PositionReply(ticket=ticket) | MemoryReply(ticket=ticket):
                self._settle(ticket, message)

    def _settle(self, ticket: int, result: Any) -> None:
        future = self._waiting.get(ticket)
        if future is None or future.done():
            return
        future.set_exception(result) if isinstance(result, Exception) else future.set_result(result)


def _error(refusal: Refusal) -> ManyhandsError:
    """Only classes of our own tree can come over the wire."""
    kind = getattr(errors, refusal.error, None) if refusal.error in errors.__all__ else None
    return (kind or EnvironmentProblem)(refusal.what, where=refusal.where, fix=refusal.fix)
