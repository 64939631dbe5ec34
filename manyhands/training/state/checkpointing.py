"""When checkpoints are saved, and how a run resumes from the newest one.

The chief copies the state between steps and writes it on another thread. On resume the chief reads and verifies the
files and broadcasts the result, so that only its host needs them. The format is in `checkpoint`. Workers may have state
that the chief lacks, so a save involves all of them: the chief requests it in the exchange of a step, and every worker
knows it at the end of that step. The tensors of a partitioned model are sent to the chief one at a time, as they are
written, and training waits for that: no worker has memory for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from manyhands.checkpoint.commit import set_aside
from manyhands.checkpoint.file_ops import FileSystem
from manyhands.checkpoint.reader import Stored, latest_committed, newest_valid, open_checkpoint, scan
from manyhands.checkpoint.retention import Best, parse_best
from manyhands.checkpoint.tensor_stream import TensorStream
from manyhands.checkpoint.writer import CheckpointWriter, SaveResult, Snapshot
from manyhands.errors import CheckpointCorrupt, CheckpointSaveFailed, SpecError
from manyhands.events import CheckpointFailed, CheckpointSaved, Resumed
from manyhands.launcher.worker_process import process_settings
from manyhands.observe.recorder import read_events
from manyhands.spec.run import CheckpointSection, best_result
from manyhands.strategies.settings import at_least
from manyhands.training.state.checkpoint_broadcast import CheckpointBroadcast, announce
from manyhands.training.state.gathered_state import WholeState
from manyhands.training.state.training_state import TrainingState
from manyhands.training.worker.worker import Worker

__all__ = ["Checkpoints", "Saver", "check_checkpoints", "load_newest", "refuse_to_start_over"]

# A save that servers request and that failed is not repeated sooner than this.
LOG_SAVE_PAUSE_S = 2.0


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
    """Saves on the chief; the other workers send it the state that only they have. In a trial nothing is saved."""

    def __init__(self, worker: Worker, training: TrainingState, settings: Checkpoints | CheckpointSection) -> None:
        self._worker, self._training, self._settings = worker, training, settings
        self._writer: CheckpointWriter | None = None
        self.ended: Sequence[SaveResult] = ()
        """Saves that `report_ended` has not reported yet; on the chief."""
        self._checks = worker.resolved.spec.train.check_every > 0
        self._is_requested = False
        self.committed: list[tuple[int, str]] = []
        """Steps and paths of the checkpoints committed since the caller last emptied this list; on the chief."""
        self._last_s, self._blocked_s = time.monotonic(), 0.0
        self.become_chief()

    def become_chief(self) -> None:
        """Create the writer if this worker is the chief, which it may become in the middle of the run."""
        worker, settings = self._worker, self._settings
        if self._writer is None and worker.is_chief and not worker.in_trial:
            root = worker.home / "checkpoints"
            self._writer = CheckpointWriter(
                root, worker.run_dir.name, settings.keep_last, settings.keep_best, _generation(root, worker)
            )
            self.ended = self._writer.ended

    def is_due(self, step: int) -> bool:
        """Whether this worker requests a save after `step`, for the exchange of that step. True on the chief only."""
        return self._writer is not None and (self.is_save_step(step) or self.is_time)

    def is_save_step(self, step: int) -> bool:
        """Whether a save is due after `step` by `every_steps`; the same on every worker."""
        every = self._settings.every_steps
        return every is not None and step % every == 0

    @property
    def is_time(self) -> bool:
        """Whether a save is due by time or on request, regardless of the step; on the chief."""
        every_s = self._settings.every_s
        if self._writer is None or self._is_requested:
            return self._writer is not None
        return every_s is not None and time.monotonic() - self._last_s >= every_s and not self._writer.busy

    @property
    def every_steps(self) -> int | None:
        return self._settings.every_steps

    @property
    def best(self) -> Best | None:
        """The result by which the best checkpoint is chosen."""
        return parse_best(self._settings.keep_best)

    def report_ended(self) -> None:
        """Report the saves that have ended, or failed, since the last call. Does not wait."""
        if self._writer is not None:
            self._report(self._writer.poll())

    def after_step(self, *, save: bool) -> None:
        """Report ended saves and start the one that the workers agreed on. Call it on all workers."""
        self.report_ended()
        if save:
            self._training.gather_state()
            self._is_requested = False
            self._save(wait=False)

    def save_soon(self) -> None:
        """Start a save, unless one is in progress: now, or with the next step if a save needs all workers."""
        if self._training.saves_together:
            self._is_requested = True
        else:
            self._save(wait=False)

    def save_for_logs(self) -> None:
        """Request a save, so that the servers' logs have less to lose. Servers repeat this until one is committed; a
        save in progress is enough.
        """
        if self._writer is not None and not self._writer.busy and time.monotonic() - self._last_s >= LOG_SAVE_PAUSE_S:
            self._is_requested = True

    def save_now(self, *, required: bool = False) -> None:
        """Save and wait. With `required`, a failed save is an error; else it is reported and training continues.

        Call it on all workers, between steps.
        """
        self._training.gather_state()
        self._save(wait=True)
        if self._writer is None:
            return
        results = self._writer.poll()
        self._report(results)
        failed = [result.error for result in results if result.error is not None]
        if required and failed:
            raise failed[-1]

    def set_aside(self, after_step: int) -> str:
        """Rename checkpoints of later steps, so that no run resumes from them; on the chief only.

        Returns the path of the newest one that is left, or "". In a trial there are none.
        """
        if self._writer is None:
            return ""
        self._writer.close(timeout_s=600.0)  # a checkpoint that is being written may be of a later step, too
        self._report(self._writer.poll())
        root = self._worker.home / "checkpoints"
        set_aside(root, after_step, FileSystem())
        newest = newest_valid(root)
        if newest is None:
            return ""
        self._worker.committed(newest.step, newest.path)
        return str(newest.path)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close(timeout_s=600.0)
            self.report_ended()

    def _save(self, *, wait: bool) -> None:
        """Save, unless a save is in progress and `wait` is False. Call it on all workers of a partitioned model."""
        start, writer, whole = time.monotonic(), self._writer, self._training.whole
        snapshot = self._snapshot(writer, wait) if writer is not None and (wait or not writer.busy) else None
        if writer is not None and snapshot is not None:
            writer.save(snapshot, wait=False)  # the save before has ended: this one reuses its memory
        if whole is not None:
            self._gather_tensors(whole, snapshot.delivery if snapshot is not None else None)
            process_settings.give_freed_memory_back()
        if snapshot is not None and writer is not None:
            self._last_s = time.monotonic()
            self._blocked_s = self._last_s - start
            if wait:
                writer.wait()

    def _snapshot(self, writer: CheckpointWriter, wait: bool) -> Snapshot | None:
        """The state to write; None if it cannot be saved, which is reported."""
        training, progress = self._training, self._training.progress
        try:
            tensors, state = training.live_state()
        except CheckpointSaveFailed as error:
            self._report([SaveResult(step=progress.step, error=error)])
            return None
        streamed = training.whole.names if training.whole is not None else frozenset()
        copies = writer.snapshot({n: one for n, one in tensors.items() if n not in streamed}, waiting=wait)
        tensors = {name: copies.get(name, one) for name, one in tensors.items()}
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
            delivery=writer.deliver(tensors, streamed) if streamed else None,
        )

    def _gather_tensors(self, whole: WholeState, delivery: TensorStream | None) -> None:
        """Send every tensor to the chief's writer; `delivery` is None if this worker writes nothing."""
        if delivery is None:
            whole.gather_tensors(self._worker.saving, (), lambda name, tensor: None)
            return
        try:
            whole.gather_tensors(self._worker.saving, delivery.names, delivery.give)
        except BaseException:
            delivery.break_off()
            raise
        finally:
            delivery.wait()

    def _report(self, results: list[SaveResult]) -> None:
        for result in results:
            if result.error is not None:
                self._worker.events.emit(CheckpointFailed(step=result.step, reason=result.error.what))
            elif result.path is not None:
                self._worker.committed(result.step, result.path)
                self.committed.append((result.step, str(result.path)))
                self._worker.events.emit(
                    CheckpointSaved(
                        step=result.step,
                        path=str(result.path),
                        num_bytes=result.num_bytes,
                        seconds=result.seconds,
                        blocked_s=self._blocked_s,
                    )
                )


