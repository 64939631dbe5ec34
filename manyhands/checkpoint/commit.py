"""Writes and commits one checkpoint: temp directory, shards, manifest, rename.

Several processes may write shards of one draft; one of them, the chief, begins and commits it. Before the rename the
checkpoint does not exist, after it it is complete; docs/checkpoints.md states the assumptions. `writer` decides when to
save, and in which thread. Start reading at `commit`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from manyhands.checkpoint.file_ops import FileSystem
from manyhands.checkpoint.format import (
    LATEST,
    MANIFEST,
    MODEL,
    SET_ASIDE,
    STATE,
    FileEntry,
    Manifest,
    StepName,
    TensorEntry,
    fingerprint,
    finite_results,
    is_temp_name,
    latest_temp_name,
    parse_step_name,
    seal,
    shard_name,
    temp_name,
)
from manyhands.checkpoint.reader import scan, verify_files
from manyhands.checkpoint.retention import Best, expendable
from manyhands.checkpoint.tensor_file import describe, tensor_chunks
from manyhands.errors import CheckpointCorrupt, CheckpointSaveFailed

__all__ = [
    "CheckpointDraft",
    "CheckpointFacts",
    "CommittedCheckpoint",
    "ShardRecord",
    "begin",
    "collect_garbage",
    "commit",
    "refuse_non_finite",
    "refuse_stale",
    "set_aside",
    "sweep",
    "write_shard",
]

# Below torch's grain size of 32768 elements a reduction stays on the calling thread: the NaN check in the background
# must not take cores from the training threads.
_SCAN_ELEMENTS = 32_000


class ShardRecord(msgspec.Struct, frozen=True):
    """The shard that one process wrote; small and plain, to be sent to the chief."""

    name: str
    size: int
    sha256: str
    tensors: dict[str, TensorEntry]


class CheckpointFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the manifest contains besides the files."""

    run: str
    generation: tuple[int, int]
    step: int
    epoch: int
    world_size: int
    slices: int
    results: dict[str, float] = {}


class CheckpointDraft(NamedTuple):
    """A checkpoint being written, in a temp directory of the root."""

    root: Path
    path: Path


class CommittedCheckpoint(NamedTuple):
    path: Path
    manifest: Manifest
    warnings: list[str]


@contextlib.contextmanager
def begin(root: Path, step: int, files: FileSystem) -> Iterator[CheckpointDraft]:
    """A new, private temp directory, removed on exit unless it was committed.

    It is locked meanwhile; `sweep` removes only unlocked ones, whose writer is dead.
    """
    path = root / temp_name(step)
    files.make_directory(path)
    try:
        lock = files.try_lock(path)
        if lock is None:
            raise CheckpointSaveFailed(f"{path} was locked by another process the moment it was made.")
        try:
            yield CheckpointDraft(root, path)
        finally:
            os.close(lock)
    finally:
        # If the disk refuses this too, the error was already reported; the next writer's `sweep` tries again.
        with contextlib.suppress(OSError):
            files.remove(path)


def write_shard(
    directory: Path,
    index: int,
    count: int,
    tensors: Mapping[str, Tensor],
    files: FileSystem | None = None,
    bring: Callable[[str], Tensor] | None = None,
) -> ShardRecord:
    """Write and sync shard `index` (from 1) of `count` into a draft's directory. Any process may; each index once.

    `bring` is passed to `tensor_chunks`.
    """
    path = directory / shard_name(index, count)
    entries = {name: TensorEntry(path.name, *describe(name, tensor)) for name, tensor in tensors.items()}
    written = (files or FileSystem()).write_file(path, tensor_chunks(tensors, bring=bring))
    return ShardRecord(path.name, written.size, written.sha256, entries)


def commit(
    draft: CheckpointDraft,
    facts: CheckpointFacts,
    state_json: bytes,
    shards: Sequence[ShardRecord],
    files: FileSystem,
    *,
    hashes: bool = True,
) -> CommittedCheckpoint:
    """Make the draft a checkpoint, or raise and leave everything as it was.

    The files are read back first (sizes always, checksums with `hashes`), so that no visible checkpoint ever fails to
    verify. The rename is the commit; LATEST is written after it, and a failure of that is only a warning.
    """
    state = files.write_file(draft.path / STATE, [memoryview(state_json)])
    entries = [FileEntry(STATE, state.size, state.sha256)]
    entries += [FileEntry(shard.name, shard.size, shard.sha256) for shard in shards]
    manifest = _manifest(draft.root, facts, entries, shards)
    sealed = files.write_file(draft.path / MANIFEST, [memoryview(seal(manifest))])
    files.sync_directory(draft.path)
    _read_back(draft.path, [*manifest.files, FileEntry(MANIFEST, sealed.size, sealed.sha256)], files, hashes)
    with files.locked(draft.root):
        # Under the lock: a stale writer that was delayed until now must see what was committed meanwhile.
        refuse_stale(draft.root, facts.generation)
        target = draft.root / str(_free_name(draft.root, facts.step))
        files.rename(draft.path, target)
        files.sync_directory(draft.root)
        warnings = _point_latest(draft.root, target.name, sealed.sha256, files)
    return CommittedCheckpoint(target, manifest, warnings)


