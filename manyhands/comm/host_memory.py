"""Shared memory of one host: a memfd, which has no name and is freed when the last process closes it.

The host's agent owns a `HostMemory` and assigns regions of it, each allocated in full before a process writes to it.
Workers inherit the file descriptor and map their regions as `Segment`s. Imports no torch. The collectives that use
this memory are in `shared_memory`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from manyhands.errors import EnvironmentProblem
from manyhands.native import library

__all__ = ["HostMemory", "Memory", "Segment", "all_bytes", "free_bytes"]

CGROUP = Path("/sys/fs/cgroup")
LARGE_PAGE = 2**21


class Segment:
    """A region of shared memory, mapped into this process. New memory is all zero."""

    def __init__(self, fd: int, num_bytes: int, offset: int = 0, *, flags: int = mmap.MAP_SHARED) -> None:
        self.num_bytes = num_bytes
        self.buffer = mmap.mmap(fd, num_bytes, flags=flags, offset=offset)
        self._first = ctypes.c_char.from_buffer(self.buffer)
        self.address = ctypes.addressof(self._first)
        self._large: int | None = None

    def words(self) -> memoryview:
        """The region as 64-bit integers, each read and written atomically (`struct` would write zeros first)."""
        return memoryview(self.buffer).cast("Q")

    def use_large_pages(self) -> None:
        """Map the region again with 2 MB pages, if the kernel allocated such, for memory with random access."""
        if self.num_bytes >= LARGE_PAGE and self._large is None:
            self._large = library.map_again(self.address, self.num_bytes) or None
            self.address = self._large or self.address

    def free(self) -> None:
        """Return the memory to the system; every process that maps it reads zeros from then on."""
        self.buffer.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Unmap the region, unless tensors still view it."""
        if self._large is not None:
            library.unmap(self._large, self.num_bytes)
        del self._first
        with contextlib.suppress(BufferError):
            self.buffer.close()


Memory = Callable[[str, int], Segment]
"""A region by name, the same for every process that requests it; `EnvironmentProblem` where there is no room."""


class _Plane(NamedTuple):
    name: str
    segment: Segment
    ranks: int


class HostMemory:
    """One memfd per attempt, and the table of its regions."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("manyhands", os.MFD_CLOEXEC)
        self._end = 0
        self._offsets: dict[tuple[str, str], int] = {}
        self._refused: dict[tuple[str, str], EnvironmentProblem] = {}
        self._planes: dict[str, list[_Plane]] = {}

    def allot(self, name: str, num_bytes: int, ranks: int = 0, generation: str = "") -> int:
        """The offset of the region `name`, the same for every caller; so is the error if it cannot be allocated.

        With `ranks` the region is a plane for that many ranks of this generation: `lose` wakes the ranks that wait in
        it, and each generation has its own plane of that name.
        """
        region = (generation if ranks else "", name)
        if region in self._refused:
            raise self._refused[region]
        if region not in self._offsets:
            try:
                self._offsets[region] = self._allocate(num_bytes)
            except EnvironmentProblem as problem:
                self._refused[region] = problem
                raise
            if ranks:
                plane = _Plane(name, Segment(self.fd, num_bytes, self._offsets[region]), ranks)
                self._planes.setdefault(generation, []).append(plane)
        return self._offsets[region]

    def _allocate(self, num_bytes: int) -> int:
        # Checked first: if the kernel runs out of memory later, it kills a process.
        free = free_bytes()
        if num_bytes > free:
            raise _no_memory(num_bytes, f"{free / 1e6:.1f} MB are free")
        is_large = num_bytes >= LARGE_PAGE and library is not None
        unit = LARGE_PAGE if is_large else mmap.ALLOCATIONGRANULARITY
        offset = -(-self._end // unit) * unit
        if is_large:
            library.allocate_large(self.fd, offset, num_bytes)
        try:
            # Without this, writing to memory that is not available would raise SIGBUS in the middle of a step.
            os.posix_fallocate(self.fd, offset, num_bytes)
        except OSError as error:
            raise _no_memory(num_bytes, error.strerror or str(error)) from error
        self._end = offset + -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        return offset

    def lose(self, rank: int | None, generation: str = "") -> None:
        """End all waits in the planes of a generation, because `rank` (counted from 0 on this host) is lost.

        None: a rank of another host is lost; ranks of this host must not wait for each other in vain either.
        """
        for plane in self._planes.get(generation, []):
            library.abort_plane(plane.segment.address, plane.ranks, plane.ranks if rank is None else rank)

    def free(self, generation: str) -> None:
        """Free the planes of a generation that no worker of this host is in any more."""
        for plane in self._planes.pop(generation, []):
            plane.segment.free()
            plane.segment.close()
            del self._offsets[generation, plane.name]

    def close(self) -> None:
        for plane in itertools.chain.from_iterable(self._planes.values()):
            plane.segment.close()
        self._planes = {}
        os.close(self.fd)


def _no_memory(num_bytes: int, why: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"Cannot allocate {num_bytes / 1e6:.1f} MB of memory to share between workers: {why}.",
        fix=["a smaller model, or fewer workers", "a higher memory limit of the container"],
    )


def all_bytes() -> int:
    """Memory of this machine, or the memory limit of the container."""
    total = int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError, ValueError):  # no container, or no limit: "max"
        total = min(total, int((CGROUP / "memory.max").read_text()))
    return total


def free_bytes(cgroup: Path = CGROUP) -> int:
    """Memory that is available on this machine, or left in the container."""
    free = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):  # no container, or no limit: "max"
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free
