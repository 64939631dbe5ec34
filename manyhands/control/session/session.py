"""A worker's or server's line to its agent: joining the run, its store, where it stands, its group, whether to stop.

It travels over a `Line`, on a thread of its own. `report`, `committed` and `publish` never block. The thread also sends
a heartbeat, whatever happens, and in an elastic run hears of newer generations: `newest` tells, `enter` goes over. A
server, which is in no generation, hears who lives. Start reading at `Session.join`.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from manyhands import errors, signals
from manyhands.comm.host_memory import Segment
from manyhands.comm.transport import Curve
from manyhands.control.coordinator.key_value_store import generation_is_over
from manyhands.control.membership.generations import is_later
from manyhands.control.messages.worker_messages import (
    Announce,
    Appointed,
    Committed,
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
    RunFacts,
    ServersWanted,
    StopRequest,
    StoreReply,
    StoreRequest,
    ToWorker,
    Welcome,
    WhereIsEveryone,
    WorkerPosition,
)
from manyhands.control.session.request_line import Line
from manyhands.control.session.store_client import StoreCalls
from manyhands.errors import EnvironmentProblem, ManyhandsError, PeerLost, PeerTimeout
from manyhands.events import Event, StepDone
from manyhands.spec.worker_identity import Group, Seat, server_endpoint

__all__ = ["RunFacts", "Session", "WorkerPosition", "latest_position", "was_opened"]

JOIN_TIMEOUT_S = 120.0
# The agent clears what it hands out: seconds for many gigabytes.
MEMORY_TIMEOUT_S = 300.0
HEARTBEAT_EVERY_S = 0.2
# Asked for an error's message, which comes without them where nobody answers.
POSITIONS_TIMEOUT_S = 1.0
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


class Session(StoreCalls):
    """Safe from any thread. In a forked child every call but `close` is refused: the socket belongs to the parent."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.group = seat.group()
        """The one that this worker is in and speaks for; of one that joins, until `enter`: no generation, rank -1."""
        self.run_call = 0
        """The public call that the run is in, as last heard; for a worker that joins."""
        self.run_dir = Path()
        self.run = ""
        self.stop_requested: str | None = None
        self.living: dict[int, int] | None = None
        """A server's: the slots, by incarnation, of workers not known to be dead. None: nothing was heard so far."""
        self.curve: Curve | None = None
        """Between workers and servers of different hosts; None where the run has one host."""
        self.clients = b""
        """A server's: the public key of those who may come in, for `control.security.rejected_peers.DoorKeeper`."""
        self.as_client: Curve | None = None
        """A server's: with which it comes to servers of other hosts."""
        self.backups: list[str] = []
        """A server's: where other hosts keep logs, the one to be preferred first."""
        self._servers = seat.servers
        self.servers_wanted = seat.num_servers
        """How many servers there should be, as last heard."""
        self.on_change: Callable[[], None] | None = None
        """Called, on the session's thread, after each change of these two and of `stop_requested`. It must not block
        nor raise."""
        self.position: tuple[int, str] | None = None
        self.first_step: int | None = None
        self.call = 0
        self._line = Line(seat.agent, ToWorker, self._take, self._due)
        self._in_vain_after_loss: set[int] = set()
        """Tickets of calls whose answer depends on members of the group."""
        self._heard = threading.Condition()
        self._announced: Announce | None = None
        self._offering = 0
        self._stranded = False
        self._sent_at = 0.0
        self._report_due = False
        self._heed_signals: Callable[[], None] = lambda: None
        if seat.memory_fd is not None:
            os.set_inheritable(seat.memory_fd, False)
        self._line.start()
        _open_sessions.add(self)
        global _was_opened
        _was_opened = True
        atexit.register(self.close)

    def join(self, facts: RunFacts) -> None:
        """Say Hello and wait for Welcome. Raises what the agent answers: `RunDirectoryInUse`, `RunFinished`, ..."""
        # Before the Hello: once the agent has it, it asks by a message, and the signal is for the agent alone.
        self._heed_signals = signals.leave_to_launcher()
        hello = Hello(**self._header(), rank=self.seat.rank, pid=os.getpid(), facts=facts)
        welcome = self._line.call(0, hello, JOIN_TIMEOUT_S, "the agent's welcome")
        self.run, self.run_dir = welcome.run, Path(welcome.run_dir)
        self.run_call = max(self.run_call, welcome.run_call)
        if self._announced is not None and self._announced.group.generation == self.group.generation:
            self.group = self._announced.group  # exact, where hosts have different numbers of workers
        self.stop_requested = self.stop_requested or welcome.stop
        self.curve, self.clients, self.as_client = welcome.curve, welcome.clients, welcome.as_client

    def _header(self) -> dict[str, Any]:
        return {"generation": self.group.generation, "incarnation": self.seat.incarnation}

    def server_endpoint(self, number: int) -> str:
        """Where a server is reached from here; under `curve` if it is a tcp:// endpoint."""
        return server_endpoint(self._servers, number)

    # ---- groups ----------------------------------------------------------------------------------------------

    @property
    def newest(self) -> Group | None:
        """The newest generation, if it is later than this worker's; with rank -1, this worker is dismissed from it.

        `lost` of it tells whether a member of this worker's group, or of one that it missed since, is gone.
        """
        announced, mine = self._announced, self.group.generation
        if announced is None or not is_later(announced.group.generation, mine):
            return None
        if not mine and announced.group.rank < 0:
            return None  # it offers itself, and others were admitted
        return replace(announced.group, lost=bool(mine) and is_later(announced.last_loss, mine))

    def enter(self, group: Group) -> None:
        """From now on this worker speaks for that generation."""
        self.group, self._offering = group, 0
        self._line.post(Heartbeat(**self._header()))

    def await_group(self, timeout_s: float, *, stranded: bool = False) -> Group:
        """Wait for a generation later than this worker's; it is not entered yet. `PeerTimeout` if none comes.

        `stranded`: its group came apart. If nobody is found to be gone, the coordinator puts it together anew.
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
            fix=["mh status, for who is missing", "--elastic with a lower bound that the living workers reach"],
        )

    def offer(self, call: int, timeout_s: float) -> Group | None:
        """Ready to be admitted, inside public call number `call`: the group that this worker is admitted to.

        None: the run has moved past that call. `PeerTimeout` if neither comes to pass.
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

    def await_end_of_call(self, call: int, timeout_s: float) -> None:
        """Wait until the run has moved past public call number `call`. `PeerTimeout` if it does not."""
        with self._heard:
            self._heard.wait_for(lambda: self.run_call > call or self._line.is_closing, timeout_s)
        if self.run_call <= call:
            raise PeerTimeout(f"The run did not end its call {call} within {timeout_s:g} s.")

    def _loss(self) -> PeerLost | None:
        newest = self.newest
        if newest is None or not newest.lost:
            return None
        return PeerLost(
            f"A member of generation {self.group.generation} is gone; {newest.generation} goes on without it."
        )

    # ---- the store -------------------------------------------------------------------------------------------

    def _store(self, op: Any, keys: list[str], timeout_s: float, **fields: Any) -> StoreReply:
        ticket = self._line.new_ticket()
        request = StoreRequest(**self._header(), ticket=ticket, op=op, keys=keys, timeout_s=timeout_s, **fields)
        reply: StoreReply = self._call_group(ticket, request, timeout_s + REPLY_SLACK_S, f"{op} {keys[0]}")
        if not reply.ok:
            over = self.seat.most_workers and reply.error == generation_is_over(request.generation)
            raise (PeerLost if over else PeerTimeout)(f"The run's store: {reply.error}.")
        return reply

    def _call_group(self, ticket: int, message: Any, timeout_s: float, what: str) -> Any:
        """A call that other members of the group answer, if only by way of the store: in vain once one is lost."""
        self._in_vain_after_loss.add(ticket)
        try:
            return self._line.call(ticket, message, timeout_s, what, in_vain=self._loss)
        finally:
            self._in_vain_after_loss.discard(ticket)

    # ---- memory ----------------------------------------------------------------------------------------------

    def shared_memory(self, name: str, num_bytes: int, ranks: int = 0) -> Segment:
        """A region that this host's workers share; `EnvironmentProblem`, for each of them, where there is no room."""
        fd = self.seat.memory_fd
        if fd is None:
            raise EnvironmentProblem("This worker's agent has no memory to share.")
        ticket = self._line.new_ticket()
        request = MemoryRequest(**self._header(), ticket=ticket, name=name, num_bytes=num_bytes, ranks=ranks)
        call = self._call_group if ranks else self._line.call
        reply: MemoryReply = call(ticket, request, MEMORY_TIMEOUT_S, f"memory for {name}")
        if reply.error:
            raise EnvironmentProblem(reply.error, fix=reply.fix)
        return Segment(fd, num_bytes, reply.offset)

    # ---- telling ---------------------------------------------------------------------------------------------

    def report(self, step: int, phase: str, call: int = 0) -> None:
        """Where this worker is, in which public call. Sent at most ten times a second; the latest always gets there."""
        first, self.position, self.call = self.position is None, (step, phase), call
        if first:
            self.first_step = step
            self._line.post(Report(**self._header(), step=step, phase=phase, call=call))
        else:
            self._report_due = True

    def committed(self, step: int, path: str) -> None:
        self._line.post(Committed(**self._header(), step=step, path=path))

    def publish(self, event: Event) -> None:
        """Updates that servers make may be quick, and each takes whoever hears of it a turn: they go together, ten
        times a second. Other steps go at once, as nobody tells of them again when this process is killed.
        """
        can_wait = isinstance(event, StepDone) and event.staleness is not None
        self._line.post(Publish(**self._header(), event=event), at_once=not can_wait)

    def positions(self) -> dict[int, WorkerPosition]:
        """Every rank's last report; empty when the agent does not answer in time."""
        ticket = self._line.new_ticket()
        question = WhereIsEveryone(**self._header(), ticket=ticket)
        try:
            reply: PositionReply = self._line.call(ticket, question, POSITIONS_TIMEOUT_S, "positions")
        except ManyhandsError:
            return {}
        return reply.positions

    def await_stop(self) -> None:
        """Wait until this process is asked to stop; for those who have nothing else to do until then."""
        with self._heard:
            self._heard.wait_for(lambda: self.stop_requested is not None or self._line.is_closing)

    def await_appointment(self) -> bool:
        """Of a spare server: wait until its seat has a number. False: it is asked to stop instead."""
        with self._heard:
            self._heard.wait_for(
                lambda: not self.seat.is_spare or self.stop_requested is not None or self._line.is_closing
            )
        return not self.seat.is_spare and self.stop_requested is None

    def close(self) -> None:
        """Send what is queued, say goodbye, and end the thread. Safe to call twice."""
        if not self._line.is_open:
            return
        for report in self._unsent_report():
            self._line.post(report)
        self._line.end(Goodbye(**self._header()))
        with self._heard:
            self._heard.notify_all()
        self._line.join()
        self._heed_signals()
        _open_sessions.discard(self)
        atexit.unregister(self.close)

    # ---- on the line's thread --------------------------------------------------------------------------------

    def _due(self, is_sending: bool) -> Iterator[Any]:
        """Where this worker is. Without news a sign of life, which says anew what may have been missed."""
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

    def _unsent_report(self) -> Iterator[Report]:
        if self._report_due and self.position is not None:
            self._report_due = False
            step, phase = self.position
            yield Report(**self._header(), step=step, phase=phase, call=self.call)

    def _take(self, message: ToWorker) -> None:
        match message:
            case StopRequest(kind=kind):
                self._hear_of(kind, self.living, self.servers_wanted)
            case Living(workers=workers):
                self._hear_of(self.stop_requested, workers, self.servers_wanted)
            case ServersWanted(number=number, servers=servers, backups=backups):
                self._servers, self.backups = servers, backups
                self._hear_of(self.stop_requested, self.living, number)
            case Appointed() if self.seat.is_spare:
                with self._heard:
                    self.seat = replace(self.seat, server=message.server, listen=message.listen)
                    self._heard.notify_all()
            case Announce():
                self._hear(message)
            case Welcome():
                self._line.settle(0, message)
            case Refusal():
                self._line.settle(0, _error(message))
            case StoreReply(ticket=ticket) | PositionReply(ticket=ticket) | MemoryReply(ticket=ticket):
                self._line.settle(ticket, message)

    def _hear(self, announced: Announce) -> None:
        before = self._announced
        if before is not None and is_later(before.group.generation, announced.group.generation):
            return
        with self._heard:
            self._announced, self.run_call = announced, max(self.run_call, announced.run_call)
            self._heard.notify_all()
        if (loss := self._loss()) is not None:
            for ticket in list(self._in_vain_after_loss):
                self._line.settle(ticket, loss)

    def _hear_of(self, stop: str | None, living: dict[int, int] | None, servers: int) -> None:
        before = self.stop_requested, self.living, self.servers_wanted
        with self._heard:
            self.stop_requested, self.living, self.servers_wanted = stop, living, servers
            self._heard.notify_all()
        if before != (stop, living, servers) and self.on_change is not None:
            self.on_change()


def _error(refusal: Refusal) -> ManyhandsError:
    """Only classes of our own tree can come over the wire."""
    kind = getattr(errors, refusal.error, None) if refusal.error in errors.__all__ else None
    return (kind or EnvironmentProblem)(refusal.what, where=refusal.where, fix=refusal.fix)
