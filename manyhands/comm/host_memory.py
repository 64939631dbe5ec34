"""Memory that the processes of one host share: a memfd, which has no name and is gone with the last who holds it.

The host's agent owns a `HostMemory` and allots regions of it, each allocated in full before anybody writes to it; its
workers inherit the file descriptor and map what they were told as `Segment`s. No torch in here. Collectives on top of
it are in `shared_memory`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
from pathlib import Path
from typing import NamedTuple

import psutil

from manyhands.errors import EnvironmentProblem
from manyhands.native import library

__all__ = ["HostMemory", "Segment", "all_bytes", "free_bytes"]

CGROUP = Path("/sys/fs/cgroup")
LARGE_PAGE = 2**21


class Segment:
    """A region of shared memory in this process. Fresh memory is all zero."""

    def __init__(self, fd: int, num_bytes: int, offset: int = 0, *, flags: int = mmap.MAP_SHARED) -> None:
        self.num_bytes = num_bytes
        self.buffer = mmap.mmap(fd, num_bytes, flags=flags, offset=offset)
        self._first = ctypes.c_char.from_buffer(self.buffer)
        self.address = ctypes.addressof(self._first)
        self._large: int | None = None

    def words(self) -> memoryview:
        """All of it as 64-bit numbers, each read and written in one go; `struct` writes zeros first."""
        return memoryview(self.buffer).cast("Q")

    def use_large_pages(self) -> None:
        """Have `address` lead to pages of 2 MB, if the memory is in such. For what is read here and there."""
        if self.num_bytes >= LARGE_PAGE and self._large is None:
            self._large = library.map_again(self.address, self.num_bytes) or None
            self.address = self._large or self.address

    def free(self) -> None:
        """Give the memory back to the system; for everybody who maps it, it is zero from now on."""
        self.buffer.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Tensors that look at the memory keep it mapped."""
        if self._large is not None:
            library.unmap(self._large, self.num_bytes)
        del self._first
        with contextlib.suppress(BufferError):
            self.buffer.close()


class _Plane(NamedTuple):
    name: str
    segment: Segment
    ranks: int


class HostMemory:
    """One memfd per attempt, and who has which region of it."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("manyhands", os.MFD_CLOEXEC)
        self._end = 0
        self._offsets: dict[tuple[str, str], int] = {}
        self._refused: dict[tuple[str, str], EnvironmentProblem] = {}
        self._planes: dict[str, list[_Plane]] = {}

    def allot(self, name: str, num_bytes: int, ranks: int = 0, generation: str = "") -> int:
        """Where the region `name` begins; the same answer to everybody who asks, a refusal included.

        With `ranks` it is a plane between so many in this generation: `lose` wakes those who wait in it, and another
        generation has another one of that name.
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
        # Asked first: what the kernel cannot allocate in the end, it makes room for by killing somebody.
        room = free_bytes()
        if num_bytes > room:
            raise _no_memory(num_bytes, f"{room / 1e6:.1f} MB are free")
        is_large = num_bytes >= LARGE_PAGE and library is not None
        unit = LARGE_PAGE if is_large else mmap.ALLOCATIONGRANULARITY
        offset = -(-self._end // unit) * unit
        if is_large:
            library.allocate_large(self.fd, offset, num_bytes)
        try:
            # Writing to memory that is not there would be a SIGBUS in the middle of a step; here it is an error.
            os.posix_fallocate(self.fd, offset, num_bytes)
        except OSError as error:
            raise _no_memory(num_bytes, error.strerror or str(error)) from error
        self._end = offset + -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        return offset

    def lose(self, rank: int | None, generation: str = "") -> None:
        """A rank of this host in a generation, counted here from 0, has ended: nobody waits for it any longer.

        None: one of another host, so that those who wait here for each other do not wait in vain.
        """
        for plane in self._planes.get(generation, []):
            library.abort_plane(plane.segment.address, plane.ranks, plane.ranks if rank is None else rank)

    def free(self, generation: str) -> None:
        """Give back the planes of a generation that nobody here is in any more."""
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
        f"No {num_bytes / 1e6:.1f} MB of memory to share between workers: {why}.",
        fix=["a smaller model, or fewer workers", "a higher memory limit of the container"],
    )


def all_bytes() -> int:
    """What this machine has, or the container that we are in may have."""
    total = int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError, ValueError):  # no container, or no limit: "max"
        total = min(total, int((CGROUP / "memory.max").read_text()))
    return total


def free_bytes(cgroup: Path = CGROUP) -> int:
    """What this machine, or the container that we are in, has left."""
    free = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):  # no container, or no limit: "max"
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free