def _manifest(root: Path, facts: CheckpointFacts, files: list[FileEntry], shards: Sequence[ShardRecord]) -> Manifest:
    tensors: dict[str, TensorEntry] = {}
    for shard in shards:
        if duplicates := tensors.keys() & shard.tensors.keys():
            raise CheckpointSaveFailed(f"Tensor {min(duplicates)!r} is in two shards, one of them {shard.name}.")
        tensors |= shard.tensors
    return Manifest(
        run=facts.run,
        generation=facts.generation,
        sequence=1 + max((found.manifest.sequence for found in scan(root) if found.manifest), default=0),
        step=facts.step,
        epoch=facts.epoch,
        world_size=facts.world_size,
        slices=facts.slices,
        results=finite_results(facts.results),
        files=files,
        tensors=tensors,
        model=fingerprint(tensors),
    )


def _read_back(path: Path, entries: list[FileEntry], files: FileSystem, hashes: bool) -> None:
    for entry in entries:
        files.forget_cache(path / entry.name)
    try:
        verify_files(path, hashes=hashes)
    except CheckpointCorrupt as error:
        raise CheckpointSaveFailed(f"What was written does not read back: {error.what}") from error


def _free_name(root: Path, step: int) -> StepName:
    names = [name for name in map(parse_step_name, os.listdir(root)) if name is not None and name.step == step]
    return StepName(step, 1 + max((name.repeat for name in names), default=0))


def _point_latest(root: Path, name: str, sha256: str, files: FileSystem) -> list[str]:
    temp = root / latest_temp_name()
    try:
        files.write_file(temp, [memoryview(f"{name} {sha256}\n".encode())])
        files.rename(temp, root / LATEST)
        files.sync_directory(root)
    except OSError as error:
        with contextlib.suppress(OSError):
            files.remove(temp)
        return [f"{root / LATEST} could not be written ({error.strerror}); the checkpoint itself is committed."]
    return []


def refuse_stale(root: Path, generation: tuple[int, int]) -> None:
    """CheckpointSaveFailed if a later generation has committed here: this writer has been replaced."""
    newest = max((found.manifest.generation for found in scan(root) if found.manifest), default=(0, 0))
    if newest > generation:
        raise CheckpointSaveFailed(
            f"Generation {generation[0]}.{generation[1]} may not write to {root}: "
            f"generation {newest[0]}.{newest[1]} has already committed there."
        )


def refuse_non_finite(tensors: Mapping[str, Tensor]) -> None:
    """CheckpointSaveFailed, with the tensor's name, if the model contains NaN or infinity."""
    for name, tensor in tensors.items():
        if name.startswith(MODEL) and (tensor.is_floating_point() or tensor.is_complex()):
            values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            # One-byte types have no arithmetic.
            narrow = values.element_size() == 1
            for part in torch.split(values.detach().reshape(-1), _SCAN_ELEMENTS):
                if part.numel() and not _finite(part.float() if narrow else part):
                    raise CheckpointSaveFailed(
                        f"Tensor {name!r} contains NaN or infinity; the checkpoint was not written.",
                        fix=["a smaller learning rate, clip_norm=1.0, or resume from the checkpoint before"],
                    )


def _finite(part: Tensor) -> bool:
    least, most = torch.aminmax(part)  # both are NaN if any element is
    return bool(torch.isfinite(least) & torch.isfinite(most))


def collect_garbage(
    root: Path, keep_last: int, best: Best | None, files: FileSystem, trusted_step: int | None = None
) -> list[str]:
    """Remove checkpoints that need not be kept; call it only after a newer commit. Unreadable ones stay. Returns
    warnings."""
    try:
        with files.locked(root):
            committed = [(found.path, found.manifest) for found in scan(root) if found.manifest]
            trusted = [trusted_step is not None and manifest.step <= trusted_step for _, manifest in committed]
            for index in expendable([manifest.results for _, manifest in committed], keep_last, best, trusted):
                old_path, manifest = committed[index]
                trash = root / temp_name(manifest.step)
                # Renamed first: a half-removed directory must never look like a damaged checkpoint.
                files.rename(old_path, trash)
                files.remove(trash)
    except (OSError, CheckpointSaveFailed) as error:
        return [f"Old checkpoints in {root} could not be removed: {error}."]
    return []


def set_aside(root: Path, after_step: int, files: FileSystem) -> None:
    """Rename checkpoints of later steps, so that no run resumes from them. Their files stay for inspection."""
    with files.locked(root):
        for found in scan(root):
            if found.name.step > after_step:
                files.rename(found.path, _free_path(found.path.with_name(f"{found.path.name}{SET_ASIDE}")))
        files.sync_directory(root)
        newest = next((found for found in scan(root) if found.manifest), None)
        if newest is not None:
            sealed = hashlib.sha256((newest.path / MANIFEST).read_bytes()).hexdigest()
            _point_latest(root, newest.path.name, sealed, files)


def _free_path(path: Path) -> Path:
    numbered = (path.with_name(f"{path.name}.{number}") for number in itertools.count(2))
    return next(name for name in itertools.chain([path], numbered) if not name.exists())


def sweep(root: Path, files: FileSystem) -> None:
    """Remove what dead writers left: only names that this module makes, and only if no live writer has the lock."""
    with files.locked(root):
        for name in filter(is_temp_name, os.listdir(root)):
            # What cannot be removed now does no harm, and the next start tries again.
            with contextlib.suppress(OSError):
                _remove_if_dead(root / name, files)


def _remove_if_dead(path: Path, files: FileSystem) -> None:
    if path.is_symlink() or not path.is_dir():
        files.remove_file(path)
    elif (lock := files.try_lock(path)) is not None:
        try:
            files.remove(path)
        finally:
            os.close(lock)
