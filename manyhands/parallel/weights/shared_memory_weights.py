"""Weights that the ranks of one host have in common: one copy in shared memory, which every rank's model looks at.

How they are updated is for those who derive from this: `fused_shared_weights` divides them into parts for a fused
update, `owner_updates` into whole tensors for torch's own optimizers. Whatever else writes to a parameter writes for
all ranks: weights change by hand inside `editing` only, where the others look at copies of their own.
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
from manyhands.parallel.gradients.shared_memory_sum import SharedGradients

__all__ = ["CommonWeights", "Kept"]


class Kept(NamedTuple):
    """One copy of the weights, or of a state: the memory, and each parameter's tensor in it."""

    segment: Segment
    views: list[Tensor]


class CommonWeights:
    """Memory for `copies` of the weights, allocated here; from `_settle` on, rank 0's weights for all ranks."""

    def __init__(
        self,
        gradients: SharedGradients,
        optimizer: Optimizer,
        plane: Plane,
        memory: Callable[[str, int], Segment],
        *,
        copies: int = 1,
    ) -> None:
        self._gradients, self._optimizer, self._plane, self._copies = gradients, optimizer, plane, copies
        self._memory, self._segments = memory, dict[str, Segment]()
        self._flat, self._params = gradients.flat, gradients.params
        self._place = {id(param): place for place, param in enumerate(self._params)}
        self._weights = self._keep("weights")
        self._alarm = self._allot("alarm", 4096)
        self._current = 0
        self._watch_every, self._names = 0, list[str]()
        self._versions: list[int] | None = None

    def _allot(self, name: str, num_bytes: int) -> Segment:
        self._segments[name] = self._memory(name, num_bytes)
        return self._segments[name]

    def _keep(self, name: str) -> list[Kept]:
        segments = [self._allot(f"{name}, copy {i}", self._flat.num_bytes) for i in range(self._copies)]
        return [Kept(segment, self._flat.views(self._params, segment)) for segment in segments]

    def _settle(self, current: int | None = None) -> None:
        """Begin with rank 0's weights; with `current`, with those of others, which are there in that copy."""
        if current is not None:
            self.look_at_copy(current)
            return
        views = self._weights[0].views
        if self._plane.rank == 0:
            for view, param in zip(views, self._params, strict=True):
                view.copy_(param.detach())
        self._plane.meet("weights of rank 0")
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
        """Which segment a tensor lies in, and at which byte; None where in none of them."""
        address = tensor.data_ptr()
        for name, segment in self._segments.items():
            if segment.address <= address < segment.address + segment.num_bytes:
                return name, address - segment.address
        return None

    def tensor_at(self, where: tuple[str, int], shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        """What another rank's `where` told of, as this one sees it."""
        name, start = where
        if name not in self._segments:
            self._allot(name, self._flat.num_bytes)
        whole = torch.frombuffer(self._segments[name].buffer, dtype=torch.float32, offset=start)
        return whole.as_strided(tuple(shape), tuple(stride))

    def move(self, plane: Plane) -> None:
        """From now on with the ranks of this plane."""
        self._plane = plane

    def _look_at(self, values: Sequence[Tensor]) -> None:
        for param, value in zip(self._params, values, strict=True):
            param.data = value

    # ---- by hand ----

    @property
    def is_current(self) -> bool:
        """Whether the optimizer still has the parameters that it had."""
        return True

    def accept(self) -> None:
        """The weights were changed from outside, on purpose and by all ranks alike."""
        self._versions = None

    def _note_versions(self) -> None:
        """From here on, whoever changes weights without `accept` is told so."""
        self._versions = [param._version for param in self._params]

    def _check_untouched(self) -> None:
        """A change by hand on every rank would be made once per rank. (Through `.data` torch does not count it.)"""
        if self._versions is not None and self._versions != [param._version for param in self._params]:
            raise TrainingFailed(
                "Weights were changed outside of a step, but the workers of this host share them.",
                fix=["with trainer.editing() as model: ..., on every worker"],
            )

    # ---- behind our back ----

    def watch(self, every: int, names: Sequence[str]) -> None:
        """What an update left in memory must be there in the next; else `MemoryChanged`, on every rank.

        A fused update looks at all of it each time, torch's own optimizers once in `every`; with 0, nothing ever.
        """
        self._watch_every, self._names = every, list(names)

    def _raise_alarm(self, place: int) -> None:
        """This parameter, or a state of it, is not what the last update left. All learn it when they meet."""
        self._alarm.buffer[:8] = (place + 1).to_bytes(8, "little")

    def _look_for_alarm(self) -> None:
        """After everybody's part of the update, before it counts."""
        place = int.from_bytes(self._alarm.buffer[:8], "little") - 1
        if place >= 0:
            raise MemoryChanged(
                f"{self._names[place]}, or a state that the optimizer keeps for it, changed in shared memory after the "
                "last update, and no step did it.",
                fix=[
                    "with trainer.editing() as model: ..., for weights and states that are changed by hand",
                    "a test of this machine's memory, where nothing changes them",
                ],
            )

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Inside, rank 0 writes to the weights that all share, and the others to copies that are dropped."""
        views = self._weights[self._current].views
        self._plane.meet("editing")
        if self._plane.rank:
            self._look_at([view.clone() for view in views])
        try:
            yield
        finally:
            self._plane.meet("edited weights")
            if self._plane.rank:
                self._look_at(views)

    def close(self) -> None:
        """Give every rank weights and states of its own again, and the memory back."""
        self.release()
        self._plane.meet("weights of their own")
        if self._plane.rank == 0:
            for segment in self._segments.values():
                segment.free()

    def release(self) -> None:
        """Give this rank weights and states of its own again."""
        self._look_at([view.clone() for view in self._weights[self._current].views])
        for param in self._params:
            state = self._optimizer.state.get(param, {})
            for name, value in state.items():
                state[name] = value.clone() if isinstance(value, Tensor) else value
