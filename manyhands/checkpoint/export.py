"""Exports the model as one file for other programs: safetensors, or a `.pt` of tensors on request."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from manyhands.checkpoint.file_ops import FileSystem
from manyhands.checkpoint.format import MODEL
from manyhands.checkpoint.reader import load
from manyhands.checkpoint.tensor_file import tensor_chunks
from manyhands.checkpoint.tensor_names import plain_name
from manyhands.errors import CheckpointSaveFailed, SpecError, UsageError

__all__ = ["export", "format_of", "save_tensors"]

Format = Literal["safetensors", "pt"]
ENDINGS: dict[str, Format] = {".safetensors": "safetensors", ".pt": "pt", ".pth": "pt"}


def export(
    path: Path, destination: Path, format: Format = "safetensors", only_model: bool = True, *, force: bool = False
) -> None:
    """Write the model of the checkpoint at `path`, verified first, under the names that the model uses.

    Without `only_model`, every tensor under its full name.
    """
    tensors = load(path).tensors
    if only_model:
        named = ((name.removeprefix(MODEL), one) for name, one in tensors.items() if name.startswith(MODEL))
        tensors = {plain_name(name): one for name, one in named}
    save_tensors(destination, tensors, format, force=force)


def format_of(destination: Path, more: Sequence[str] = ()) -> Format:
    """The format for a file name ending. `SpecError` for an unknown ending.

    `more`: further endings that the caller handles, listed in the error.
    """
    ending = destination.suffix.lower()
    if ending not in ENDINGS:
        known, named = [*ENDINGS, *more], f"ends with {ending}" if ending else "has no ending"
        raise SpecError(
            f"{destination} {named}, so the format is not known; known endings: {', '.join(known)}.",
            fix=[str(destination.with_suffix(".safetensors")), str(destination.with_suffix(".pt"))],
        )
    return ENDINGS[ending]


def save_tensors(
    destination: Path, tensors: Mapping[str, Tensor], format: Format = "safetensors", *, force: bool = False
) -> None:
    """Write `tensors` to one file, completely or not at all; overwrites an existing file only with `force`."""
    if destination.is_dir() or (destination.exists() and not force):
        fix = [] if destination.is_dir() else ["--force (in Python: force=True)"]
        raise UsageError(f"{destination} already exists.", fix=["another file name", *fix])
    files, temp = FileSystem(), destination.with_name(f".{destination.name}.tmp-{uuid.uuid4().hex}")
    try:
        _write(temp, tensors, format, files)
        files.rename(temp, destination)
        files.sync_directory(destination.parent)
    except (OSError, RuntimeError) as error:  # torch's writer turns an OSError into a RuntimeError
        why = (isinstance(error, OSError) and error.strerror) or error
        raise CheckpointSaveFailed(f"{destination} was not written: {why}.") from error
    finally:
        with contextlib.suppress(OSError):
            files.remove(temp)


def _write(temp: Path, tensors: Mapping[str, Tensor], format: Format, files: FileSystem) -> None:
    # Unlike a checkpoint this is for other users to read: the umask decides.
    if format == "safetensors":
        files.write_file(temp, tensor_chunks(tensors, {"format": "pt"}), mode=0o666)
        return
    with os.fdopen(files.create(temp, mode=0o666), "wb") as file:
        # Cloned, because torch.save writes the whole storage of a view.
        torch.save({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, file)
        file.flush()
        files.sync(file.fileno(), temp)
