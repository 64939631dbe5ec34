"""A parameter server that has rows of embeddings and nothing else, without its sockets: messages in, messages out.

For `mode="hybrid"`. Workers open it with the rows in place, look rows up, and send what each step has for them; a step
is applied when all its pieces are there, and counts once. Rows are in memory that outlives the server: one that takes
the place of a dead one finds them, and which servers there were. Start reading at `RowServer.take`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import msgspec
from torch import nn

from manyhands.embedding.row_layer import Contribution, Sparse
from manyhands.parameter_server.memory.versioned_memory import Memory, course_register
from manyhands.parameter_server.protocol.messages import (
    Applied,
    ApplyRows,
    FromWorker,
    Lookup,
    Number,
    Opened,
    OpenRows,
    Refused,
    RowGradients,
)
from manyhands.parameter_server.protocol.variable_listing import ServedVariable
from manyhands.parameter_server.tables.server_tables import Tables, parts_of, seeded

__all__ = ["RowServer"]

Outbox = list[tuple[bytes, Any]]


class RowServer:
    """Number `number` of a run's servers. Its model is made as the workers' are."""

    has_work = False

    def __init__(self, number: int, model: nn.Module, memory: Memory, *, seed: int) -> None:
        """`seed` is the run's, which rows begin with."""
        sparse = Sparse(model)
        sparse.set_seed(seed)
        self._specs = [layer.spec for layer in sparse.layers.values()]
        self._number, self._memory = number, memory
        self._register = course_register(memory, number)
        self._opened: OpenRows | None = None
        self._tables: Tables
        self.version = 0
        """The last step that was applied, as far as this process knows."""
        self.num_made = 0
        """Updates that this process has made."""
        self.refused: Counter[str] = Counter()
        """Messages that changed nothing, because they were "late", or of a "misfit"."""
        if told := self._register.value:
            self._begin(msgspec.msgpack.decode(told, type=OpenRows))

    def is_released(self) -> bool:
        """Whether the others have the rows that this server had."""
        told = course_register(self._memory, 0).value
        return not told or msgspec.msgpack.decode(told, type=OpenRows).servers <= self._number

    def take(self, sender: bytes, message: FromWorker) -> Outbox:
        """Whatever it says, it does no harm."""
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
            why = f"it is server {self._number}, asked for step {message.step} of {message.servers} servers"
            return [(sender, Refused(number=message.number, server=self._number, why=why))]
        if before is None or message.number > before.number:
            self._register.write(msgspec.msgpack.encode(message))
            self._begin(message)
        return [(sender, Opened(number=message.number, server=self._number))]

    def _begin(self, opened: OpenRows) -> None:
        self._opened, self.version = opened, opened.step
        specs = seeded(self._specs, opened.seeds)
        self._tables = Tables(specs, self._memory, parts_of(self._number, opened.servers))

    def _apply(self, sender: bytes, opened: OpenRows, message: ApplyRows) -> Outbox:
        """Pieces may have gone to a server that died: then all of it is sent again."""
        if message.step > self.version:
            found = self._found(message)
            if found is None:
                return []
            self._tables.apply(message.step + opened.base, found, message.factor, message.tables)
            self._tables.drop_until(message.step)
            self.version, self.num_made = message.step, self.num_made + 1
        return [(sender, Applied(number=message.number, server=self._number, step=message.step))]

    def _found(self, message: ApplyRows) -> list[Contribution] | None:
        if message.handed:
            return self._tables.gather_step(message.step, message.handed)
        return self._tables.gather([message.step]) if self._tables.has(message.step, message.pieces) else None

    # ---- what a server of weights does besides ----

    @property
    def course_number(self) -> Number | None:
        return self._opened.number if self._opened is not None else None

    def variables(self) -> list[ServedVariable]:
        """None: dense weights are the workers' own."""
        return []

    def work(self) -> Outbox:
        return []

    def hear_living(self, workers: Collection[int]) -> None:
        """It is all the same to rows who sends their gradients."""

    def standing(self) -> None:
        """Servers of rows have nothing to tell each other."""
