"""TensorBoard summaries of a run, written by the chief in a background thread.

The hook puts its values into a bounded queue; one thread owns the event file. A full, slow or failing disk only costs
summaries, which are counted and warned about once. Needs the extra `tensorboard`, and imports it only when training
begins.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import socket
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from manyhands.errors import EnvironmentProblem, SpecError
from manyhands.private_files import in_a_run, make_directory, open_private

__all__ = ["SummaryWriter", "TensorBoardHook"]

MAX_QUEUED = 10_000
FLUSH_S = 2.0
RETRY_S = 10.0
CLOSE_TIMEOUT_S = 10.0
# How long the import of tensorboard may take; on a busy machine far longer than writing to disk.
IMPORT_TIMEOUT_S = 60.0
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class TensorBoardHook:
    """Loss, learning rate, samples/s, gradient norm, seconds per phase, and the results of validations and epochs.

    Results are shown at the last step before them. A resumed run continues from its checkpoint: what an earlier attempt
    wrote beyond that is replaced, not drawn twice.

    Args:
        log_dir: Where to write. Default: `summaries` in the trainer's `home`, the run directory for the first one.
        every: Steps between two points.
    """

    chief_only = True

    def __init__(self, log_dir: str | Path | None = None, every: int = 1) -> None:
        if every < 1:
            raise SpecError(f"TensorBoardHook: every is {every}, but must be at least 1.", fix=["every=1"])
        if importlib.util.find_spec("tensorboard") is None:
            raise EnvironmentProblem(
                "TensorBoardHook needs the package tensorboard, which is not installed.",
                fix=["pip install 'manyhands[tensorboard]'"],
            )
        self._log_dir, self._every = log_dir, every
        self._last_step = 0
        self._writer: SummaryWriter | None = None
        self._dropped_before = 0
        self._warned = False

    @property
    def dropped(self) -> int:
        """Values that could not be written."""
        return self._dropped_before + (self._writer.dropped if self._writer else 0)

    def begin(self, trainer: Any) -> None:
        if self._writer is None:  # the first fit of the run; later calls use the same writer
            log_dir = Path(self._log_dir) if self._log_dir is not None else Path(trainer.home) / "summaries"
            self._writer = SummaryWriter(log_dir, first_step=self._last_step + 1)

    def after_step(self, trainer: Any, step: int, stats: Any) -> None:
        if step <= self._last_step:
            return
        self._last_step = step
        if step % self._every == 0:
            values = {f"train/{name}": getattr(stats, name, None) for name in _TRAIN_VALUES}
            values |= {f"seconds/{phase}": seconds for phase, seconds in stats.seconds.items()}
            self._put(values, step)

    def after_validation(self, trainer: Any, results: Mapping[str, Any]) -> None:
        self._put({f"validation/{name}": value for name, value in results.items()}, self._last_step)

    def after_epoch(self, trainer: Any, epoch: int, results: Mapping[str, Any]) -> None:
        self._put({f"epoch/{name}": value for name, value in results.items()} | {"epoch/epoch": epoch}, self._last_step)

    def end(self, trainer: Any, error: BaseException | None) -> None:
        if self._writer is not None:
            self._writer.close(CLOSE_TIMEOUT_S)
            self._warn_once()
            self._dropped_before, self._writer = self.dropped, None

    def state(self) -> dict[str, int]:
        return {"last_step": self._last_step}

    def restore(self, state: Mapping[str, int]) -> None:
        self._last_step = state["last_step"]

    def _put(self, values: Mapping[str, Any], step: int) -> None:
        if self._writer is not None:
            self._writer.put(values, step)
            self._warn_once()

    def _warn_once(self) -> None:
        if self.dropped and not self._warned and self._writer is not None:
            self._warned = True
            # Under `-W error` a warning is an exception; even then it must not end the training.
            with contextlib.suppress(RuntimeWarning):
                warnings.warn(
                    f"TensorBoard summaries are being lost ({self._writer.reason}); training continues.",
                    RuntimeWarning,
                    stacklevel=2,
                )


_TRAIN_VALUES = ("loss", "lr", "samples_per_s", "grad_norm")


class _Values(NamedTuple):
    time_s: float
    step: int
    values: Mapping[str, Any]


class SummaryWriter:
    """Owns the event file, in its own thread; after a failure it starts another file, after a pause."""

    def __init__(self, log_dir: Path, first_step: int = 1) -> None:
        self.dropped = 0
        self.reason = ""
        self._log_dir = log_dir
        self._purge_step: int | None = first_step if first_step > 1 else None
        self._queue: queue.Queue[_Values | None] = queue.Queue(MAX_QUEUED)
        self._file: _EventFile | None = None
        self._retry_at = 0.0
        self._imported = threading.Event()
        self._writing = False
        self._thread = threading.Thread(target=self._work, name="manyhands-tensorboard", daemon=True)
        self._thread.start()

    def put(self, values: Mapping[str, Any], step: int) -> None:
        """Write numbers by name at a step, now or a little later. Never waits."""
        try:
            self._queue.put_nowait(_Values(time.time(), step, values))
        except queue.Full:
            self._drop("the disk is too slow")

    def close(self, timeout_s: float) -> None:
        """Write the queue, or give up `timeout_s` after tensorboard is imported; the rest is dropped."""
        self._imported.wait(IMPORT_TIMEOUT_S)
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._give_up(f"not written within {timeout_s:g} s of the end")

    def _give_up(self, reason: str) -> None:
        if self._writing:
            self._drop(reason)
        with contextlib.suppress(queue.Empty):
            while True:
                if self._queue.get_nowait() is not None:
                    self._drop(reason)
        self._queue.put(None)

    def _work(self) -> None:
        with contextlib.suppress(Exception):  # writing the first value raises it again, and reports it
            _tensorboard()
        self._imported.set()
        while (item := self._queue.get()) is not None:
            self._writing = True
            try:
                self._write(item)
            except Exception as error:  # no error of a summary may affect training
                self._drop(f"{type(error).__name__}: {error}")
                self._close_file()
                self._retry_at = time.monotonic() + RETRY_S
            self._writing = False
        self._close_file()

    def _write(self, item: _Values) -> None:
        if self._file is None:
            if time.monotonic() < self._retry_at:
                self.dropped += 1
                return
            self._file = _EventFile(self._log_dir, self._purge_step)
            self._purge_step = None
        self._file.write(item)
        if self._queue.empty() or time.monotonic() - self._file.flushed_at >= FLUSH_S:
            self._file.flush()

    def _drop(self, reason: str) -> None:
        self.dropped += 1
        self.reason = reason

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def _tensorboard() -> tuple[Any, Any, Any, Callable[[str, float], Any]]:
    """The classes that write event files. The import takes a second or more, so the writer's thread does it."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.summary.writer.record_writer import RecordWriter
    from torch.utils.tensorboard.summary import scalar

    return Event, SessionLog, RecordWriter, cast(Callable[[str, float], Any], scalar)


