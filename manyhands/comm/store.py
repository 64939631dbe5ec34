"""The rendezvous store of process groups, carried by the run's control channel.

`ControlStore` is a `torch.distributed.Store`: Gloo, NCCL, `new_group` and DeviceMesh exchange their addresses
through it, so there is no TCPStore that listens on a port. The coordinator stores the values per generation; each
group has its own prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

__all__ = ["ControlStore", "KeyValueClient"]

DEFAULT_TIMEOUT_S = 60.0


class KeyValueClient(Protocol):
    """The client that a `ControlStore` uses; in a worker `control.session.session` implements it."""

    def get(self, key: str, timeout_s: float) -> bytes: ...
    def set(self, key: str, value: bytes) -> None: ...
    def wait(self, keys: list[str], timeout_s: float) -> None: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete(self, key: str) -> bool: ...


class ControlStore(dist.Store):  # type: ignore[misc, name-defined]
    """C++ threads call this too, so `values` must be thread-safe."""

    def __init__(self, values: KeyValueClient, prefix: str) -> None:
        super().__init__()
        self._values, self._prefix, self._timeout_s = values, prefix, DEFAULT_TIMEOUT_S

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def get(self, key: str) -> bytes:
        return self._values.get(self._prefix + key, self._timeout_s)

    def set(self, key: str, value: str | bytes) -> None:
        self._values.set(self._prefix + key, value.encode() if isinstance(value, str) else bytes(value))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        self._values.wait([self._prefix + key for key in keys], timeout_s)

    def add(self, key: str, amount: int) -> int:
        return self._values.add(self._prefix + key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._values.check([self._prefix + key for key in keys])

    def delete_key(self, key: str) -> bool:
        return self._values.delete(self._prefix + key)
