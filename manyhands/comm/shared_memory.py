"""Collectives between the workers of one host, through memory that they share.

A `Segment` is memory without a name: a memfd, allocated in full when it is made, handed on as a file descriptor, gone
with the last process that maps it. A `Plane` is one rank's place in it. Every call names itself and has a deadline: a
rank that does not arrive becomes a `PeerTimeout` that names it. Tensors in, tensors out. Start reading at `Plane`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from pathlib import Path

import psutil
import torch
from torch import Tensor

from manyhands.errors import EnvironmentProblem, PeerLost, PeerTimeout
from manyhands.native import library, why_not

__all__ = ["AREA_BYTES", "Plane", "Segment"]

# Per rank and turn; longer tensors go through in pieces. Larger than the caches gains nothing.
AREA_BYTES = 2**20
_LINE = 64

_DTYPES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
}


class Segment:
    """Shared memory, by file descriptor. Fresh memory is all zero."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd, self.num_bytes = fd, num_bytes
        self._map = mmap.mmap(fd, num_bytes)
        self._first = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._first)

    @classmethod
    def create(cls, num_bytes: int) -> Segment:
        # Asked first: what the kernel cannot allocate in the end, it makes room for by killing somebody.
        room = _free_bytes()
        if num_bytes > room:
            raise _no_memory(num_bytes, f"{room / 1e6:.1f} MB are free")
        fd = os.memfd_create("manyhands", os.MFD_CLOEXEC)
        try:
            # Writing to memory that is not there would be a SIGBUS in the middle of a step; here it is an error.
            os.posix_fallocate(fd, 0, num_bytes)
            return cls(fd, num_bytes)
        except OSError as error:
            os.close(fd)
            raise _no_memory(num_bytes, error.strerror or str(error)) from error

    def close(self) -> None:
        del self._first
        self._map.close()
        os.close(self.fd)


class Plane:
    """Rank `rank` of `world` on one host. All ranks make the same calls in the same order with the same sizes.

    Sums follow `program`, a tree of additions in postfix form (see `parallel.tree.program`): the same bits for every
    rank, and for every number of ranks that hold the same nodes. After an error the plane is of no more use to anybody.
    """

    def __init__(
        self, segment: Segment, rank: int, world: int, *, area_bytes: int = AREA_BYTES, timeout_s: float = 30.0
    ) -> None:
        if library is None:
            raise EnvironmentProblem(
                f"No shared-memory collectives: {why_not()}.", fix=["a C compiler, and pip install"]
            )
        self.rank, self.world, self.timeout_s = rank, world, timeout_s
        self._segment, self._timeout_ns = segment, int(timeout_s * 1e9)
        area_bytes = _whole_area(area_bytes, world)
        self._plane = library.open_plane(segment.address, segment.num_bytes, rank, world, area_bytes)

    @staticmethod
    def num_bytes(world: int, area_bytes: int = AREA_BYTES) -> int:
        """How large a segment must be."""
        return int(library.plane_bytes(world, _whole_area(area_bytes, world)))

    def all_reduce_(self, tensor: Tensor, program: bytes, name: str) -> None:
        """Sum in place over the ranks."""
        kind = _kind(tensor)
        self._check(
            library.all_reduce(self._plane, tensor.data_ptr(), tensor.numel(), kind, program, self._timeout_ns), name
        )

    def reduce_scatter(self, output: Tensor, input: Tensor, program: bytes, name: str) -> None:
        """`input` holds a part for every rank; `output` becomes the sum of this rank's."""
        assert input.numel() == self.world * output.numel() and input.dtype == output.dtype
        kind, _ = _kind(input), _kind(output)
        self._check(
            library.reduce_scatter(
                self._plane, output.data_ptr(), input.data_ptr(), output.numel(), kind, program, self._timeout_ns
            ),
            name,
        )

    def all_gather(self, output: Tensor, input: Tensor, name: str) -> None:
        """`output` becomes the ranks' `input`s, one after the other."""
        assert output.is_contiguous() and input.is_contiguous() and output.nbytes == self.world * input.nbytes
        self._check(
            library.all_gather(self._plane, output.data_ptr(), input.data_ptr(), input.nbytes, self._timeout_ns), name
        )

    def broadcast_(self, tensor: Tensor, name: str, *, source: int = 0) -> None:
        assert tensor.is_contiguous()
        self._check(library.broadcast(self._plane, tensor.data_ptr(), tensor.nbytes, source, self._timeout_ns), name)

    def meet(self, name: str) -> None:
        self._check(library.meet(self._plane, self._timeout_ns), name)

    def abort(self) -> None:
        """Wake everybody who waits here, now or later. From any thread."""
        library.abort_plane(self._segment.address, self.world)

    def _check(self, code: int, name: str) -> None:
        if code == 0:
            return
        if code >= library.MISSING:
            raise PeerTimeout(
                f"Rank {self.rank} waited {self.timeout_s:g} s for rank {code - library.MISSING} in {name!r}.",
                fix=[
                    f"the log of that rank: mh logs --rank {code - library.MISSING}",
                    "[comm] timeout_s, if a step may take this long",
                ],
            )
        if code == library.ABORTED:
            raise PeerLost(f"Rank {self.rank} was in {name!r} when a peer was lost.")
        raise MemoryError if code == library.NO_MEMORY else ValueError(f"{name!r} was called with what cannot be.")


def _no_memory(num_bytes: int, why: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"No {num_bytes / 1e6:.1f} MB of memory to share between workers: {why}.",
        fix=["a smaller model, or fewer workers", "a higher memory limit of the container"],
    )


def _free_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """What this machine, or the container that we are in, has left."""
    free = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):  # no container, or no limit: "max"
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free


def _whole_area(area_bytes: int, world: int) -> int:
    """Every rank's part of an area starts on a cache line of its own."""
    return -(-area_bytes // (world * _LINE)) * world * _LINE


def _kind(tensor: Tensor) -> int:
    if tensor.dtype not in _DTYPES or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"a {tensor.dtype} tensor on {tensor.device} cannot be summed in shared memory")
    return int(getattr(library, _DTYPES[tensor.dtype]))
