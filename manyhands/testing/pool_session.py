"""A worker's session for ranks without an agent: the rendezvous is a file, events are collected in a list."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import FileStore  # type: ignore[attr-defined]

from manyhands.comm.host_memory import HostMemory, Segment
from manyhands.control.session.session import RunFacts, WorkerPosition
from manyhands.events import Event
from manyhands.spec.worker_identity import WorkerIdentity

__all__ = ["PoolSession"]


class PoolSession:
    def __init__(
        self, rank: int, world_size: int, store: Path, run_dir: Path, flags: dict[str, Any], hosts: int = 1
    ) -> None:
        per_host = world_size // hosts
        self.identity = WorkerIdentity(
            agent="none",
            rank=rank,
            world_size=world_size,
            local_rank=rank % per_host,
            local_world_size=per_host,
            host=rank // per_host,
            num_hosts=hosts,
            generation="1.1",
            incarnation=1,
            flags={"launch.ui": "none", "launch.threads": 1, **flags},
        )
        self.group, self.newest = self.identity.group(), None
        self.run_dir = run_dir
        self.stop_requested: str | None = None
        self.events: list[Event] = []
        self._store = FileStore(str(store), -1)
        self._memory: HostMemory | None = None

    def join(self, facts: RunFacts) -> None:
        (self.run_dir / "events").mkdir(parents=True, exist_ok=True)

    def get(self, key: str, timeout_s: float) -> bytes:
        self._store.wait([key], timedelta(seconds=timeout_s))
        return self._store.get(key)

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]

    def wait(self, keys: list[str], timeout_s: float) -> None:
        self._store.wait(keys, timedelta(seconds=timeout_s))

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def delete(self, key: str) -> bool:
        return self._store.delete_key(key)

    def shared_memory(self, name: str, num_bytes: int, ranks: int = 0) -> Segment:
        """The first rank to ask allocates in place of the agent; the others open its memory through /proc."""
        key = f"memory/{self.identity.host}/{name}"
        if self._store.add(f"{key}/asked", 1) == 1:
            self._memory = self._memory or HostMemory()
            offset, fd = self._memory.allot(name, num_bytes, ranks), self._memory.fd
            self.set(key, f"{os.getpid()} {fd} {offset}".encode())
            return Segment(fd, num_bytes, offset)
        pid, number, offset = map(int, self.get(key, timeout_s=100.0).split())
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        try:
            return Segment(fd, num_bytes, offset)
        finally:
            os.close(fd)

    def report(self, step: int, phase: str, call: int = 0) -> None: ...

    def committed(self, step: int, path: str) -> None: ...

    def publish(self, event: Event) -> None:
        self.events.append(event)

    def interruptible(self) -> AbstractContextManager[None]:
        return nullcontext()

    def positions(self) -> dict[int, WorkerPosition]:
        return {}

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
