"""Servers and a worker that shares no memory with them in one process, joined by a list of messages that goes wrong."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

import manyhands as mh
from manyhands.comm.host_memory import HostMemory, Segment
from manyhands.launcher.worker_process.lazy_compiler import load_compiler_late
from manyhands.parallel.model.step_buffers import ForeignState, StepBuffers, changing_state
from manyhands.parallel.weights.fused_update import state_names
from manyhands.parallel.weights.local_update import runs_fused
from manyhands.parameter_server.memory.optimizer_states import settings_of, store_states
from manyhands.parameter_server.memory.versioned_memory import layout_name
from manyhands.parameter_server.protocol.chunk_placement import divide
from manyhands.parameter_server.protocol.leases import Interval, Lease
from manyhands.parameter_server.protocol.messages import Filled, FromServer, FromWorker, Open
from manyhands.parameter_server.server.server import ParameterServerCore, open_memory
from manyhands.parameter_server.tables.server_tables import ServerTables
from manyhands.parameter_server.worker.remote_access import RemoteAccess
from manyhands.parameter_server.worker.row_lookup import ServedRows
from manyhands.parameter_server.worker.stream_transfers import StreamTransfer

load_compiler_late()  # as every worker does: a plain optimizer would load all of torch's compiler

WORKER = 7
ROWS = 3


def make_model() -> nn.Module:
    """Two tensors of several frames each, batch statistics, and rows by id."""
    torch.manual_seed(3)
    rows = mh.nn.Embedding(64, name="rows", optimizer=mh.optim.rows.SGD(lr=1.0))
    return nn.Sequential(nn.Linear(300, 500), nn.BatchNorm1d(500), nn.Linear(500, 300), rows)


class Wire:
    """A link whose other ends are `ParameterServerCore`s here; `faults`: messages lost, repeated, late, broken."""

    def __init__(self, servers: list[ParameterServerCore], replace: Callable[[int], ParameterServerCore]) -> None:
        self.servers, self._replace = servers, replace
        self.chance, self.faults, self.deaths = random.Random(0), 0.0, 0.0
        self.dead: list[ParameterServerCore] = []
        self._tickets = 0

    def reach(self, num_servers: int) -> None:
        assert num_servers <= len(self.servers)

    def follow(self, message: Open) -> None:
        self.reach(message.servers)

    def ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def close(self) -> None: ...

    def carry(
        self, transfers: Sequence[StreamTransfer], what: str, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        assert is_wanted()
        for turn in range(5000):
            if all(transfer.is_done for transfer in transfers):
                return
            for transfer in transfers:
                self._round(transfer, turn)
        raise AssertionError(f"servers did not {what}")

    def _round(self, transfer: StreamTransfer, turn: int) -> None:
        due = transfer.due()
        if not due:
            transfer.again()
        for message in self._spoil(due, turn, FromWorker):
            answers = self.say(transfer.server, message)
            if turn < 100 and self.chance.random() < self.deaths:
                self.kill(transfer.server)
                return
            for answer in self._spoil(answers, turn, FromServer):
                transfer.hear(answer)

    def kill(self, server: int) -> None:
        self.dead.append(self.servers[server])
        self.servers[server] = self._replace(server)

    @property
    def refused(self) -> Counter[str]:
        return sum((server.refused for server in [*self.dead, *self.servers]), Counter[str]())

    def say(self, server: int, message: Any) -> list[Any]:
        return [answer for _, answer in self.servers[server].take(b"worker", message)]

    def _spoil(self, messages: Sequence[Any], turn: int, kind: Any) -> list[Any]:
        """In the end all gets through."""
        if turn > 100 or not self.faults:
            return list(messages)
        kept = [one for one in messages if self.chance.random() > self.faults]
        kept += [one for one in messages if self.chance.random() < self.faults]
        kept += [one for one in (self._break(one, kind) for one in messages) if one is not None]
        if self.chance.random() < self.faults:
            self.chance.shuffle(kept)
        return kept

    def _break(self, message: Any, kind: Any) -> Any:
        """As a port would take it, if a byte were another one."""
        data = bytearray(msgspec.msgpack.encode(message))
        data[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
        if self.chance.random() > self.faults or len(data) < 10_000:
            return None  # all that protects what is not in a frame is CURVE
        try:
            return msgspec.msgpack.decode(data, type=kind)
        except ValueError:
            return None


class Away:
    """One worker on another host than its servers; `optimizer` is made of parameters."""

    def __init__(
        self,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        *,
        num_servers: int = 2,
        clip_norm: float | None = None,
        ahead: int | None = 0,
    ) -> None:
        self._host, self._make_optimizer, self._clip_norm = HostMemory(), optimizer, clip_norm
        self.model = make_model()
        self.optimizer = optimizer(self.model.parameters())
        servers = [self._server(number) for number in range(num_servers)]
        self.wire = Wire(servers, self._server)
        self.remote = RemoteAccess(self.wire, WORKER, clips=clip_norm is not None)  # type: ignore[arg-type]
        self._filling, self._num_servers, self._ahead = 2**32, num_servers, ahead

    def memory(self, name: str, num_bytes: int) -> Segment:
        return Segment(self._host.fd, num_bytes, self._host.allot(name, num_bytes))

    def _server(self, number: int) -> ParameterServerCore:
        """The replacement of a dead server finds its memory, and nothing else."""
        model = make_model()
        return ParameterServerCore(
            number,
            model,
            self._make_optimizer(model.parameters()),
            None,
            self.memory,
            clip_norm=self._clip_norm,
            place={},
            foreign=ForeignState(),
        )

    def open(
        self, number: int = 1, version: int = 0, counts: Sequence[int] | None = None, rows: ServerTables | None = None
    ) -> Open:
        """One slice a step, from this worker's model on. With `counts` servers have the states."""
        names = [name for name, _ in self.model.named_parameters()]
        params, fused = list(self.model.parameters()), runs_fused(self.optimizer)
        opened = Open(
            number=(1, 1, number),
            interval=Interval(
                call=1, first=version + 1, last=100, start_row=0, num_rows=1000, batch_size=10, slices=1, whole=False
            ),
            version=version,
            layout=layout_name(names, params),
            trained=names,
            copies=3 if self._ahead is None else 2,
            rows=ROWS,
            workers=[WORKER],
            servers=self._num_servers,
            ahead=self._ahead,
            backups=0,
            damping=False,
            groups=settings_of(self.optimizer),
            counts=list(counts or ()),
            more=b"",
            scheduler=None,
            scheduled=False,
            states=state_names(self.optimizer) if fused else [],
            away=[WORKER],
            brings=self.remote.brings(states=counts is None),
        )
        parts = divide([param.numel() for param in params], self._num_servers, {}, whole=not fused)
        self.served = self.remote.enter(self.model, opened, parts, ForeignState())
        with torch.no_grad():
            for view, param in zip(self.served.weights(version).views, params, strict=True):
                view.copy_(param)
            for view, buffer in zip(self.served.buffers(version), changing_state(self.model, params), strict=True):
                view.copy_(buffer)
        if counts is None:
            counts, more = store_states(self.served, self.optimizer, version, range(len(params)), whole=not fused)
            opened = msgspec.structs.replace(opened, counts=counts, more=more)
        opened = msgspec.structs.replace(opened, tables=self.remote.put_rows(rows, self._num_servers))
        self.remote.open(opened, lambda: True)
        self.opened = opened
        return opened

    def step(self, step: int, grads: Sequence[torch.Tensor]) -> Filled:
        """Push these, and have every server apply them."""
        self._filling += 1
        held = Lease(step, 0, step % ROWS, self._filling)
        with torch.no_grad():
            for view, grad in zip(self.served.row(self.remote.row(held)).views, grads, strict=True):
                view.copy_(grad)
        buffers = StepBuffers(self.model)
        self.served.write_statistics(0, [torch.full((buffers.most_numel,), float(step), dtype=torch.float64)])
        self.remote.send(held)
        filled = Filled(number=self.opened.number, worker=WORKER, held=held, based_on=step - 1, total=1.0, weight=10.0)
        self.tell(filled)
        return filled

    def tell(self, filled: Filled) -> None:
        for number, server in enumerate(self.wire.servers):
            self.wire.say(number, filled)
            server.work()

    def rows_here(self) -> ServedRows:
        """A worker's side of embeddings; its rows are in its private memory."""
        return ServedRows(make_model(), 0, self.wire, self.remote.memory, shares=False)  # type: ignore[arg-type]

    def weights_of_servers(self, version: int) -> list[torch.Tensor]:
        found = open_memory(self.model, self.memory, self.opened, ForeignState())
        return [view.clone() for view in found.weights(version).views]

    def close(self) -> None:
        self.remote.close()
        self._host.close()
