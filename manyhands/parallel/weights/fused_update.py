"""Optimizers as one pass over memory: which of torch's there is a fused version of here, and how it is applied.

A fused update reads gradients, weights and states once and writes them once (see native/update.c), and keeps its states
where torch keeps them, under torch's names: a checkpoint does not tell which of the two ran. It follows torch's own
operations; square roots may differ in the last bit. For the result not to depend on the number of workers, a run uses
it everywhere or nowhere. Its numbers of each step: `fused_optimizers`. Start reading at `fusible`, then `Fused.apply`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.native import library, why_not
from manyhands.parallel.gradients.slice_tree import ONE
from manyhands.parallel.weights.fused_optimizers import KINDS, Group

__all__ = [
    "BLOCK",
    "WORTH_A_THREAD",
    "Batch",
    "Fused",
    "Piece",
    "counts_steps",
    "fusible",
    "has_fused",
    "names_by_group",
    "pack_pieces",
    "run_update",
    "state_names",
]

MAX_STATES = 3
BLOCK = 1024
"""Elements of weights that native updates at a time, and has digests of: MH_BLOCK_BYTES of core.h."""
# Below so many elements each, handing work to a thread takes longer than it saves.
WORTH_A_THREAD = 2**17


def fusible(optimizer: Optimizer, params: Iterable[Tensor]) -> str:
    """Why this optimizer has no fused version here; empty where it has."""
    kind = KINDS.get(type(optimizer))
    if library is None:
        return why_not()
    if kind is None:
        return f"{type(optimizer).__name__} has no fused version"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "the optimizer has hooks around its steps"
    for group in optimizer.param_groups:
        for option in ("foreach", "fused", "capturable", "differentiable"):
            if group.get(option):
                return f"the optimizer was asked for {option}=True"
        if any(isinstance(value, Tensor) for value in _numbers(group)):
            return "a setting of the optimizer is a tensor"
    for param in params:
        if param.dtype != torch.float32 or param.device.type != "cpu":
            return f"a parameter is {param.dtype} on {param.device}"
    return ""


def has_fused(optimizer: Optimizer) -> bool:
    """Whether there is a fused version of its kind, which treats every element by itself."""
    return type(optimizer) in KINDS


def state_names(optimizer: Optimizer) -> list[str]:
    """The states, as long as the parameters, that this optimizer keeps."""
    return sorted({name for names in names_by_group(optimizer) for name in names})


def names_by_group(optimizer: Optimizer) -> list[list[str]]:
    """The same by group of parameters."""
    states = KINDS[type(optimizer)].states
    return [[name for name in states(group) if name is not None] for group in optimizer.param_groups]


def counts_steps(optimizer: Optimizer) -> bool:
    """Whether it keeps, for each parameter, the number of its steps beside those states."""
    return KINDS[type(optimizer)].counts_steps


def _numbers(group: Group) -> list[Any]:
    plain = [value for name, value in group.items() if name != "params" and not isinstance(value, tuple)]
    return [*plain, *group.get("betas", ())]


class Piece(NamedTuple):
    """A stretch of a parameter, as addresses: `struct mh_piece` of core.h."""

    numel: int
    old: int
    new: int
    old_states: tuple[int, ...]
    new_states: tuple[int, ...]


def pack_pieces(pieces: Iterable[Piece]) -> bytes:
    padding = (0,) * MAX_STATES
    numbers: list[int] = []
    for piece in pieces:
        olds, news = (*piece.old_states, *padding)[:MAX_STATES], (*piece.new_states, *padding)[:MAX_STATES]
        numbers += [piece.numel, piece.old, piece.new, *olds, *news]
    return struct.pack(f"{len(numbers)}Q", *numbers)


Cut = tuple[int, int, int]
"""Of which one of several tensors, from which element on, and how many."""


def cut(numels: Sequence[int], num_parts: int) -> list[list[Cut]]:
    """Tensors of these sizes in parts of about the same number of elements, cut at cache lines where they must be."""
    total, done = sum(numels), 0
    parts: list[list[Cut]] = []
    part: list[Cut] = []
    for member, numel in enumerate(numels):
        start = 0
        while start < numel or numel == 0:
            room = total * (len(parts) + 1) // num_parts - done if len(parts) + 1 < num_parts else total
            count = min(numel - start, max(16, -(-room // 16) * 16))
            part.append((member, start, count))
            start, done = start + count, done + count
            if len(parts) + 1 < num_parts and done >= total * (len(parts) + 1) // num_parts:
                parts.append(part)
                part = []
            if numel == 0:
                break
    return [*parts, part] if part else parts or [[]]


class Batch(NamedTuple):
    """Parameters that take the same numbers in a step."""

    group: int
    steps: int
    members: list[int]
    """Places in `Fused.params`."""


class Fused:
    """The fused version of `optimizer`, over its own states.

    `make_state(param, name, start)` gives a new state, like the parameter in shape and strides and filled with `start`;
    by default in memory of the process's own.
    """

    def __init__(self, optimizer: Optimizer, make_state: Callable[[Tensor, str, float], Tensor] | None = None) -> None:
        self.optimizer = optimizer
        self.params: list[Tensor] = [param for group in optimizer.param_groups for param in group["params"]]
        self._kind = KINDS[type(optimizer)]
        self._make_state = make_state or (lambda param, name, start: torch.full_like(param, start))
        self._group_of = [i for i, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        self._members = [
            [p for p, g in enumerate(self._group_of) if g == i] for i in range(len(optimizer.param_groups))
        ]
        self._threads = ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), "fused-update")  # starts none yet
        self.adopt()
        # Whoever loads states replaces them; what was known of the old ones no longer holds.
        self._loaded = optimizer.register_load_state_dict_post_hook(lambda _: self.adopt())

    @property
    def is_current(self) -> bool:
        """False once the optimizer was given further parameters (`add_param_group`): they would never be updated."""
        return len(self.params) == sum(len(group["params"]) for group in self.optimizer.param_groups)

    def close(self) -> None:
        self._loaded.remove()
        self._threads.shutdown()

    def adopt(self) -> None:
        """Take over states that are there, into memory of `make_state`."""
        self._steps = torch.zeros(len(self.params))
        self._counted = [0] * len(self.params)
        self._alike: int | None = None
        """How many steps every parameter has taken, where that is one number; `_counted` is then out of date."""
        self._known: set[int] = set()
        self._tables: dict[int, tuple[tuple[list[int], int], list[tuple[list[Cut], bytes]]]] = {}
        for place, param in enumerate(self.params):
            state = self.optimizer.state.get(param)
            if state and any(value is not None for value in state.values()):
                self._move_in(place, state)

    def _move_in(self, place: int, state: dict[str, Any]) -> None:
        for name in self.state_names(place):
            if name is not None and state.get(name) is not None:
                state[name] = self._make_state(self.params[place], name, 0.0).copy_(state[name])
        if self._kind.counts_steps:
            self._counted[place] = int(state["step"])
            self._steps[place] = self._counted[place]
            state["step"] = self._steps[place]
        self._known.add(place)

    def state_names(self, place: int) -> Sequence[str | None]:
        return self._kind.states(self.optimizer.param_groups[self._group_of[place]])

    def states(self, place: int) -> list[Tensor | None]:
        state = self.optimizer.state.get(self.params[place], {})
        return [state.get(name) if name is not None else None for name in self.state_names(place)]

    def plan_step(self, places: Sequence[int]) -> list[Batch]:
        """Who is updated how if these parameters take a step; makes the states that they still lack.

        Nothing counts before `step_taken`: until then a plan can be dropped and made again.
        """
        if len(places) == len(self.params) and self._all_alike():
            assert self._alike is not None
            steps = self._alike + 1 if self._kind.counts_steps else 1
            return [Batch(group, steps, members) for group, members in enumerate(self._members) if members]
        batches: dict[tuple[int, int], list[int]] = {}
        for place in places:
            fresh = place not in self._known
            if fresh:
                self._start_states(place)
            steps = self._steps_of(place) + 1 if self._kind.counts_steps else int(not fresh)
            batches.setdefault((self._group_of[place], steps), []).append(place)
        return [Batch(group, steps, members) for (group, steps), members in batches.items()]

    def _all_alike(self) -> bool:
        """The usual case: all parameters have taken the same steps, so a group is a batch."""
        if self._alike is None and len(self._known) == len(self.params) and len(set(self._counted)) <= 1:
            self._alike = self._counted[0] if self._counted else 0
        return self._alike is not None

    def seen(self, place: int) -> int:
        """How many steps its states have seen; where none are counted, 1 once there are states."""
        return self._steps_of(place) if self._kind.counts_steps else int(place in self._known)

    def _steps_of(self, place: int) -> int:
        return self._counted[place] if self._alike is None else self._alike

    def step_taken(self, batches: Sequence[Batch]) -> None:
        """The planned step was done."""
        if self._kind.counts_steps:
            self._count(batches)
        self._known.update(place for batch in batches for place in batch.members)
        # What a scheduler looks for, to warn of steps in the wrong order.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def _count(self, batches: Sequence[Batch]) -> None:
        if self._alike is not None and sum(len(batch.members) for batch in batches) == len(self.params):
            self._alike += 1
            self._steps += 1
            return
        if self._alike is not None:
            self._counted, self._alike = [self._alike] * len(self.params), None
        places = [place for batch in batches for place in batch.members]
        for place in places:
            self._counted[place] += 1
        self._steps[torch.tensor(places, dtype=torch.int64)] += 1

    def _start_states(self, place: int) -> None:
        if not self._kind.counts_steps and not self.state_names(place):
            return
        state = self.optimizer.state[self.params[place]]
        start = self._kind.starts_at(self.optimizer.param_groups[self._group_of[place]])
        if self._kind.counts_steps:
            state["step"] = self._steps[place]
        for name in self.state_names(place):
            if name is not None:
                state[name] = self._make_state(self.params[place], name, start)

    def how(self, batch: Batch, factor: float = 1.0, clip: float = 1.0) -> bytes:
        return self._kind.how(self.optimizer.param_groups[batch.group], batch.steps).pack(factor, clip)

    def is_whole_group(self, batch: Batch) -> bool:
        return batch.members is self._members[batch.group]

    def apply(self) -> None:
        """What `optimizer.step()` does with the gradients in `.grad`, on as many threads as torch has."""
        batches = self.plan_step([place for place, param in enumerate(self.params) if param.grad is not None])
        for batch in batches:
            params = [self.params[place] for place in batch.members]
            gradients = [like(param) for param in params]  # some are copies that must live until they are used
            addresses = [grad.data_ptr() for grad in gradients]
            how, calls = self.how(batch), []
            for cuts, table in self._tables_of(batch, [param.data_ptr() for param in params]):
                sources = [addresses[member] + 4 * start for member, start, _ in cuts]
                calls.append((how, table, struct.pack(f"{len(sources)}Q", *sources), ONE))
            others = [self._threads.submit(run_update, *call) for call in calls[1:]]
            run_update(*calls[0])
            for other in others:
                other.result()
        self.step_taken(batches)

    def _tables_of(self, batch: Batch, weights: list[int]) -> list[tuple[list[Cut], bytes]]:
        """The batch's pieces, for each thread. A group's are kept; states stay where they are until `adopt`."""
        whole, num_threads = self.is_whole_group(batch), torch.get_num_threads()
        known = self._tables.get(batch.group)
        if whole and known is not None and known[0] == (weights, num_threads):
            return known[1]
        numels = [self.params[place].numel() for place in batch.members]
        tables = []
        for cuts in cut(numels, num_threads if sum(numels) >= WORTH_A_THREAD * num_threads else 1):
            pieces = []
            for member, start, numel in cuts:
                at = weights[member] + 4 * start
                states = self.states(batch.members[member])
                kept = tuple(0 if state is None else state.data_ptr() + 4 * start for state in states)
                pieces.append(Piece(numel, at, at, kept, kept))
            tables.append((cuts, pack_pieces(pieces)))
        if whole:
            self._tables[batch.group] = (weights, num_threads), tables
        return tables


def run_update(how: bytes, pieces: bytes, sources: bytes, program: bytes, watch: bytes = b"") -> None:
    """`watch` is `struct mh_watch` of core.h, or nothing."""
    code = library.update(how, pieces, sources, program, watch)
    if code:
        raise MemoryError("no memory for an update") if code == library.NO_MEMORY else AssertionError(code)


def like(param: Tensor) -> Tensor:
    """The parameter's gradient in the parameter's own memory order."""
    grad = param.grad
    assert grad is not None
    return grad if grad.stride() == param.stride() else torch.empty_like(param).copy_(grad)
