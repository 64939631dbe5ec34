"""A worker's or server's connection to its agent: joining the run, the store, reports, generations, stop requests.

Messages travel over a `RequestLine`, on its thread. `report`, `committed` and `publish` never block. The thread also
sends heartbeats, independent of what the process is doing, and in an elastic run receives new generations: `newest`
returns the latest, `enter` switches to it. Servers belong to no generation and receive the list of live workers.
Start reading at `Session.join`.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from manyhands import errors, signals
from manyhands.comm.host_memory import Segment
from manyhands.comm.peer_waits import waits_for_peers
from manyhands.comm.transport import MAX_MESSAGE_BYTES, Curve
from manyhands.control.coordinator.key_value_store import generation_is_over
from manyhands.control.membership.generations import is_later
from manyhands.control.messages.worker_messages import (
    Announce,
    Appointed,
    CommitNotice,
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
    RunFacts,
    ServersWanted,
    StopRequest,
    StoreReply,
    StoreRequest,
    ToWorker,
    WorkerHello,
    WorkerPosition,
    WorkerReport,
    WorkerWelcome,
)
from manyhands.control.session.request_line import RequestLine
from manyhands.errors import EnvironmentProblem, ManyhandsError, PeerLost, PeerTimeout
from manyhands.events import Event, StepDone
from manyhands.spec.worker_identity import Group, WorkerIdentity, server_endpoint

__all__ = ["RunFacts", "Session", "StoreClient", "WorkerPosition", "latest_position", "was_opened"]


# The message holds a key and a header as well as the value.
MAX_VALUE_BYTES = MAX_MESSAGE_BYTES - 4096
# For requests whose reply depends on no other worker.
AT_ONCE_S = 30.0


class StoreClient(ABC):
    """What `comm.store.ControlStore` is built on. Values belong to a generation and are discarded with it."""

    @abstractmethod
    def _store(self, op: str, keys: list[str], timeout_s: float, **fields: Any) -> StoreReply:
        """Raises `PeerTimeout` if no reply came in time, and `PeerLost` if none can come."""

    def get(self, key: str, timeout_s: float) -> bytes:
        return self._store("get", [key], timeout_s).value

    def set(self, key: str, value: bytes) -> None:
        if len(value) > MAX_VALUE_BYTES:
            raise ValueError(f"{key}: {len(value)} bytes are more than a store value may have ({MAX_VALUE_BYTES}).")
        self._store("set", [key], AT_ONCE_S, value=value)

    def wait(self, keys: list[str], timeout_s: float) -> None:
        self._store("wait", keys, timeout_s)

    def add(self, key: str, amount: int) -> int:
        return self._store("add", [key], AT_ONCE_S, amount=amount).number

    def check(self, keys: list[str]) -> bool:
        return bool(self._store("check", keys, AT_ONCE_S).number)

    def delete(self, key: str) -> bool:
        return bool(self._store("delete", [key], AT_ONCE_S).number)


JOIN_TIMEOUT_S = 120.0
# The agent zeroes the memory that it hands out: seconds for many gigabytes.
MEMORY_TIMEOUT_S = 300.0
HEARTBEAT_EVERY_S = 0.2
# Positions go into the text of an error, which leaves them out if the agent does not answer.
POSITIONS_TIMEOUT_S = 1.0
# The agent itself replies when a request timed out; this only covers an agent or coordinator that is unreachable.
REPLY_SLACK_S = 5.0

_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_was_opened = False


def latest_position() -> tuple[int | None, int | None, str]:
    """This process's first step, and the step and phase that it last reported, for its failure record."""
    for session in _open_sessions:
        if session.position is not None:
            return session.first_step, *session.position
    return None, None, ""


def was_opened() -> bool:
    """Whether this process ever opened a session, even if it is closed now."""
    return _was_opened


