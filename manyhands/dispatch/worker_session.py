"""A worker's connection to its cluster: it receives calls, runs their steps, and sends back results and changes.

Variables are read from their servers when a step accesses them, as they were when the call started.
Start reading at `WorkerSession.serve`.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from torch import Tensor

from manyhands.comm.tensor_messages import Placeholder, check_size, dtype_name, pack, raw_bytes, tensor_from, unpack
from manyhands.comm.transport import Curve, Frame, Port, open_port
from manyhands.data.randomness import randomness
from manyhands.data.sample_order import slice_key
from manyhands.dispatch.heartbeat import HeartbeatThread
from manyhands.dispatch.messages import (
    CallDone,
    CallFailed,
    CannotFinish,
    HubWelcome,
    Leaving,
    Map,
    Read,
    ReadReply,
    RunCall,
    Stop,
    ToWorker,
    WorkerReady,
)
from manyhands.dispatch.step_functions import Context, DatasetContext, find_step
from manyhands.dispatch.variable_ledger import Change
from manyhands.errors import EnvironmentProblem, PeerLost, UsageError

__all__ = ["WorkerConfig", "WorkerSession"]

TICK_MS = 200
JOIN_TIMEOUT_S = 60.0
# A read is repeated after this time: the server may have died and been replaced.
ASK_AGAIN_S = 0.5
TRACEBACK_CHARS = 6000
MESSAGE_CHARS = 1000


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's cluster and its modules of steps."""

    address: str
    """Address of the cluster: "ipc://…" on its host, else "tcp://host:port"."""
    steps: tuple[str, ...] = ()
    """Modules to import, or paths of Python files."""
    number: int = -1
    """-1: the cluster assigns one."""


class _SnapshotGone(Exception):
    pass


