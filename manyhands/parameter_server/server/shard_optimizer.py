"""A server's shard of the weights: from gradients in buffers to the next version, with a fused update where possible.

An optimizer that has a fused version (`fused_update`) runs on chunks of tensors; any other torch optimizer runs on
whole tensors in private memory, whose new values and states are copied to where the workers and this server's
successor find them. Nothing counts before the caller has committed it: `update` can be repeated. Start reading at
`ShardOptimizer.update`.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.parallel.gradients.gradient_norm import clip_factor, global_norm
from manyhands.parallel.gradients.slice_tree import ONE, finish, program
from manyhands.parallel.model.flat_layout import in_memory_order
from manyhands.parallel.weights.fused_update import (
    WORTH_A_THREAD,
    Batch,
    Fused,
    ParameterRange,
    counts_steps,
    pack_pieces,
    run_update,
)
from manyhands.parameter_server.memory.optimizer_states import load_states, store_states
from manyhands.parameter_server.memory.versioned_memory import VersionedMemory
from manyhands.parameter_server.protocol.chunk_placement import Chunk

__all__ = ["FusedShardOptimizer", "Gradient", "ShardOptimizer", "WholeShardOptimizer"]

_LINE = 16


class Gradient(NamedTuple):
    """The input of one update: gradient buffers in the order of their slices, and a factor for their sum."""

    rows: tuple[int, ...]
    present: Sequence[int]
    """Parameters that have a gradient in at least one buffer."""
    factor: float


class ShardOptimizer(ABC):
    """Updates this server's `chunks` of the parameters; other parameters of `optimizer` stay untouched."""

    def __init__(
        self, memory: VersionedMemory, optimizer: Optimizer, chunks: Sequence[Chunk], clip_norm: float | None
    ) -> None:
        self._memory, self.optimizer, self._chunks, self._clip_norm = memory, optimizer, list(chunks), clip_norm
        self._param_index = {id(param): place for place, param in enumerate(memory.params)}

    @abstractmethod
    def resume(self, version: int, counts: Sequence[int], more: bytes) -> None:
        """Load weights and states of this version. `counts` and `more` were committed with it."""

    @abstractmethod
    def update(self, version: int, gradient: Gradient) -> float | None:
        """Compute the version after this one. Returns the gradient's norm, if it was needed."""

    @abstractmethod
    def updated(self, version: int) -> None:
        """What `update` computed from this version is committed."""

    @abstractmethod
    def counts(self) -> list[int]:
        """By parameter, after the last update: how many steps its state has seen."""

    def more(self) -> bytes:
        """What else a successor needs of the last update."""
        return b""

    def close(self) -> None:  # noqa: B027  most have nothing to close
        """No more updates follow."""

    def _total(self, gradient: Gradient) -> list[Tensor | None]:
        """The sum along the tree, by parameter, in private memory; scaled."""
        rows = [self._memory.row(number).views for number in gradient.rows]
        count, present = len(rows), set(gradient.present)
        return [
            finish({(0, v): row[place] for v, row in enumerate(rows)}, count, torch.add) * gradient.factor
            if place in present
            else None
            for place in range(len(self._memory.params))
        ]

    def _clip(self, total: Sequence[Tensor | None]) -> tuple[float, float]:
        """The norm of the whole gradient, of which this server may own a part only, and the factor to clip with."""
        norm = global_norm(grad for grad in total if grad is not None)
        return norm, clip_factor(norm, self._clip_norm)


