"""A worker's connection to its run, as `training` sees it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from manyhands.comm.host_memory import Segment
from manyhands.control.messages.worker_messages import RunFacts, WorkerPosition
from manyhands.events import Event
from manyhands.spec.worker_identity import Group, WorkerIdentity

__all__ = ["RunSession"]


class RunSession(Protocol):
    """Has three implementations, which are alike to their users.

    `session.Session` is for a process with an agent, `launcher.solo_run.SoloSession` for one that is its own launcher
    (`launcher.evaluator_session.EvaluatorSession`, which derives from it, for one that only evaluates a run), and
    `testing.pool_session.PoolSession` for ranks of tests. Elastic runs and parameter servers need more of an agent than
    this: `training.worker.worker.Worker.agent_session`.
    """

    identity: WorkerIdentity
    group: Group

    @property
    def run_dir(self) -> Path:
        """Known after `join`."""

    @property
    def newest(self) -> Group | None:
        """In an elastic run, the newest generation, if it is later than `group`."""

    @property
    def stop_requested(self) -> str | None: ...

    def join(self, facts: RunFacts) -> None:
        """Every training of the script joins. Raises what the run refuses: `RunDirectoryInUse`, `RunFinished`, ..."""

    # The run's store, by which workers of a generation exchange small values: see `comm.store.KeyValueClient`.
    def get(self, key: str, timeout_s: float) -> bytes: ...
    def set(self, key: str, value: bytes) -> None: ...
    def wait(self, keys: list[str], timeout_s: float) -> None: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete(self, key: str) -> bool: ...

    def shared_memory(self, name: str, num_bytes: int, ranks: int = 0) -> Segment:
        """A region that this host's workers share; each of them gets `EnvironmentProblem` if there is no room."""

    def report(self, step: int, phase: str, call: int = 0) -> None:
        """Report step, phase and public call. Never blocks."""

    def committed(self, step: int, path: str) -> None:
        """Report a committed checkpoint. Never blocks."""

    def publish(self, event: Event) -> None:
        """Have an event shown. Never blocks."""

    def positions(self) -> dict[int, WorkerPosition]:
        """Every rank's last report, as far as it is known."""

    def interruptible(self) -> AbstractContextManager[None]:
        """A context for steps, in which an interrupt of a notebook's kernel waits for the end of a step."""

    def close(self) -> None:
        """Safe to call twice."""
