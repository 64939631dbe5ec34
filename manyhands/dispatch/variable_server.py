"""A server process of a cluster: it stores variables, applies commits to them in order, and answers reads.

Every version is written to shared memory held by the cluster's process before it is acknowledged; a restarted server
finds it there. Which commit counts, and what a snapshot shows, is decided in `variable_ledger`. Start reading at
`VariableServer.run`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import zmq
from torch import Tensor

from manyhands.comm.host_memory import Segment
from manyhands.comm.tensor_messages import DTYPES, dtype_name, raw_bytes, tensor_bytes, tensor_from
from manyhands.comm.transport import Port, open_port
from manyhands.control.security.keys import client_curve, server_curve
from manyhands.control.security.rejected_peers import PeerGate
from manyhands.dispatch.messages import (
    Apply,
    CommitApplied,
    Read,
    ReadReply,
    ServerHello,
    ServerWelcome,
    Stop,
    ToServer,
    VariableLocation,
)
from manyhands.dispatch.variable_ledger import Change, Versions

__all__ = ["KeptVariable", "ServerConfig", "VariableServer", "region_bytes"]

HEADER_BYTES = 64
TICK_MS = 250

Reply = Callable[[ReadReply, list[memoryview]], object]


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    hub: str
    address: str
    """Endpoint for workers of this host."""
    memory_fd: int
    listen: str = ""
    """Endpoint for workers of other hosts, as "tcp://address:port"; port 0: any."""
    key: bytes = b""


def region_bytes(num_bytes: int) -> int:
    """Shared memory that a variable needs."""
    return HEADER_BYTES + 2 * _padded(num_bytes)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // HEADER_BYTES) * HEADER_BYTES


class KeptVariable:
    """The newest version of a variable, in shared memory that outlives this process, consistent whenever it is killed.

    There are two copies, and one number that says which copy is valid and which commit made it.
    """

    def __init__(self, fd: int, kept: VariableLocation) -> None:
        self._num_bytes = tensor_bytes(kept.shape, kept.dtype)
        self._segment = Segment(fd, region_bytes(self._num_bytes), kept.offset)
        self._mark = self._segment.words()[:1]
        self._kept = kept

    def newest(self) -> tuple[int, Tensor] | None:
        commit, copy = divmod(self._mark[0], 2)
        return (commit, self._copy(copy).clone()) if commit else None

    def write(self, commit: int, value: Tensor) -> None:
        copy = 1 - self._mark[0] % 2
        self._copy(copy).copy_(value)
        self._mark[0] = 2 * commit + copy

    def _copy(self, which: int) -> Tensor:
        dtype = DTYPES[self._kept.dtype]
        if not self._num_bytes:
            return torch.empty(self._kept.shape, dtype=dtype)
        start = HEADER_BYTES + which * _padded(self._num_bytes)
        count = self._num_bytes // dtype.itemsize
        flat = torch.frombuffer(self._segment.buffer, dtype=dtype, count=count, offset=start)
        return flat.reshape(self._kept.shape)


class VariableServer:
    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._context: zmq.Context[Any] = zmq.Context()
        self._hub: Port[ToServer] = open_port(self._context, zmq.DEALER, config.hub, ToServer, with_frames=True)
        self._ports: list[Port[Read]] = [open_port(self._context, zmq.ROUTER, config.address, Read, bind=True)]
        self._gate: PeerGate | None = None
        self._applied = -1
        """The last applied commit; -1 until the cluster has sent the list of variables."""
        self._memory: dict[str, KeptVariable] = {}
        self._versions: dict[str, Versions[Tensor]] = {}
        self._waiting: dict[tuple[bytes, int], tuple[Read, Reply]] = {}
        """By sender and ticket: a repeated request is answered once."""
        addresses = {"ipc": config.address}
        if config.listen:
            addresses["tcp"] = self._listen()
        self._hub.send(ServerHello(server=config.number, pid=os.getpid(), addresses=addresses))

    def _listen(self) -> str:
        self._gate = PeerGate(self._context, client_curve(self._config.key).public)
        curve = server_curve(self._config.key)
        port = open_port(self._context, zmq.ROUTER, self._config.listen, Read, bind=True, curve=curve)
        self._ports.append(port)
        return port.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def run(self) -> None:
        """Serve until the cluster sends Stop."""
        poller = zmq.Poller()
        gate_sockets = self._gate.sockets if self._gate else []
        for socket in (self._hub.socket, *(port.socket for port in self._ports), *gate_sockets):
            poller.register(socket, zmq.POLLIN)
        while True:
            poller.poll(TICK_MS)
            if self._gate is not None:
                self._gate.attend()
            before = self._applied
            for _, message, frames in self._hub.receive_with_frames():
                if isinstance(message, Stop):
                    return
                self._take(message, frames)
            if self._applied != before:
                self._hub.send(CommitApplied(commit=self._applied))
            for port in self._ports:
                for sender, read in port.receive():
                    self._waiting[sender, read.ticket] = (read, _reply_to(port, sender))
            self._answer()

    def close(self) -> None:
        if self._gate is not None:
            self._gate.close()
        self._hub.close()
        for port in self._ports:
            port.close()
        self._context.term()

    def _take(self, message: ToServer, frames: list[bytes]) -> None:
        match message:
            case ServerWelcome():
                self._keep(message.kept)
                self._applied = message.applied
            case Apply():
                self._keep(message.kept)
                self._apply(message, frames)
            case Read():
                self._waiting[b"", message.ticket] = (message, self._hub.send)

    def _keep(self, variables: list[VariableLocation]) -> None:
        for kept in variables:
            if kept.name not in self._memory:
                self._memory[kept.name] = KeptVariable(self._config.memory_fd, kept)
                self._versions[kept.name] = Versions(self._memory[kept.name].newest())

    def _apply(self, message: Apply, frames: list[bytes]) -> None:
        for change, data in zip(message.changes, frames, strict=True):
            versions = self._versions[change.name]
            if not versions.has(message.commit):
                value = _changed(change, tensor_from(data, change.shape, change.dtype), versions.newest)
                self._memory[change.name].write(message.commit, value)
                versions.put(message.commit, value)
            versions.forget(message.oldest)
        self._applied = message.commit

    def _answer(self) -> None:
        """Answer the reads whose commit has been applied."""
        for key, (read, reply) in list(self._waiting.items()):
            if self._applied < max(0, read.after):
                continue
            del self._waiting[key]
            versions = self._versions.get(read.name)
            found = versions.at(read.snapshot) if versions is not None else "absent"
            if isinstance(found, Tensor):
                value = ReadReply(ticket=read.ticket, found="there", shape=tuple(found.shape), dtype=dtype_name(found))
                reply(value, [raw_bytes(found)])
            else:
                reply(ReadReply(ticket=read.ticket, found=found), [])


def _changed(change: Change, value: Tensor, newest: tuple[int, Tensor] | None) -> Tensor:
    if change.op == "assign":
        return value
    assert newest is not None, "the ledger refuses to add to a variable that does not exist"
    return newest[1] + value


def _reply_to(port: Port[Any], sender: bytes) -> Reply:
    return lambda value, frames: port.send(value, frames, to=sender)
