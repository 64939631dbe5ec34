"""Saves in the background: one thread, at most one save in flight.

The training loop only pays for the copy of the tensors (`CheckpointWriter.snapshot`); the thread hashes, writes, reads
back and removes old checkpoints. A save that fails changes nothing on disk, and training continues: `poll` reports it.
The protocol is in `commit`. Start reading at `CheckpointWriter`.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from manyhands.checkpoint.commit import (
    CheckpointFacts,
    begin,
    collect_garbage,
    commit,
    refuse_non_finite,
    refuse_stale,
    sweep,
    write_shard,
)
from manyhands.checkpoint.file_ops import FileSystem
from manyhands.checkpoint.format import encode_state, plan_shards
from manyhands.checkpoint.retention import parse_best
from manyhands.checkpoint.tensor_file import file_order
from manyhands.checkpoint.tensor_stream import TensorStream
from manyhands.errors import CheckpointSaveFailed
from manyhands.private_files import make_directory

__all__ = ["CheckpointWriter", "SaveResult", "Snapshot", "take_snapshot_tensors"]

MAX_SHARD_BYTES = 2 * 2**30


class Snapshot(msgspec.Struct, kw_only=True):
    """Input of a save. The tensors must not change until it has ended; `state` is encoded before `save` returns."""

    step: int
    epoch: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    world_size: int
    slices: int
    results: dict[str, float] = {}
    delivery: TensorStream | None = None
    """Provides the values of the tensors that are only placeholders in `tensors`."""

    def bring(self, name: str) -> Tensor:
        if self.delivery is None or name not in self.delivery:
            return self.tensors[name]
        tensor = self.delivery.take(name)
        refuse_non_finite({name: tensor})
        return tensor

    def end_delivery(self) -> None:
        if self.delivery is not None:
            self.delivery.end()


class SaveResult(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    path: Path | None = None
    num_bytes: int = 0
    seconds: float = 0.0
    error: CheckpointSaveFailed | None = None
    skipped: str | None = None
    """Why the save was not started: an earlier one was still running."""
    warnings: list[str] = []
    """The checkpoint is committed, but LATEST or the removal of an old one failed."""


def take_snapshot_tensors(
    tensors: Mapping[str, Tensor], reuse: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Copies on the CPU that training will not change, in the memory of `reuse` if shape and type fit.

    New memory costs a page fault for every 4 KiB, often more than the copy itself.
    """
    reuse, taken = reuse or {}, {}
    for name, tensor in tensors.items():
        buffer = reuse.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
        taken[name] = buffer.copy_(tensor.detach())
    return taken


