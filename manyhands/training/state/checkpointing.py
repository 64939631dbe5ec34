"""When checkpoints are taken, and how a run finds its way back to the newest one.

The chief copies the state beside the step and writes it on another thread. On resume the chief reads and verifies,
and gives the result to the others, so that only its host needs the files. The format is `checkpoint`'s business.
Workers may have state that the chief lacks, so all of them take part in a save: the chief says in the step's own
exchange that one is due, and every worker learns it with the step's end. A divided model's tensors come to the chief
as they are written, one at a time, and the step waits for that: no worker has room for all of them.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from manyhands.checkpoint.commit import set_aside
from manyhands.checkpoint.file_ops import Files
from manyhands.checkpoint.reader import Stored, latest_committed, newest_valid, open_checkpoint, scan
from manyhands.checkpoint.retention import Best, parse_best
from manyhands.checkpoint.tensor_stream import Delivery
from manyhands.checkpoint.writer import CheckpointWriter, SaveResult, Snapshot
from manyhands.errors import CheckpointCorrupt, CheckpointSaveFailed, SpecError
from manyhands.events import CheckpointFailed, CheckpointSaved, Resumed
from manyhands.launcher.worker_process import process_settings
from manyhands.observe.recorder import read_events
from manyhands.spec.run import CheckpointSection, best_result
from manyhands.strategies.settings import at_least
from manyhands.training.state.checkpoint_broadcast import Incoming, announce
from manyhands.training.state.gathered_state import WholeState
from manyhands.training.state.training_state import Training
from manyhands.training.worker.worker import Worker

__all__ = ["Checkpoints", "Saver", "check_checkpoints", "load_newest", "refuse_to_start_over"]

# One that fails is not tried again at once.
LOGS_WAIT_S = 2.0


class Checkpoints(msgspec.Struct, frozen=True, kw_only=True):
    """When to save and what to keep. One is always committed before step 1 and when `fit` ends.

    Args:
        every_steps: Save where the run's step is a multiple of it. Default: by time alone.
        every_s: Save after so many seconds, with the next step; 600 by default, None for by steps alone. A run that is
            killed loses what it did since: choose what you can bear to compute again.
        keep_last: How many of the newest stay on disk; a checkpoint is about three times the model.
        keep_best: Keep the best one, too, by a result such as "loss" (smallest) or "accuracy" (largest), or by
            "min:NAME" / "max:NAME"; of the validation, if there is one. `fit` saves whenever a validation finds a
            better one, and waits for that. Default: none.
    """

    every_steps: int | None = None
    every_s: float | None = 600.0
    keep_last: int = 3
    keep_best: str | None = None

    def __post_init__(self) -> None:
        at_least("every_steps", self.every_steps, 1, "mh.Checkpoints")
        at_least("keep_last", self.keep_last, 1, "mh.Checkpoints")
        if self.every_s is not None and self.every_s < 0:
            what = f"every_s is {self.every_s:g}, but must not be below 0."
            raise SpecError(what, where="mh.Checkpoints", fix=["every_s=600", "every_s=None"])
        best_result(self.keep_best)


def check_checkpoints(given: object) -> None:
    if not isinstance(given, Checkpoints | None):
        raise SpecError(f"checkpoint is {given!r}.", fix=["checkpoint=mh.Checkpoints(every_steps=100)"])


class Saver:
    """Saves on the chief; the other workers hand over what only they have. In a trial nothing is saved."""

    def __init__(self, worker: Worker, training: Training, settings: Checkpoints | CheckpointSection) -> None:
        self._worker, self._training, self._settings = worker, training, settings
        self._writer: CheckpointWriter | None = None
        self._checks = worker.resolved.spec.train.check_every > 0
        self._wanted = False
        self.committed: list[tuple[int, str]] = []
        """Steps and paths of the checkpoints that were committed since they were taken from here; on the chief."""
        self._last_s, self._blocked_s = time.monotonic(), 0.0
        self.take_office()

    def take_office(self) -> None:
        """The chief writes. It may have become that in the middle of the run."""
        worker, settings = self._worker, self._settings
        if self._writer is None and worker.is_chief and not worker.in_trial:
            root = worker.home / "checkpoints"
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

    @property
    def best(self) -> Best | None:
        """What the best checkpoint is chosen by."""
        return parse_best(self._settings.keep_best)

    def tell_ended(self) -> None:
        """Of the saves that have ended, or failed, since this was last asked. Waits for nothing."""
        if self._writer is not None:
            self._tell(self._writer.poll())

    def after_step(self, *, save: bool) -> None:
        """Start the save that the workers agreed on; tell of those that have ended. For all workers alike."""
        self.tell_ended()
        if save:
            self._training.gather_state()
            self._wanted = False
            self._save(wait=False)

    def save_soon(self) -> None:
        """Start a save, unless one is under way: now, or with the next step where all workers must take part."""
        if self._training.saves_together:
            self._wanted = True
        else:
            self._save(wait=False)

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
        self._save(wait=True)
        if self._writer is None:
            return
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
        root = self._worker.home / "checkpoints"
        set_aside(root, after_step, Files())
        newest = newest_valid(root)
        if newest is None:
            return ""
        self._worker.committed(newest.step, newest.path)
        return str(newest.path)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close(timeout_s=600.0)
            self.tell_ended()

    def _save(self, *, wait: bool) -> None:
        """Unless one is under way and this need not wait. For all workers alike where the model is divided."""
        start, writer, whole = time.monotonic(), self._writer, self._training.whole
        snapshot = self._snapshot(writer, wait) if writer is not None and (wait or not writer.busy) else None
        if writer is not None and snapshot is not None:
            writer.save(snapshot, wait=False)  # the one before has ended: its memory is this one's
        if whole is not None:
            self._bring(whole, snapshot.delivery if snapshot is not None else None)
            process_settings.give_freed_memory_back()
        if snapshot is not None and writer is not None:
            self._last_s = time.monotonic()
            self._blocked_s = self._last_s - start
            if wait:
                writer.wait()

    def _snapshot(self, writer: CheckpointWriter, wait: bool) -> Snapshot | None:
        """What is to be written; None, and told, where that cannot be."""
        training, progress = self._training, self._training.progress
        try:
            tensors, state = training.parts()
        except CheckpointSaveFailed as error:
            self._tell([SaveResult(step=progress.step, error=error)])
            return None
        late = training.whole.names if training.whole is not None else frozenset()
        here = writer.snapshot({n: one for n, one in tensors.items() if n not in late}, waiting=wait)
        tensors = {name: here.get(name, one) for name, one in tensors.items()}
        compares = training.engine.compares_copies or (training.whole is not None and self._checks)
        writer.trusted_step = progress.agreed if compares else None
        return Snapshot(
            step=progress.step,
            epoch=progress.epoch,
            tensors=tensors,
            state=state,
            world_size=self._worker.world_size,
            slices=training.slices,
            results=dict(progress.results),
            delivery=writer.deliver(tensors, late) if late else None,
        )

    def _bring(self, whole: WholeState, delivery: Delivery | None) -> None:
        """Every tensor to the chief's writer, which has a `delivery` if there is something to write."""
        if delivery is None:
            whole.bring(self._worker.saving, (), lambda name, tensor: None)
            return
        try:
            whole.bring(self._worker.saving, delivery.names, delivery.give)
        except BaseException:
            delivery.break_off()
            raise
        finally:
            delivery.wait()

    def _tell(self, results: list[SaveResult]) -> None:
        for result in results:
            if result.error is not None:
                self._worker.emit(CheckpointFailed(step=result.step, reason=result.error.what))
            elif result.path is not None:
                self._worker.committed(result.step, result.path)
                self.committed.append((result.step, str(result.path)))
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


