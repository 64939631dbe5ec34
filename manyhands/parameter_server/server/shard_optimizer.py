"""A server's part of the weights: from gradients in rows of memory to the next version, fused where it can be.

An optimizer that has a fused version (`fused_update`) runs on chunks of tensors; any other of torch's runs on whole
tensors of this server's own, whose new values and states are copied to where the others, and this server's successor,
find them. Nothing counts before the caller has committed it: `update` can be done again. Start reading at
`ServedPart.update`.
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
    Piece,
    counts_steps,
    pack_pieces,
    run_update,
)
from manyhands.parameter_server.memory.optimizer_states import load_states, store_states
from manyhands.parameter_server.memory.versioned_memory import ServedMemory
from manyhands.parameter_server.protocol.chunk_placement import Chunk

__all__ = ["FusedPart", "Gradient", "ServedPart", "WholePart"]

_LINE = 16


class Gradient(NamedTuple):
    """What one update is made of: rows in the order of their slices, and what their sum is multiplied by."""

    rows: tuple[int, ...]
    present: Sequence[int]
    """Parameters that have a gradient in some row."""
    factor: float


class ServedPart(ABC):
    """`chunks` of the memory's parameters are this server's; others of the `optimizer`'s it leaves alone."""

    def __init__(
        self, memory: ServedMemory, optimizer: Optimizer, chunks: Sequence[Chunk], clip_norm: float | None
    ) -> None:
        self._memory, self.optimizer, self._chunks, self._clip_norm = memory, optimizer, list(chunks), clip_norm
        self._place = {id(param): place for place, param in enumerate(memory.params)}

    @abstractmethod
    def resume(self, version: int, counts: Sequence[int], more: bytes) -> None:
        """Take over weights and states of this version. `counts` and `more` are what was committed with it."""

    @abstractmethod
    def update(self, version: int, gradient: Gradient) -> float | None:
        """Make the version after this one; the gradient's norm, if it was needed."""

    @abstractmethod
    def updated(self, version: int) -> None:
        """What `update` made of this version is committed."""

    @abstractmethod
    def counts(self) -> list[int]:
        """By parameter, with the last update: how many steps its states have seen."""

    def more(self) -> bytes:
        """What else a successor needs to know of the last update."""
        return b""

    def close(self) -> None:  # noqa: B027  most have nothing to close
        """Nothing more comes."""

    def _total(self, gradient: Gradient) -> list[Tensor | None]:
        """The sum along the tree, by parameter, in memory of this process; scaled."""
        rows = [self._memory.row(number).views for number in gradient.rows]
        count, there = len(rows), set(gradient.present)
        return [
            finish({(0, v): row[place] for v, row in enumerate(rows)}, count, torch.add) * gradient.factor
            if place in there
            else None
            for place in range(len(self._memory.params))
        ]

    def _clip(self, total: Sequence[Tensor | None]) -> tuple[float, float]:
        """The norm of the whole gradient, of which this server may have a part only, and what to multiply by."""
        norm = global_norm(grad for grad in total if grad is not None)
        return norm, clip_factor(norm, self._clip_norm)


