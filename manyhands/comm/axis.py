"""Collectives over the ranks of one mesh axis. Each call has a name and a timeout, so a hang raises an error that says
which call and which rank.

An `Axis` owns one process group and never exposes it. It knows tensors only, no models, plans or strategies. Calls
ending in `_start` return at once; wait on the `Pending` that they return. With one rank every call is a no-op.
Start reading at `Axis`.
"""

from __future__ import annotations

import re
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from manyhands.comm.device_groups import GroupsByDevice
from manyhands.comm.handed_over import count_handed_over
from manyhands.comm.peer_waits import Waiting, different_collectives, waits_for_peers
from manyhands.errors import PeerLost, PeerTimeout, TrainingFailed

__all__ = ["Axis", "CompletedWork", "Following", "Pending", "connect"]

POLL_LOST_S = 0.2
BROADCAST_BYTES = 32 * 2**20
NAME_BYTES = 80
"""The error for ranks in different collectives shows at most this much of each rank's call name."""


class Pending:
    """An operation under way. `wait` may be called once; it raises `PeerLost` or `PeerTimeout` with the name."""

    def __init__(self, work: Any, name: str, axis: Axis, *, polls_lost: bool = True) -> None:
        """`polls_lost`: `wait` may wait in short intervals and check in between whether a rank is lost."""
        self._work, self._name, self._axis, self._looks_up = work, name, axis, polls_lost

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return bool(self._work.is_completed())

    def wait(self) -> None:
        began = perf_counter()
        try:
            self._axis.wait_for(self._work, self._name, polls_lost=self._looks_up)
        except RuntimeError as error:
            raise self._axis.translate(error, self._name) from error
        finally:
            self._axis.waiting.seconds += perf_counter() - began


