"""What the user's code gets that asks a divided model for all of its parameters: whole ones.

Whoever asks a divided layer for its `weight` gets a `Parted`. `model.parameters()`, for a penalty in a loss or a number
in a metric, must come to the same, but only there: optimizers, checkpoints and the engine work on parts. Start reading
at `Holder`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from manyhands.parallel.tensor.layers import Divided, class_of

__all__ = ["hold_", "is_users_code", "users_code"]

_is_users: ContextVar[bool] = ContextVar("manyhands_users_code", default=False)


@contextmanager
def users_code() -> Iterator[None]:
    """Around a loss or a metric."""
    token = _is_users.set(True)
    try:
        yield
    finally:
        _is_users.reset(token)


def is_users_code() -> bool:
    return _is_users.get()


class Holder:
    """A module with divided layers in it, or one itself, to be mixed into its own class."""

    def named_parameters(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        for name, param in super().named_parameters(prefix, *args, **kwargs):  # type: ignore[misc]
            yield name, _as_asked(self, name.removeprefix(f"{prefix}."), param) if is_users_code() else param  # type: ignore[arg-type]


def _as_asked(holder: nn.Module, name: str, param: nn.Parameter) -> Tensor:
    owner, _, tensor = name.rpartition(".")
    module = holder.get_submodule(owner)
    return module.place.outside(tensor, param) if isinstance(module, Divided) else param


def hold_(model: nn.Module) -> None:
    """Have every module that divided layers are in, and those themselves, answer like this."""
    for module in model.modules():
        if any(isinstance(one, Divided) for one in module.modules()):
            module.__class__ = class_of(Holder, type(module))  # type: ignore[arg-type]