class FusedPart(ServedPart):
    """Gradients are summed on their way into new weights, block by block."""

    def __init__(
        self, memory: ServedMemory, optimizer: Optimizer, chunks: Sequence[Chunk], clip_norm: float | None
    ) -> None:
        super().__init__(memory, optimizer, chunks, clip_norm)
        self._version = 0
        self._counts_steps = counts_steps(optimizer)
        self._batches: list[Batch] = []
        optimizer.state.clear()  # some have states from the beginning; those that count are in memory
        self._fused = Fused(optimizer, self._state)
        # Parameters that are not trained now have no place in memory, and take no part.
        self._in_optimizer = [self._place.get(id(param), -1) for param in self._fused.params]
        self._stretches = self._merge(chunks)
        self._threads = ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), "served-update")

    def _merge(self, chunks: Sequence[Chunk]) -> dict[int, list[tuple[int, int]]]:
        """By place, this server's elements of the one section that all parameters are in."""
        found: dict[int, list[tuple[int, int]]] = {}
        for place, start, stop in chunks:
            base = self._memory.flat.starts[place]
            found.setdefault(place, []).append((base + start, base + -(-stop // _LINE) * _LINE))
        return found

    def _state(self, param: Tensor, name: str, start: float) -> Tensor:
        view = self._memory.states(name, self._version).views[self._place[id(param)]]
        if start:
            for place, low, high in self._chunks:
                if place == self._place[id(param)]:
                    in_memory_order(view)[low:high] = start
        return view

    def resume(self, version: int, counts: Sequence[int], more: bytes) -> None:
        self._version, self._batches = version, []
        self._look(version)
        self.optimizer.state.clear()
        places = range(len(self._memory.params))
        load_states(self._memory, self.optimizer, version, counts, more, places, whole=False)
        self._fused.adopt()

    def _look(self, version: int) -> None:
        for param, view in zip(self._memory.params, self._memory.weights(version).views, strict=True):
            param.data = view

    def update(self, version: int, gradient: Gradient) -> float | None:
        self._version, there = version, set(gradient.present)
        numbers = [number for number, place in enumerate(self._in_optimizer) if place in there]
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
        """As a row, in memory of this process."""
        flat = self._memory.flat
        self._sum = torch.empty(flat.sections[0].numel)
        return [
            self._sum[start : start + param.numel()].as_strided(param.shape, param.stride())
            for start, param in zip(flat.starts, self._memory.params, strict=True)
        ]

    def _apply(self, batch: Batch, version: int, rows: Sequence[int], along: bytes, how: bytes) -> None:
        places = [self._in_optimizer[number] for number in batch.members]
        stretches = _joined([stretch for place in places for stretch in self._stretches.get(place, ())])
        num_threads = torch.get_num_threads() if sum(b - a for a, b in stretches) >= 2 * WORTH_A_THREAD else 1
        calls = []
        for mine in _cut(stretches, num_threads):
            pieces, sources = self._pieces(batch, version, mine, rows)
            calls.append((how, pieces, sources, along))
        others = [self._threads.submit(run_update, *call) for call in calls[1:]]
        for call in calls[:1]:
            run_update(*call)
        for other in others:
            other.result()

    def _pieces(
        self, batch: Batch, version: int, stretches: Sequence[tuple[int, int]], rows: Sequence[int]
    ) -> tuple[bytes, bytes]:
        memory, names = self._memory, self._fused.state_names(batch.members[0])
        old, new = (
            [memory.weights(v).segment.address, *(memory.states(n, v).segment.address if n else 0 for n in names)]
            for v in (version, version + 1)
        )
        pieces, sources = [], list[int]()
        for start, stop in stretches:
            (old_w, *olds), (new_w, *news) = (
                [base + 4 * start if base else 0 for base in bases] for bases in (old, new)
            )
            pieces.append(Piece(stop - start, old_w, new_w, tuple(olds), tuple(news)))
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
        self._look(version + 1)
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


def _joined(stretches: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in sorted(stretches):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def _cut(stretches: Sequence[tuple[int, int]], num_parts: int) -> list[list[tuple[int, int]]]:
    """In parts of about the same length, cut at cache lines."""
    total, parts, done = sum(stop - start for start, stop in stretches), list[list[tuple[int, int]]](), 0
    part: list[tuple[int, int]] = []
    for first, stop in stretches:
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


class WholePart(ServedPart):
    """The optimizer runs as it is, on tensors of this process. Weights and states are copied out after every update."""

    def __init__(
        self, memory: ServedMemory, optimizer: Optimizer, chunks: Sequence[Chunk], clip_norm: float | None
    ) -> None:
        super().__init__(memory, optimizer, chunks, clip_norm)
        self._mine = sorted({chunk.place for chunk in chunks})
        self._counts, self._more = [0] * len(memory.params), b""
        self._committed = self._counts, self._more
        self._is_fresh = False
        """Tensors and states of this process are those of the version that is committed."""

    def resume(self, version: int, counts: Sequence[int], more: bytes) -> None:
        self._committed, self._is_fresh = (list(counts), more), False

    def _catch_up(self, version: int) -> None:
        """What an update that was not committed has left behind is put right."""
        if not self._is_fresh:
            weights = self._memory.weights(version).views
            for place in self._mine:
                self._memory.params[place].data = weights[place].clone()
            load_states(self._memory, self.optimizer, version, *self._committed, self._mine, whole=True, copy=True)

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

    def counts(self) -> list[int]:
        return self._counts

    def more(self) -> bytes:
        return self._more
