"""Small checkpoints to try things on, and file layers that fail or kill on call."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from manyhands.checkpoint import CheckpointWriter, SaveResult, Snapshot, load, newest_valid
from manyhands.checkpoint.file_ops import FileSystem


def snapshot(step: int, **changes: object) -> Snapshot:
    """Two tensors, both holding the step's number; 64 + 64 bytes, so that 100-byte shards hold one each."""
    tensors = {
        "model/layer/weight": torch.full((4, 4), float(step)),
        "optimizer/momentum": torch.full((16,), step + 0.5),
    }
    fields = {
        "step": step,
        "epoch": step // 10,
        "tensors": tensors,
        "state": {"step": step},
        "world_size": 2,
        "slices": 4,
    }
    return Snapshot(**(fields | changes))  # type: ignore[arg-type]


def writer(root: Path, files: FileSystem | None = None, **changes: object) -> CheckpointWriter:
    fields = {"run": "tiny", "keep_last": 3, "keep_best": None, "generation": (1, 1), "max_shard_bytes": 100}
    return CheckpointWriter(root, files=files, **(fields | changes))  # type: ignore[arg-type]


def save(
    root: Path, step: int, files: FileSystem | None = None, results: dict[str, float] | None = None, **changes: object
) -> SaveResult:
    hand = writer(root, files, **changes)
    hand.save(snapshot(step, results=results or {}), wait=True)
    (result,) = hand.poll()
    assert hand.close(1.0)
    return result


def must_save(root: Path, step: int, **changes: object) -> Path:
    result = save(root, step, **changes)  # type: ignore[arg-type]
    assert result.error is None, result.error
    assert result.path is not None
    return result.path


def whole_step(root: Path) -> int | None:
    """The step the loader returns, after checking that every part of it belongs to that step."""
    found = newest_valid(root)
    if found is None:
        return None
    loaded = load(found.path)
    expected = snapshot(found.step)
    assert loaded.state == expected.state
    assert loaded.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(loaded.tensors[name], tensor), name
    return found.step


def leftovers(root: Path) -> list[str]:
    return [name for name in os.listdir(root) if ".tmp-" in name]


class FailAt(FileSystem):
    """Raises at the n-th change (from 1); `calls` counts them."""

    def __init__(self, n: int, errno: int) -> None:
        self.n, self.errno, self.calls, self.failed_in = n, errno, 0, ""

    def before(self, operation: str, path: Path) -> None:
        self.calls += 1
        if self.calls == self.n:
            self.failed_in = f"{operation} {path.name}"
            raise OSError(self.errno, os.strerror(self.errno))


class KillAt(FailAt):
    """SIGKILL instead of the n-th change."""

    def __init__(self, n: int) -> None:
        super().__init__(n, 0)

    def before(self, operation: str, path: Path) -> None:
        self.calls += 1
        if self.calls == self.n:
            os.kill(os.getpid(), signal.SIGKILL)
