"""The run's store, as a worker has it: six verbs, each a question that the coordinator answers.

How a question travels, and when there is no use in waiting for its answer, is `control.session.session`'s business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from manyhands.comm.transport import MAX_MESSAGE_BYTES
from manyhands.control.messages.worker_messages import StoreReply

__all__ = ["StoreCalls"]

# A value shares its message with a key and a header.
MAX_VALUE_BYTES = MAX_MESSAGE_BYTES - 4096
# For what waits for nobody else.
AT_ONCE_S = 30.0


class StoreCalls(ABC):
    """What `comm.store.ControlStore` stands on. Values belong to a generation, and are gone with it."""

    @abstractmethod
    def _store(self, op: str, keys: list[str], timeout_s: float, **fields: Any) -> StoreReply:
        """Raises `PeerTimeout` where there is no answer, and `PeerLost` where there will be none."""

    def get(self, key: str, timeout_s: float) -> bytes:
        return self._store("get", [key], timeout_s).value

    def set(self, key: str, value: bytes) -> None:
        if len(value) > MAX_VALUE_BYTES:
            raise ValueError(f"{key}: {len(value)} bytes are more than a store value may have ({MAX_VALUE_BYTES}).")
        self._store("set", [key], AT_ONCE_S, value=value)

    def wait(self, keys: list[str], timeout_s: float) -> None:
        self._store("wait", keys, timeout_s)

    def add(self, key: str, amount: int) -> int:
        return self._store("add", [key], AT_ONCE_S, amount=amount).number

    def check(self, keys: list[str]) -> bool:
        return bool(self._store("check", keys, AT_ONCE_S).number)

    def delete(self, key: str) -> bool:
        return bool(self._store("delete", [key], AT_ONCE_S).number)
