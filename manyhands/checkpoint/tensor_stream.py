"""Tensors from the thread that has them to the one that writes them, one at a time, in the order of the file.

Where a model is divided no process has room for all of it. So the training loop fetches a tensor when its turn has
come, and waits until the writer has it; what was written before is forgotten by then. Start reading at `Delivery`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.errors import CheckpointSaveFailed

__all__ = ["Delivery", "announced"]


def announced(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Stands for a tensor that is still to come: its shape and type, without memory for its values."""
    return torch.empty((), dtype=dtype).expand(tuple(shape))


class Delivery:
    """Of the tensors in `names`, in that order. One thread gives, another takes."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._known = frozenset(names)
        self._changed = threading.Condition()
        self._here: tuple[str, Tensor] | None = None
        self._over = self._broken = False

    def __contains__(self, name: str) -> bool:
        return name in self._known

    # The thread that has them.

    def give(self, name: str, tensor: Tensor) -> None:
        """Wait until the writer has taken it, or wants no more: then it is dropped."""
        with self._changed:
            self._here = name, tensor
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._here is None or self._over)
            self._here = None

    def wait(self) -> None:
        """Until nothing that was given is looked at any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._over)

    def break_off(self) -> None:
        """Nothing more will be given; whoever waits for it fails."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    # The thread that writes.

    def take(self, name: str) -> Tensor:
        with self._changed:
            self._changed.wait_for(lambda: self._here is not None or self._broken)
            if self._here is None:
                raise CheckpointSaveFailed(f"A worker was lost before {name!r} came; the checkpoint was not written.")
            (given, tensor), self._here = self._here, None
            assert given == name, f"{given} was given where {name} is due"
            self._changed.notify_all()
            return tensor

    def end(self) -> None:
        """All is written, or nothing more will be."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