class FusedShardOptimizer(ShardOptimizer):
    """Sums the gradients while it computes new weights, block by block."""

    def __init__(
        self, memory: VersionedMemory, optimizer: Optimizer, chunks: Sequence[Chunk], clip_norm: float | None
    ) -> None:
        super().__init__(memory, optimizer, chunks, clip_norm)
        self._version = 0
        self._counts_steps = counts_steps(optimizer)
        self._batches: list[Batch] = []
        optimizer.state.clear()  # some optimizers create states at once; the valid ones are in memory
        self._fused = Fused(optimizer, self._state)
        # Frozen parameters have no memory here, and are left out.
        self._in_optimizer = [self._param_index.get(id(param), -1) for param in self._fused.params]
        self._ranges = self._merge(chunks)
        self._threads = ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), "served-update")

    def _merge(self, chunks: Sequence[Chunk]) -> dict[int, list[tuple[int, int]]]:
        """By parameter index, this server's elements of the one section that all parameters are in."""
        found: dict[int, list[tuple[int, int]]] = {}
        for place, start, stop in chunks:
            base = self._memory.flat.starts[place]
            found.setdefault(place, []).append((base + start, base + -(-stop // _LINE) * _LINE))
        return found

    def _state(self, param: Tensor, name: str, start: float) -> Tensor:
        view = self._memory.states(name, self._version).views[self._param_index[id(param)]]
        if start:
            for place, low, high in self._chunks:
                if place == self._param_index[id(param)]:
                    in_memory_order(view)[low:high] = start
        return view

    def resume(self, version: int, counts: Sequence[int], more: bytes) -> None:
        self._version, self._batches = version, []
        self._point_to_version(version)
        self.optimizer.state.clear()
        places = range(len(self._memory.params))
        load_states(self._memory, self.optimizer, version, counts, more, places, whole=False)
        self._fused.adopt()

    def _point_to_version(self, version: int) -> None:
        for param, view in zip(self._memory.params, self._memory.weights(version).views, strict=True):
            param.data = view

    def update(self, version: int, gradient: Gradient) -> float | None:
        self._version, present = version, set(gradient.present)
        numbers = [number for number, place in enumerate(self._in_optimizer) if place in present]
        self._batches = self._fused.plan_step(numbers)
        norm, clip, factor = None, 1.0, gradient.factor
        rows, along = [self._memory.row(row).segment.address for row in gradient.rows], _program(len(gradient.rows))
        if self._clip_norm is not None:
            total, views = self._total(gradient), self._sum_views()
            norm, clip = self._clip(total)
            for view, grad in zip(views, total, strict=True):
                if grad is not None:
                    view.copy_(grad)
            rows, along, factor = [self._sum.data_ptr()], ONE, 1.0
        for batch in self._batches:
            self._apply(batch, version, rows, along, self._fused.how(batch, factor, clip))
        self._carry_over(version, {self._in_optimizer[number] for batch in self._batches for number in batch.members})
        return norm

    def _sum_views(self) -> list[Tensor]:
        """Laid out like a gradient buffer, in private memory."""
        flat = self._memory.flat
        self._sum = torch.empty(flat.sections[0].numel)
        return [
            self._sum[start : start + param.numel()].as_strided(param.shape, param.stride())
            for start, param in zip(flat.starts, self._memory.params, strict=True)
        ]

    def _apply(self, batch: Batch, version: int, rows: Sequence[int], along: bytes, how: bytes) -> None:
        places = [self._in_optimizer[number] for number in batch.members]
        ranges = _joined([one for place in places for one in self._ranges.get(place, ())])
        num_threads = torch.get_num_threads() if sum(b - a for a, b in ranges) >= 2 * WORTH_A_THREAD else 1
        calls = []
        for mine in _cut(ranges, num_threads):
            pieces, sources = self._pieces(batch, version, mine, rows)
            calls.append((how, pieces, sources, along))
        others = [self._threads.submit(run_update, *call) for call in calls[1:]]
        for call in calls[:1]:
            run_update(*call)
        for other in others:
            other.result()

    def _pieces(
        self, batch: Batch, version: int, ranges: Sequence[tuple[int, int]], rows: Sequence[int]
    ) -> tuple[bytes, bytes]:
        memory, names = self._memory, self._fused.state_names(batch.members[0])
        old, new = (
            [memory.weights(v).segment.address, *(memory.states(n, v).segment.address if n else 0 for n in names)]
            for v in (version, version + 1)
        )
        pieces, sources = [], list[int]()
        for start, stop in ranges:
            (old_w, *olds), (new_w, *news) = (
                [base + 4 * start if base else 0 for base in bases] for bases in (old, new)
            )
            pieces.append(ParameterRange(stop - start, old_w, new_w, tuple(olds), tuple(news)))
            sources += [row + 4 * start for row in rows]
        return pack_pieces(pieces), struct.pack(f"{len(sources)}Q", *sources)

    def _carry_over(self, version: int, changed: set[int]) -> None:
        """What this update does not change is the same in the next version."""
        memory = self._memory
        names = {name for number in range(len(self._in_optimizer)) for name in self._fused.state_names(number) if name}
        for place, start, stop in self._chunks:
            if place in changed:
                continue
            kept = [(memory.weights(version), memory.weights(version + 1))]
            kept += [(memory.states(name, version), memory.states(name, version + 1)) for name in names]
            for old, new in kept:
                in_memory_order(new.views[place])[start:stop] = in_memory_order(old.views[place])[start:stop]

    def updated(self, version: int) -> None:
        self._fused.step_taken(self._batches)
        self._version = version + 1
        self._point_to_version(version + 1)
        for place in (place for place in self._in_optimizer if place >= 0):
            state = self.optimizer.state.get(self._memory.params[place], {})
            for name in state.keys() - {"step"}:
                state[name] = self._memory.states(name, version + 1).views[place]

    def counts(self) -> list[int]:
        stepping = {number for batch in self._batches for number in batch.members}
        found = [0] * len(self._memory.params)
        for number, place in enumerate(self._in_optimizer):
            if place < 0:
                continue
            seen = self._fused.seen(number)
            found[place] = seen + 1 if number in stepping and self._counts_steps else seen or int(number in stepping)
        return found

    def close(self) -> None:
        self._fused.close()
        self._threads.shutdown()


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def _cut(ranges: Sequence[tuple[int, int]], num_parts: int) -> list[list[tuple[int, int]]]:
    """Splits ranges into parts of about the same length, at cache lines."""
    total, parts, done = sum(stop - start for start, stop in ranges), list[list[tuple[int, int]]](), 0
    part: list[tuple[int, int]] = []
    for first, stop in ranges:
        start = first
        while start < stop:
            room = -(-(total * (len(parts) + 1) // num_parts - done) // _LINE) * _LINE
            end = min(stop, start + max(room, _LINE)) if len(parts) + 1 < num_parts else stop
            part.append((start, end))
            done, start = done + end - start, end
            if done >= total * (len(parts) + 1) // num_parts and len(parts) + 1 < num_parts:
                parts.append(part)
                part = []
    return [*parts, part] if part else parts


_programs: dict[int, bytes] = {}


def _program(count: int) -> bytes:
    if count not in _programs:
        _programs[count] = program([(0, v) for v in range(count)], count)
    return _programs[count]


class WholeShardOptimizer(ShardOptimizer):
    """The unchanged optimizer, on private tensors. Weights and states are copied out after every update."""

    def __init__(
        self, memory: VersionedMemory, optimizer: Optimizer, chunks: Sequence[Chunk], clip_norm: float | None
    ) -> None:
        super().__init__(memory, optimizer, chunks, clip_norm)
        self._mine = sorted({chunk.place for chunk in chunks})
        self._counts, self._more = [0] * len(memory.params), b""
        self._committed = self._counts, self._more
        self._is_fresh = False
        """The private tensors and states are those of the committed version."""
        self._iterations = self._read_iterations()
        """After the committed update, where the optimizer counts its updates in a setting."""

    def resume(self, version: int, counts: Sequence[int], more: bytes) -> None:
        self._committed, self._is_fresh = (list(counts), more), False
        self._iterations = self._read_iterations()

    def _read_iterations(self) -> list[int]:
        return [group["iterations"] for group in self.optimizer.param_groups if "iterations" in group]

    def _catch_up(self, version: int) -> None:
        """Undoes an update that was not committed."""
        if not self._is_fresh:
            weights = self._memory.weights(version).views
            for place in self._mine:
                self._memory.params[place].data = weights[place].clone()
            load_states(self._memory, self.optimizer, version, *self._committed, self._mine, whole=True, copy=True)
            for group, iterations in zip(self.optimizer.param_groups, self._iterations, strict=False):
                group["iterations"] = iterations

    def update(self, version: int, gradient: Gradient) -> float | None:
        self._catch_up(version)
        self._is_fresh = False
        total, norm = self._total(gradient), None
        if self._clip_norm is not None:
            norm, clip = self._clip(total)
            total = [None if grad is None else grad * clip for grad in total]
        for place in self._mine:
            self._memory.params[place].grad = total[place]
        self.optimizer.step()
        for place in self._mine:
            self._memory.weights(version + 1).views[place].copy_(self._memory.params[place].detach())
            self._memory.params[place].grad = None
        self._counts, self._more = store_states(self._memory, self.optimizer, version + 1, self._mine, whole=True)
        return norm

    def updated(self, version: int) -> None:
        self._committed, self._is_fresh = (self._counts, self._more), True
        self._iterations = self._read_iterations()

    def counts(self) -> list[int]:
        return self._counts

    def more(self) -> bytes:
        return self._more
