"""Embedding rows in a step of replicas: every rank gets all slices' gradients, and applies them to its own copy.

For strategies without servers. In a step: `begin`, `leave` after each slice, `exchange`, `apply`.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor, nn

from manyhands.comm.axis import Axis
from manyhands.embedding.row_layer import Sparse, TableGradient, decode, encode, merge, norm_of

__all__ = ["SparseStep"]


class SparseStep:
    """Promises: after `apply`, rows are bitwise equal on every rank, and for every number of ranks."""

    are_here = True
    """Every rank has all rows."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.sparse = Sparse(model)
        self.sparse.set_seed(seed)
        self.factor = 1.0
        """Factor for the sum of gradients."""
        self._mine: dict[int, list[TableGradient]] = {}
        self._summed: list[TableGradient] = []

    def __bool__(self) -> bool:
        return bool(self.sparse)

    def begin(self) -> None:
        self.sparse.drop()
        self._mine, self._summed, self.factor = {}, [], 1.0

    def leave(self, place: int) -> None:
        """Collect the gradients after the backward of the slice with index `place`."""
        if self:
            self._mine[place] = self.sparse.take()

    def exchange(self, axis: Axis, number: int) -> None:
        if not self:
            return
        slices: dict[int, list[TableGradient]] = {}
        for data in axis.all_gather_bytes(f"rows of step {number}", encode(self._mine)):
            slices |= decode(data)
        self._summed = merge(one for place in sorted(slices) for one in slices[place])

    def norm(self) -> float:
        return norm_of(self._summed) * self.factor

    def apply(self, number: int) -> None:
        self.sparse.apply(number, self._summed, self.factor)
        self._mine, self._summed = {}, []

    def put_down(self) -> None:
        """Before another training: put the rows where it finds them, in the layers of this process. They are there."""

    def take_up(self) -> None:
        """Continue with the rows that the layers have now."""

    def synchronise(self, axis: Axis) -> None:
        """Copy rank 0's rows to every rank."""
        if not self or axis.size == 1:
            return
        state = self.sparse.state() if axis.rank == 0 else {}
        header = axis.all_gather_bytes("tables of rank 0", msgspec.msgpack.encode(_shapes(state)))[0]
        shapes = msgspec.msgpack.decode(header, type=dict[str, dict[str, tuple[str, list[int]]]])
        if axis.rank != 0:
            state = {table: {name: _empty(*one) for name, one in parts.items()} for table, parts in shapes.items()}
        axis.broadcast_([state[table][name] for table, parts in shapes.items() for name in parts], "rows of rank 0")
        if axis.rank != 0:
            self.sparse.restore(state)


def _shapes(state: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, tuple[str, list[int]]]]:
    return {
        table: {name: (str(one.dtype).removeprefix("torch."), list(one.shape)) for name, one in parts.items()}
        for table, parts in state.items()
    }


def _empty(dtype: str, shape: list[int]) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))
