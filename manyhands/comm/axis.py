"""A line of ranks that talk: collectives that carry a name and a timeout, so a hang becomes an error with an address.

An `Axis` owns one process group and hands it to nobody. Tensors in, tensors out: models, plans and strategies are
other people's business. Calls ending in `_start` return at once; their `Pending` is waited for later. With one rank
every call has nothing to do. Start reading at `Axis`.
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
from manyhands.comm.peer_waits import Waiting
from manyhands.comm.purposes import do_different_things
from manyhands.errors import PeerLost, PeerTimeout, TrainingFailed

__all__ = ["Axis", "Done", "Following", "Pending", "connect"]

LOOK_UP_S = 0.2
BROADCAST_BYTES = 32 * 2**20
NAME_BYTES = 80
"""So much of what others do is told where workers differ in it."""


class Pending:
    """An operation under way. `wait` may be called once; it raises `PeerLost` or `PeerTimeout` with the name."""

    def __init__(self, work: Any, name: str, axis: Axis, *, looks_up: bool = True) -> None:
        """`looks_up`: it can be waited for a while, to look up in between whether anybody is lost."""
        self._work, self._name, self._axis, self._looks_up = work, name, axis, looks_up

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return bool(self._work.is_completed())

    def wait(self) -> None:
        began = perf_counter()
        try:
            self._axis.wait_for(self._work, self._name, looks_up=self._looks_up)
        except RuntimeError as error:
            raise self._axis.translate(error, self._name) from error
        finally:
            self._axis.waiting.seconds += perf_counter() - began


class Done(Pending):
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

    `missing` is asked, after a timeout only, for a line that says where the other ranks were last seen. `lost` is asked
    now and then during a long wait: whether a rank is known to be gone, whose connection may be silent for ever.
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

    def wait_for(self, work: Any, name: str, *, looks_up: bool = True) -> None:
        """Wait for an operation that was started here."""
        while self._lost is not None and looks_up:
            try:
                work.wait(timedelta(seconds=LOOK_UP_S))
                return
            except RuntimeError as error:
                if "Operation timed out" not in str(error):  # what an impatient wait says; Gloo's own words are others
                    raise
                if self._lost():
                    raise PeerLost(f"Rank {self.rank} was in {name!r} when a rank was lost.") from error
        work.wait()

    def sum_start(self, tensor: torch.Tensor, name: str) -> Pending:
        """Sum in place over the ranks, in the backend's order: the same bits for any grouping with two ranks only."""
        if self.size == 1:
            return Done()
        return self._start(lambda group: group.allreduce([tensor]), name)

    def all_to_all_start(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: list[int], input_sizes: list[int], name: str
    ) -> Pending:
        return self._start(lambda group: group.alltoall_base(output, input, output_sizes, input_sizes), name)

    def all_gather_start(self, output: torch.Tensor, input: torch.Tensor, name: str) -> Pending:
        """`output` becomes the ranks' `input`s, one after the other; all of one size."""
        if self.size == 1:
            output.copy_(input.view_as(output))
            return Done()
        return self._start(lambda group: group._allgather_base(output, input), name)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, name: str) -> None:
        """`output` becomes the sum of all ranks' parts for this one; `input` holds one for each rank, and is spent."""
        self.sum_start(input, name).wait()
        output.copy_(input.view(self.size, *output.shape)[self.rank])

    def send_start(self, tensor: torch.Tensor, to: int, tag: int, name: str) -> Pending:
        """To one rank, which receives it with the same tag. The tensor must not change until it has gone."""
        return self._start(lambda group: group.send([tensor], to, tag), name, looks_up=False)

    def receive_start(self, tensor: torch.Tensor, source: int, tag: int, name: str) -> Pending:
        """Into `tensor`, of the size that was sent."""
        return self._start(lambda group: group.recv([tensor], source, tag), name, looks_up=False)

    def all_gather_bytes(self, name: str, data: bytes) -> list[bytes]:
        """Every rank's `data`, of any length, in rank order. `TrainingFailed` if they call it in different names."""
        if self.size == 1:
            return [data]
        mark = zlib.crc32(name.encode())
        told = self._rows(torch.tensor([len(data), mark]), f"{name} (lengths)")
        if bool((told[:, 1] != mark).any()):
            raise self._differ(name)
        lengths = told[:, 0]
        longest = int(lengths.max())
        if longest == 0:
            return [b""] * self.size
        rows = self._rows(_padded(data, longest), name)
        return [rows[r, : int(lengths[r])].numpy().tobytes() for r in range(self.size)]

    def _rows(self, mine: torch.Tensor, name: str) -> torch.Tensor:
        """Every rank's, of one size."""
        everyone = torch.empty(self.size * len(mine), dtype=mine.dtype)
        self.all_gather_start(everyone, mine, name).wait()
        return everyone.view(self.size, len(mine))

    def _differ(self, name: str) -> TrainingFailed:
        """By all ranks together: each has seen that there is another name than its own."""
        rows = self._rows(_padded(name.encode()[:NAME_BYTES], NAME_BYTES), "what ranks do")
        return do_different_things(
            {rank: row.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for rank, row in enumerate(rows)}
        )

    def broadcast_(self, tensors: Iterable[torch.Tensor], name: str, *, source: int = 0) -> None:
        """Give every rank the source's values, in place. Tensors of one dtype travel together, some at a time."""
        if self.size == 1:
            return
        by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in tensors:
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for (dtype, device), group in ((kind, some) for kind, all_of in by_kind.items() for some in _together(all_of)):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
            # Gloo knows no bool, bf16 arithmetic or 8-bit floats; a broadcast moves bytes and needs none.
            raw = flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device=device)
            self._broadcast(raw, source, f"{name} ({dtype})")
            if self.rank != source:  # whose tensors may be in use, and must not seem changed
                _scatter_back(flat, group)

    def _broadcast(self, raw: torch.Tensor, source: int, name: str) -> None:
        options = _broadcast_options(source)
        self._start(lambda group: group.broadcast([raw], options), name).wait()

    def barrier(self, name: str) -> None:
        self.all_gather_bytes(name, b"")

    def close(self) -> None:
        """Drop the group; its sockets close, which is how peers that wait for us learn that we are gone."""
        self._group = None

    def retire(self) -> None:
        """The same after an error, when an operation may still be pending: its end is waited for on another thread."""
        dropped = [self._group]
        self._group = None
        threading.Thread(target=dropped.clear, name="manyhands-retired-group", daemon=True).start()

    def translate(self, error: RuntimeError, name: str) -> PeerLost:
        text = str(error)
        if "imed out" in text or "imeout" in text:
            return PeerTimeout(
                f"Rank {self.rank} waited {self.timeout_s:g} s for the others in {name!r}. {self._missing()}".rstrip(),
                fix=[
                    "the logs of the ranks that did not arrive (mh logs --rank R)",
                    "[comm] timeout_s, if a step may take this long",
                ],
            )
        return PeerLost(f"Rank {self.rank} lost a peer in {name!r}: {_reason(text)}.")

    def _start(self, call: Callable[[Any], Any], name: str, *, looks_up: bool = True) -> Pending:
        """Without `looks_up` for what passes between two: a wait for it that ends early closes all of Gloo's pairs."""
        if self._group is None:
            raise PeerLost(f"Rank {self.rank} has left its group and cannot take part in {name!r}.")
        try:
            return Pending(call(self._group), name, self, looks_up=looks_up)
        except RuntimeError as error:
            raise self.translate(error, name) from error


class Following(Axis):
    """Whatever axis `find` gives at the time, for those who outlive a generation: in each, as many ranks, as placed."""

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
    """Build the group of one generation: Gloo on CPUs, bound to `address` and nothing else.

    On CUDA devices NCCL for what is there, and the same Gloo beside it for what is in the host's memory.
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
            apart = [dist.PrefixStore(name, store) for name in ("nccl", "gloo")]  # type: ignore[attr-defined]
            on_device = dist.ProcessGroupNCCL(apart[0], rank, size, nccl)
            axis._group = GroupsByDevice(on_device, dist.ProcessGroupGloo(apart[1], rank, size, options))
        else:
            axis._group = dist.ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        raise axis.translate(error, "connecting to the other workers") from error
    return axis


def gloo_options(address: str, timeout: timedelta) -> Any:
    """Gloo at `address` and nowhere else."""
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


def _together(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """As many at a time as fit in a message: it is a copy of them."""
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
