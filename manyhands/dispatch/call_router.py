"""The calls and variables of a cluster: sends messages to workers and servers, and handles theirs.

`call_queue` and `variable_ledger` decide; this module turns decisions into messages, and allocates the shared memory
that outlives servers. Not thread-safe: the hub calls it under its lock. Start reading at `CallRouter.take` and
`CallRouter.pump`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
from torch import Tensor

from manyhands.comm.host_memory import HostMemory
from manyhands.comm.tensor_messages import tensor_bytes, tensor_from
from manyhands.comm.transport import Frame
from manyhands.dispatch.call_queue import MOST_WAITING, CallQueue
from manyhands.dispatch.messages import (
    Apply,
    CallDone,
    CallFailed,
    CannotFinish,
    CommitApplied,
    FromMember,
    Map,
    Read,
    ReadReply,
    RunCall,
    ServerHello,
    ServerWelcome,
    VariableLocation,
)
from manyhands.dispatch.variable_ledger import Change, VariableInfo, VariableLedger
from manyhands.dispatch.variable_server import region_bytes
from manyhands.errors import CallCancelled, ManyhandsError, StepFailed, UsageError

__all__ = ["CallOutcome", "CallRouter", "Peer"]

Peer = tuple[str, bytes]
"""The port ("ipc" or "tcp") that a member is connected to, and its identity there."""


class CallOutcome:
    """The result or error of a call."""

    def __init__(self) -> None:
        self.frames: list[bytes] | None = None
        self.error: ManyhandsError | None = None

    @property
    def ended(self) -> bool:
        return self.frames is not None or self.error is not None


class _Call(msgspec.Struct):
    step: str
    frames: Sequence[Frame]
    outcome: CallOutcome


class _Reading(msgspec.Struct):
    info: VariableInfo
    snapshot: int
    after: int
    answer: Any
    sent_to: Peer | None = None


class CallRouter:
    def __init__(
        self, memory: HostMemory, send: Callable[[Peer, Any, Sequence[Frame]], None], most_waiting: int = MOST_WAITING
    ) -> None:
        self.queue: CallQueue[Peer] = CallQueue(most_waiting)
        self.ledger = VariableLedger()
        self.refused = 0
        """Number of ignored messages: from unknown senders, late, or malformed."""
        self._memory, self._send = memory, send
        self._calls: dict[int, _Call] = {}
        self._kept: dict[str, VariableLocation] = {}
        self._servers: dict[int, tuple[Peer, dict[str, str]]] = {}
        """Live servers: their connection, and the addresses to read from."""
        self._addresses: dict[int, dict[str, str]] = {}
        self._maps: dict[Peer, tuple[int, int]] = {}
        """Numbers of servers and variables in the last map that each worker got."""
        self._tickets = itertools.count(1)
        self._readings: dict[int, _Reading] = {}

    # ---- calls -----------------------------------------------------------------------------------------------

    def schedule(self, step: str, frames: Sequence[Frame]) -> CallOutcome:
        """Add a call; only if the queue has room."""
        call = _Call(step, frames, CallOutcome())
        self._calls[self.queue.schedule()] = call
        return call.outcome

    def take_failure(self) -> ManyhandsError | None:
        """The failure that is due; returned once."""
        call = self.queue.failure_due
        if call is None:
            return None
        self.queue.raised()
        return self._calls.pop(call).outcome.error

    def lost(self, peer: Peer, who: str) -> None:
        """Handle a lost worker."""
        self._maps.pop(peer, None)
        effect = self.queue.lost(peer)
        if effect.failed and effect.call is not None:
            call = self._calls[effect.call]
            what = f"Step {call.step!r} (call {effect.call}) ran on {effect.losses} workers, and each died during it."
            call.outcome.error = StepFailed(
                what, fix=[f"look at what {who} wrote to standard error", "more memory for workers"]
            )
        self._cancel(effect.cancelled)

    def left(self, peer: Peer) -> None:
        """Handle a worker that left voluntarily. A call just assigned to it does not count as a lost worker's."""
        given = self.queue.running.get(peer)
        if given is not None and not self.queue.begin_again(peer, given.call, given.attempt):
            self._cancel([given.call])
        self._maps.pop(peer, None)
        self.queue.lost(peer)

    def cancel_all(self, why: str) -> None:
        for call in self._calls.values():
            if not call.outcome.ended:
                call.outcome.error = CallCancelled(why)
        self._calls.clear()

    def _cancel(self, calls: Iterable[int]) -> None:
        for number in calls:
            call = self._calls.pop(number)
            call.outcome.error = CallCancelled(
                f"Step {call.step!r} (call {number}) was cancelled: another call failed."
            )

    # ---- messages from workers and servers -------------------------------------------------------------------

    def take(self, peer: Peer, message: FromMember, frames: list[bytes]) -> None:
        """Handle a message of a live worker or a server."""
        match message:
            case CallDone() if self._is_at(peer, message):
                self._done(peer, message, frames)
            case CallFailed() if self._is_at(peer, message):
                self._fail(peer, message, self._raised(message))
            case CannotFinish() if self._is_at(peer, message):
                if not self.queue.begin_again(peer, message.call, message.attempt):
                    self._cancel([message.call])
            case CommitApplied() if (server := self.server_of(peer)) is not None:
                self.ledger.applied(server, message.commit)
            case ReadReply() if self.server_of(peer) is not None:
                self._answered(message, frames)
            case _:
                self.refused += 1

    def _is_at(self, peer: Peer, message: CallDone | CallFailed | CannotFinish) -> bool:
        return self.queue.is_at(peer, message.call, message.attempt)

    def _done(self, peer: Peer, message: CallDone, frames: list[bytes]) -> None:
        payloads = frames[message.value_frames :]
        if not 1 <= message.value_frames <= len(frames) or not _fit(message.changes, payloads):
            self.refused += 1
            return
        try:
            self.commit(message.changes, payloads, f"step {self._calls[message.call].step!r} (call {message.call})")
        except ManyhandsError as error:
            self._fail(peer, message, StepFailed(error.what, where=error.where, fix=error.fix))
            return
        self.queue.done(peer, message.call, message.attempt)
        self._calls.pop(message.call).outcome.frames = frames[: message.value_frames]

    def _raised(self, message: CallFailed) -> StepFailed:
        step = self._calls[message.call].step
        what = f"Step {step!r} (call {message.call}) raised {message.error}: {message.message}"
        return StepFailed(f"{what}\n{message.traceback}".rstrip())

    def _fail(self, peer: Peer, message: CallDone | CallFailed, error: StepFailed) -> None:
        call = self._calls[message.call]
        call.outcome.error = error
        self._cancel(self.queue.failed(peer, message.call, message.attempt) or [])
        # Of several failures one is raised; the others are raised only by `fetch` of their values.
        if not self.queue.fails_for(message.call):
            del self._calls[message.call]

    # ---- variables -------------------------------------------------------------------------------------------

    def commit(self, changes: Sequence[Change], payloads: Sequence[Frame], where: str) -> None:
        """Commit all changes of one call; or none, and raise the reason."""
        why = self.ledger.refusal(changes)
        if why is not None:
            raise UsageError(why, where=where, fix=["cluster.variables() lists the variables"])
        fresh = self.ledger.place(changes)
        offsets = [self._memory.allot(f"variable {info.name}", region_bytes(info.num_bytes)) for info in fresh]
        for info, offset in zip(fresh, offsets, strict=True):
            self._kept[info.name] = VariableLocation(info.name, info.shape, info.dtype, offset)
        self.ledger.commit(changes, payloads, fresh)

    def read(self, name: str) -> Future[Tensor | None]:
        """A variable with all commits so far; the result None means that it has to be read again."""
        info = self.ledger.catalogue.get(name)
        if info is None:
            raise UsageError(f"No variable is called {name!r}; there are {', '.join(self.ledger.catalogue) or 'none'}.")
        answer: Future[Tensor | None] = Future()
        reading = _Reading(info, self.ledger.commits, self.ledger.marks[info.server], answer)
        self._readings[next(self._tickets)] = reading
        return answer

    def _answered(self, message: ReadReply, frames: list[bytes]) -> None:
        reading = self._readings.pop(message.ticket, None)
        if reading is None:
            self.refused += 1
        elif message.found == "there" and len(frames) == 1:
            reading.answer.set_result(tensor_from(frames[0], message.shape, message.dtype))
        else:
            reading.answer.set_result(None)

    def server_of(self, peer: Peer) -> int | None:
        return next((number for number, (known, _) in self._servers.items() if known == peer), None)

    def server_came(self, peer: Peer, hello: ServerHello) -> None:
        self._servers[hello.server] = (peer, hello.addresses)
        self._addresses[hello.server] = hello.addresses
        catalogue = self.ledger.catalogue
        kept = [kept for name, kept in self._kept.items() if catalogue[name].server == hello.server]
        self._send(peer, ServerWelcome(applied=self.ledger.started_again(hello.server), kept=kept), [])

    @property
    def server_peers(self) -> list[Peer]:
        return [peer for peer, _ in self._servers.values()]

    def server_lost(self, number: int) -> None:
        self._servers.pop(number, None)

    # ---- messages to workers and servers ---------------------------------------------------------------------

    def pump(self) -> None:
        """Send everything that can be sent now."""
        for number, (peer, _) in self._servers.items():
            self._send_commits(number, peer)
        while not self.ledger.behind and (given := self.queue.hand_out(self.ledger.commits)) is not None:
            self._send_map(given.worker)
            call = self._calls[given.call]
            run = RunCall(
                call=given.call,
                attempt=given.attempt,
                step=call.step,
                snapshot=given.snapshot,
                marks=self.ledger.marks,
            )
            self._send(given.worker, run, call.frames)
        for ticket, reading in self._readings.items():
            self._send_reading(ticket, reading)

    def _send_commits(self, number: int, peer: Peer) -> None:
        newest = min([self.ledger.commits, *(reading.snapshot for reading in self._readings.values())])
        oldest = self.queue.oldest_snapshot(newest)
        for commit in self.ledger.due(number):
            kept = [self._kept[change.name] for change in commit.changes]
            apply = Apply(commit=commit.number, oldest=min(oldest, newest), changes=list(commit.changes), kept=kept)
            self._send(peer, apply, commit.payloads)

    def _send_map(self, worker: Peer) -> None:
        """Send the locations of variables, if they changed. Restarted servers keep their address."""
        newest = (len(self._addresses), len(self._kept))
        if self._maps.get(worker) != newest:
            self._maps[worker] = newest
            places = {name: info.server for name, info in self.ledger.catalogue.items()}
            servers = {number: addresses[worker[0]] for number, addresses in self._addresses.items()}
            self._send(worker, Map(servers=servers, places=places), [])

    def _send_reading(self, ticket: int, reading: _Reading) -> None:
        peer, _ = self._servers.get(reading.info.server, (None, {}))
        if peer is not None and reading.sent_to != peer:
            reading.sent_to = peer
            read = Read(ticket=ticket, name=reading.info.name, snapshot=reading.snapshot, after=reading.after)
            self._send(peer, read, [])


def _fit(changes: Sequence[Change], payloads: Sequence[Frame]) -> bool:
    """Whether every change came with the bytes of its tensor."""
    try:
        wanted = [tensor_bytes(change.shape, change.dtype) for change in changes]
    except ValueError:
        return False
    announced = [change.num_bytes for change in changes]
    return wanted == announced == [len(payload) for payload in payloads]
