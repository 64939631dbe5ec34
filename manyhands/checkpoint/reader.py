"""Finding, verifying and loading checkpoints. Trusts nothing in the directory, writes nothing.

A directory is a checkpoint if its manifest is sealed and every file has the size and SHA-256 given in the manifest.
Other entries of the root are ignored. Start reading at `newest_valid` and `load`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch import Size, Tensor

from manyhands.checkpoint.format import (
    LATEST,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_STATE_BYTES,
    MODEL,
    STATE,
    FileEntry,
    Manifest,
    StepName,
    decode_state,
    parse_latest,
    parse_step_name,
    unseal,
)
from manyhands.checkpoint.tensor_file import map_tensors, open_regular, read_header
from manyhands.checkpoint.tensor_names import plain_name
from manyhands.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch, CheckpointTooNew

__all__ = [
    "Candidate",
    "Found",
    "Loaded",
    "Stored",
    "check_model",
    "latest_committed",
    "load",
    "newest_valid",
    "open_checkpoint",
    "scan",
    "verify_files",
]

_READ_BYTES = 2**20


class Candidate(msgspec.Struct, frozen=True):
    """A directory named like a checkpoint: its manifest, or why its manifest cannot be used."""

    path: Path
    name: StepName
    manifest: Manifest | None
    problem: CheckpointError | None = None

    @property
    def order(self) -> tuple[tuple[int, int], int, StepName]:
        """The order of commits, not of steps: after a return to an earlier step, the later commits are newer."""
        generation, sequence = (self.manifest.generation, self.manifest.sequence) if self.manifest else ((-1, -1), -1)
        return generation, sequence, self.name


class Found(msgspec.Struct, frozen=True):
    step: int
    path: Path
    manifest: Manifest
    skipped: list[str]
    """Newer directories that did not verify, each with the reason."""


class Loaded(msgspec.Struct, frozen=True):
    manifest: Manifest
    state: dict[str, Any]
    tensors: dict[str, Tensor]
    """Memory-mapped from the files; writing to one changes memory, never the checkpoint."""


class Stored(msgspec.Struct, frozen=True):
    """A verified checkpoint whose tensors are read on request."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]

    def tensors(self) -> dict[str, Tensor]:
        """Memory-mapped from the files; writing to one changes memory, never the checkpoint."""
        found: dict[str, Tensor] = {}
        for shard in self.manifest.by_shard():
            found |= map_tensors(self.path / shard)
        return found

    def tensor(self, name: str) -> Tensor:
        """One tensor, mapped separately, so that its pages leave memory when it is dropped."""
        return map_tensors(self.path / self.manifest.tensors[name].shard, [name])[name]


def scan(root: Path) -> list[Candidate]:
    """Everything in `root` named like a checkpoint, newest commit first, unreadable ones last. Reads manifests only."""
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [_candidate(root / name, parsed) for name in names if (parsed := parse_step_name(name))]
    return sorted(found, key=lambda candidate: candidate.order, reverse=True)


def _candidate(path: Path, name: StepName) -> Candidate:
    try:
        return Candidate(path, name, read_manifest(path))
    except CheckpointError as error:
        return Candidate(path, name, None, error)


def newest_valid(root: Path) -> Found | None:
    """The newest checkpoint in `root` that verifies in full; None if there is none at all.

    Two cases are errors, not reasons to fall back or to start over, because continuing would hide existing work: a
    newer checkpoint of a later format (CheckpointTooNew), and checkpoints none of which verifies (CheckpointCorrupt),
    even if their manifests are missing. An empty directory is no checkpoint, even with the name of one.
    """
    candidates = scan(root)
    skipped: list[str] = []
    for candidate in candidates:
        if candidate.manifest is None:
            continue
        try:
            manifest = verify_files(candidate.path)
        except CheckpointCorrupt as error:
            skipped.append(error.what)
            continue
        return Found(manifest.step, candidate.path, manifest, skipped + _unreadable(candidates, candidate.name))
    skipped += _unreadable(candidates, StepName(-1))
    if left := sum(_has_files(candidate.path) for candidate in candidates):
        raise CheckpointCorrupt(
            f"None of the {left} checkpoints in {root} can be used. " + " ".join(skipped),
            fix=[f"mh ckpt verify {root}", f"to start over, move it away: mv {root} {root}.broken"],
        )
    return None


def _has_files(path: Path) -> bool:
    try:
        return any(os.scandir(path))
    except OSError:  # a directory that cannot be read may contain files
        return True


