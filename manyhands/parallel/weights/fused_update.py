"""Fused optimizers: which of torch's optimizers have a version here that is one pass over memory, and how it runs.

A fused update reads gradients, weights and optimizer state once and writes them once (native/update.c). It keeps its
state where torch keeps it, under torch's names, so a checkpoint is the same with either version. It does the same
operations as torch; square roots may differ in the last bit. A run uses it on all workers or on none, so that the
result does not depend on the number of workers. Start reading at `fusible`, then `Fused.apply`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from manyhands.native import library, why_not
from manyhands.parallel.gradients.slice_tree import ONE

__all__ = [
    "BLOCK",
    "KINDS",
    "WORTH_A_THREAD",
    "Batch",
    "Fused",
    "Group",
    "ParameterRange",
    "counts_steps",
    "fusible",
    "has_fused",
    "names_by_group",
    "pack_pieces",
    "run_update",
    "state_names",
]


Group = Mapping[str, Any]


class How(NamedTuple):
    """`struct mh_update` of core.h, field by field."""

    optimizer: int
    first: int = 0
    nesterov: int = 0
    maximize: int = 0
    extra: int = 0
    factor: float = 1.0
    clip: float = 1.0
    step_size: float = 0.0
    weight_decay: float = 0.0
    shrink: float = 1.0
    momentum: float = 0.0
    gradient_share: float = 1.0
    second_keep: float = 0.0
    second_share: float = 0.0
    root_divisor: float = 1.0
    eps: float = 0.0

    def pack(self, factor: float, clip: float) -> bytes:
        return struct.pack("5i11f", *self._replace(factor=factor, clip=clip))


class FusedKind(NamedTuple):
    """One optimizer: the state that a group's settings require, in native's order, and the numbers of a step."""

    states: Callable[[Group], Sequence[str | None]]
    counts_steps: bool
    how: Callable[[Group, int], How]
    """From the group's settings and the number of a parameter's steps, this one included; 0 if the optimizer counts
    no steps and there is no state yet."""
    starts_at: Callable[[Group], float] = lambda group: 0.0


def _sgd(group: Group, steps: int) -> How:
    return How(
        optimizer=library.SGD,
        first=steps == 0,
        nesterov=bool(group["nesterov"]),
        maximize=bool(group["maximize"]),
        step_size=-group["lr"],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        gradient_share=1 - group["dampening"],
    )


def _adam(group: Group, steps: int) -> How:
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    decoupled = group.get("decoupled_weight_decay", False)
    return How(
        optimizer=library.ADAM,
        maximize=bool(group["maximize"]),
        extra=bool(group["amsgrad"]),
        step_size=-(group["lr"] / (1 - beta1**steps)),
        weight_decay=0.0 if decoupled else decay,
        shrink=1 - group["lr"] * decay if decoupled else 1.0,
        gradient_share=1 - beta1,
        second_keep=beta2,
        second_share=1 - beta2,
        root_divisor=(1 - beta2**steps) ** 0.5,
        eps=group["eps"],
    )


def _adagrad(group: Group, steps: int) -> How:
    return How(
        optimizer=library.ADAGRAD,
        maximize=bool(group["maximize"]),
        step_size=-(group["lr"] / (1 + (steps - 1) * group["lr_decay"])),
        weight_decay=group["weight_decay"],
        eps=group["eps"],
    )


def _rmsprop(group: Group, steps: int) -> How:
    return How(
        optimizer=library.RMSPROP,
        maximize=bool(group["maximize"]),
        extra=bool(group["centered"]),
        step_size=-group["lr"],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        second_keep=group["alpha"],
        second_share=1 - group["alpha"],
        eps=group["eps"],
    )


_ADAM = FusedKind(
    states=lambda group: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq" if group["amsgrad"] else None),
    counts_steps=True,
    how=_adam,
)
KINDS: dict[type[Optimizer], FusedKind] = {
    SGD: FusedKind(lambda group: ("momentum_buffer",) if group["momentum"] else (), counts_steps=False, how=_sgd),
    Adam: _ADAM,
    AdamW: _ADAM,
    Adagrad: FusedKind(
        lambda group: ("sum",), counts_steps=True, how=_adagrad, starts_at=lambda g: g["initial_accumulator_value"]
    ),
    RMSprop: FusedKind(
        lambda group: (
            "square_avg",
            "momentum_buffer" if group["momentum"] > 0 else None,
            "grad_avg" if group["centered"] else None,
        ),
        counts_steps=True,
        how=_rmsprop,
    ),
}


MAX_STATES = 3
BLOCK = 1024
"""Elements of weights that native updates, and digests, at a time: MH_BLOCK_BYTES of core.h."""
# With fewer elements per thread, starting work on another thread takes longer than it saves.
WORTH_A_THREAD = 2**17


def fusible(optimizer: Optimizer, params: Iterable[Tensor]) -> str:
    """Why this optimizer has no fused version here; empty if it has one."""
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
    """Whether its class has a fused version, which updates each element independently."""
    return type(optimizer) in KINDS


def state_names(optimizer: Optimizer) -> list[str]:
    """The names of optimizer state that is as large as the parameters."""
    return sorted({name for names in names_by_group(optimizer) for name in names})


def names_by_group(optimizer: Optimizer) -> list[list[str]]:
    """The same by parameter group."""
    states = KINDS[type(optimizer)].states
    return [[name for name in states(group) if name is not None] for group in optimizer.param_groups]


def counts_steps(optimizer: Optimizer) -> bool:
    """Whether it also keeps the number of steps of each parameter."""
    return KINDS[type(optimizer)].counts_steps


def _numbers(group: Group) -> list[Any]:
    plain = [value for name, value in group.items() if name != "params" and not isinstance(value, tuple)]
    return [*plain, *group.get("betas", ())]


class ParameterRange(NamedTuple):
    """A range of a parameter's elements, as addresses: `struct mh_piece` of core.h."""

    numel: int
    old: int
    new: int
    old_states: tuple[int, ...]
    new_states: tuple[int, ...]


