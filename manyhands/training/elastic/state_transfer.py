"""Sends the state of one worker to others, which take it over completely or not at all.

`regroup` and `divergence_repair` decide when, and which worker is the source.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from manyhands.comm.axis import Axis
from manyhands.strategies.base import StepStats

if TYPE_CHECKING:
    from manyhands.training.state.training_state import TrainingState

__all__ = ["broadcast_state"]


class _Shape(msgspec.Struct):
    name: str
    dtype: str
    shape: list[int]
    stride: list[int]
    at: tuple[str, int] | None = None
    """Its location in shared memory; None: it is sent."""


class _SentState(msgspec.Struct):
    parts: dict[str, Any]
    tensors: list[_Shape]
    slices: int
    stats: dict[str, Any]
    """Statistics of the last committed step."""


def broadcast_state(
    axis: Axis,
    training: TrainingState | None,
    source: int,
    *,
    with_hooks: bool = False,
    from_shared_memory: bool = True,
    own: bool = False,
) -> Callable[[], None]:
    """Send the state of rank `source` to all ranks of `axis`. The returned function makes this worker take it over.

    With `from_shared_memory`, tensors in the shared memory of the ranks' host are not sent. With `own`, all ranks of
    `axis` have the same part of the model.
    """
    sends = axis.rank == source
    tensors: dict[str, Tensor] = {}
    data = b""
    if sends:
        assert training is not None
        tensors, data = _packed(training, from_shared_memory, own)
    state = msgspec.msgpack.decode(axis.all_gather_bytes("state", data)[source], type=_SentState)
    if not sends:
        tensors = {one.name: _empty(one) for one in state.tensors if one.at is None}
    axis.broadcast_([tensors[one.name] for one in state.tensors if one.at is None], "state", source=source)

    def take() -> None:
        assert training is not None
        for one in state.tensors:
            if one.at is not None:
                tensors[one.name] = training.engine.held.shared_tensor(one.at, one.shape, one.stride)
        training.slices = state.slices
        training.load_state(state.parts, tensors, with_hooks=with_hooks, own=own)
        training.last_stats = StepStats(**state.stats)

    return take


def _packed(training: TrainingState, from_shared_memory: bool, own: bool) -> tuple[dict[str, Tensor], bytes]:
    rows = training.engine.served_rows
    with rows.telling_peers() if rows is not None else nullcontext():
        tensors, parts = training.live_state(own=own)
    where = training.engine.held.where if from_shared_memory else lambda tensor: None
    shapes = [_shape(name, one, where(one)) for name, one in tensors.items()]
    last = training.last_stats
    stats = {} if last is None else {name: getattr(last, name) for name in ("grad_norm", "skipped", "stop", "lr")}
    known = {"loss": last.loss if last else 0.0, "rows": last.rows if last else 0, **stats}
    return tensors, msgspec.msgpack.encode(_SentState(parts, shapes, training.slices, known))


def _shape(name: str, one: Tensor, where: tuple[str, int] | None) -> _Shape:
    return _Shape(name, str(one.dtype).removeprefix("torch."), list(one.shape), list(one.stride()), where)


def _empty(one: _Shape) -> Tensor:
    return torch.empty(one.shape, dtype=getattr(torch, one.dtype))
