"""Weights that the ranks of one host share: each rank updates its part, once, for all ranks of the host.

Parameters and optimizer state are in shared memory, one copy per host. When all gradients are there, a rank sums its
part of them along the tree and computes the new weights in the same pass (native/update.c); after a barrier all ranks
use them. There is no gather. With clipping or loss scaling the sums are made first, since their norm is needed.

With `copies=2` an update reads one copy of weights and optimizer state, writes the other, and a flip makes that the
current one. A worker that is killed at any instruction of an update leaves the old copy intact, and any other rank can
repeat its part from its gradients (`finish_for`), which are still there. Start reading at `FusedSharedWeights.apply`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.comm.host_memory import Segment
from manyhands.comm.shared_memory import Plane
from manyhands.errors import TrainingFailed
from manyhands.parallel.gradients.shared_memory_sum import SharedMemorySum
from manyhands.parallel.gradients.slice_tree import ONE
from manyhands.parallel.replicas.fingerprint import fingerprint
from manyhands.parallel.weights.fused_update import (
    BLOCK,
    Batch,
    Fused,
    ParameterRange,
    fusible,
    pack_pieces,
    run_update,
    state_names,
)
from manyhands.parallel.weights.shared_memory_weights import SharedMemoryWeights

__all__ = ["FusedSharedWeights", "shareable"]

_LINE_FLOATS = 16


def shareable(params: Sequence[nn.Parameter], optimizer: Optimizer) -> str:
    """Why these weights cannot be shared with this optimizer; empty if they can."""
    why = fusible(optimizer, params)
    if why:
        return why
    known = set(map(id, params))
    if any(id(param) not in known for group in optimizer.param_groups for param in group["params"]):
        return "the optimizer has parameters that are not the model's, or are frozen"
    return ""


class _Table(NamedTuple):
    """A rank's pieces of a batch and their gradients, packed for native/update.c."""

    pieces: bytes
    sources: bytes
    num_blocks: int


