"""Collectives between the workers of one host through shared memory.

A `Plane` is one rank's view of a segment. Every call has a name and a deadline: a rank that does not arrive raises a
`PeerTimeout` that names it, and ranks that call under different names get an error with all names. Start reading at
`Plane`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from manyhands.comm.handed_over import count_handed_over
from manyhands.comm.host_memory import Segment
from manyhands.comm.peer_waits import Waiting, different_collectives, waits_for_peers
from manyhands.errors import EnvironmentProblem, PeerLost, PeerTimeout
from manyhands.native import library, why_not

__all__ = ["AREA_BYTES", "DTYPES", "Plane"]

# Per rank and pass; longer tensors are copied in chunks. An area larger than the caches is no faster.
AREA_BYTES = 2**20
_LINE = 64

DTYPES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
}


class Plane:
    """Rank `rank` of `world` on one host. All ranks make the same calls in the same order with the same sizes.

    Sums follow `program`, a tree of additions in postfix form (see `parallel.gradients.slice_tree.program`): the same
    bits on every rank, and for every number of ranks that has the same nodes. After an error no rank can use the
    plane any more.
    `ranks` are the run's ranks in the plane and `here` the run's ranks on this host, one of which may be lost: errors
    use these numbers. `missing` is called only after a timeout and returns a line that says where the other ranks were
    last seen.
    """

    def __init__(
        self,
        segment: Segment,
        rank: int,
        world: int,
        *,
        area_bytes: int = AREA_BYTES,
        timeout_s: float = 30.0,
        ranks: Sequence[int] | None = None,
        here: Sequence[int] | None = None,
        missing: Callable[[], str] = lambda: "",
    ) -> None:
        if library is None:
            raise EnvironmentProblem(
                f"Shared-memory collectives are not available: {why_not()}.", fix=["a C compiler, and pip install"]
            )
        self.rank, self.world, self.timeout_s = rank, world, timeout_s
        self._ranks = range(world) if ranks is None else ranks
        self._here = self._ranks if here is None else here
        self._segment, self._timeout_ns, self._missing = segment, int(timeout_s * 1e9), missing
        self.num_posts = 0
        """Number of posts of this rank."""
        self.waiting = Waiting()
        area_bytes = _whole_area(area_bytes, world)
        self._plane = library.open_plane(segment.address, segment.num_bytes, rank, world, area_bytes)

    @staticmethod
    def num_bytes(world: int, area_bytes: int = AREA_BYTES) -> int:
        """Required size of the segment."""
        return int(library.plane_bytes(world, _whole_area(area_bytes, world)))

    @waits_for_peers
    def all_reduce_(self, tensor: Tensor, program: bytes, name: str) -> None:
        """Sum in place over the ranks."""
        kind, began = _kind(tensor), perf_counter()
        count_handed_over(tensor.nbytes)
        library.set_purpose(self._plane, name)
        code = library.all_reduce(self._plane, tensor.data_ptr(), tensor.numel(), kind, program, self._timeout_ns)
        self._add_wait(began, code, name)

    @waits_for_peers
    def reduce_scatter(self, output: Tensor, input: Tensor, program: bytes, name: str) -> None:
        """`input` has one chunk per rank; `output` becomes the sum of this rank's chunks."""
        assert input.numel() == self.world * output.numel() and input.dtype == output.dtype
        kind, _ = _kind(input), _kind(output)
        count_handed_over(input.nbytes)
        library.set_purpose(self._plane, name)
        self._check(
            library.reduce_scatter(
                self._plane, output.data_ptr(), input.data_ptr(), output.numel(), kind, program, self._timeout_ns
            ),
            name,
        )

    @waits_for_peers
    def all_gather(self, output: Tensor, input: Tensor, name: str) -> None:
        """`output` becomes the concatenation of all ranks' `input`s."""
        assert output.is_contiguous() and input.is_contiguous() and output.nbytes == self.world * input.nbytes
        count_handed_over(input.nbytes)
        began = perf_counter()
        library.set_purpose(self._plane, name)
        code = library.all_gather(self._plane, output.data_ptr(), input.data_ptr(), input.nbytes, self._timeout_ns)
        self._add_wait(began, code, name)

    @waits_for_peers
    def broadcast_(self, tensor: Tensor, name: str, *, source: int = 0) -> None:
        assert tensor.is_contiguous()
        count_handed_over(tensor.nbytes if self.rank == source else 0)
        library.set_purpose(self._plane, name)
        self._check(library.broadcast(self._plane, tensor.data_ptr(), tensor.nbytes, source, self._timeout_ns), name)

    def sum_shared(self, target: Tensor, sources: Sequence[Tensor], program: bytes) -> None:
        """Sum tensors that are already in shared memory, without a barrier. `target` may be one of the sources."""
        assert all(source.dtype == target.dtype and source.numel() == target.numel() for source in sources)
        assert all(tensor.is_contiguous() for tensor in (target, *sources))
        addresses = [source.data_ptr() for source in sources]
        self.sum_at(target.data_ptr(), addresses, target.numel(), target.dtype, program)

    def sum_at(self, target: int, sources: Sequence[int], count: int, dtype: torch.dtype, program: bytes) -> None:
        """`sum_shared` by address."""
        addresses = struct.pack(f"{len(sources)}Q", *sources)
        self._check(library.sum(target, addresses, count, _number(dtype), program), "sum")

    @waits_for_peers
    def barrier(self, name: str) -> None:
        began = perf_counter()
        library.set_purpose(self._plane, name)
        self._add_wait(began, library.meet(self._plane, self._timeout_ns), name)

    def post(self, times: int = 1) -> None:
        """Announce that data is written. Returns at once, without a barrier; other ranks check the count of posts."""
        self.num_posts += times
        library.post(self._plane, self.num_posts % 2**32)

    def all_posted(self, times: int) -> bool:
        """Whether every rank has posted `times` times since the plane was made; its writes before are then visible."""
        return bool(library.all_posted(self._plane, times % 2**32))

    @waits_for_peers
    def wait_posted(self, times: int, name: str) -> None:
        began = perf_counter()
        self._add_wait(began, library.wait_posted(self._plane, times % 2**32, self._timeout_ns), name)

    def abort(self, rank: int) -> None:
        """End every wait in this plane, present and future, because `rank` is lost. Safe from any thread."""
        library.abort_plane(self._segment.address, self.world, rank)

    def _add_wait(self, began: float, code: int, name: str) -> None:
        self.waiting.seconds += perf_counter() - began
        self._check(code, name)

    def _check(self, code: int, name: str) -> None:
        if code == 0:
            return
        mine = self._ranks[self.rank]
        if code >= library.MISSING:
            other = self._ranks[code - library.MISSING]
            raise PeerTimeout(
                f"Rank {mine} waited {self.timeout_s:g} s for rank {other} in {name!r}. {self._missing()}".rstrip(),
                fix=[
                    f"the log of that rank: mh logs --rank {other}",
                    "a larger [comm] timeout_s, if a step may take this long",
                ],
            )
        if code == library.ABORTED:
            lost = library.lost_rank(self._segment.address)
            which = f"rank {self._here[lost]}" if lost < len(self._here) else "a rank of another host"
            raise PeerLost(f"Rank {mine} was in {name!r} when {which} was lost.")
        if code == library.UNLIKE:
            purposes = [library.purpose_of(self._plane, rank) for rank in range(self.world)]
            raise different_collectives(dict(zip(self._ranks, purposes, strict=True)))
        raise MemoryError if code == library.NO_MEMORY else ValueError(f"{name!r} was called with invalid arguments.")


def _whole_area(area_bytes: int, world: int) -> int:
    """Padded so that every rank's part of an area starts on a new cache line."""
    return -(-area_bytes // (world * _LINE)) * world * _LINE


def _number(dtype: torch.dtype) -> int:
    if dtype not in DTYPES:
        raise ValueError(f"{dtype} cannot be summed in shared memory")
    return int(getattr(library, DTYPES[dtype]))


def _kind(tensor: Tensor) -> int:
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"a tensor that is not contiguous, or on {tensor.device}, cannot be summed in shared memory")
    return _number(tensor.dtype)