def pack_pieces(pieces: Iterable[ParameterRange]) -> bytes:
    padding = (0,) * MAX_STATES
    numbers: list[int] = []
    for piece in pieces:
        olds, news = (*piece.old_states, *padding)[:MAX_STATES], (*piece.new_states, *padding)[:MAX_STATES]
        numbers += [piece.numel, piece.old, piece.new, *olds, *news]
    return struct.pack(f"{len(numbers)}Q", *numbers)


Cut = tuple[int, int, int]
"""Index of the tensor, first element, number of elements."""


def cut(numels: Sequence[int], num_parts: int) -> list[list[Cut]]:
    """Divide tensors of these sizes into parts of about the same number of elements; cuts are at cache lines."""
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
    """Parameters that are updated with the same numbers in a step."""

    group: int
    steps: int
    members: list[int]
    """Indices in `Fused.params`."""


class Fused:
    """The fused version of `optimizer`, on the optimizer's state.

    `make_state(param, name, start)` returns new state with the parameter's shape and strides, filled with `start`;
    by default in private memory of the process.
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
        # load_state_dict replaces the state: what was recorded of the old state is no longer valid.
        self._loaded = optimizer.register_load_state_dict_post_hook(lambda _: self.adopt())

    @property
    def is_current(self) -> bool:
        """False once parameters were added to the optimizer (`add_param_group`): they would never be updated."""
        return len(self.params) == sum(len(group["params"]) for group in self.optimizer.param_groups)

    def close(self) -> None:
        self._loaded.remove()
        self._threads.shutdown()

    def adopt(self) -> None:
        """Move existing state into memory of `make_state`."""
        self._steps = torch.zeros(len(self.params))
        self._counted = [0] * len(self.params)
        self._common_steps: int | None = None
        """The number of steps of every parameter if all have taken the same number; `_counted` is then out of date."""
        self._known: set[int] = set()
        self._tables: dict[int, tuple[tuple[list[int], int], list[tuple[list[Cut], bytes]]]] = {}
        for index, param in enumerate(self.params):
            state = self.optimizer.state.get(param)
            if state and any(value is not None for value in state.values()):
                self._adopt_state(index, state)

    def _adopt_state(self, index: int, state: dict[str, Any]) -> None:
        for name in self.state_names(index):
            if name is not None and state.get(name) is not None:
                state[name] = self._make_state(self.params[index], name, 0.0).copy_(state[name])
        if self._kind.counts_steps:
            self._counted[index] = int(state["step"])
            self._steps[index] = self._counted[index]
            state["step"] = self._steps[index]
        self._known.add(index)

    def state_names(self, index: int) -> Sequence[str | None]:
        return self._kind.states(self.optimizer.param_groups[self._group_of[index]])

    def states(self, index: int) -> list[Tensor | None]:
        state = self.optimizer.state.get(self.params[index], {})
        return [state.get(name) if name is not None else None for name in self.state_names(index)]

    def plan_step(self, indices: Sequence[int]) -> list[Batch]:
        """The batches of a step of these parameters; creates state that is missing.

        No step is counted before `step_taken`: until then a plan can be dropped and made again.
        """
        if len(indices) == len(self.params) and self._have_common_steps():
            assert self._common_steps is not None
            steps = self._common_steps + 1 if self._kind.counts_steps else 1
            return [Batch(group, steps, members) for group, members in enumerate(self._members) if members]
        batches: dict[tuple[int, int], list[int]] = {}
        for index in indices:
            fresh = index not in self._known
            if fresh:
                self._start_states(index)
            steps = self._steps_of(index) + 1 if self._kind.counts_steps else int(not fresh)
            batches.setdefault((self._group_of[index], steps), []).append(index)
        return [Batch(group, steps, members) for (group, steps), members in batches.items()]

    def _have_common_steps(self) -> bool:
        """The usual case: all parameters have taken the same number of steps, so a group is a batch."""
        if self._common_steps is None and len(self._known) == len(self.params) and len(set(self._counted)) <= 1:
            self._common_steps = self._counted[0] if self._counted else 0
        return self._common_steps is not None

    def seen(self, index: int) -> int:
        """The number of the parameter's steps; if the optimizer counts none, 1 once there is state."""
        return self._steps_of(index) if self._kind.counts_steps else int(index in self._known)

    def _steps_of(self, index: int) -> int:
        return self._counted[index] if self._common_steps is None else self._common_steps

    def step_taken(self, batches: Sequence[Batch]) -> None:
        """Count the planned step, which was done."""
        if self._kind.counts_steps:
            self._count(batches)
        self._known.update(index for batch in batches for index in batch.members)
        # A learning-rate scheduler reads this to warn about a wrong order of steps.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def _count(self, batches: Sequence[Batch]) -> None:
        if self._common_steps is not None and sum(len(batch.members) for batch in batches) == len(self.params):
            self._common_steps += 1
            self._steps += 1
            return
        if self._common_steps is not None:
            self._counted, self._common_steps = [self._common_steps] * len(self.params), None
        indices = [index for batch in batches for index in batch.members]
        for index in indices:
            self._counted[index] += 1
        self._steps[torch.tensor(indices, dtype=torch.int64)] += 1

    def _start_states(self, index: int) -> None:
        if not self._kind.counts_steps and not self.state_names(index):
            return
        state = self.optimizer.state[self.params[index]]
        start = self._kind.starts_at(self.optimizer.param_groups[self._group_of[index]])
        if self._kind.counts_steps:
            state["step"] = self._steps[index]
        for name in self.state_names(index):
            if name is not None:
                state[name] = self._make_state(self.params[index], name, start)

    def how(self, batch: Batch, factor: float = 1.0, clip: float = 1.0) -> bytes:
        return self._kind.how(self.optimizer.param_groups[batch.group], batch.steps).pack(factor, clip)

    def is_whole_group(self, batch: Batch) -> bool:
        return batch.members is self._members[batch.group]

    def apply(self) -> None:
        """Do what `optimizer.step()` does with the gradients in `.grad`, on as many threads as torch uses."""
        batches = self.plan_step([index for index, param in enumerate(self.params) if param.grad is not None])
        for batch in batches:
            params = [self.params[index] for index in batch.members]
            gradients = [like(param) for param in params]  # keeps copies alive until they are used
            addresses = [grad.data_ptr() for grad in gradients]
            how, calls = self.how(batch), []
            for cuts, table in self._tables_of(batch, [param.data_ptr() for param in params]):
                sources = [addresses[member] + 4 * start for member, start, _ in cuts]
                calls.append((how, table, struct.pack(f"{len(sources)}Q", *sources), ONE))
            futures = [self._threads.submit(run_update, *call) for call in calls[1:]]
            run_update(*calls[0])
            for future in futures:
                future.result()
        self.step_taken(batches)

    def _tables_of(self, batch: Batch, weights: list[int]) -> list[tuple[list[Cut], bytes]]:
        """The batch's pieces for each thread. Those of a whole group are cached: state does not move until `adopt`."""
        whole, num_threads = self.is_whole_group(batch), torch.get_num_threads()
        known = self._tables.get(batch.group)
        if whole and known is not None and known[0] == (weights, num_threads):
            return known[1]
        numels = [self.params[index].numel() for index in batch.members]
        tables = []
        for cuts in cut(numels, num_threads if sum(numels) >= WORTH_A_THREAD * num_threads else 1):
            pieces = []
            for member, start, numel in cuts:
                at = weights[member] + 4 * start
                states = self.states(batch.members[member])
                kept = tuple(0 if state is None else state.data_ptr() + 4 * start for state in states)
                pieces.append(ParameterRange(numel, at, at, kept, kept))
            tables.append((cuts, pack_pieces(pieces)))
        if whole:
            self._tables[batch.group] = (weights, num_threads), tables
        return tables


def run_update(how: bytes, pieces: bytes, sources: bytes, program: bytes, watch: bytes = b"") -> None:
    """`watch` is `struct mh_watch` of core.h, or empty."""
    code = library.update(how, pieces, sources, program, watch)
    if code:
        raise MemoryError("no memory for an update") if code == library.NO_MEMORY else AssertionError(code)


def like(param: Tensor) -> Tensor:
    """The parameter's gradient in the parameter's memory order."""
    grad = param.grad
    assert grad is not None
    return grad if grad.stride() == param.stride() else torch.empty_like(param).copy_(grad)
