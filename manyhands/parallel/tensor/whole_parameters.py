"""Lets a user's loss or metric see whole parameters of a sharded model.

The `weight` of a sharded layer is a `ShardedTensor`. `model.parameters()` must return the same, for a penalty in a loss
or a value in a metric, but only there: optimizers, checkpoints and the engine work on shards. Start reading at
`WholeParameters`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from manyhands.parallel.tensor.layers import ParallelLayer, class_of

__all__ = ["hold_", "is_users_code", "users_code"]

_is_users: ContextVar[bool] = ContextVar("manyhands_users_code", default=False)


@contextmanager
def users_code() -> Iterator[None]:
    """Used around a loss or a metric."""
    token = _is_users.set(True)
    try:
        yield
    finally:
        _is_users.reset(token)


def is_users_code() -> bool:
    return _is_users.get()


class WholeParameters:
    """Mixed into the class of a module that is, or contains, a sharded layer."""

    def named_parameters(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        for name, param in super().named_parameters(prefix, *args, **kwargs):  # type: ignore[misc]
            yield name, _as_whole(self, name.removeprefix(f"{prefix}."), param) if is_users_code() else param  # type: ignore[arg-type]


def _as_whole(holder: nn.Module, name: str, param: nn.Parameter) -> Tensor:
    owner, _, tensor = name.rpartition(".")
    module = holder.get_submodule(owner)
    return module.place.outside(tensor, param) if isinstance(module, ParallelLayer) else param


def hold_(model: nn.Module) -> None:
    """Mix `WholeParameters` into every sharded layer and every module that contains one."""
    for module in model.modules():
        if any(isinstance(one, ParallelLayer) for one in module.modules()):
            module.__class__ = class_of(WholeParameters, type(module))  # type: ignore[arg-type]