class _EventFile:
    """One file in TensorBoard's format. TensorBoard's own writer has a thread that blocks, and dies on an error."""

    def __init__(self, log_dir: Path, purge_step: int | None) -> None:
        Event, SessionLog, RecordWriter, self._scalar = _tensorboard()  # noqa: N806
        self._event = Event
        ours = in_a_run(log_dir)  # elsewhere the user's umask applies
        make_directory(log_dir) if ours else log_dir.mkdir(parents=True, exist_ok=True)
        # Readers sort the files of a directory by name.
        name = f"events.out.tfevents.{time.time_ns():020d}.{socket.gethostname()}.{os.getpid()}"
        self._raw = os.fdopen(open_private(log_dir / name, NEW), "wb") if ours else (log_dir / name).open("xb")
        self._records = RecordWriter(self._raw)
        self._put(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge_step is not None:  # readers then drop what an earlier attempt wrote at this step or later
            start = SessionLog(status=SessionLog.START)
            self._put(Event(wall_time=time.time(), step=purge_step, session_log=start))
        self.flush()

    def write(self, item: _Values) -> None:
        for name, value in item.values.items():
            if value is not None:
                summary = self._scalar(name, float(value))
                self._put(self._event(wall_time=item.time_s, step=item.step, summary=summary))

    def flush(self) -> None:
        self._raw.flush()
        self.flushed_at = time.monotonic()

    def close(self) -> None:
        self._raw.close()

    def _put(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
