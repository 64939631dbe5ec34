"""The main thread of a cluster: it owns sockets and child processes, and drives the `CallRouter`.

All state is guarded by one condition, `changed`; other threads use the public methods of `Hub`. Calls and variables are
handled in `call_router`. Start reading at `Hub._turn`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import zmq
from torch import Tensor

from manyhands.comm.host_memory import HostMemory
from manyhands.comm.tensor_messages import dtype_name, raw_bytes
from manyhands.comm.transport import Curve, Frame, Port, open_port
from manyhands.control.processes.fence import Guard
from manyhands.control.processes.private_directory import private_directory
from manyhands.control.security.keys import client_curve, server_curve
from manyhands.control.security.rejected_peers import PeerGate
from manyhands.dispatch.call_queue import MOST_WAITING
from manyhands.dispatch.call_router import CallOutcome, CallRouter, Peer
from manyhands.dispatch.child_processes import ChildConfig, ClusterChild
from manyhands.dispatch.messages import Alive, FromMember, HubWelcome, Leaving, NotReady, ServerHello, Stop, WorkerReady
from manyhands.dispatch.variable_ledger import Change
from manyhands.dispatch.variable_server import ServerConfig
from manyhands.errors import GaveUp, UsageError

__all__ = ["Hub", "HubSettings", "News"]

TICK_MS = 250
STOP_S = 2.0
# After a child has ended this many times in a row before it was ready, the hub gives up.
MOST_FAILED_STARTS = 3

Role = Literal["worker", "server"]
News = Callable[[str, Role, int, str], None]
"""Called with "started" or "lost", role and number, and the process or how it ended."""


class HubSettings(msgspec.Struct, frozen=True, kw_only=True):
    workers: int
    servers: int
    steps: list[str]
    seed: int = 0
    threads: int = 1
    silent_s: float = 30.0
    most_waiting: int = MOST_WAITING
    listen: str = ""
    """An address without a port, at which workers of other hosts join."""
    key: bytes = b""


class _Member(msgspec.Struct):
    """A worker that has joined."""

    number: int
    child: ClusterChild | None
    heard_at: float


class Hub:
    def __init__(self, settings: HubSettings, news: News) -> None:
        """`news` is called in the hub's thread, without its lock."""
        self.settings = settings
        self.changed = threading.Condition(threading.RLock())
        self.broken: BaseException | None = None
        """The error that ended the cluster."""
        self.closed = False
        self._closing = False
        self._news, self._unreported = news, list[tuple[str, Role, int, str]]()
        self._members: dict[Peer, _Member] = {}
        self._children: dict[int, ClusterChild] = {}
        """By pidfd."""
        self._to_start: list[tuple[Role, int]] = [("worker", number) for number in range(settings.workers)]
        """Children to be started."""
        self._failed_starts: dict[tuple[Role, int], int] = {}
        self._num_servers = 0
        self._listened: dict[int, str] = {}
        """TCP endpoints of servers; a restarted server listens at the same one."""
        self._open()
        self.desk = CallRouter(self._memory, self._send, settings.most_waiting)
        self.add_servers(settings.servers)
        self._thread = threading.Thread(target=self._serve, name="manyhands-cluster", daemon=True)
        self._thread.start()

    def _open(self) -> None:
        self._directory = private_directory()
        self._guard = Guard(self._directory)
        self._memory = HostMemory()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context: zmq.Context[Any] = zmq.Context()
        self._gate: PeerGate | None = None
        self.address = f"ipc://{self._directory}/hub"
        self._ports: dict[str, Port[FromMember]] = {"ipc": self._bind(self.address)}
        self.tcp_address = ""
        if self.settings.listen:
            self._gate = PeerGate(self._context, client_curve(self.settings.key).public)
            port = self._ports["tcp"] = self._bind(f"tcp://{self.settings.listen}:0", server_curve(self.settings.key))
            self.tcp_address = port.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _bind(self, endpoint: str, curve: Curve | None = None) -> Port[FromMember]:
        return open_port(self._context, zmq.ROUTER, endpoint, FromMember, bind=True, curve=curve, with_frames=True)

    # ---- for other threads -----------------------------------------------------------------------------------

    def poke(self) -> None:
        """Wake the thread."""
        with self.changed, contextlib.suppress(BlockingIOError):  # it is being woken already
            if not self.closed:
                os.eventfd_write(self._wake, 1)

    def wait_for(self, condition: Callable[[], Any], timeout_s: float | None = None) -> bool:
        """Wait until the condition holds; False on timeout. Raises if the cluster failed or was closed."""
        with self.changed:
            self.changed.wait_for(lambda: condition() or self.broken or self.closed, timeout_s)
            self._check()
            return bool(condition())

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken
        if self.closed or self._closing:
            raise UsageError("The cluster is shut down.", fix=["a new mh.dispatch.Cluster"])

    @property
    def all_ready(self) -> bool:
        return not self._to_start and all(child.ready for child in self._children.values())

    @property
    def refused(self) -> int:
        """Number of ignored messages: from unknown senders, late, or malformed."""
        return self.desk.refused + sum(port.garbage for port in self._ports.values())

    def schedule(self, step: str, frames: Sequence[Frame]) -> CallOutcome:
        """Put a call into the queue, once there is room. Raises a failure that is due."""
        with self.changed:
            self.wait_for(lambda: self.desk.queue.room or self.desk.queue.failure_due is not None)
            self.raise_due()
            outcome = self.desk.schedule(step, frames)
        self.poke()
        return outcome

    def raise_due(self) -> None:
        """Raise the failure that is due, once."""
        with self.changed:
            self._check()
            error = self.desk.take_failure()
            self.changed.notify_all()
        if error is not None:
            raise error

    def change(self, name: str, op: Literal["assign", "add"], value: Tensor) -> None:
        """One change to one variable, as a call would make it."""
        # A copy: the caller may change its tensor before a server has it.
        data = bytes(raw_bytes(value))
        change = Change(name=name, op=op, shape=tuple(value.shape), dtype=dtype_name(value), num_bytes=len(data))
        with self.changed:
            self.wait_for(lambda: not self.desk.ledger.behind)
            self.desk.commit([change], [data], f"cluster.{op}({name!r}, ...)")
        self.poke()

    def read(self, name: str) -> Tensor:
        """A variable with all commits so far."""
        while True:
            with self.changed:
                self._check()
                answer = self.desk.read(name)
            self.poke()
            self.wait_for(answer.done)
            value = answer.result()
            if value is not None:
                return value

    def add_servers(self, count: int) -> list[int]:
        with self.changed:
            numbers = list(range(self._num_servers, self._num_servers + count))
            self._num_servers += count
            for number in numbers:
                self.desk.ledger.add_server(number)
                self._to_start.append(("server", number))
        self.poke()
        return numbers

    def pids(self, role: Role) -> dict[int, int]:
        """Process ids of ready children, by number."""
        with self.changed:
            found = {child.number: child.pid for child in self._children.values() if child.role == role and child.ready}
            return dict(sorted(found.items()))

    def close(self) -> None:
        """End all workers and servers, and wait for them."""
        self._closing = True
        self.poke()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- the thread ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._poller = zmq.Poller()
        gate_sockets = self._gate.sockets if self._gate else []
        for readable in (self._wake, *(port.socket for port in self._ports.values()), *gate_sockets):
            self._poller.register(readable, zmq.POLLIN)
        try:
            while not self._closing:
                self._turn()
        except BaseException as error:
            self.broken = error
        finally:
            self._end()

    def _turn(self) -> None:
        ready = {key for key, _ in self._poller.poll(TICK_MS)}
        with self.changed:
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._gate is not None:
                self._gate.attend()
            for name, port in self._ports.items():
                for sender, message, frames in port.receive_with_frames():
                    self._take((name, sender), message, frames)
            for pidfd in ready & self._children.keys():
                self._lose_child(self._children[pidfd])
            self._lose_silent(time.monotonic())
            self._start_children()
            self.desk.pump()
            unreported, self._unreported = self._unreported, []
            self.changed.notify_all()
        for item in unreported:
            self._news(*item)

    def _take(self, peer: Peer, message: FromMember, frames: list[bytes]) -> None:
        match message:
            case WorkerReady():
                self._welcome(peer, message)
            case ServerHello() if (child := self._child(peer, "server", message.server)) is not None:
                self._ready(child)
                self._listened[message.server] = message.addresses.get("tcp", "")
                self.desk.server_came(peer, message)
            case NotReady() if (child := self._child(peer, message.role, message.number)) is not None:
                if not child.ready:
                    what = (
                        f"{message.role.capitalize()} {message.number} of the cluster could not start.\n{message.what}"
                    )
                    raise UsageError(what.rstrip(), where="Cluster.start")
            case Alive():
                member = self._members.get((peer[0], message.worker))
                if member is not None:
                    member.heard_at = time.monotonic()
                self._send(peer, Alive(worker=message.worker, known=member is not None), [])
            case Leaving() if peer in self._members:
                self.desk.left(peer)
                self._unreported.append(("lost", "worker", self._members.pop(peer).number, "left"))
            case _:
                self.desk.take(peer, message, frames)

    def _send(self, peer: Peer, message: Any, frames: Sequence[Frame]) -> None:
        self._ports[peer[0]].send(message, frames, to=peer[1])

    # ---- members ---------------------------------------------------------------------------------------------

    def _child(self, peer: Peer, role: Role, number: int) -> ClusterChild | None:
        """The child with that role and number; only a peer on this host can be one."""
        children = self._children.values() if peer[0] == "ipc" else ()
        return next((child for child in children if (child.role, child.number) == (role, number)), None)

    def _ready(self, child: ClusterChild) -> None:
        child.ready = True
        self._failed_starts.pop((child.role, child.number), None)
        self._unreported.append(("started", child.role, child.number, f"pid {child.pid}"))

    def _welcome(self, peer: Peer, hello: WorkerReady) -> None:
        if peer in self._members:
            return
        child = self._child(peer, "worker", hello.number)
        if child is not None:
            number = child.number
            self._ready(child)
        else:
            taken = {member.number for member in self._members.values()}
            number = next(free for free in range(self.settings.workers, 2**31) if free not in taken)
            self._unreported.append(("started", "worker", number, f"pid {hello.pid} on {hello.host}"))
        self._members[peer] = _Member(number, child, time.monotonic())
        welcome = HubWelcome(number=number, seed=self.settings.seed, silent_s=self.settings.silent_s)
        self._send(peer, welcome, [])
        self.desk.queue.came(peer)

    def _lose(self, peer: Peer, why: str) -> None:
        member = self._members.pop(peer)
        self.desk.lost(peer, f"worker {member.number}")
        self._unreported.append(("lost", "worker", member.number, why))

    def _lose_silent(self, now: float) -> None:
        for peer, member in list(self._members.items()):
            if now - member.heard_at > self.settings.silent_s:
                if member.child is not None:
                    self._lose_child(member.child, f"silent for {self.settings.silent_s:g} s")
                else:
                    self._lose(peer, f"silent for {self.settings.silent_s:g} s")

    def _lose_child(self, child: ClusterChild, why: str = "") -> None:
        """Kill the child, if it still runs, and schedule the start of a replacement."""
        self._poller.unregister(child.pidfd)
        del self._children[child.pidfd]
        why = " and ".join(filter(None, [why, child.kill()]))
        child_key = (child.role, child.number)
        if not child.ready:
            self._failed_starts[child_key] = self._failed_starts.get(child_key, 0) + 1
            if self._failed_starts[child_key] >= MOST_FAILED_STARTS:
                who = f"{child.role.capitalize()} {child.number}"
                raise GaveUp(f"{who} ended {MOST_FAILED_STARTS} times before it was ready: {why}.")
        elif child.role == "server":
            self.desk.server_lost(child.number)
            self._unreported.append(("lost", "server", child.number, why))
        for peer in [peer for peer, member in self._members.items() if member.child is child]:
            self._lose(peer, why)
        self._to_start.append(child_key)

    def _start_children(self) -> None:
        to_start, self._to_start = self._to_start, []
        for role, number in to_start:
            child = ClusterChild(self._config(role, number), self._guard, [self._memory.fd] if role == "server" else [])
            self._children[child.pidfd] = child
            self._poller.register(child.pidfd, zmq.POLLIN)

    def _config(self, role: Role, number: int) -> ChildConfig:
        settings, server = self.settings, {}
        if role == "server":
            listen = self._listened.get(number) or (f"tcp://{settings.listen}:0" if settings.listen else "")
            config = ServerConfig(
                number=number,
                hub=self.address,
                address=f"ipc://{self._directory}/server-{number}",
                memory_fd=self._memory.fd,
                listen=listen,
                key=settings.key,
            )
            server = msgspec.to_builtins(config, builtin_types=(bytes,))
        return ChildConfig(
            role=role,
            number=number,
            hub=self.address,
            path=sys.path,
            threads=settings.threads,
            steps=settings.steps,
            server=server,
        )

    # ---- the end ---------------------------------------------------------------------------------------------

    def _end(self) -> None:
        for peer in [*self._members, *self.desk.server_peers]:
            self._send(peer, Stop(), [])
        self._await_children(time.monotonic() + STOP_S)
        for child in self._children.values():
            child.kill()
        if self._gate is not None:
            self._gate.close()
        for port in self._ports.values():
            port.close()
        self._context.term()
        self._memory.close()
        self._guard.close()
        with self.changed:
            os.close(self._wake)
            self.desk.cancel_all("The cluster was shut down." if self.broken is None else "The cluster failed.")
            self.closed = True
            self.changed.notify_all()

    def _await_children(self, deadline: float) -> None:
        """Wait until the deadline for ready children to end; idle ones end when they get Stop."""
        left = {child.pidfd for child in self._children.values() if child.ready}
        poller = zmq.Poller()
        for pidfd in left:
            poller.register(pidfd, zmq.POLLIN)
        while left and (wait_s := deadline - time.monotonic()) > 0:
            for pidfd, _ in poller.poll(round(wait_s * 1000)):
                poller.unregister(pidfd)
                left.discard(pidfd)