class CheckpointWriter:
    """Writes checkpoints of one run into `root`, which it creates; removes what dead writers left there.

    Only the training thread may call its methods.
    """

    def __init__(
        self,
        root: Path,
        run: str,
        keep_last: int,
        keep_best: str | None,
        generation: tuple[int, int],
        *,
        verify: bool = True,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        files: FileSystem | None = None,
    ) -> None:
        self._root, self._run, self._generation = root, run, generation
        self._keep_last, self._best = keep_last, parse_best(keep_best)
        self._verify, self._max_shard_bytes = verify, max_shard_bytes
        self._files = files or FileSystem()
        self.trusted_step: int | None = None
        """Always keep one checkpoint of this step or before: workers were last known to agree then."""
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()
        self._idle.set()
        self.ended: list[SaveResult] = []
        """What the next `poll` returns. Another thread appends to it: only look whether it is empty."""
        self._results_lock = threading.Lock()
        self._buffers: dict[str, Tensor] = {}
        try:
            self._open_root()
        except OSError as error:
            raise CheckpointSaveFailed(f"Checkpoints cannot be written to {root}: {error.strerror}.") from error

    def _open_root(self) -> None:
        make_directory(self._root.parent)
        if not self._root.is_dir():
            self._files.make_directory(self._root)
            self._files.sync_directory(self._root.parent)
        sweep(self._root, self._files)

    @property
    def busy(self) -> bool:
        """Whether a save is running. Check before taking a snapshot that would be skipped."""
        return not self._idle.is_set()

    def snapshot(self, tensors: Mapping[str, Tensor], *, waiting: bool = False) -> dict[str, Tensor]:
        """`take_snapshot_tensors` into the memory of the previous snapshot; waits for the save that still reads it.

        If training waits for the save to end (`waiting`), tensors on the CPU are not copied.
        """
        self._wait(None)
        if waiting and all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors.values()):
            return dict(tensors)
        self._buffers = take_snapshot_tensors(tensors, reuse=self._buffers)
        return self._buffers

    def deliver(self, tensors: Mapping[str, Tensor], announced: Collection[str]) -> TensorStream:
        """The stream for a snapshot of these tensors, of which `announced` are placeholders, in file order."""
        shards = self._plan(tensors)
        order = (name for names in shards for name in file_order({name: tensors[name] for name in names}))
        return TensorStream([name for name in order if name in announced])

    def save(self, snapshot: Snapshot, *, wait: bool) -> None:
        """Start a save. Never raises if the save fails; `poll` reports it.

        With `wait`, waits for the running save, then for this one: afterwards it is committed or has failed.
        Without, returns at once; if a save is running this one is skipped, which `poll` reports too.
        """
        if self.busy and not wait:
            self._report(SaveResult(step=snapshot.step, skipped="the save before it is still running"))
            snapshot.end_delivery()
            return
        self._wait(None)
        try:
            state_json = encode_state(snapshot.state)
        except (TypeError, ValueError, RecursionError) as error:
            failed = CheckpointSaveFailed(f"The state of step {snapshot.step} cannot be saved as JSON: {error}.")
            self._report(SaveResult(step=snapshot.step, error=failed))
            snapshot.end_delivery()
            return
        # A daemon: if the process ends without `close`, the unfinished save is useless, and `sweep` removes it later.
        self._thread = threading.Thread(
            target=self._save, args=(snapshot, state_json), name="manyhands-checkpoint", daemon=True
        )
        self._idle.clear()
        self._thread.start()
        if wait:
            self._wait(None)

    def poll(self) -> list[SaveResult]:
        """Saves that ended, failed or were skipped since the last call. Never blocks."""
        with self._results_lock:
            results = self.ended.copy()
            self.ended.clear()
        return results

    def wait(self) -> None:
        """Wait for the running save, if there is one."""
        self._wait(None)

    def close(self, timeout_s: float) -> bool:
        """Wait for the save in flight; False if it is still running then. `poll` returns its result."""
        self._wait(timeout_s)
        self._buffers = {}
        return not self.busy

    def _wait(self, timeout_s: float | None) -> None:
        if self._idle.wait(timeout_s) and self._thread is not None:
            self._thread.join()

    def _report(self, result: SaveResult) -> None:
        with self._results_lock:
            self.ended.append(result)

    def _save(self, snapshot: Snapshot, state_json: bytes) -> None:
        needed = len(state_json) + sum(tensor.nbytes for tensor in snapshot.tensors.values())
        started = time.monotonic()
        try:
            result = self._write(snapshot, state_json)
            result = msgspec.structs.replace(result, seconds=time.monotonic() - started)
        except CheckpointSaveFailed as error:
            result = SaveResult(step=snapshot.step, error=error)
        except Exception as error:
            result = SaveResult(step=snapshot.step, error=self._failure(snapshot.step, needed, error))
        finally:
            snapshot.end_delivery()
        with self._results_lock:
            # Both under the lock: a thread that sees the result may start the next save.
            self.ended.append(result)
            self._idle.set()

    def _write(self, snapshot: Snapshot, state_json: bytes) -> SaveResult:
        refuse_stale(self._root, self._generation)
        streamed = snapshot.delivery or ()
        refuse_non_finite({name: tensor for name, tensor in snapshot.tensors.items() if name not in streamed})
        facts = CheckpointFacts(
            run=self._run,
            generation=self._generation,
            step=snapshot.step,
            epoch=snapshot.epoch,
            world_size=snapshot.world_size,
            slices=snapshot.slices,
            results=snapshot.results,
        )
        plan = self._plan(snapshot.tensors)
        with begin(self._root, snapshot.step, self._files) as draft:
            shards = [
                write_shard(
                    draft.path, index, len(plan), {n: snapshot.tensors[n] for n in names}, self._files, snapshot.bring
                )
                for index, names in enumerate(plan, start=1)
            ]
            snapshot.end_delivery()
            done = commit(draft, facts, state_json, shards, self._files, hashes=self._verify)
        trusted = self.trusted_step
        warnings = done.warnings + collect_garbage(self._root, self._keep_last, self._best, self._files, trusted)
        return SaveResult(step=snapshot.step, path=done.path, num_bytes=done.manifest.num_bytes, warnings=warnings)

    def _plan(self, tensors: Mapping[str, Tensor]) -> list[list[str]]:
        return plan_shards({name: tensor.nbytes for name, tensor in tensors.items()}, self._max_shard_bytes)

    def _failure(self, step: int, needed: int, error: Exception) -> CheckpointSaveFailed:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            reason = f"{error.strerror or error} ({_size(needed)} needed, {self._free()} free)"
        failed = CheckpointSaveFailed(
            f"The checkpoint of step {step} was not saved to {self._root}: {reason}. Earlier ones are unchanged.",
            fix=["free some space, or keep fewer: keep_last=1"] if _is_full(error) else [],
        )
        failed.__cause__ = error
        return failed

    def _free(self) -> str:
        try:
            return _size(self._files.free_bytes(self._root))
        except OSError:
            return "unknown"


def _is_full(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"