def refuse_to_start_over(root: Path, run_dir: Path) -> None:
    """CheckpointCorrupt if the run has committed a checkpoint to `root`, where there is none to go on from."""
    last = latest_committed(root)
    known = str(last) if last is not None else _recorded_commit(root.relative_to(run_dir), run_dir)
    if known is not None:
        raise CheckpointCorrupt(
            f"The run in {run_dir} has committed checkpoints, the last one known being {known}, but {root} has none "
            "to go on from.",
            fix=[
                f"put the checkpoints back into {root}",
                "start over in a new run directory: --run-dir NEW",
                'start over in this one: fit(resume="never")',
            ],
        )


def _recorded_commit(below: Path, run_dir: Path) -> str | None:
    """The last checkpoint in a directory of the run that its events tell of. The run may have been moved since."""
    found = None
    for event in read_events(run_dir / "events" / "chief.jsonl"):
        if isinstance(event, CheckpointSaved):
            parts = Path(event.path).parts
            if parts[-1 - len(below.parts) : -1] == below.parts:
                found = parts[-1]
    return found


def load_newest(worker: Worker) -> Incoming | None:
    """The newest valid checkpoint of the run, for every worker; None where there is none."""
    found = announce(worker, _open(worker) if worker.is_chief else None)
    if found is not None and worker.is_elastic:
        found.all()  # here, because whoever is lost on the way is made up for by those who load it once more
    return found


def _open(worker: Worker) -> Stored | None:
    root = worker.home / "checkpoints"
    newest = newest_valid(root)
    if newest is None:
        refuse_to_start_over(root, worker.run_dir)
        return None
    last = latest_committed(root)
    if last is not None and last.step > newest.step and not (root / str(last)).exists():
        newest.skipped.append(f"{root / str(last)}, which was committed last, is gone.")
    worker.committed(newest.step, newest.path)
    worker.emit(Resumed(step=newest.step, epoch=newest.manifest.epoch, path=str(newest.path), skipped=newest.skipped))
    return open_checkpoint(newest.path, verify=False)  # newest_valid has just verified it