def latest_committed(root: Path) -> StepName | None:
    """What LATEST names as the last commit, even if it no longer exists."""
    try:
        return parse_latest(_read(root / LATEST, 4096))
    except CheckpointCorrupt:
        return None


def _unreadable(candidates: list[Candidate], after: StepName) -> list[str]:
    """Why directories with a later name than `after` have no manifest, by which they could be ordered."""
    problems = [other.problem for other in candidates if other.problem is not None and other.name > after]
    for problem in problems:
        if isinstance(problem, CheckpointTooNew):
            raise problem
    return [problem.what for problem in problems]


def read_manifest(path: Path) -> Manifest:
    """The manifest of one checkpoint directory, with its seal checked; the other files are not checked."""
    manifest = unseal(_read(path / MANIFEST, MAX_MANIFEST_BYTES), str(path / MANIFEST))
    named = parse_step_name(path.name)
    if named is not None and named.step != manifest.step:
        raise CheckpointCorrupt(f"{path} contains step {manifest.step}: the directory was renamed or swapped.")
    return manifest


def verify_files(path: Path, *, hashes: bool = True) -> Manifest:
    """Check every file's size, header and (with `hashes`) SHA-256; CheckpointCorrupt names the bad one."""
    manifest = read_manifest(path)
    for entry in manifest.files:
        _verify_file(path / entry.name, entry, hashes)
    for shard, tensors in manifest.by_shard().items():
        if read_header(path / shard) != {name: (entry.dtype, entry.shape) for name, entry in tensors.items()}:
            raise CheckpointCorrupt(f"{path / shard} contains other tensors than the manifest lists.")
    return manifest


def load(path: Path, *, verify: bool = True) -> Loaded:
    """Everything in one checkpoint directory, verified by checksum unless `verify` is False."""
    stored = open_checkpoint(path, verify=verify)
    return Loaded(stored.manifest, stored.state, stored.tensors())


def open_checkpoint(path: Path, *, verify: bool = True) -> Stored:
    """The same without its tensors, which can be read from the result."""
    manifest = verify_files(path, hashes=verify)
    return Stored(path, manifest, _read_state(path / STATE))


def check_model(manifest: Manifest, model_tensors: Mapping[str, Tensor]) -> None:
    """CheckpointMismatch unless the checkpoint's model has the names and shapes of `model_tensors` (a `state_dict()`).

    Types may differ: loading converts. Prefixes that `torch.compile` adds to names are ignored.
    """
    in_model = ((name.removeprefix(MODEL), one) for name, one in manifest.tensors.items() if name.startswith(MODEL))
    saved = {plain_name(name): Size(one.shape) for name, one in in_model}
    wanted = {plain_name(name): tensor.shape for name, tensor in model_tensors.items()}
    differences = [f"{name!r} is missing in the checkpoint" for name in wanted if name not in saved]
    differences += [f"{name!r} is only in the checkpoint" for name in saved if name not in wanted]
    differences += [
        f"{name!r} is {list(saved[name])} in the checkpoint and {list(wanted[name])} in the model"
        for name in wanted
        if name in saved and saved[name] != wanted[name]
    ]
    if differences:
        more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise CheckpointMismatch(
            f"The checkpoint of step {manifest.step} (run {manifest.run!r}) is from another model: "
            + "; ".join(differences[:3])
            + more
            + ".",
            fix=["the model it was written with", "another run directory, to start over with this model"],
        )


def _read(path: Path, max_bytes: int) -> bytes:
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size > max_bytes:
            raise CheckpointCorrupt(f"{path} has {size} bytes, but the limit is {max_bytes}.")
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read()
    except OSError as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error.strerror}.") from error
    finally:
        os.close(fd)


def _read_state(path: Path) -> dict[str, Any]:
    try:
        return decode_state(_read(path, MAX_STATE_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path} is not a run's state: {error}.") from error


def _verify_file(path: Path, entry: FileEntry, hashes: bool) -> None:
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size != entry.size:
            raise CheckpointCorrupt(f"{path} has {size} bytes; the manifest says {entry.size}.")
        if hashes and (digest := _digest(fd)) != entry.sha256:
            raise CheckpointCorrupt(f"{path} has SHA-256 {digest[:12]}…; the manifest says {entry.sha256[:12]}….")
    except OSError as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error.strerror}.") from error
    finally:
        os.close(fd)


def _digest(fd: int) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
    while count := os.readv(fd, [buffer]):
        digest.update(buffer[:count])
    return digest.hexdigest()