def _generation(root: Path, worker: Worker) -> tuple[int, int]:
    """Higher than that of every commit so far, so that a writer of an earlier start of the run can no longer commit."""
    committed = [candidate.manifest.generation[0] for candidate in scan(root) if candidate.manifest is not None]
    return max(committed, default=0) + 1, worker.session.identity.attempt


def refuse_to_start_over(root: Path, run_dir: Path) -> None:
    """`CheckpointCorrupt` if the run has committed a checkpoint to `root`, which has none to resume from."""
    last = latest_committed(root)
    newest = str(last) if last is not None else _recorded_commit(root.relative_to(run_dir), run_dir)
    if newest is not None:
        raise CheckpointCorrupt(
            f"The run in {run_dir} has committed checkpoints, the last one known being {newest}, but {root} has none "
            "to resume from.",
            fix=[
                f"put the checkpoints back into {root}",
                "start over in a new run directory: --run-dir NEW",
                'start over in this one: fit(resume="never")',
            ],
        )


def _recorded_commit(below: Path, run_dir: Path) -> str | None:
    """The last checkpoint in directory `below` that the run's events record. The run may have been moved since."""
    found = None
    for event in read_events(run_dir / "events" / "chief.jsonl"):
        if isinstance(event, CheckpointSaved):
            parts = Path(event.path).parts
            if parts[-1 - len(below.parts) : -1] == below.parts:
                found = parts[-1]
    return found


def load_newest(worker: Worker) -> CheckpointBroadcast | None:
    """The newest valid checkpoint of the run, on every worker; None if there is none."""
    found = announce(worker, _open(worker) if worker.is_chief else None)
    if found is not None and worker.is_elastic:
        found.all()  # now: if a worker is lost during the broadcast, the others load it again
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
    worker.events.emit(
        Resumed(step=newest.step, epoch=newest.manifest.epoch, path=str(newest.path), skipped=newest.skipped)
    )
    return open_checkpoint(newest.path, verify=False)  # newest_valid has just verified it
