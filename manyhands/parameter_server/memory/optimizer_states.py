"""Optimizer states in memory that servers and workers share, and back.

States of optimizers that run fused have the shape of their parameters and are laid out like them. Those of any other
have separate regions; a state that is no tensor, or a single number, goes into a few bytes committed with the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.comm.host_memory import Segment
from manyhands.errors import TrainingFailed
from manyhands.parallel.weights.fused_update import counts_steps, names_by_group
from manyhands.parameter_server.memory.versioned_memory import VersionedMemory

__all__ = [
    "load_settings",
    "load_states",
    "merge_states",
    "plain_schedule",
    "settings_of",
    "store_states",
    "stored_tensors",
]


class _StateEntry(msgspec.Struct, array_like=True):
    """One state of one parameter: a tensor of this type and shape in memory, a one-element tensor, or a plain value."""

    place: int
    name: str
    kind: str
    """"tensor", "number" or "plain"."""
    dtype: str = ""
    shape: list[int] = []
    value: Any = None


def store_states(
    memory: VersionedMemory, optimizer: Optimizer, version: int, places: Sequence[int], *, whole: bool
) -> tuple[list[int], bytes]:
    """Copy the states of parameters to the memory of this version. Returns step counts, and what is not in memory."""
    counts, entries = [0] * len(memory.params), list[_StateEntry]()
    for place in places:
        state = optimizer.state.get(memory.params[place], {})
        if not any(value is not None for value in state.values()):
            continue
        counts[place] = int(state["step"]) if "step" in state else 1  # some optimizers have states before any step
        for name, value in state.items():
            if whole:
                entries.append(_store(memory, version, place, name, value))
            elif name != "step" and value is not None:
                _copy(memory.states(name, version).views[place], value)
    return counts, msgspec.msgpack.encode(entries)


def load_states(
    memory: VersionedMemory,
    optimizer: Optimizer,
    version: int,
    counts: Sequence[int],
    more: bytes,
    places: Sequence[int],
    *,
    whole: bool,
    copy: bool = False,
) -> None:
    """Give the optimizer the stored states; with `copy`, in private memory."""
    state, wanted = optimizer.state, set(places)
    if not whole:
        counting, names = counts_steps(optimizer), _state_names(optimizer, memory)
        for place in (place for place in places if counts[place] and (counting or names[place])):
            param = memory.params[place]
            state[param] = {name: memory.states(name, version).views[place] for name in names[place]}
            if counting:
                state[param]["step"] = torch.tensor(float(counts[place]))
        return
    for place in places:
        state.pop(memory.params[place], None)
    for entry in msgspec.msgpack.decode(more, type=list[_StateEntry]) if more else ():
        if entry.place in wanted:
            value = _load(memory, version, entry)
            state[memory.params[entry.place]][entry.name] = value.clone() if copy and entry.kind == "tensor" else value


def stored_tensors(memory: VersionedMemory, version: int, more: bytes, places: Sequence[int]) -> list[Segment]:
    """Where the states with separate regions are, for the parameters with the indices `places`."""
    entries = msgspec.msgpack.decode(more, type=list[_StateEntry]) if more else []
    return [_segment(memory, version, entry) for entry in entries if entry.kind == "tensor" and entry.place in places]


def merge_states(reports: Sequence[tuple[list[int], bytes]]) -> tuple[list[int], bytes]:
    """The reports of several servers on their shards, as one."""
    counts = [max(of_parameter) for of_parameter in zip(*(counts for counts, _ in reports), strict=True)]
    entries = [entry for _, more in reports if more for entry in msgspec.msgpack.decode(more, type=list[_StateEntry])]
    return counts, msgspec.msgpack.encode(entries)


def _state_names(optimizer: Optimizer, memory: VersionedMemory) -> dict[int, list[str]]:
    place_of = {id(param): place for place, param in enumerate(memory.params)}
    return {
        place_of[id(param)]: names
        for group, names in zip(optimizer.param_groups, names_by_group(optimizer), strict=True)
        for param in group["params"]
        if id(param) in place_of  # the others are frozen now
    }


def _store(memory: VersionedMemory, version: int, place: int, name: str, value: Any) -> _StateEntry:
    if isinstance(value, Tensor) and value.numel() != 1:
        entry = _StateEntry(place, name, "tensor", str(value.dtype).removeprefix("torch."), list(value.shape))
        _copy(_tensor(memory, version, entry), value)
        return entry
    if isinstance(value, Tensor):
        return _StateEntry(
            place, name, "number", str(value.dtype).removeprefix("torch."), list(value.shape), value.item()
        )
    if isinstance(value, int | float | bool | str | None):
        return _StateEntry(place, name, "plain", value=value)
    raise TrainingFailed(
        f"{name!r}, a state of the optimizer, is a {type(value).__name__}, which a parameter server cannot keep.",
        fix=["an optimizer whose states are tensors and numbers", 'strategy="mirrored"'],
    )


def _load(memory: VersionedMemory, version: int, entry: _StateEntry) -> Any:
    if entry.kind == "plain":
        return entry.value
    if entry.kind == "number":
        return torch.full(entry.shape, entry.value, dtype=getattr(torch, entry.dtype))
    return _tensor(memory, version, entry)


def _tensor(memory: VersionedMemory, version: int, entry: _StateEntry) -> Tensor:
    segment, shape = _segment(memory, version, entry), tuple(entry.shape)
    dtype, numel = getattr(torch, entry.dtype), torch.Size(shape).numel()
    if not numel:  # torch refuses empty buffers
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(segment.buffer, dtype=dtype, count=numel).view(shape)


def _segment(memory: VersionedMemory, version: int, entry: _StateEntry) -> Segment:
    num_bytes = torch.Size(entry.shape).numel() * getattr(torch, entry.dtype).itemsize
    num_bytes = -(-max(num_bytes, 1) // 4096) * 4096
    return memory.segment(f"state {entry.name} of {entry.place} {num_bytes} {version % memory.state_copies}", num_bytes)


def _copy(target: Tensor, value: Tensor) -> None:
    if target.data_ptr() != value.data_ptr():
        target.copy_(value)


def plain_schedule(scheduler: Any) -> dict[str, Any] | None:
    """A scheduler's state, in the form in which a message carries it."""
    if scheduler is None:
        return None
    state: dict[str, Any] = scheduler.state_dict()
    try:
        msgspec.msgpack.encode(state)
    except (TypeError, ValueError, OverflowError) as error:
        raise TrainingFailed(
            f"The state of {type(scheduler).__name__} cannot be sent to a parameter server: {error}.",
            fix=["a scheduler whose state_dict() has numbers, text, lists and dicts", 'scheduler_every="epoch"'],
        ) from error
    return state


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of each parameter group, in the form in which a message carries them."""
    return [
        {name: _number(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]


def _number(value: Any) -> Any:
    """A learning rate may be a tensor."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def load_settings(optimizer: Optimizer, settings: Sequence[dict[str, Any]]) -> None:
    for group, mine in zip(optimizer.param_groups, settings, strict=True):
        for name, value in mine.items():
            before = group.get(name)
            if isinstance(before, Tensor):
                before.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(before, tuple) else value