class CompletedWork(Pending):
    """Nothing to wait for."""

    def __init__(self) -> None:
        pass

    @property
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class Axis:
    """Ranks 0 to `size` - 1 of one generation.

    `missing` is called only after a timeout and returns a line that says where the other ranks were last seen. `lost`
    is polled during a long wait and returns whether a rank is known to be lost: its connection may never close.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        group: Any = None,
        *,
        timeout_s: float = 30.0,
        missing: Callable[[], str] = lambda: "",
        lost: Callable[[], bool] | None = None,
    ) -> None:
        assert group is not None or size == 1
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._group, self._missing, self._lost = group, missing, lost
        self.waiting = Waiting()

    @waits_for_peers
    def wait_for(self, work: Any, name: str, *, polls_lost: bool = True) -> None:
        """Wait for an operation that was started here."""
        while self._lost is not None and polls_lost:
            try:
                work.wait(timedelta(seconds=POLL_LOST_S))
                return
            except RuntimeError as error:
                if "Operation timed out" not in str(error):  # the text of a short wait; Gloo's own timeouts differ
                    raise
                if self._lost():
                    raise PeerLost(f"Rank {self.rank} was in {name!r} when a rank was lost.") from error
        work.wait()

    def sum_start(self, tensor: torch.Tensor, name: str) -> Pending:
        """Sum in place over the ranks, in the backend's order: independent of the grouping for two ranks only."""
        if self.size == 1:
            return CompletedWork()
        count_handed_over(tensor.nbytes)
        return self._start(lambda group: group.allreduce([tensor]), name)

    def all_to_all_start(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: list[int], input_sizes: list[int], name: str
    ) -> Pending:
        count_handed_over(input.nbytes)
        return self._start(lambda group: group.alltoall_base(output, input, output_sizes, input_sizes), name)

    def all_gather_start(self, output: torch.Tensor, input: torch.Tensor, name: str) -> Pending:
        """`output` becomes the concatenation of all ranks' `input`s, which have the same size."""
        if self.size == 1:
            output.copy_(input.view_as(output))
            return CompletedWork()
        count_handed_over(input.nbytes)
        return self._start(lambda group: group._allgather_base(output, input), name)

    def all_gather(self, mine: torch.Tensor, name: str) -> torch.Tensor:
        """The tensors of all ranks, which have the same shape, stacked in rank order."""
        gathered = mine.new_empty(self.size, *mine.shape)
        self.all_gather_start(gathered.view(-1), mine.reshape(-1), name).wait()
        return gathered

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, name: str) -> None:
        """`input` has one chunk per rank; `output` becomes the sum of this rank's chunks. Overwrites `input`."""
        self.sum_start(input, name).wait()
        output.copy_(input.view(self.size, *output.shape)[self.rank])

    def send_start(self, tensor: torch.Tensor, to: int, tag: int, name: str) -> Pending:
        """Send to one rank, which receives with the same tag. The tensor must not change until the send is done."""
        count_handed_over(tensor.nbytes)
        return self._start(lambda group: group.send([tensor], to, tag), name, polls_lost=False)

    def receive_start(self, tensor: torch.Tensor, source: int, tag: int, name: str) -> Pending:
        """Receive into `tensor`, which has the size of the tensor that was sent."""
        return self._start(lambda group: group.recv([tensor], source, tag), name, polls_lost=False)

    def all_gather_bytes(self, name: str, data: bytes) -> list[bytes]:
        """Every rank's `data`, of any length, in rank order. `TrainingFailed` if ranks call it with different names."""
        if self.size == 1:
            return [data]
        name_crc = zlib.crc32(name.encode())
        headers = self.all_gather(torch.tensor([len(data), name_crc]), f"{name} (lengths)")
        if bool((headers[:, 1] != name_crc).any()):
            raise self._different_names(name)
        lengths = headers[:, 0]
        longest = int(lengths.max())
        if longest == 0:
            return [b""] * self.size
        gathered = self.all_gather(_padded(data, longest), name)
        return [gathered[r, : int(lengths[r])].numpy().tobytes() for r in range(self.size)]

    def _different_names(self, name: str) -> TrainingFailed:
        """Every rank calls this: each has received a name that differs from its own."""
        names = self.all_gather(_padded(name.encode()[:NAME_BYTES], NAME_BYTES), "what ranks do")
        return different_collectives(
            {rank: line.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for rank, line in enumerate(names)}
        )

    def broadcast_(self, tensors: Iterable[torch.Tensor], name: str, *, source: int = 0) -> None:
        """Copy the source's values to every rank, in place. Tensors of one dtype share messages of limited size."""
        if self.size == 1:
            return
        by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in tensors:
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for (dtype, device), group in ((kind, some) for kind, all_of in by_kind.items() for some in _grouped(all_of)):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
            # Gloo has no bool, bf16 arithmetic or 8-bit floats; a broadcast only moves bytes.
            raw = flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device=device)
            self._broadcast(raw, source, f"{name} ({dtype})")
            if self.rank != source:  # the source's tensors may be in use: their version counters must not change
                _scatter_back(flat, group)

    def _broadcast(self, raw: torch.Tensor, source: int, name: str) -> None:
        options = _broadcast_options(source)
        count_handed_over(raw.nbytes if self.rank == source else 0)
        self._start(lambda group: group.broadcast([raw], options), name).wait()

    def barrier(self, name: str) -> None:
        self.all_gather_bytes(name, b"")

    def close(self) -> None:
        """Drop the group. Its sockets close, which ends the wait of peers that wait for this rank."""
        self._group = None

    def retire(self) -> None:
        """`close` after an error, when an operation may still be pending: another thread waits for it to end."""
        dropped = [self._group]
        self._group = None
        threading.Thread(target=dropped.clear, name="manyhands-retired-group", daemon=True).start()

    def translate(self, error: RuntimeError, name: str) -> PeerLost:
        text = str(error)
        if "imed out" in text or "imeout" in text:
            return PeerTimeout(
                f"Rank {self.rank} waited {self.timeout_s:g} s for other ranks in {name!r}. {self._missing()}".rstrip(),
                fix=[
                    "the logs of the ranks that did not arrive (mh logs --rank R)",
                    "a larger [comm] timeout_s, if a step may take this long",
                ],
            )
        return PeerLost(f"Rank {self.rank} lost a peer in {name!r}: {_reason(text)}.")

    def _start(self, call: Callable[[Any], Any], name: str, *, polls_lost: bool = True) -> Pending:
        """Not `polls_lost` for point-to-point calls: if a wait on one times out early, Gloo closes all its pairs."""
        if self._group is None:
            raise PeerLost(f"Rank {self.rank} has left its group and cannot join {name!r}.")
        try:
            return Pending(call(self._group), name, self, polls_lost=polls_lost)
        except RuntimeError as error:
            raise self.translate(error, name) from error


