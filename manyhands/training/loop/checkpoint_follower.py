"""`fit` in a process that evaluates the checkpoints of a run, beside its training.

The run is only read: its checkpoints, its record, and which calls of the script it has finished. What was evaluated
before, by a process that was killed, is read from its events. Start reading at `CheckpointFollower.follow`.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from manyhands.checkpoint.reader import Candidate, Stored, open_checkpoint, scan
from manyhands.control.run_directory import read_run
from manyhands.errors import CheckpointCorrupt, CheckpointTooNew, UsageError
from manyhands.events import CheckpointEvaluated, Event, RunStarted, StepDone
from manyhands.launcher.evaluator_session import EvaluatorSession
from manyhands.observe.recorder import parse_line, read_events
from manyhands.observe.tensorboard import SummaryWriter
from manyhands.training.loop.following_decisions import (
    SpeedBeside,
    commit_of,
    digest_of,
    next_checkpoint,
    threads_beside,
)
from manyhands.training.state.training_state import TrainingState
from manyhands.training.worker.worker import Worker

if TYPE_CHECKING:
    from manyhands.training.loop.following_decisions import Commit

__all__ = ["CheckpointFollower"]

Evaluate = Callable[[], tuple[dict[str, float], int]]
"""Results and the number of examples."""

LAST_BYTES = 4 * 2**20
"""What is read of a record that is longer when the evaluator starts: the newest steps."""
FIRST_BYTES = 2**16
SUMMARIES_CLOSE_S = 10.0


class CheckpointFollower:
    """Evaluates each checkpoint of one training once, over all calls of `fit` in this process and in those before."""

    def __init__(self, worker: Worker, training: TrainingState) -> None:
        assert isinstance(worker.session, EvaluatorSession)
        self._worker, self._training, self._session = worker, training, worker.session
        self._record = _Record(worker.run_dir / "events" / "chief.jsonl", worker.number)
        self._times = SpeedBeside()
        self._evaluated = list(_earlier(worker))
        self._after: Commit | None = max((event.commit for event in self._evaluated), default=None)
        self._shown = ""
        """The digest of the weights that the model has."""
        self._summaries: SummaryWriter | None = None

    def follow(self, call: int, evaluate: Evaluate, is_call_over: Callable[[], bool]) -> list[dict[str, float]]:
        """Evaluate what the run commits, until the call or the run has ended; a row for each, as in a history.

        A run that is stopped, killed or resumed is still followed. Afterwards the model has the call's last weights.
        """
        while True:
            is_over = is_call_over() or self._session.is_over()  # before looking: a last checkpoint precedes the end
            found = next_checkpoint(self._on_disk(), self._after)
            stored = self._open(found) if found is not None else None
            if stored is not None and _call_of(stored) > call:
                break  # the next call of `fit` takes it
            if stored is not None:
                self._take(stored, evaluate)
            elif found is not None and found.manifest is not None:
                self._after = commit_of(found.manifest)
            elif is_over:
                break
            else:
                time.sleep(self._session.patience.poll_s)
        self._close()
        self._end_with_weights_of(call)
        return [_row(event) for event in self._evaluated if event.call == call]

    def _on_disk(self) -> list[Candidate]:
        return scan(self._worker.home / "checkpoints")

    def _open(self, found: Candidate) -> Stored | None:
        return self._read(found.path, lambda: open_checkpoint(found.path))

    def _read(self, path: Path, read: Callable[[], Stored]) -> Stored | None:
        """None for a checkpoint that is gone or damaged, which is said."""
        try:
            return read()
        except CheckpointTooNew:
            raise
        except (CheckpointCorrupt, OSError) as error:
            why = str(error) if path.exists() else "the run removed it, to keep only its newest ones."
            self._worker.events.warn(f"{path.name} was not evaluated: {why}")
            return None

    def _take(self, stored: Stored, evaluate: Evaluate) -> None:
        manifest, digest, began_s = stored.manifest, digest_of(stored.manifest), time.time()
        self._after = commit_of(manifest)
        if self._evaluated and digest == self._evaluated[-1].digest:
            return
        if self._show(stored) is None:
            return
        self._choose_threads()
        start = time.monotonic()
        results, rows = evaluate()
        seconds = time.monotonic() - start
        self._times.evaluated(began_s, time.time())
        for event in self._record.new_events():
            if isinstance(event, StepDone):
                self._times.add(event.time_s, event.took_s)
        done = CheckpointEvaluated(
            time_s=time.time(),
            step=manifest.step,
            results=results,
            rows=rows,
            seconds=seconds,
            call=_call_of(stored),
            commit=self._after,
            digest=digest,
            step_s=self._times.beside_s,
            step_alone_s=self._times.alone_s,
            training=self._worker.number,
        )
        self._evaluated.append(done)
        self._worker.events.emit(done)
        self._summarise(done)

    def _show(self, stored: Stored) -> Stored | None:
        """Load the weights, which the run may remove at any moment: None if it has."""

        def load() -> Stored:
            self._training.show(stored)
            return stored

        if self._read(stored.path, load) is None:
            return None
        self._training.progress.step = stored.manifest.step
        self._shown = digest_of(stored.manifest)
        return stored

    def _end_with_weights_of(self, call: int) -> None:
        """What the script does next is about these, also if an earlier process evaluated them."""
        last = next((event for event in reversed(self._evaluated) if event.call <= call), None)
        if last is not None and last.digest == self._shown:
            return
        opened = (stored for one in self._on_disk() if one.manifest and (stored := self._open(one)) is not None)
        on_disk = sorted(opened, key=lambda one: last is None or digest_of(one.manifest) != last.digest)
        shown = next((stored for stored in on_disk if self._show(stored) is not None), None)
        if shown is None:
            raise CheckpointCorrupt(f"No checkpoint of {self._worker.home} is left that can be read.")
        if last is None or self._shown != last.digest:
            wanted = f"of step {last.step}" if last is not None else "of this call"
            self._worker.events.warn(
                f"The weights {wanted} are gone: the script continues with those of step {shown.manifest.step}."
            )

    def _choose_threads(self) -> None:
        """Leave the cores of a training on this host to it, unless the user has set a number of threads."""
        worker, used = self._worker, self._record.threads_used()
        spec = worker.resolved.spec
        if used is not None and spec.launch.threads is None and not spec.train.exact:
            torch.set_num_threads(threads_beside(len(os.sched_getaffinity(0)), used))

    def _summarise(self, event: CheckpointEvaluated) -> None:
        """For TensorBoard, beside the training's own summaries, if it writes any."""
        folder = self._worker.home / "summaries"
        if self._summaries is None and folder.is_dir() and importlib.util.find_spec("tensorboard") is not None:
            self._summaries = SummaryWriter(folder / "evaluator", first_step=event.step)
        if self._summaries is not None:
            self._summaries.put({f"evaluator/{name}": value for name, value in event.results.items()}, event.step)

    def _close(self) -> None:
        if self._summaries is not None:
            self._summaries.close(SUMMARIES_CLOSE_S)
            self._summaries = None