class Session(StoreClient):
    """Safe from any thread. In a forked child every call but `close` is refused: the socket belongs to the parent."""

    def __init__(self, identity: WorkerIdentity) -> None:
        self.identity = identity
        self.group = identity.group()
        """The group that this worker is in and sends messages for; for a joining worker, until `enter`: no generation,
        rank -1."""
        self.run_call = 0
        """The public call that the run is in, as last received; for a joining worker."""
        self.run_dir = Path()
        self.run = ""
        self.stop_requested: str | None = None
        self.living: dict[int, int] | None = None
        """For servers: the slot, by incarnation, of each worker not known to be dead. None: not received yet."""
        self.curve: Curve | None = None
        """Keys between workers and servers of different hosts; None if the run has one host."""
        self.clients = b""
        """For servers: the public key of peers that may connect, for `control.security.rejected_peers.PeerGate`."""
        self.as_client: Curve | None = None
        """For servers: the keys with which this one connects to servers of other hosts."""
        self.backups: list[str] = []
        """For servers: endpoints where other hosts keep backup logs, the preferred one first."""
        self._servers = identity.servers
        self.servers_wanted = identity.num_servers
        """How many servers there should be, as last received."""
        self.on_change: Callable[[], None] | None = None
        """Called on the session's thread after `living`, `servers_wanted` or `stop_requested` changed. It must neither
        block nor raise."""
        self.position: tuple[int, str] | None = None
        self.first_step: int | None = None
        self.call = 0
        self._line = RequestLine(identity.agent, ToWorker, self._receive, self._due)
        self._group_tickets: set[int] = set()
        """Tickets of calls whose reply depends on other members of the group."""
        self._heard = threading.Condition()
        self._announced: Announce | None = None
        self._offering = 0
        self._stranded = False
        self._sent_at = 0.0
        self._report_due = False
        self._restore_signals: Callable[[], None] = lambda: None
        if identity.memory_fd is not None:
            os.set_inheritable(identity.memory_fd, False)
        self._line.start()
        _open_sessions.add(self)
        global _was_opened
        _was_opened = True
        atexit.register(self.close)

    def join(self, facts: RunFacts) -> None:
        """Send Hello and wait for Welcome. Raises the agent's refusal: `RunDirectoryInUse`, `RunFinished`, ..."""
        # Before the Hello: once the agent has it, the agent alone handles signals, and asks for a stop with a message.
        self._restore_signals = signals.leave_to_launcher()
        hello = WorkerHello(**self._header(), rank=self.identity.rank, pid=os.getpid(), facts=facts)
        welcome = self._line.call(0, hello, JOIN_TIMEOUT_S, "the agent's welcome")
        self.run, self.run_dir = welcome.run, Path(welcome.run_dir)
        self.run_call = max(self.run_call, welcome.run_call)
        if self._announced is not None and self._announced.group.generation == self.group.generation:
            self.group = self._announced.group  # exact, where hosts have different numbers of workers
        self.stop_requested = self.stop_requested or welcome.stop
        self.curve, self.clients, self.as_client = welcome.curve, welcome.clients, welcome.as_client

    def _header(self) -> dict[str, Any]:
        return {"generation": self.group.generation, "incarnation": self.identity.incarnation}

    def server_endpoint(self, number: int) -> str:
        """Where a server is reached from here; under `curve` if it is a tcp:// endpoint."""
        return server_endpoint(self._servers, number)

    # ---- groups ----------------------------------------------------------------------------------------------

    @property
    def newest(self) -> Group | None:
        """The newest generation, if it is later than this worker's; its rank is -1 if this worker is dismissed.

        Its `lost` says whether a member was lost from this worker's group, or from one that this worker skipped since.
        """
        announced, mine = self._announced, self.group.generation
        if announced is None or not is_later(announced.group.generation, mine):
            return None
        if not mine and announced.group.rank < 0:
            return None  # this worker waits to be admitted, and others were
        return replace(announced.group, lost=bool(mine) and is_later(announced.last_loss, mine))

    def enter(self, group: Group) -> None:
        """Switch to that generation: this worker's messages are for it from now on."""
        self.group, self._offering = group, 0
        self._line.post(Heartbeat(**self._header()))

    @waits_for_peers
    def await_group(self, timeout_s: float, *, stranded: bool = False) -> Group:
        """Wait for a generation later than this worker's, without entering it. `PeerTimeout` if none is announced.

        `stranded`: a collective of its group failed. If no member turns out to be lost, the coordinator forms the same
        group again.
        """
        self._stranded = stranded
        if stranded and self.newest is None:
            self._line.post(Heartbeat(**self._header(), stranded=True))
        try:
            with self._heard:
                self._heard.wait_for(lambda: self.newest is not None or self._line.is_closing, timeout_s)
        finally:
            self._stranded = False
        if (newest := self.newest) is not None:
            return newest
        raise PeerTimeout(
            f"No generation after {self.group.generation or 'the first'} was announced within {timeout_s:g} s.",
            fix=[
                "mh status, to see which workers are missing",
                "--elastic, with a lower bound that the live workers reach",
            ],
        )

    @waits_for_peers
    def offer(self, call: int, timeout_s: float) -> Group | None:
        """Wait to be admitted during public call number `call`; return the group that admitted this worker.

        None: the run has moved past that call. `PeerTimeout` if neither happens in time.
        """
        self._offering = call
        self._line.post(Offer(**self._header(), call=call))
        try:
            with self._heard:
                self._heard.wait_for(lambda: self.newest or self.run_call > call or self._line.is_closing, timeout_s)
        finally:
            self._offering = 0
        if (newest := self.newest) is not None:
            return newest
        if self.run_call > call:
            self._line.post(Heartbeat(**self._header()))
            return None
        raise PeerTimeout(f"The run did not admit this worker to its call {call} within {timeout_s:g} s.")

    @waits_for_peers
    def await_end_of_call(self, call: int, timeout_s: float) -> None:
        """Wait until the run has moved past public call number `call`. `PeerTimeout` if it does not."""
        with self._heard:
            self._heard.wait_for(lambda: self.run_call > call or self._line.is_closing, timeout_s)
        if self.run_call <= call:
            raise PeerTimeout(f"The run did not end its call {call} within {timeout_s:g} s.")

    def _lost_peer(self) -> PeerLost | None:
        newest = self.newest
        if newest is None or not newest.lost:
            return None
        return PeerLost(
            f"A member of generation {self.group.generation} is gone; {newest.generation} continues without it."
        )

    # ---- the store -------------------------------------------------------------------------------------------

    def _store(self, op: Any, keys: list[str], timeout_s: float, **fields: Any) -> StoreReply:
        ticket = self._line.new_ticket()
        request = StoreRequest(**self._header(), ticket=ticket, op=op, keys=keys, timeout_s=timeout_s, **fields)
        reply: StoreReply = self._call_group(ticket, request, timeout_s + REPLY_SLACK_S, f"{op} {keys[0]}")
        if not reply.ok:
            over = self.identity.most_workers and reply.error == generation_is_over(request.generation)
            raise (PeerLost if over else PeerTimeout)(f"The run's store: {reply.error}.")
        return reply

    def _call_group(self, ticket: int, message: Any, timeout_s: float, what: str) -> Any:
        """A call whose reply needs other members of the group, if only through the store: fails once one is lost."""
        self._group_tickets.add(ticket)
        try:
            return self._line.call(ticket, message, timeout_s, what, hopeless=self._lost_peer)
        finally:
            self._group_tickets.discard(ticket)

    # ---- memory ----------------------------------------------------------------------------------------------

    def shared_memory(self, name: str, num_bytes: int, ranks: int = 0) -> Segment:
        """A region that this host's workers share; each of them gets `EnvironmentProblem` if there is no room."""
        fd = self.identity.memory_fd
        if fd is None:
            raise EnvironmentProblem("This worker's agent has no memory to share.")
        ticket = self._line.new_ticket()
        request = MemoryRequest(**self._header(), ticket=ticket, name=name, num_bytes=num_bytes, ranks=ranks)
        call = self._call_group if ranks else self._line.call
        reply: MemoryReply = call(ticket, request, MEMORY_TIMEOUT_S, f"memory for {name}")
        if reply.error:
            raise EnvironmentProblem(reply.error, fix=reply.fix)
        return Segment(fd, num_bytes, reply.offset)

    # ---- reports ---------------------------------------------------------------------------------------------

    def report(self, step: int, phase: str, call: int = 0) -> None:
        """Report step, phase and public call. Sent at most ten times a second; the latest report is always sent."""
        first, self.position, self.call = self.position is None, (step, phase), call
        if first:
            self.first_step = step
            self._line.post(WorkerReport(**self._header(), step=step, phase=phase, call=call))
        else:
            self._report_due = True

    def committed(self, step: int, path: str) -> None:
        self._line.post(CommitNotice(**self._header(), step=step, path=path))

    def publish(self, event: Event) -> None:
        """Send an event to the agent.

        Updates on servers may follow each other fast, and each message costs its receiver a turn: their events are
        sent together, ten times a second. Events of other steps are sent at once, because if this process is killed
        no other process can report them.
        """
        can_wait = isinstance(event, StepDone) and event.staleness is not None
        self._line.post(Publish(**self._header(), event=event), at_once=not can_wait)

    def interruptible(self) -> AbstractContextManager[None]:
        return nullcontext()  # an interrupt is for the agent, which sends a `StopRequest`

    def positions(self) -> dict[int, WorkerPosition]:
        """Every rank's last report; empty when the agent does not answer in time."""
        ticket = self._line.new_ticket()
        request = PositionRequest(**self._header(), ticket=ticket)
        try:
            reply: PositionReply = self._line.call(ticket, request, POSITIONS_TIMEOUT_S, "positions")
        except ManyhandsError:
            return {}
        return reply.positions

    @waits_for_peers
    def await_stop(self) -> None:
        """Wait until this process is asked to stop; for processes that have nothing else to do until then."""
        with self._heard:
            self._heard.wait_for(lambda: self.stop_requested is not None or self._line.is_closing)

    @waits_for_peers
    def await_appointment(self) -> bool:
        """For a spare server: wait until it is assigned a server number. False: it is asked to stop instead."""
        with self._heard:
            self._heard.wait_for(
                lambda: not self.identity.is_spare or self.stop_requested is not None or self._line.is_closing
            )
        return not self.identity.is_spare and self.stop_requested is None

    def close(self) -> None:
        """Send what is queued and a Goodbye, and end the thread. Safe to call twice."""
        if not self._line.is_open:
            return
        for report in self._unsent_report():
            self._line.post(report)
        self._line.end(Goodbye(**self._header()))
        with self._heard:
            self._heard.notify_all()
        self._line.join()
        self._restore_signals()
        _open_sessions.discard(self)
        atexit.unregister(self.close)

    # ---- on the connection's thread --------------------------------------------------------------------------

    def _due(self, is_sending: bool) -> Iterator[Any]:
        """An unsent report, or else a heartbeat or offer, which repeats state that the agent may have missed."""
        now = time.monotonic()
        for report in self._unsent_report():
            is_sending = True
            yield report
        if is_sending:
            self._sent_at = now
        elif now - self._sent_at >= HEARTBEAT_EVERY_S and not self._line.is_closing:
            self._sent_at, call = now, self._offering
            beat = Heartbeat(**self._header(), stranded=self._stranded)
            yield Offer(**self._header(), call=call) if call else beat

    def _unsent_report(self) -> Iterator[WorkerReport]:
        if self._report_due and self.position is not None:
            self._report_due = False
            step, phase = self.position
            yield WorkerReport(**self._header(), step=step, phase=phase, call=self.call)

    def _receive(self, message: ToWorker) -> None:
        match message:
            case StopRequest(kind=kind):
                self._update(kind, self.living, self.servers_wanted)
            case LiveWorkers(workers=workers):
                self._update(self.stop_requested, workers, self.servers_wanted)
            case ServersWanted(number=number, servers=servers, backups=backups):
                self._servers, self.backups = servers, backups
                self._update(self.stop_requested, self.living, number)
            case Appointed() if self.identity.is_spare:
                with self._heard:
                    self.identity = replace(self.identity, server=message.server, listen=message.listen)
                    self._heard.notify_all()
            case Announce():
                self._note_generation(message)
            case WorkerWelcome():
                self._line.settle(0, message)
            case Refusal():
                self._line.settle(0, _error(message))
            case StoreReply(ticket=ticket) | PositionReply(ticket=ticket) | MemoryReply(ticket=ticket):
                self._line.settle(ticket, message)

    def _note_generation(self, announced: Announce) -> None:
        before = self._announced
        if before is not None and is_later(before.group.generation, announced.group.generation):
            return
        with self._heard:
            self._announced, self.run_call = announced, max(self.run_call, announced.run_call)
            self._heard.notify_all()
        if (lost := self._lost_peer()) is not None:
            for ticket in list(self._group_tickets):
                self._line.settle(ticket, lost)

    def _update(self, stop: str | None, living: dict[int, int] | None, servers: int) -> None:
        before = self.stop_requested, self.living, self.servers_wanted
        with self._heard:
            self.stop_requested, self.living, self.servers_wanted = stop, living, servers
            self._heard.notify_all()
        if before != (stop, living, servers) and self.on_change is not None:
            self.on_change()


def _error(refusal: Refusal) -> ManyhandsError:
    """Only exception classes of `manyhands.errors` are created from a message."""
    kind = getattr(errors, refusal.error, None) if refusal.error in errors.__all__ else None
    return (kind or EnvironmentProblem)(refusal.what, where=refusal.where, fix=refusal.fix)
