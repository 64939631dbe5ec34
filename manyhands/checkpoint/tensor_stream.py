"""Passes tensors from the training thread to the thread that writes them, one at a time, in file order.

With a sharded model no process has memory for all of it. So the training loop fetches a tensor when the writer needs
it, and waits until the writer has taken it; the tensors before it are freed by then. Start reading at `TensorStream`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.errors import CheckpointSaveFailed

__all__ = ["TensorStream", "announced"]


def announced(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A placeholder for a tensor that is still to be fetched: its shape and type, without memory for its values."""
    return torch.empty((), dtype=dtype).expand(tuple(shape))


class TensorStream:
    """Passes the tensors in `names`, in that order. One thread calls `give`, another `take`."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._known = frozenset(names)
        self._changed = threading.Condition()
        self._current: tuple[str, Tensor] | None = None
        self._ended = self._broken = False

    def __contains__(self, name: str) -> bool:
        return name in self._known

    # The training thread.

    def give(self, name: str, tensor: Tensor) -> None:
        """Wait until the writer has taken it; if the writer has stopped, the tensor is dropped."""
        with self._changed:
            self._current = name, tensor
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._current is None or self._ended)
            self._current = None

    def wait(self) -> None:
        """Wait until the writer no longer reads any tensor that it was given."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended)

    def break_off(self) -> None:
        """No more tensors will be given; a waiting `take` fails."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    # The writer's thread.

    def take(self, name: str) -> Tensor:
        with self._changed:
            self._changed.wait_for(lambda: self._current is not None or self._broken)
            if self._current is None:
                raise CheckpointSaveFailed(
                    f"A worker was lost before sending {name!r}; the checkpoint was not written."
                )
            (given, tensor), self._current = self._current, None
            assert given == name, f"{given} was given where {name} was expected"
            self._changed.notify_all()
            return tensor

    def end(self) -> None:
        """All tensors are written, or the save has failed."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
