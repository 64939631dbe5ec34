"""The model alone, as one file for other programs: plain safetensors, or a `.pt` of tensors on request."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from manyhands.checkpoint.files import Files
from manyhands.checkpoint.layout import MODEL
from manyhands.checkpoint.reader import load
from manyhands.checkpoint.tensorfile import tensor_chunks
from manyhands.errors import CheckpointSaveFailed, UsageError

__all__ = ["export", "format_of", "save_tensors"]

Format = Literal["safetensors", "pt"]


def export(
    path: Path, destination: Path, format: Format = "safetensors", only_model: bool = True, *, force: bool = False
) -> None:
    """Write the model of the checkpoint at `path`, verified first, under the model's own names.

    Without `only_model`, every tensor under its full name.
    """
    tensors = load(path).tensors
    if only_model:
        tensors = {name.removeprefix(MODEL): t for name, t in tensors.items() if name.startswith(MODEL)}
    save_tensors(destination, tensors, format, force=force)


def format_of(destination: Path) -> Format:
    """As the ending says: torch's own for those that its users know as such, else safetensors."""
    return "pt" if destination.suffix in (".pt", ".pth") else "safetensors"


def save_tensors(
    destination: Path, tensors: Mapping[str, Tensor], format: Format = "safetensors", *, force: bool = False
) -> None:
    """Write `tensors` to one file: whole or not at all, and over an existing file only with `force`."""
    if destination.is_dir() or (destination.exists() and not force):
        fix = [] if destination.is_dir() else ["--force (in Python: force=True)"]
        raise UsageError(f"{destination} already exists.", fix=["another file name", *fix])
    files, temp = Files(), destination.with_name(f".{destination.name}.tmp-{uuid.uuid4().hex}")
    try:
        _write(temp, tensors, format, files)
        files.rename(temp, destination)
        files.sync_directory(destination.parent)
    except OSError as error:
        raise CheckpointSaveFailed(f"{destination} was not written: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):
            files.remove(temp)


def _write(temp: Path, tensors: Mapping[str, Tensor], format: Format, files: Files) -> None:
    # Unlike a checkpoint this is for others to read: the user's umask decides.
    if format == "safetensors":
        files.write_file(temp, tensor_chunks(tensors, {"format": "pt"}), mode=0o666)
        return
    with os.fdopen(files.create(temp, mode=0o666), "wb") as file:
        # Cloned, because torch.save writes the whole memory a tensor is a view of.
        torch.save({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, file)
        file.flush()
        files.sync(file.fileno(), temp)