class FusedSharedWeights(SharedMemoryWeights):
    """Makes all ranks share rank 0's weights. Every rank constructs one at the same time."""

    def __init__(
        self,
        gradients: SharedMemorySum,
        optimizer: Optimizer,
        plane: Plane,
        memory: Callable[[str, int], Segment],
        *,
        copies: int = 1,
        current: int | None = None,
    ) -> None:
        """`current` is for a rank that joins later, which constructs one alone: the copy that the other ranks use."""
        super().__init__(gradients, optimizer, plane, memory, copies=copies)
        # Allocate all memory first: if there is not enough, nothing has changed yet.
        self._states = {name: self._keep(f"state {name}") for name in state_names(optimizer)}
        self._digests_left: dict[int, Tensor] = {}
        """By parameter group, digests of the blocks of this rank's part as the last update left them."""
        self._in_optimizer = [self._index_of[id(p)] for group in optimizer.param_groups for p in group["params"]]
        self._begin_sharing(current)
        self._fused = Fused(optimizer, self._state)
        self._tables: dict[tuple[object, ...], _Table] = {}

    def _state(self, param: Tensor, name: str, start: float) -> Tensor:
        """Memory for optimizer state. New memory is zero, and other ranks may be updating their parts already."""
        self._digests_left.clear()
        if name not in self._states:
            self._states[name] = self._keep(f"state {name}")
        segment, views = self._states[name][self._current]
        index = self._index_of[id(param)]
        # With two copies no rank writes to this one in a step, so it is filled for ranks that are lost in it, too.
        mine = self._part_of(self._plane.rank) if self._copies == 1 else range(self._flat.num_bytes // 4)
        low, high = self._overlap(index, mine)
        if start and low < high:
            _range_of(segment, low, high).fill_(start)
        return views[index]

    def _part_of(self, rank: int) -> range:
        """All weights have one dtype, so there is one section."""
        return self._flat.sections[0].part(rank, self._plane.world)

    def _overlap(self, index: int, part: range) -> tuple[int, int]:
        """The elements of a parameter that are in `part`, as positions in the flat memory, with the gap after it."""
        start = self._flat.starts[index]
        stop = start + -(-self._params[index].numel() // _LINE_FLOATS) * _LINE_FLOATS
        return max(start, part.start), min(stop, part.stop)

    # ---- the update ----

    @property
    def is_current(self) -> bool:
        return self._fused.is_current

    def scale(self, factor: float) -> None:
        self._check_untouched()
        if not self.is_current:
            raise TrainingFailed(
                "Parameters were added to the optimizer while the workers of this host share their weights.",
                fix=["optimizer.add_param_group(...) inside `with trainer.editing():`"],
            )
        self._factor, self._clip, self._summed = factor, 1.0, False

    def clip(self, factor: float) -> None:
        self._clip = factor

    def apply(self) -> None:
        """Sum this rank's part of the gradients and update its part of the weights; then wait for the other ranks."""
        self._batches = self._fused.plan_step(self._numbers())
        left = self.finish_for(self._plane.rank)
        self._plane.barrier("new weights")
        self._check_alarm()
        self._digests_left = left
        self._fused.step_taken(self._batches)
        self._flip()
        self._note_versions()

    def finish_for(self, rank: int) -> dict[int, Tensor]:
        """Do a rank's part of the update. With two copies it can be repeated for any rank until the flip.

        Returns, if memory is checked, the digests of what it wrote by parameter group.
        """
        left: dict[int, Tensor] = {}
        for batch in self._batches:
            how = self._fused.how(batch, self._factor, self._clip)
            program = ONE if self._summed else self._gradients.program
            table = self._table(batch, rank)
            if not (self._watch_every and rank == self._plane.rank and self._fused.is_whole_group(batch)):
                run_update(how, table.pieces, table.sources, program)
                continue
            digests = torch.empty(2, table.num_blocks, dtype=torch.int64)
            watch = struct.pack("2Q", digests[0].data_ptr(), digests[1].data_ptr())
            run_update(how, table.pieces, table.sources, program, watch)
            self._compare(batch, digests[0])
            left[batch.group] = digests[1]
        if self._copies > 1:
            self._copy_unchanged(rank)
        return left

    def _compare(self, batch: Batch, found: Tensor) -> None:
        before = self._digests_left.get(batch.group)
        if before is None or torch.equal(before, found):
            return
        block = int((before != found).nonzero()[0])
        blocks = [
            range(low, min(low + BLOCK, stop))
            for start, stop in self._ranges(batch, self._plane.rank)
            for low in range(start, stop, BLOCK)
        ]
        indices = [self._in_optimizer[number] for number in batch.members]
        overlaps = [(index, *self._overlap(index, blocks[block])) for index in indices]
        self._raise_alarm(next(index for index, low, high in overlaps if low < high))

    def accept(self) -> None:
        super().accept()
        self._digests_left.clear()

    def digest_of_part(self) -> int:
        """The digest of this rank's part of weights and optimizer state, to compare with other hosts' copies."""
        part = self._part_of(self._plane.rank)
        kept = {"weights": self._weights, **dict(sorted(self._states.items()))}
        return fingerprint(
            (name, _range_of(copies[self._current].segment, part.start, part.stop)) for name, copies in kept.items()
        )

    def _flip(self) -> None:
        if self._copies == 1:
            return
        self.look_at_copy(self._next)

    def look_at_copy(self, current: int) -> None:
        super().look_at_copy(current)
        for index in self._in_optimizer:
            state = self._optimizer.state.get(self._params[index], {})
            for name in self._states.keys() & state.keys():
                state[name] = self._states[name][current].views[index]

    def move(self, plane: Plane) -> None:
        super().move(plane)
        self._tables.clear()  # the ranks' parts have changed
        self._digests_left.clear()

    @property
    def _next(self) -> int:
        return (self._current + 1) % self._copies

    def _copy_unchanged(self, rank: int) -> None:
        """Copy what this step does not change into the next copy."""
        changed = {self._in_optimizer[number] for batch in self._batches for number in batch.members}
        part = self._part_of(rank)
        for index in range(len(self._params)) if len(changed) < len(self._params) else ():
            low, high = self._overlap(index, part)
            for kept in (self._weights, *self._states.values()) if index not in changed and low < high else ():
                new, old = (_range_of(kept[i].segment, low, high) for i in (self._next, self._current))
                new.copy_(old)

    def _numbers(self) -> Sequence[int]:
        """The optimizer's parameters that have a gradient."""
        present = self._gradients.present
        if len(present) == len(self._params):
            return range(len(self._in_optimizer))
        with_gradient = set(present)
        return [number for number, index in enumerate(self._in_optimizer) if index in with_gradient]

    def _table(self, batch: Batch, rank: int) -> _Table:
        """A rank's pieces of the batch and their gradients; cached for a whole group while gradient buffers stay."""
        if not self._fused.is_whole_group(batch):
            return self._make_table(batch, rank)
        key = (batch.group, rank, self._current, self._summed, self._gradients.starts)
        if key not in self._tables:
            self._tables[key] = self._make_table(batch, rank)
        return self._tables[key]

    def _make_table(self, batch: Batch, rank: int) -> _Table:
        names = self._fused.state_names(batch.members[0])
        kept = [self._weights, *(self._states[name] if name is not None else None for name in names)]
        old, new = ([k[i].segment.address if k else 0 for k in kept] for i in (self._current, self._next))
        pieces, sources = [], []
        for start, stop in self._ranges(batch, rank):
            (old_w, *olds), (new_w, *news) = (
                [base + 4 * start if base else 0 for base in bases] for bases in (old, new)
            )
            pieces.append(ParameterRange(stop - start, old_w, new_w, tuple(olds), tuple(news)))
            at = 4 * start
            sources += [self._gradients.total_address(at)] if self._summed else self._gradients.addresses(at)
        num_blocks = sum(-(-piece.numel // BLOCK) for piece in pieces)
        return _Table(pack_pieces(pieces), struct.pack(f"{len(sources)}Q", *sources), num_blocks)

    def _ranges(self, batch: Batch, rank: int) -> list[tuple[int, int]]:
        """A rank's part of the batch's parameters as element ranges; neighbours are joined, with the gap between."""
        ranges: list[tuple[int, int]] = []
        part = self._part_of(rank)
        for number in batch.members:
            start, stop = self._overlap(self._in_optimizer[number], part)
            if start >= stop:
                continue
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        return ranges

    def norm(self) -> float:
        self._summed = True
        return self._gradients.norm(self._gradients.total(), self._factor)

    def release(self) -> None:
        self._fused.close()
        super().release()


def _range_of(segment: Segment, start: int, stop: int) -> Tensor:
    return torch.frombuffer(segment.buffer, dtype=torch.float32, count=stop - start, offset=4 * start)
