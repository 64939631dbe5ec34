"""A parameter server that has embedding rows only, without its sockets: messages in, messages out.

For `mode="hybrid"`. Workers open it when the rows are in memory, look rows up, and send each step's gradients for them;
a step is applied when all its messages have arrived, and counts once. Rows are in memory that outlives the server: the
successor of a dead one finds them, and which servers there were. Start reading at `RowServer.take`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import msgspec
from torch import nn

from manyhands.comm.host_memory import Memory
from manyhands.embedding.row_layer import Sparse, TableGradient
from manyhands.parameter_server.memory.versioned_memory import open_register
from manyhands.parameter_server.protocol.messages import (
    ApplyRows,
    FromWorker,
    Lookup,
    Number,
    Opened,
    OpenRows,
    Refused,
    RowGradients,
    UpdateApplied,
)
from manyhands.parameter_server.protocol.variable_listing import ServedVariable
from manyhands.parameter_server.tables.server_tables import ServerTables, parts_of, seeded

__all__ = ["RowServer"]

Outbox = list[tuple[bytes, Any]]


class RowServer:
    """Number `number` of a run's servers. Its model is created in the same way as the workers'."""

    has_work = False

    def __init__(self, number: int, model: nn.Module, memory: Memory, *, seed: int) -> None:
        """`seed`: of the run, for new rows."""
        sparse = Sparse(model)
        sparse.set_seed(seed)
        self._specs = [layer.spec for layer in sparse.layers.values()]
        self._number, self._memory = number, memory
        self._register = open_register(memory, number)
        self._opened: OpenRows | None = None
        self._tables: ServerTables
        self.version = 0
        """The last step that was applied, as far as this process knows."""
        self.num_made = 0
        """Updates that this process has applied."""
        self.refused: Counter[str] = Counter()
        """Messages without effect, because they were "late", or of a "misfit"."""
        if encoded := self._register.value:
            self._begin(msgspec.msgpack.decode(encoded, type=OpenRows))

    def is_released(self) -> bool:
        """Whether other servers have the rows that this one had."""
        encoded = open_register(self._memory, 0).value
        return not encoded or msgspec.msgpack.decode(encoded, type=OpenRows).servers <= self._number

    def take(self, sender: bytes, message: FromWorker) -> Outbox:
        """Handle one message. None can do harm."""
        if isinstance(message, OpenRows):
            return self._open(sender, message)
        if self._opened is None or message.number != self._opened.number:
            self.refused["late"] += 1
            return []
        match message:
            case RowGradients() if message.filling > self.version:
                self._tables.keep(message)
            case Lookup():
                rows = self._tables.look_up(message)
                return [(sender, rows)] if rows is not None else []
            case ApplyRows():
                return self._apply(sender, self._opened, message)
        return []

    def _open(self, sender: bytes, message: OpenRows) -> Outbox:
        before = self._opened
        if before is not None and message.number < before.number:
            self.refused["late"] += 1
            return []
        if self._number >= message.servers or message.step < 0 or message.base < 0:
            self.refused["misfit"] += 1
            why = f"it is server {self._number}, but step {message.step} is for {message.servers} servers"
            return [(sender, Refused(number=message.number, server=self._number, why=why))]
        if before is None or message.number > before.number:
            self._register.write(msgspec.msgpack.encode(message))
            self._begin(message)
        return [(sender, Opened(number=message.number, server=self._number))]

    def _begin(self, opened: OpenRows) -> None:
        self._opened, self.version = opened, opened.step
        specs = seeded(self._specs, opened.seeds)
        self._tables = ServerTables(specs, self._memory, parts_of(self._number, opened.servers))

    def _apply(self, sender: bytes, opened: OpenRows, message: ApplyRows) -> Outbox:
        """Some messages may have gone to a server that died: then all are sent again."""
        if message.step > self.version:
            found = self._gathered(message)
            if found is None:
                return []
            self._tables.apply(message.step + opened.base, found, message.factor, message.tables)
            self._tables.drop_until(message.step)
            self.version, self.num_made = message.step, self.num_made + 1
        return [(sender, UpdateApplied(number=message.number, server=self._number, step=message.step))]

    def _gathered(self, message: ApplyRows) -> list[TableGradient] | None:
        if message.handed:
            return self._tables.gather_step(message.step, message.handed)
        return self._tables.gather([message.step]) if self._tables.has(message.step, message.pieces) else None

    # ---- the rest of a server's interface ----

    @property
    def interval_number(self) -> Number | None:
        return self._opened.number if self._opened is not None else None

    def variables(self) -> list[ServedVariable]:
        """None: workers have the dense weights."""
        return []

    def work(self) -> Outbox:
        return []

    def set_living_workers(self, workers: Collection[int]) -> None:
        """Nothing to do: a row's gradients may come from any worker."""

    def standing(self) -> None:
        """Row servers send each other no progress."""