class Following(Axis):
    """Forwards each call to the axis that `find` returns at the time, for objects that outlive a generation.

    The axis of every generation has the same size, and this process has the same rank in it.
    """

    def __init__(self, find: Callable[[], Axis]) -> None:
        first = find()
        super().__init__(first.rank, first.size, find, timeout_s=first.timeout_s)
        self._find, self.waiting = find, first.waiting

    def sum_start(self, tensor: torch.Tensor, name: str) -> Pending:
        return self._find().sum_start(tensor, name)

    def all_to_all_start(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: list[int], input_sizes: list[int], name: str
    ) -> Pending:
        return self._find().all_to_all_start(output, input, output_sizes, input_sizes, name)

    def all_gather_start(self, output: torch.Tensor, input: torch.Tensor, name: str) -> Pending:
        return self._find().all_gather_start(output, input, name)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, name: str) -> None:
        self._find().reduce_scatter(output, input, name)

    def send_start(self, tensor: torch.Tensor, to: int, tag: int, name: str) -> Pending:
        return self._find().send_start(tensor, to, tag, name)

    def receive_start(self, tensor: torch.Tensor, source: int, tag: int, name: str) -> Pending:
        return self._find().receive_start(tensor, source, tag, name)

    def _broadcast(self, raw: torch.Tensor, source: int, name: str) -> None:
        self._find()._broadcast(raw, source, name)


def connect(
    store: Store | None,
    rank: int,
    size: int,
    *,
    address: str,
    device: torch.device,
    timeout_s: float,
    missing: Callable[[], str] = lambda: "",
    lost: Callable[[], bool] | None = None,
) -> Axis:
    """Build the process group of one generation: Gloo on CPUs, bound to `address` only.

    With CUDA devices, NCCL for CUDA tensors and the same Gloo for tensors in host memory.
    """
    if size == 1:
        return Axis(rank, size, timeout_s=timeout_s, missing=missing)
    assert store is not None
    timeout = timedelta(seconds=timeout_s)
    on_cuda, options = device.type == "cuda", gloo_options(address, timeout)
    axis = Axis(rank, size, object(), timeout_s=timeout_s, missing=missing, lost=None if on_cuda else lost)
    try:
        if on_cuda:
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            stores = [dist.PrefixStore(name, store) for name in ("nccl", "gloo")]  # type: ignore[attr-defined]
            on_device = dist.ProcessGroupNCCL(stores[0], rank, size, nccl)
            axis._group = GroupsByDevice(on_device, dist.ProcessGroupGloo(stores[1], rank, size, options))
        else:
            axis._group = dist.ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        raise axis.translate(error, "connecting to the other workers") from error
    return axis


def gloo_options(address: str, timeout: timedelta) -> Any:
    """Options that bind Gloo to `address` only."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return options


def _reason(text: str) -> str:
    """The part of Gloo's message that says what happened: without its source file and without its advice."""
    first = text.splitlines()[0] if text else "the connection was closed"
    return re.sub(r"^\[[^]]*\]\s*|\. This is typically.*$", "", first)


def _broadcast_options(source: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = source
    options.rootTensor = 0
    return options


def _padded(data: bytes, length: int) -> torch.Tensor:
    padded = torch.zeros(length, dtype=torch.uint8)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return padded


def _grouped(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Groups of about `BROADCAST_BYTES`: a message is a copy of its tensors, so its size is bounded."""
    some: list[torch.Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        some.append(tensor)
        num_bytes += tensor.numel() * tensor.element_size()
        if num_bytes >= BROADCAST_BYTES:
            yield some
            some, num_bytes = [], 0
    if some:
        yield some


def _scatter_back(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    start = 0
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
            start += tensor.numel()
