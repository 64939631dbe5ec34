"""The files of a run, copied to hosts that do not have them: those that git tracks below the working directory.

Start reading at `tracked_files`.
"""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path
from typing import IO

from manyhands.errors import UsageError
from manyhands.private_files import make_directory

__all__ = ["MOST_BYTES", "copy_files", "tracked_files", "write_tar"]

MOST_BYTES = 100 * 10**6
GIT_TIMEOUT_S = 60.0


def tracked_files(folder: str) -> list[str]:
    """Paths relative to `folder`; refuses more than `MOST_BYTES`, and names the largest file."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=folder, capture_output=True, timeout=GIT_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error).encode()
        raise UsageError(
            f"The files that git tracks in {folder} cannot be listed: {said.decode(errors='replace').strip()}.",
            where="--code ship",
            fix=["git init and git add", "--code here, if the hosts share this directory"],
        ) from error
    names = [name for name in os.fsdecode(listed).split("\0") if name and os.path.lexists(os.path.join(folder, name))]
    sizes = {name: os.lstat(os.path.join(folder, name)).st_size for name in names}
    if sum(sizes.values()) > MOST_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise UsageError(
            f"The files that git tracks in {folder} have {sum(sizes.values()) / 1e6:.0f} MB; at most "
            f"{MOST_BYTES / 1e6:.0f} MB are copied to hosts. The largest is {largest}, {sizes[largest] / 1e6:.0f} MB.",
            where="--code ship",
            fix=["data on a disk that all hosts have", "--code here, if the hosts share this directory"],
        )
    return names


def write_tar(folder: str, names: list[str], stream: IO[bytes]) -> None:
    """A tar of the files, without owners: they belong to the user who unpacks it."""
    with tarfile.open(fileobj=stream, mode="w|") as tar:
        for name in names:
            tar.add(os.path.join(folder, name), arcname=name, recursive=False, filter=_without_owner)


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def copy_files(folder: str, names: list[str], target: Path) -> None:
    """The same on a disk that all hosts share: a copy that no later edit changes."""
    make_directory(target)
    packed = io.BytesIO()
    write_tar(folder, names, packed)
    packed.seek(0)
    with tarfile.open(fileobj=packed) as tar:
        tar.extractall(target, filter="tar")
