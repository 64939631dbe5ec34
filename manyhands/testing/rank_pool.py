"""Reused worker processes that run a function as ranks 0 to n - 1, with real collectives between them.

Starting a process and importing torch takes seconds, so a pool keeps its processes between calls, and forks them from
one that has imported torch and computes nothing (Python's fork server). Inside the function `mh.Trainer` and `mh.join`
work as in a run of n workers, without an agent. Functions must be importable, arguments and results picklable by
multiprocessing. Start reading at `RankPool.__call__`.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

__all__ = ["RankFailed", "RankPool"]

# What ranks import, and what starts no thread when it is imported: a process with threads must not be forked.
PRELOADED = ["torch", "torch._dynamo", "torch.distributed", "manyhands.training.trainer"]
# A rank that does not end by then, such as one whose collective waits, is killed.
END_WITHIN_S = 5.0


class RankFailed(AssertionError):
    """Carries the traceback of each failed rank."""


class RankPool:
    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._workers: list[tuple[BaseProcess, Connection]] = []

    def __call__(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        run_dir: Path | None = None,
        flags: dict[str, Any] | None = None,
        hosts: int = 1,
        deadline_s: float = 240.0,
    ) -> list[Any]:
        """`fn(*args)` on every rank; results in rank order. A rank that raises fails the call, with its traceback.

        `flags` are settings by dotted key, as if given on the command line. With `hosts`, the ranks act as if they were
        on that many hosts, and share memory only with ranks of the same one.
        """
        self.start(world_size)
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            home = run_dir or Path(folder) / "run"
            for rank in range(world_size):
                self._workers[rank][1].send((fn, args, rank, world_size, folder, str(home), flags or {}, hosts))
            try:
                return self._collect(world_size, time.monotonic() + deadline_s)
            except BaseException:
                self.close()  # their state is unknown: the next call starts new processes
                raise

    def _collect(self, world_size: int, deadline: float) -> list[Any]:
        results, failures = [], []
        for rank in range(world_size):
            process, pipe = self._workers[rank]
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                failures.append(f"rank {rank} (pid {process.pid}) did not answer in time")
                continue
            try:
                ok, value = pipe.recv()
            except EOFError:
                ok, value = False, f"ended with exit code {process.exitcode}"
            if ok:
                results.append(value)
            else:
                failures.append(f"rank {rank}:\n{value}")
        if failures:
            raise RankFailed("\n".join(failures))
        return results

    def start(self, world_size: int) -> None:
        """Start processes up to that many, without waiting for them. A call starts those that it needs."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        while len(self._workers) < world_size:
            parent_end, child_end = context.Pipe()
            process = context.Process(target=_serve, args=(child_end, self._threads), daemon=True)
            process.start()
            child_end.close()
            self._workers.append((process, parent_end))

    def pids(self) -> set[int | None]:
        return {process.pid for process, _ in self._workers}

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.terminate()  # under `make coverage` a rank handles it, and saves what it has counted
            process.join(END_WITHIN_S)
            process.kill()
            process.join()
        self._workers = []


def _serve(pipe: Connection, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    while True:
        try:
            fn, args, *rest = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, _run(fn, args, *rest)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        torch.set_deterministic_debug_mode("default")
        torch.set_num_threads(threads)


def _run(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    folder: str,
    run_dir: str,
    flags: dict[str, Any],
    hosts: int,
) -> Any:
    from manyhands.testing.pool_session import PoolSession
    from manyhands.training.worker.worker import with_session

    session = PoolSession(rank, world_size, Path(folder) / "store", Path(run_dir), flags, hosts)
    with with_session(session):
        return fn(*args)
