"""Weights that the ranks of one host share: one copy in shared memory, which every rank's model uses.

Subclasses update them: `fused_shared_weights` divides them into parts for a fused update, `owner_updates` into whole
tensors for torch's optimizers. Any other write to a parameter writes for all ranks: users change weights only inside
`editing`, where the other ranks use private copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.comm.host_memory import Segment
from manyhands.comm.shared_memory import Plane
from manyhands.errors import MemoryChanged, TrainingFailed
from manyhands.parallel.gradients.shared_memory_sum import SharedMemorySum

__all__ = ["SharedCopy", "SharedMemoryWeights"]


class SharedCopy(NamedTuple):
    """One copy of the weights, or of one kind of optimizer state: the memory, and each parameter's tensor in it."""

    segment: Segment
    views: list[Tensor]


class SharedMemoryWeights:
    """Memory for `copies` of the weights, allocated here; from `_begin_sharing` on, all ranks use rank 0's weights."""

    def __init__(
        self,
        gradients: SharedMemorySum,
        optimizer: Optimizer,
        plane: Plane,
        memory: Callable[[str, int], Segment],
        *,
        copies: int = 1,
    ) -> None:
        self._gradients, self._optimizer, self._plane, self._copies = gradients, optimizer, plane, copies
        self._memory, self._segments = memory, dict[str, Segment]()
        self._flat, self._params = gradients.flat, gradients.params
        self._index_of = {id(param): index for index, param in enumerate(self._params)}
        self._weights = self._keep("weights")
        self._alarm = self._allot("alarm", 4096)
        self._current = 0
        self._watch_every, self._names = 0, list[str]()
        self._versions: list[int] | None = None

    def _allot(self, name: str, num_bytes: int) -> Segment:
        self._segments[name] = self._memory(name, num_bytes)
        return self._segments[name]

    def _keep(self, name: str) -> list[SharedCopy]:
        segments = [self._allot(f"{name}, copy {i}", self._flat.num_bytes) for i in range(self._copies)]
        return [SharedCopy(segment, self._flat.views(self._params, segment)) for segment in segments]

    def _begin_sharing(self, current: int | None = None) -> None:
        """Start with rank 0's weights; with `current`, with those that the other ranks have in that copy."""
        if current is not None:
            self.look_at_copy(current)
            return
        views = self._weights[0].views
        if self._plane.rank == 0:
            for view, param in zip(views, self._params, strict=True):
                view.copy_(param.detach())
        self._plane.barrier("weights of rank 0")
        self._look_at(views)

    @property
    def segments(self) -> list[Segment]:
        return list(self._segments.values())

    @property
    def current(self) -> int:
        """The copy that is in use."""
        return self._current

    def look_at_copy(self, current: int) -> None:
        self._current = current
        self._look_at(self._weights[current].views)

    def where(self, tensor: Tensor) -> tuple[str, int] | None:
        """The segment that contains a tensor, and the byte where it starts; None if no segment does."""
        address = tensor.data_ptr()
        for name, segment in self._segments.items():
            if segment.address <= address < segment.address + segment.num_bytes:
                return name, address - segment.address
        return None

    def tensor_at(self, where: tuple[str, int], shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        """The tensor whose location another rank got from `where`, in this rank's mapping."""
        name, start = where
        if name not in self._segments:
            self._allot(name, self._flat.num_bytes)
        whole = torch.frombuffer(self._segments[name].buffer, dtype=torch.float32, offset=start)
        return whole.as_strided(tuple(shape), tuple(stride))

    def move(self, plane: Plane) -> None:
        """Use the plane of another group of ranks."""
        self._plane = plane

    def _look_at(self, values: Sequence[Tensor]) -> None:
        for param, value in zip(self._params, values, strict=True):
            param.data = value

    # ---- changes by the user ----

    @property
    def is_current(self) -> bool:
        """Whether the optimizer still has the same parameters."""
        return True

    def accept(self) -> None:
        """Accept that the weights were changed from outside, on purpose and in the same way on all ranks."""
        self._versions = None

    def _note_versions(self) -> None:
        """From here on, a change of the weights without `accept` raises an error."""
        self._versions = [param._version for param in self._params]

    def _check_untouched(self) -> None:
        """A change by the user's code would be made once per rank. (Torch does not count changes through `.data`.)"""
        if self._versions is not None and self._versions != [param._version for param in self._params]:
            raise TrainingFailed(
                "Weights were changed outside of a step, but the workers of this host share them.",
                fix=["with trainer.editing() as model: ..., on every worker"],
            )

    # ---- memory that changed without an update ----

    def watch(self, every: int, names: Sequence[str]) -> None:
        """Check that memory is at each update what the last one left; else raise `MemoryChanged` on every rank.

        A fused update checks all of it each time, torch's optimizers once in `every` updates; 0 checks nothing.
        """
        self._watch_every, self._names = every, list(names)

    def _raise_alarm(self, index: int) -> None:
        """Record that this parameter, or its optimizer state, changed; all ranks read that after the next barrier."""
        self._alarm.buffer[:8] = (index + 1).to_bytes(8, "little")

    def _check_alarm(self) -> None:
        """Called after all ranks' parts of the update, before it counts."""
        index = int.from_bytes(self._alarm.buffer[:8], "little") - 1
        if index >= 0:
            raise MemoryChanged(
                f"{self._names[index]}, or its optimizer state, changed in shared memory after the last update, but "
                "not by a training step.",
                fix=[
                    "with trainer.editing() as model: ..., if your code changes weights or optimizer state",
                    "a memory test of this machine, if it does not",
                ],
            )

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Inside, rank 0 writes to the shared weights, and the other ranks to copies that are dropped."""
        views = self._weights[self._current].views
        self._plane.barrier("editing")
        if self._plane.rank:
            self._look_at([view.clone() for view in views])
        try:
            yield
        finally:
            self._plane.barrier("edited weights")
            if self._plane.rank:
                self._look_at(views)

    def close(self) -> None:
        """Give every rank a private copy of weights and optimizer state again, and free the shared memory."""
        self.release()
        self._plane.barrier("private copies of the weights")
        if self._plane.rank == 0:
            for segment in self._segments.values():
                segment.free()

    def release(self) -> None:
        """Give this rank a private copy of weights and optimizer state again."""
        self._look_at([view.clone() for view in self._weights[self._current].views])
        for param in self._params:
            state = self._optimizer.state.get(param, {})
            for name, value in state.items():
                state[name] = value.clone() if isinstance(value, Tensor) else value
