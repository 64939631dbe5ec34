"""When checkpoints are taken, and how a run finds its way back to the newest one.

The chief copies the state beside the step and writes it on another thread. On resume the chief reads and verifies,
and gives the result to the others, so that only its host needs the files. The format is `checkpoint`'s business.
Workers may have state that the chief lacks, so all of them take part in a save: the chief says in the step's own
exchange that one is due, and every worker learns it with the step's end.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from manyhands.checkpoint.commit import set_aside
from manyhands.checkpoint.files import Files
from manyhands.checkpoint.layout import Manifest
from manyhands.checkpoint.reader import Loaded, load, newest_valid, scan
from manyhands.checkpoint.writer import CheckpointWriter, SaveResult, Snapshot
from manyhands.errors import CheckpointError, CheckpointSaveFailed, ManyhandsError
from manyhands.events import CheckpointFailed, CheckpointSaved, Resumed
from manyhands.runtime.training import Training
from manyhands.runtime.worker import Worker
from manyhands.spec.run import CheckpointSection

__all__ = ["Checkpoints", "Saver", "load_newest"]


# One that fails is not tried again at once.
LOGS_WAIT_S = 2.0


class Checkpoints(msgspec.Struct, frozen=True, kw_only=True):
    """When to save and what to keep. One is always committed before step 1 and when `fit` ends."""

    every_steps: int | None = None
    every_s: float | None = 600.0
    keep_last: int = 3
    keep_best: str | None = None
    """A result such as "loss" (smallest) or "accuracy" (largest), or "min:NAME" / "max:NAME"."""


class Saver:
    """Saves on the chief; the other workers hand over what only they have. In a trial nothing is saved."""

    def __init__(self, worker: Worker, training: Training, settings: Checkpoints | CheckpointSection) -> None:
        self._worker, self._training, self._settings = worker, training, settings
        self._writer: CheckpointWriter | None = None
        self._wanted = False
        self._last_s, self._blocked_s = time.monotonic(), 0.0
        self.take_office()

    def take_office(self) -> None:
        """The chief writes. It may have become that in the middle of the run."""
        worker, settings = self._worker, self._settings
        if self._writer is None and worker.is_chief and not worker.in_trial:
            root = worker.run_dir / "checkpoints"
            self._writer = CheckpointWriter(
                root, worker.run_dir.name, settings.keep_last, settings.keep_best, _generation(root, worker)
            )

    def is_due(self, step: int) -> bool:
        """Whether this worker wants a save after `step`; asked before it. Only the chief ever does."""
        if self._writer is None:
            return False
        every = self._settings.every_steps
        return (every is not None and step % every == 0) or self.is_time

    @property
    def is_time(self) -> bool:
        """Whether this worker wants a save, whatever the step."""
        every_s = self._settings.every_s
        if self._writer is None or self._wanted:
            return self._writer is not None
        return every_s is not None and time.monotonic() - self._last_s >= every_s and not self._writer.busy

    @property
    def every_steps(self) -> int | None:
        return self._settings.every_steps

    def after_step(self, *, save: bool) -> None:
        """Start the save that the workers agreed on; tell of those that have ended. For all workers alike."""
        if self._writer is not None:
            self._tell(self._writer.poll())
        if save:
            self._training.gather_state()
            self._wanted = False
            self._start()

    def save_soon(self) -> None:
        """Start a save, unless one is under way: now, or with the next step where all workers must take part."""
        if self._training.saves_together:
            self._wanted = True
        else:
            self._start()

    def save_for_logs(self) -> None:
        """For all that servers may lose: this is asked for until there is a checkpoint, and one that is being written
        will do.
        """
        if self._writer is not None and not self._writer.busy and time.monotonic() - self._last_s >= LOGS_WAIT_S:
            self._wanted = True

    def save_now(self, *, required: bool = False) -> None:
        """Save and wait. With `required`, a failed save is an error; else it is told and training goes on.

        For all workers alike, between steps.
        """
        self._training.gather_state()
        if self._writer is None:
            return
        self._save(wait=True)
        results = self._writer.poll()
        self._tell(results)
        failed = [result.error for result in results if result.error is not None]
        if required and failed:
            raise failed[-1]

    def set_aside(self, after_step: int) -> str:
        """Have nobody resume from checkpoints of later steps; the newest that is left, or nothing. On the chief alone.

        In a trial there are none.
        """
        if self._writer is None:
            return ""
        self._writer.close(timeout_s=600.0)  # what is being written has a place in this, too
        self._tell(self._writer.poll())
        root = self._worker.run_dir / "checkpoints"
        set_aside(root, after_step, Files())
        newest = newest_valid(root)
        if newest is None:
            return ""
        self._worker.session.committed(newest.step, str(newest.path))
        return str(newest.path)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close(timeout_s=600.0)
            self._tell(self._writer.poll())

    def _start(self) -> None:
        if self._writer is not None and not self._writer.busy:
            self._save(wait=False)

    def _save(self, *, wait: bool) -> None:
        assert self._writer is not None
        start = time.monotonic()
        training, progress = self._training, self._training.progress
        try:
            tensors, state = training.parts()
        except CheckpointSaveFailed as error:
            self._tell([SaveResult(step=progress.step, error=error)])
            return
        snapshot = Snapshot(
            step=progress.step,
            epoch=progress.epoch,
            tensors=self._writer.snapshot(tensors, waiting=wait),
            state=state,
            world_size=self._worker.world_size,
            slices=training.slices,
            results=dict(progress.results),
        )
        self._writer.trusted_step = progress.agreed if training.engine.compares_copies else None
        self._last_s = time.monotonic()
        self._blocked_s = self._last_s - start
        self._writer.save(snapshot, wait=wait)

    def _tell(self, results: list[SaveResult]) -> None:
        for result in results:
            if result.error is not None:
                self._worker.emit(CheckpointFailed(step=result.step, reason=result.error.what))
            elif result.path is not None:
                self._worker.session.committed(result.step, str(result.path))
                self._worker.emit(
                    CheckpointSaved(
                        step=result.step,
                        path=str(result.path),
                        num_bytes=result.num_bytes,
                        seconds=result.seconds,
                        blocked_s=self._blocked_s,
                    )
                )


def _generation(root: Path, worker: Worker) -> tuple[int, int]:
    """Higher than every commit so far, so that a writer of an earlier life of the run can commit nothing any more."""
    committed = [candidate.manifest.generation[0] for candidate in scan(root) if candidate.manifest is not None]
    return max(committed, default=0) + 1, worker.session.seat.attempt


def load_newest(worker: Worker) -> Loaded | None:
    """The newest valid checkpoint of the run, on every worker; None where there is none."""
    found: Loaded | None = None
    problem: ManyhandsError | None = None
    if worker.is_chief:
        try:
            found = _read(worker)
        except CheckpointError as error:
            problem = error
    if problem is not None:
        raise problem
    return _share(worker, found)


def _read(worker: Worker) -> Loaded | None:
    newest = newest_valid(worker.run_dir / "checkpoints")
    if newest is None:
        return None
    worker.session.committed(newest.step, str(newest.path))
    worker.emit(Resumed(step=newest.step, epoch=newest.manifest.epoch, path=str(newest.path), skipped=newest.skipped))
    return load(newest.path, verify=False)  # newest_valid has just verified it


class _Shape(msgspec.Struct):
    name: str
    dtype: str
    shape: list[int]


class _Message(msgspec.Struct):
    manifest: Manifest | None = None
    state: dict[str, Any] = {}
    tensors: list[_Shape] = []


def _share(worker: Worker, found: Loaded | None) -> Loaded | None:
    if worker.world_size == 1:
        return found
    message = _Message()
    if found is not None:
        shapes = [_Shape(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in found.tensors.items()]
        message = _Message(found.manifest, found.state, shapes)
    sent = worker.axis.all_gather_bytes("checkpoint state", msgspec.json.encode(message) if worker.is_chief else b"")[0]
    message = msgspec.json.decode(sent, type=_Message)
    if message.manifest is None:
        return None
    tensors = found.tensors if found else {shape.name: _empty(shape) for shape in message.tensors}
    worker.axis.broadcast_(tensors.values(), "checkpoint tensors")
    return Loaded(message.manifest, message.state, dict(tensors))


def _empty(shape: _Shape) -> Tensor:
    return torch.empty(shape.shape, dtype=getattr(torch, shape.dtype))
