"""A run of one worker without a launcher: `python train.py`.

`SoloSession` replaces the session with an agent. It holds the run directory's lock, shows progress in this process,
turns the first SIGTERM, SIGUSR1 or Ctrl-C into a request to stop (a signal for which `signals.ends_at_once` is true
ends the process), and marks the run directory with how the script ended.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from msgspec.structs import replace

from manyhands.comm.host_memory import Segment
from manyhands.control.messages.launch_request import Display
from manyhands.control.messages.worker_messages import StoreReply
from manyhands.control.run_directory import RunDirectory, default_path, run_name
from manyhands.control.session.session import RunFacts, StoreClient, WorkerPosition
from manyhands.errors import Preempted
from manyhands.events import Event, RunEnded
from manyhands.launcher.launch import how_to_resume, open_display
from manyhands.launcher.script_exit import ending
from manyhands.observe.notebook import in_notebook
from manyhands.observe.recorder import Recorder
from manyhands.signals import STOP_SIGNALS, ends_at_once
from manyhands.spec.load import Resolved, environment
from manyhands.spec.worker_identity import WorkerIdentity

__all__ = ["SoloSession"]


class SoloSession(StoreClient):
    """The only worker of a run, and its own launcher."""

    def __init__(self, resolved: Resolved) -> None:
        self.identity = WorkerIdentity(
            agent="", rank=0, world_size=1, local_rank=0, local_world_size=1, generation="1.1", incarnation=1
        )
        self.group, self.newest = self.identity.group(), None
        self.stop_requested: str | None = None
        self.recorder: Recorder | None = None
        self._resolved = resolved
        self._directory: RunDirectory | None = None
        self._display: Display | None = None
        self._step = 0
        self._checkpoint: str | None = None
        self._signalled_at: float | None = None
        self._interrupted = False

    def takes(self, other: Resolved) -> bool:
        """Whether a training with these settings belongs to this run: it sets no other run directory."""
        asked, mine = other.spec.run.run_dir, self._resolved.spec.run.run_dir
        if self._directory is None or asked is None:
            return asked is None or (mine is not None and Path(asked).absolute() == Path(mine).absolute())
        return Path(asked).absolute() == self.run_dir.absolute()

    @property
    def run_dir(self) -> Path:
        assert self._directory is not None
        return self._directory.path

    def join(self, facts: RunFacts) -> None:
        if self._directory is not None:  # for an earlier training of the script
            return
        path = Path(facts.run_dir) if facts.run_dir else default_path(run_name(facts.script))
        self._directory = RunDirectory.adopt(
            path, facts.overwrite, group_readable=self._resolved.spec.run.group_readable, command=sys.argv
        )
        self._display = open_display(self._resolved, environment(), solo=True)
        ending.add_run(self)
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                # A notebook's kernel keeps running when a cell is interrupted: `interruptible`.
                if number != signal.SIGINT or not in_notebook():
                    signal.signal(number, self._on_signal)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """In a notebook, around steps: an interrupt ends them after the current step or the next, which is committed.

        It is raised as `KeyboardInterrupt`, and the kernel keeps running: weights are those of a complete step, and the
        next training starts there. A second interrupt does not wait for the step. Elsewhere this does nothing.
        """
        if not in_notebook() or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._on_interrupt)
        self._interrupted = False
        try:
            yield
        except Preempted as stopped:
            if self._interrupted:
                raise KeyboardInterrupt(str(stopped)) from None
            raise
        finally:
            signal.signal(signal.SIGINT, before)
            if self._interrupted:
                self.stop_requested = None
        if self._interrupted:  # in the last step
            raise KeyboardInterrupt

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted, self.stop_requested = True, self.stop_requested or "preempt"

    def _store(self, op: str, keys: list[str], timeout_s: float, **fields: Any) -> StoreReply:
        return StoreReply(ticket=0, ok=True)  # there is no other worker to leave values for, or to wait for

    def shared_memory(self, name: str, num_bytes: int, ranks: int = 0) -> Segment:
        raise AssertionError("a single worker has no shared memory")

    def report(self, step: int, phase: str, call: int = 0) -> None:
        self._step = step

    def committed(self, step: int, path: str) -> None:
        self._checkpoint = path

    def publish(self, event: Event) -> None:
        if self._display is not None:
            self._display.event(event)

    def positions(self) -> dict[int, WorkerPosition]:
        return {}

    def close(self) -> None:
        pass  # the end of the process is the end of the run; see `end`

    def end(self, code: int, error: BaseException | None) -> None:
        """The script has ended: report it, and mark the run directory."""
        dropped = self.recorder.dropped if self.recorder is not None else 0
        reason = "done" if code == 0 else f"{type(error).__name__}: {error}".splitlines()[0]
        ended = RunEnded(time_s=time.time(), exit_code=code, step=self._step, reason=reason, dropped=dropped)
        if self.recorder is not None:
            self.recorder.emit(ended)
            self.recorder.close(timeout_s=5.0)
        if self._display is not None:
            named = type(error).__name__ if error is not None and code else reason  # the error itself is printed above
            self._display.event(replace(ended, reason=named))
            self._display.close()
        if self._directory is not None:
            self._directory.mark("finished" if code == 0 else "stopped" if code in (75, 130, 143) else "failed", code)
            self._directory.release()

    def resume_lines(self) -> list[str]:
        if self._checkpoint is None:
            return []
        resume = how_to_resume(self._resolved, str(self.run_dir))
        return [f"  last checkpoint: {self._checkpoint}", f"  resume: {resume}"]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if ends_at_once(number, None if self._signalled_at is None else now - self._signalled_at):
            os._exit(128 + number)
        if self._signalled_at is not None:
            return
        self._signalled_at, self.stop_requested = now, "preempt"
        if number == signal.SIGINT and not self._step:
            raise KeyboardInterrupt  # no training is running: behave like any script