def _earlier(worker: Worker) -> Iterator[CheckpointEvaluated]:
    """What an evaluator that was killed has evaluated of this training."""
    for event in read_events(worker.run_dir / "events" / "evaluator.jsonl"):
        if isinstance(event, CheckpointEvaluated) and event.training == worker.number:
            yield event


def _call_of(stored: Stored) -> int:
    """The call of `fit` in which the checkpoint was taken."""
    return int(stored.state["progress"]["call"])


def _row(event: CheckpointEvaluated) -> dict[str, float]:
    return {"step": event.step, **{f"val_{name}": value for name, value in event.results.items()}}


class _Record:
    """The steps and starts in the record of a live run, each read once."""

    def __init__(self, path: Path, training: int) -> None:
        self._path, self._training = path, training
        self._position: int | None = None
        self._rest = b""
        self._started: RunStarted | None = None

    def threads_used(self) -> int | None:
        """Of all workers of the run; None if its chief is on another host, or has not recorded its start yet."""
        if self._started is None:
            self._note_start(self._first_lines())
        try:
            is_here = read_run(self._path.parent.parent).host == socket.gethostname()
        except UsageError:  # for a moment, on a file system of several hosts
            return None
        return self._started.workers * self._started.threads if is_here and self._started is not None else None

    def new_events(self) -> list[Event]:
        try:
            with self._path.open("rb") as file:
                if self._position is None:
                    self._position = max(0, os.fstat(file.fileno()).st_size - LAST_BYTES)
                file.seek(self._position)
                fresh = file.read()
        except OSError:  # not there yet
            return []
        self._position += len(fresh)
        *lines, self._rest = (self._rest + fresh).split(b"\n")
        wanted = (line for line in lines if line.startswith((b'{"event":"StepDone"', b'{"event":"RunStarted"')))
        found = [event for line in wanted if (event := parse_line(line)) is not None]
        self._note_start(found)
        return [event for event in found if getattr(event, "training", 1) == self._training]

    def _first_lines(self) -> list[Event]:
        try:
            with self._path.open("rb") as file:
                lines = file.read(FIRST_BYTES).split(b"\n")[:-1]
        except OSError:
            return []
        return [event for line in lines if (event := parse_line(line)) is not None]

    def _note_start(self, found: list[Event]) -> None:
        starts = [event for event in found if isinstance(event, RunStarted)]
        self._started = starts[-1] if starts else self._started
