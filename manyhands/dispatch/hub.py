"""The thread at the middle of a cluster: it holds sockets and processes, and turns the desk's crank.

All state is under one condition, `changed`; other threads enter through the public methods of `Hub`. What calls and
variables come to is `call_router`'s business. Start reading at `Hub._turn`.
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
from manyhands.comm.tensor_messages import Frame, ParcelPort, dtype_name, open_parcel_port, raw_bytes
from manyhands.comm.transport import Curve
from manyhands.control.processes.fence import Guard
from manyhands.control.processes.private_directory import private_directory
from manyhands.control.security.keys import client_curve, server_curve
from manyhands.control.security.rejected_peers import DoorKeeper
from manyhands.dispatch.call_queue import MOST_WAITING
from manyhands.dispatch.call_router import Desk, Outcome, Peer
from manyhands.dispatch.child_processes import Child, ChildConfig
from manyhands.dispatch.messages import Alive, FromMember, Hello, Leaving, NotReady, ServerHello, Stop, Welcome
from manyhands.dispatch.variable_ledger import Change
from manyhands.dispatch.variable_server import ServerConfig
from manyhands.errors import GaveUp, UsageError

__all__ = ["Hub", "HubSettings", "News"]

TICK_MS = 250
STOP_S = 2.0
# A child that ends before it was ready, so many times in a row, would do so for ever.
MOST_FALSE_STARTS = 3

Role = Literal["worker", "server"]
News = Callable[[str, Role, int, str], None]
"""Hears "started" or "lost", of whom, and its process or how it ended."""


class HubSettings(msgspec.Struct, frozen=True, kw_only=True):
    workers: int
    servers: int
    steps: list[str]
    seed: int = 0
    threads: int = 1
    silent_s: float = 30.0
    most_waiting: int = MOST_WAITING
    listen: str = ""
    """An address without a port, where workers of other hosts come in."""
    key: bytes = b""


class _Member(msgspec.Struct):
    """A worker that has said Hello."""

    number: int
    child: Child | None
    heard_at: float


class Hub:
    def __init__(self, settings: HubSettings, news: News) -> None:
        """`news` is called in the hub's own thread, outside of its lock."""
        self.settings = settings
        self.changed = threading.Condition(threading.RLock())
        self.broken: BaseException | None = None
        """Why there is no cluster any more."""
        self.closed = False
        self._closing = False
        self._news, self._untold = news, list[tuple[str, Role, int, str]]()
        self._members: dict[Peer, _Member] = {}
        self._children: dict[int, Child] = {}
        """By pidfd."""
        self._wanted: list[tuple[Role, int]] = [("worker", number) for number in range(settings.workers)]
        """Children to be started."""
        self._false_starts: dict[tuple[Role, int], int] = {}
        self._num_servers = 0
        self._listened: dict[int, str] = {}
        """Where servers listened for other hosts; those that are started again do it there."""
        self._open()
        self.desk = Desk(self._memory, self._send, settings.most_waiting)
        self.add_servers(settings.servers)
        self._thread = threading.Thread(target=self._serve, name="manyhands-cluster", daemon=True)
        self._thread.start()

    def _open(self) -> None:
        self._directory = private_directory()
        self._guard = Guard(self._directory)
        self._memory = HostMemory()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context: zmq.Context[Any] = zmq.Context()
        self._door: DoorKeeper | None = None
        self.address = f"ipc://{self._directory}/hub"
        self._ports: dict[str, ParcelPort[FromMember]] = {"ipc": self._bind(self.address)}
        self.tcp_address = ""
        if self.settings.listen:
            self._door = DoorKeeper(self._context, client_curve(self.settings.key).public)
            port = self._ports["tcp"] = self._bind(f"tcp://{self.settings.listen}:0", server_curve(self.settings.key))
            self.tcp_address = port.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _bind(self, endpoint: str, curve: Curve | None = None) -> ParcelPort[FromMember]:
        return open_parcel_port(self._context, zmq.ROUTER, endpoint, FromMember, bind=True, curve=curve)

    # ---- for other threads -----------------------------------------------------------------------------------

    def poke(self) -> None:
        """Have the thread look at once."""
        with self.changed, contextlib.suppress(BlockingIOError):  # it will look anyway
            if not self.closed:
                os.eventfd_write(self._wake, 1)

    def wait_for(self, condition: Callable[[], Any], timeout_s: float | None = None) -> bool:
        """Until the condition holds; False if it does not in time. Raises why the cluster is broken or closed."""
        with self.changed:
            self.changed.wait_for(lambda: condition() or self.broken or self.closed, timeout_s)
            self._check()
            return bool(condition())

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken
        if self.closed or self._closing:
            raise UsageError("The cluster is shut down.", fix=["a new mh.Cluster"])

    @property
    def all_ready(self) -> bool:
        return not self._wanted and all(child.ready for child in self._children.values())

    @property
    def refused(self) -> int:
        """Messages that did not count: of strangers, late, or malformed."""
        return self.desk.refused + sum(port.refused for port in self._ports.values())

    def schedule(self, step: str, frames: Sequence[Frame]) -> Outcome:
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
        """A variable, as all commits so far have made it."""
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
                self._wanted.append(("server", number))
        self.poke()
        return numbers

    def pids(self, role: Role) -> dict[int, int]:
        """Of children that are ready, by number."""
        with self.changed:
            found = {child.number: child.pid for child in self._children.values() if child.role == role and child.ready}
            return dict(sorted(found.items()))

    def close(self) -> None:
        """End all members, and wait for it."""
        self._closing = True
        self.poke()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- the thread ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._poller = zmq.Poller()
        doors = self._door.sockets if self._door else []
        for readable in (self._wake, *(port.socket for port in self._ports.values()), *doors):
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
            if self._door is not None:
                self._door.attend()
            for name, port in self._ports.items():
                for sender, message, frames in port.receive():
                    self._take((name, sender), message, frames)
            for pidfd in ready & self._children.keys():
                self._lose_child(self._children[pidfd])
            self._lose_silent(time.monotonic())
            self._start_wanted()
            self.desk.pump()
            untold, self._untold = self._untold, []
            self.changed.notify_all()
        for item in untold:
            self._news(*item)

    def _take(self, peer: Peer, message: FromMember, frames: list[bytes]) -> None:
        match message:
            case Hello():
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
                self._untold.append(("lost", "worker", self._members.pop(peer).number, "left"))
            case _:
                self.desk.take(peer, message, frames)

    def _send(self, peer: Peer, message: Any, frames: Sequence[Frame]) -> None:
        self._ports[peer[0]].send(message, frames, to=peer[1])

    # ---- members ---------------------------------------------------------------------------------------------

    def _child(self, peer: Peer, role: Role, number: int) -> Child | None:
        """The child of that name; only this host's own can speak for one."""
        children = self._children.values() if peer[0] == "ipc" else ()
        return next((child for child in children if (child.role, child.number) == (role, number)), None)

    def _ready(self, child: Child) -> None:
        child.ready = True
        self._false_starts.pop((child.role, child.number), None)
        self._untold.append(("started", child.role, child.number, f"pid {child.pid}"))

    def _welcome(self, peer: Peer, hello: Hello) -> None:
        if peer in self._members:
            return
        child = self._child(peer, "worker", hello.number)
        if child is not None:
            number = child.number
            self._ready(child)
        else:
            taken = {member.number for member in self._members.values()}
            number = next(free for free in range(self.settings.workers, 2**31) if free not in taken)
            self._untold.append(("started", "worker", number, f"pid {hello.pid} on {hello.host}"))
        self._members[peer] = _Member(number, child, time.monotonic())
        welcome = Welcome(number=number, seed=self.settings.seed, silent_s=self.settings.silent_s)
        self._send(peer, welcome, [])
        self.desk.queue.came(peer)

    def _lose(self, peer: Peer, why: str) -> None:
        member = self._members.pop(peer)
        self.desk.lost(peer, f"worker {member.number}")
        self._untold.append(("lost", "worker", member.number, why))

    def _lose_silent(self, now: float) -> None:
        for peer, member in list(self._members.items()):
            if now - member.heard_at > self.settings.silent_s:
                if member.child is not None:
                    self._lose_child(member.child, f"silent for {self.settings.silent_s:g} s")
                else:
                    self._lose(peer, f"silent for {self.settings.silent_s:g} s")

    def _lose_child(self, child: Child, why: str = "") -> None:
        """Whatever it was, it is dead when this returns, and another is wanted in its place."""
        self._poller.unregister(child.pidfd)
        del self._children[child.pidfd]
        why = " and ".join(filter(None, [why, child.bury()]))
        seat = (child.role, child.number)
        if not child.ready:
            self._false_starts[seat] = self._false_starts.get(seat, 0) + 1
            if self._false_starts[seat] >= MOST_FALSE_STARTS:
                who = f"{child.role.capitalize()} {child.number}"
                raise GaveUp(f"{who} ended {MOST_FALSE_STARTS} times before it was ready: {why}.")
        elif child.role == "server":
            self.desk.server_lost(child.number)
            self._untold.append(("lost", "server", child.number, why))
        for peer in [peer for peer, member in self._members.items() if member.child is child]:
            self._lose(peer, why)
        self._wanted.append(seat)

    def _start_wanted(self) -> None:
        wanted, self._wanted = self._wanted, []
        for role, number in wanted:
            child = Child(self._config(role, number), self._guard, [self._memory.fd] if role == "server" else [])
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
            child.bury()
        if self._door is not None:
            self._door.close()
        for port in self._ports.values():
            port.close()
        self._context.term()
        self._memory.close()
        self._guard.close()
        with self.changed:
            os.close(self._wake)
            self.desk.cancel_all("The cluster was shut down." if self.broken is None else "The cluster broke down.")
            self.closed = True
            self.changed.notify_all()

    def _await_children(self, deadline: float) -> None:
        """Those that are idle end by themselves; nobody waits long for the others."""
        left = {child.pidfd for child in self._children.values() if child.ready}
        poller = zmq.Poller()
        for pidfd in left:
            poller.register(pidfd, zmq.POLLIN)
        while left and (wait_s := deadline - time.monotonic()) > 0:
            for pidfd, _ in poller.poll(round(wait_s * 1000)):
                poller.unregister(pidfd)
                left.discard(pidfd)
