"""Weights that the ranks of one host share: each updates its part, once, for everybody.

Parameters and the optimizer's states lie in shared memory, one copy per host. After all gradients are there, a rank
sums its part of them along the tree and turns it into new weights in the same pass (native/update.c); a meeting later
everybody computes with them. Nothing is gathered. With clipping or loss scaling the sums are made first, since their
norm decides.

Whatever else writes to a parameter writes for all ranks: weights change by hand inside `editing` only, where the
others' look at copies of their own. Start reading at `SharedWeights.apply`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.comm.segments import Segment
from manyhands.comm.shared_memory import Plane
from manyhands.native import library
from manyhands.parallel.fused import Batch, Fused, Piece, fusible, pack_pieces, state_names
from manyhands.parallel.norms import blocks_of, norm_of, squares_of
from manyhands.parallel.shared_gradients import SharedGradients

__all__ = ["SharedWeights", "shareable"]

_LINE_FLOATS = 16


def shareable(params: Sequence[nn.Parameter], optimizer: Optimizer) -> str:
    """Why these weights cannot be shared under this optimizer; empty where they can."""
    why = fusible(optimizer, params)
    if why:
        return why
    known = set(map(id, params))
    if any(id(param) not in known for group in optimizer.param_groups for param in group["params"]):
        return "the optimizer has parameters that are not the model's, or are frozen"
    return ""


class SharedWeights:
    """Rank 0's weights, for all ranks, from now on. Every rank makes one at the same time."""

    def __init__(
        self,
        gradients: SharedGradients,
        optimizer: Optimizer,
        plane: Plane,
        memory: Callable[[str, int], Segment],
    ) -> None:
        self._gradients, self._plane, self._memory = gradients, plane, memory
        self._flat, self._params = gradients.flat, gradients.params
        # All memory first: where there is not enough, nothing has changed yet.
        self._segment = memory("weights", self._flat.num_bytes)
        self._states: dict[str, tuple[Segment, list[Tensor]]] = {}
        for name in state_names(optimizer):
            self._add_state(name)
        self._views = self._flat.views(self._params, self._segment)
        self._place = {id(param): place for place, param in enumerate(self._params)}
        self._part = self._flat.sections[0].part(plane.rank, plane.world) if self._flat.sections else range(0)
        if plane.rank == 0:
            for view, param in zip(self._views, self._params, strict=True):
                view.copy_(param.detach())
        plane.meet("weights of rank 0")
        self._look_at(self._views)
        self._fused = Fused(optimizer, self._state)
        self._in_optimizer = [self._place[id(param)] for param in self._fused.params]

    def _look_at(self, values: Sequence[Tensor]) -> None:
        for param, value in zip(self._params, values, strict=True):
            param.data = value

    def _state(self, param: Tensor, name: str, start: float) -> Tensor:
        """Memory for a state of the optimizer. Fresh memory is zero, and other ranks may be updating theirs already."""
        if name not in self._states:
            self._add_state(name)
        segment, views = self._states[name]
        place = self._place[id(param)]
        low, high = self._own(place)
        if start and low < high:
            torch.frombuffer(segment.buffer, dtype=torch.float32, count=high - low, offset=4 * low).fill_(start)
        return views[place]

    def _add_state(self, name: str) -> None:
        segment = self._memory(f"state {name}", self._flat.num_bytes)
        self._states[name] = segment, self._flat.views(self._params, segment)

    def _own(self, place: int) -> tuple[int, int]:
        """This rank's part of a parameter, in elements of the whole, up to the next parameter's start."""
        start = self._flat.starts[place]
        stop = start + -(-self._params[place].numel() // _LINE_FLOATS) * _LINE_FLOATS
        return max(start, self._part.start), min(stop, self._part.stop)

    # ---- the update ----

    def scale(self, factor: float) -> None:
        self._factor, self._clip, self._summed = factor, 1.0, False

    def clip(self, factor: float) -> None:
        self._clip = factor

    def apply(self) -> None:
        """Sum this rank's part of the gradients and update its part of the weights; then wait for the others."""
        present = set(self._gradients.present)
        numbers = [number for number, place in enumerate(self._in_optimizer) if place in present]
        for batch in self._fused.begin_step(numbers):
            self._apply(batch)
        self._plane.meet("new weights")

    def _apply(self, batch: Batch) -> None:
        stretches = self._stretches(batch)
        if not stretches:
            return
        base, names = self._segment.address, self._fused.state_names(batch.members[0])
        bases = [self._states[name][0].address if name is not None else 0 for name in names]
        pieces, sources = [], []
        for start, stop in stretches:
            states = tuple(state + 4 * start if state else 0 for state in bases)
            pieces.append(Piece(stop - start, base + 4 * start, base + 4 * start, states, states))
            rows = self._gradients.addresses(4 * start)
            sources += rows[:1] if self._summed else rows
        program = _SUMMED if self._summed else self._gradients.program
        how = self._fused.how(batch, self._factor, self._clip)
        code = library.update(how, pack_pieces(pieces), struct.pack(f"{len(sources)}Q", *sources), program)
        assert code == 0 or code == library.NO_MEMORY, code
        if code:
            raise MemoryError("no memory for an update")

    def _stretches(self, batch: Batch) -> list[tuple[int, int]]:
        """This rank's part of the batch's parameters, in elements; neighbours in one piece, with the gap between."""
        found: list[tuple[int, int]] = []
        for number in batch.members:
            place = self._in_optimizer[number]
            start, stop = self._own(place)
            if start >= stop:
                continue
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], stop)
            else:
                found.append((start, stop))
        return found

    def norm(self) -> float:
        """Of the whole scaled gradient; ranks share the work."""
        total = self._gradients.total()
        self._summed = True
        blocks = list(blocks_of(total[place] for place in self._gradients.present))
        rank, world = self._plane.rank, self._plane.world
        mine = blocks[len(blocks) * rank // world : len(blocks) * (rank + 1) // world]
        squares = torch.zeros(-(-len(blocks) // world), dtype=torch.float64)
        squares[: len(mine)] = squares_of([block * self._factor for block in mine])
        everyone = torch.empty(world * len(squares), dtype=torch.float64)
        self._plane.all_gather(everyone, squares, "norm")
        sizes = [len(blocks) * (r + 1) // world - len(blocks) * r // world for r in range(world)]
        return norm_of(torch.cat([row[:size] for row, size in zip(everyone.view(world, -1), sizes, strict=True)]))

    # ---- by hand ----

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Inside, rank 0 writes to the weights that all share, and the others to copies that are dropped."""
        self._plane.meet("editing")
        if self._plane.rank:
            self._look_at([view.clone() for view in self._views])
        try:
            yield
        finally:
            self._plane.meet("edited weights")
            if self._plane.rank:
                self._look_at(self._views)

    def close(self) -> None:
        """Give every rank weights and states of its own again."""
        self._fused.close()
        self._look_at([view.clone() for view in self._views])
        for param in self._fused.params:
            state = self._fused.optimizer.state.get(param, {})
            for name in self._states.keys() & state.keys():
                state[name] = state[name].clone()
        self._plane.meet("weights of their own")
        if self._plane.rank == 0:
            for segment in (self._segment, *(segment for segment, _ in self._states.values())):
                segment.free()


_SUMMED = struct.pack("i", 0)