class WorkerSession:
    """A worker's connection to its cluster. `number`, `seed` and `num_calls` are readable from any thread; the rest is
    for one thread."""

    def __init__(self, config: WorkerConfig, curve: Curve | None = None) -> None:
        self._curve, self._token = curve, secrets.token_bytes(16)
        self._context: zmq.Context[Any] = zmq.Context()
        self._hub: Port[ToWorker] = open_port(
            self._context, zmq.DEALER, config.address, ToWorker, identity=self._token, curve=curve, with_frames=True
        )
        self._servers: dict[int, tuple[str, Port[ReadReply]]] = {}
        self._map = Map(servers={}, places={})
        self._tickets = 0
        self._made: dict[tuple[str, int], Any] = {}
        """Datasets and their iterators, by kind and number."""
        self.num_calls = 0
        """How many calls it has finished."""
        self._hub.send(WorkerReady(number=config.number, pid=os.getpid(), host=socket.gethostname()))
        try:
            welcome = self._welcome(config.address)
        except BaseException:
            self.close()
            raise
        self.number, self.seed = welcome.number, welcome.seed
        # A broken connection may have lost a message, so the worker has to join again as a new one.
        self._disconnects = self._hub.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._heartbeat = HeartbeatThread(
            self._context, config.address, curve, self._token, welcome.silent_s, self._disconnects
        )

    def _welcome(self, address: str) -> HubWelcome:
        if self._hub.socket.poll(round(JOIN_TIMEOUT_S * 1000)):
            for _, message in self._hub.receive(most=1):
                if isinstance(message, HubWelcome):
                    return message
        raise EnvironmentProblem(
            f"The cluster at {address} did not answer within {JOIN_TIMEOUT_S:g} s.",
            fix=["a join file that this cluster wrote", "check that the cluster is still running"],
        )

    def serve(self, stopping: Callable[[], bool]) -> None:
        """Run calls until `stopping`, or until the cluster sends Stop. `PeerLost` if it stops answering."""
        while True:
            if stopping():
                self._hub.send(Leaving())
                return
            if self._heartbeat.lost:
                raise PeerLost(f"Worker {self.number}: {self._heartbeat.lost}")
            if not self._hub.socket.poll(TICK_MS):
                continue
            for _, message, frames in self._hub.receive_with_frames(most=1):
                match message:
                    case Stop():
                        return
                    case Map():
                        self._map = message
                    case RunCall():
                        self._run(message, frames)

    def close(self) -> None:
        if hasattr(self, "_heartbeat"):
            self._heartbeat.close()
            # In this order: the monitor would wait for ever for a reader of its last event, and `term` with it.
            self._hub.socket.disable_monitor()
            self._disconnects.close(0)
        # The last messages, such as the result of the last call, still have to be sent.
        self._hub.close(linger_ms=1000)
        for _, port in self._servers.values():
            port.close()
        self._context.term()

    # ---- calls -----------------------------------------------------------------------------------------------

    def _run(self, run: RunCall, frames: list[bytes]) -> None:
        names = self._map.places
        context = Context(run.call, self.number, names, lambda name: self._read(name, run.snapshot, run.marks))
        try:
            with randomness(slice_key(self.seed, run.call, 0, "compute")):
                args, kwargs = unpack(frames, self._fill)
                result = find_step(run.step)(context, *args, **kwargs)
            done, parts = _done(run, result, context.changes)
        except _SnapshotGone:
            self._hub.send(CannotFinish(call=run.call, attempt=run.attempt))
        except Exception as error:
            if self._heartbeat.lost:
                raise
            self._hub.send(_failure(run, error))
        else:
            self._hub.send(done, parts)  # one message: the cluster gets all of it, or nothing
            self.num_calls += 1

    # ---- variables -------------------------------------------------------------------------------------------

    def _read(self, name: str, snapshot: int, marks: dict[int, int]) -> Tensor:
        server = self._map.places[name]
        port, after = self._port(server), marks.get(server, 0)
        self._tickets += 1
        read = Read(ticket=self._tickets, name=name, snapshot=snapshot, after=after)
        while True:
            port.send(read)
            ask_again = time.monotonic() + ASK_AGAIN_S
            while (left := ask_again - time.monotonic()) > 0:
                if self._heartbeat.lost:
                    raise PeerLost(f"Worker {self.number}: {self._heartbeat.lost}")
                if port.socket.poll(max(1, round(left * 1000))):
                    for _, value, frames in port.receive_with_frames():
                        if value.ticket == read.ticket:
                            return _tensor(name, value, frames)

    def _port(self, server: int) -> Port[ReadReply]:
        address = self._map.servers[server]
        known = self._servers.get(server)
        if known is None or known[0] != address:
            port = open_port(self._context, zmq.DEALER, address, ReadReply, curve=self._curve, with_frames=True)
            self._servers[server] = known = (address, port)
        return known[1]

    # ---- datasets --------------------------------------------------------------------------------------------

    def _fill(self, found: Placeholder) -> Any:
        """This worker's dataset or iterator for a placeholder; made on first use."""
        key = (found.kind, found.number)
        if key not in self._made:
            self._made[key] = self._make(found)
        return self._made[key]

    def _make(self, found: Placeholder) -> Any:
        if found.kind == "iterator":
            dataset, _, name = found.name.partition(" ")
            return iter(self._fill(Placeholder("dataset", int(dataset), name)))
        with randomness(slice_key(self.seed, found.number, self.number, "fetch")):
            return find_step(found.name)(DatasetContext(self.number, self.seed))


def _done(run: RunCall, result: Any, changes: dict[str, tuple[str, Tensor]]) -> tuple[CallDone, list[Frame]]:
    """The message with a call's result and changes; `UsageError` if they cannot be sent."""
    value = pack(result, f"what {run.step} returned")
    done = CallDone(
        call=run.call,
        attempt=run.attempt,
        value_frames=len(value),
        changes=[_change(name, op, tensor) for name, (op, tensor) in changes.items()],
    )
    parts = [*value, *(raw_bytes(tensor) for _, tensor in changes.values())]
    check_size(done, parts, f"what {run.step} returned and changed")
    return done, parts


def _change(name: str, op: Any, tensor: Tensor) -> Change:
    shape = tuple(tensor.shape)
    return Change(name=name, op=op, shape=shape, dtype=dtype_name(tensor), num_bytes=tensor.nbytes)


def _tensor(name: str, value: ReadReply, frames: list[bytes]) -> Tensor:
    if value.found == "gone":
        raise _SnapshotGone
    if value.found == "absent" or len(frames) != 1:
        raise UsageError(f"Variable {name!r} did not exist when this call started.")
    return tensor_from(frames[0], value.shape, value.dtype)


def _failure(run: RunCall, error: Exception) -> CallFailed:
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    text = "".join(traceback.format_exception(type(error), error, frame))
    return CallFailed(
        call=run.call,
        attempt=run.attempt,
        error=type(error).__name__,
        message=str(error)[:MESSAGE_CHARS],
        traceback=text[-TRACEBACK_CHARS:],
    )
