"""Collectives between the workers of one host, through memory that they share.

A `Plane` is one rank's place in a segment. Every call names itself and has a deadline: a rank that does not arrive
becomes a `PeerTimeout` that names it, and ranks that meet under different names are told so. Tensors in, tensors out.
Start reading at `Plane`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from manyhands.comm.host_memory import Segment
from manyhands.comm.peer_waits import Waiting
from manyhands.comm.purposes import do_different_things
from manyhands.errors import EnvironmentProblem, PeerLost, PeerTimeout
from manyhands.native import library, why_not

__all__ = ["AREA_BYTES", "DTYPES", "Plane"]

# Per rank and turn; longer tensors go through in pieces. Larger than the caches gains nothing.
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

    Sums follow `program`, a tree of additions in postfix form (see `gradients.slice_tree`): the same bits for every
    rank, and for every number of ranks that hold the same nodes. After an error the plane is of no more use to anybody.
    Errors name the ranks of the plane by `ranks`, and those of this host, whoever is lost among them, by `here`: their
    numbers in the run. `missing` is asked, after a timeout only, for a line that says where the others were last seen.
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
                f"No shared-memory collectives: {why_not()}.", fix=["a C compiler, and pip install"]
            )
        self.rank, self.world, self.timeout_s = rank, world, timeout_s
        self._ranks = range(world) if ranks is None else ranks
        self._here = self._ranks if here is None else here
        self._segment, self._timeout_ns, self._missing = segment, int(timeout_s * 1e9), missing
        self.num_posts = 0
        """How often this rank has posted."""
        self.waiting = Waiting()
        area_bytes = _whole_area(area_bytes, world)
        self._plane = library.open_plane(segment.address, segment.num_bytes, rank, world, area_bytes)

    @staticmethod
    def num_bytes(world: int, area_bytes: int = AREA_BYTES) -> int:
        """How large a segment must be."""
        return int(library.plane_bytes(world, _whole_area(area_bytes, world)))

    def all_reduce_(self, tensor: Tensor, program: bytes, name: str) -> None:
        """Sum in place over the ranks."""
        kind, began = _kind(tensor), perf_counter()
        library.set_purpose(self._plane, name)
        code = library.all_reduce(self._plane, tensor.data_ptr(), tensor.numel(), kind, program, self._timeout_ns)
        self._waited(began, code, name)

    def reduce_scatter(self, output: Tensor, input: Tensor, program: bytes, name: str) -> None:
        """`input` holds a part for every rank; `output` becomes the sum of this rank's."""
        assert input.numel() == self.world * output.numel() and input.dtype == output.dtype
        kind, _ = _kind(input), _kind(output)
        library.set_purpose(self._plane, name)
        self._check(
            library.reduce_scatter(
                self._plane, output.data_ptr(), input.data_ptr(), output.numel(), kind, program, self._timeout_ns
            ),
            name,
        )

    def all_gather(self, output: Tensor, input: Tensor, name: str) -> None:
        """`output` becomes the ranks' `input`s, one after the other."""
        assert output.is_contiguous() and input.is_contiguous() and output.nbytes == self.world * input.nbytes
        began = perf_counter()
        library.set_purpose(self._plane, name)
        code = library.all_gather(self._plane, output.data_ptr(), input.data_ptr(), input.nbytes, self._timeout_ns)
        self._waited(began, code, name)

    def broadcast_(self, tensor: Tensor, name: str, *, source: int = 0) -> None:
        assert tensor.is_contiguous()
        library.set_purpose(self._plane, name)
        self._check(library.broadcast(self._plane, tensor.data_ptr(), tensor.nbytes, source, self._timeout_ns), name)

    def sum_shared(self, target: Tensor, sources: Sequence[Tensor], program: bytes) -> None:
        """Sum memory that lies in segments already, without meeting anybody: `target` may be one of the sources."""
        assert all(source.dtype == target.dtype and source.numel() == target.numel() for source in sources)
        assert all(tensor.is_contiguous() for tensor in (target, *sources))
        addresses = [source.data_ptr() for source in sources]
        self.sum_at(target.data_ptr(), addresses, target.numel(), target.dtype, program)

    def sum_at(self, target: int, sources: Sequence[int], count: int, dtype: torch.dtype, program: bytes) -> None:
        """The same of addresses."""
        addresses = struct.pack(f"{len(sources)}Q", *sources)
        self._check(library.sum(target, addresses, count, _number(dtype), program), "sum")

    def meet(self, name: str) -> None:
        began = perf_counter()
        library.set_purpose(self._plane, name)
        self._waited(began, library.meet(self._plane, self._timeout_ns), name)

    def post(self, times: int = 1) -> None:
        """Say that something is written, to whoever looks: nobody meets anybody here, and nobody waits."""
        self.num_posts += times
        library.post(self._plane, self.num_posts % 2**32)

    def all_posted(self, times: int) -> bool:
        """Whether every rank has posted so often since the plane was made; then what each wrote before it is there."""
        return bool(library.all_posted(self._plane, times % 2**32))

    def wait_posted(self, times: int, name: str) -> None:
        began = perf_counter()
        self._waited(began, library.wait_posted(self._plane, times % 2**32, self._timeout_ns), name)

    def abort(self, rank: int) -> None:
        """Wake everybody who waits here, now or later, because `rank` is lost. From any thread."""
        library.abort_plane(self._segment.address, self.world, rank)

    def _waited(self, began: float, code: int, name: str) -> None:
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
                    "[comm] timeout_s, if a step may take this long",
                ],
            )
        if code == library.ABORTED:
            lost = library.lost_rank(self._segment.address)
            who = f"rank {self._here[lost]}" if lost < len(self._here) else "a rank of another host"
            raise PeerLost(f"Rank {mine} was in {name!r} when {who} was lost.")
        if code == library.UNLIKE:
            purposes = [library.purpose_of(self._plane, rank) for rank in range(self.world)]
            raise do_different_things(dict(zip(self._ranks, purposes, strict=True)))
        raise MemoryError if code == library.NO_MEMORY else ValueError(f"{name!r} was called with what cannot be.")


def _whole_area(area_bytes: int, world: int) -> int:
    """Every rank's part of an area starts on a cache line of its own."""
    return -(-area_bytes // (world * _LINE)) * world * _LINE


def _number(dtype: torch.dtype) -> int:
    if dtype not in DTYPES:
        raise ValueError(f"{dtype} cannot be summed in shared memory")
    return int(getattr(library, DTYPES[dtype]))


def _kind(tensor: Tensor) -> int:
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"a tensor with gaps, or on {tensor.device}, cannot be summed in shared memory")
    return _number(tensor.dtype)
