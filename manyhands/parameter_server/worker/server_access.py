"""How a worker reaches the memory that servers keep, whichever way that is: `Local` and `Remote` are the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn

from manyhands.parallel.model.step_buffers import ForeignState
from manyhands.parameter_server.memory.versioned_memory import Memory, ServedMemory
from manyhands.parameter_server.protocol.chunk_placement import Chunk
from manyhands.parameter_server.protocol.leases import Held
from manyhands.parameter_server.protocol.messages import Of, Open
from manyhands.parameter_server.tables.server_tables import Tables

__all__ = ["Reach"]


class Reach(Protocol):
    """How a worker reaches the memory that servers keep: `Local` shares it with them, `Remote` sends frames."""

    is_away: bool

    @property
    def memory(self) -> Memory:
        """The servers', or this worker's own, with regions of the same names."""

    def enter(
        self, model: nn.Module, opened: Open, parts: Sequence[Sequence[Chunk]], foreign: ForeignState
    ) -> ServedMemory:
        """What this worker sees of a course's memory; `parts` says what each server has of it."""

    def brings(self, *, states: bool) -> list[Of]: ...

    def open(self, opened: Open, is_wanted: Callable[[], bool]) -> None:
        """By the chief: have all servers begin this course with what it has put into the memory. `PeerLost` when it
        `is_wanted` no more.
        """

    def last_course(self) -> Open: ...

    def standings(self, opened: Open) -> list[bytes]: ...

    def put_rows(self, tables: Tables | None, servers: int) -> list[int]:
        """By the chief: have these rows in the servers' memory when the course begins."""

    def fetch_rows(self, tables: Tables) -> None: ...

    def fetch_states(self, opened: Open, version: int, mores: Sequence[bytes]) -> None: ...

    def look(self, version: int) -> bool:
        """Have these weights and buffers in the memory; False: they are gone, and so is what they were wanted for."""

    def pull(self) -> tuple[list[Tensor], list[int]]: ...

    def read(self) -> tuple[list[Tensor], int] | None:
        """The newest weights where they are, and their version; None where a copy is to be preferred."""

    def stayed(self, version: int) -> bool:
        """Whether weights of this version are still what they were, and what was made of them counts."""

    def row(self, held: Held) -> int:
        """Where in the memory this gradient goes."""

    def send(self, held: Held) -> None:
        """Have the gradient where servers find it."""

    def are_up(self, servers: int) -> bool: ...

    def close(self) -> None: ...
