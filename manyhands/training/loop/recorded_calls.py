"""Public calls are numbered, so that a restarted script finds what the run has already done.

Every worker runs the script from the top, also after a restart. A call that had finished before the checkpoint that
the run resumes from returns its recorded result at once; the call in which the checkpoint was taken is resumed; later
ones run as usual. Records are files `<run_dir>/calls/0001-fit.json`, written by the chief when a call ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from manyhands import exact_json
from manyhands.errors import CheckpointCorrupt
from manyhands.exact_json import numbers_from_text
from manyhands.private_files import make_directory, open_private

__all__ = ["RecordedCalls"]


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    result: Any = None


class RecordedCalls:
    """The calls of one training. `resume_at` is the call in which the loaded checkpoint was taken."""

    def __init__(self, directory: Path, *, writes: Callable[[], bool], warn: Callable[[str], None]) -> None:
        """`writes` is called each time: this worker may have become the chief."""
        self._directory, self._writes, self._warn = directory, writes, warn
        self._results: dict[int, tuple[str, Any]] = {}
        self.number = 0
        self.resume_at = 0
        self._is_past = False

    def begin(self, name: str, *, is_past: bool = False) -> None:
        """`is_past`: this worker joined late, and the other workers have finished the call."""
        self.number += 1
        self._name, self._is_past = name, is_past

    @property
    def already_done(self) -> bool:
        return self.number < self.resume_at or self._is_past

    @property
    def is_recorded(self) -> bool:
        """Whether the run has recorded this call, for a process that only reads the run."""
        return self._path().exists()

    @property
    def is_resumed(self) -> bool:
        """Whether this is the call in which the loaded checkpoint was taken."""
        return self.number == self.resume_at

    def recorded(self) -> Any:
        path = self._path()
        try:
            record = msgspec.json.decode(path.read_bytes(), type=_Record)
            record.result = numbers_from_text(record.result)  # no result of a call has text in it
        except (OSError, msgspec.MsgspecError) as error:
            raise CheckpointCorrupt(
                f"The record of call {self.number} ({self._name}) is missing or broken: {path}: {error}",
                fix=["start over in a new run directory: --run-dir NEW"],
            ) from error
        if record.name != self._name:
            raise CheckpointCorrupt(
                f"Call {self.number} of this script is {self._name}, but the run recorded {record.name}.",
                fix=["start over in a new run directory: --run-dir NEW"],
            )
        return record.result

    def finish(self, result: Any) -> None:
        self._results[self.number] = self._name, result
        if self._writes():
            self._record(self.number)

    def finish_with(self, write: Callable[[], Any]) -> None:
        """The same for a result that `write` writes to a separate file; what `write` returns is recorded."""
        try:
            self.finish(write())
        except OSError as error:
            self._warn(f"The result of call {self.number} ({self._name}) could not be recorded: {error.strerror}.")

    def record_missing(self) -> None:
        """On a new chief: write the records that the lost chief may not have written."""
        for number in self._results:
            if not self._path(number).exists():
                self._record(number)

    def _record(self, number: int) -> None:
        name, result = self._results[number]
        try:
            self._write(self._path(number), _Record(name, result))
        except OSError as error:  # a full disk costs the record, not the result
            self._warn(f"The result of call {number} ({name}) could not be recorded: {error.strerror}.")

    def _write(self, path: Path, record: _Record) -> None:
        make_directory(self._directory)
        temporary = path.with_suffix(".tmp")
        with os.fdopen(open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(exact_json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)

    def tensors_path(self) -> Path:
        """The file for results that are too large for a record."""
        return self._path().with_suffix(".safetensors")

    def _path(self, number: int | None = None) -> Path:
        number = self.number if number is None else number
        name = self._results[number][0] if number in self._results else self._name
        return self._directory / f"{number:04d}-{name}.json"
