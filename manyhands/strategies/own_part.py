"""A step as one worker sees it that trains by itself: its own slices, counted from 0, as if they were the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from manyhands.strategies.base import PieceLike, StepLike

__all__ = ["OwnPart"]


class OwnPart:
    """Of `step`, the slices in `share` that have rows. Randomness stays that of the whole step's slices."""

    def __init__(self, step: StepLike, share: range) -> None:
        self._step = step
        self._slices = [v for v in share if step.bounds[v][0] < step.bounds[v][1]]
        self.number, self.bounds = step.number, [step.bounds[v] for v in self._slices]
        self.num_slices, self.rows = len(self._slices), sum(high - low for low, high in self.bounds)
        self.fetched_together, self.last = step.fetched_together, step.last

    @property
    def load_s(self) -> float:
        return self._step.load_s

    def mine(self) -> Iterator[PieceLike]:
        return map(self.piece, self._step.mine())

    def slice(self, v: int) -> PieceLike:
        return self.piece(self._step.slice(self._slices[v]))

    def piece(self, piece: PieceLike) -> PieceLike:
        """One of the whole step's, as one of these."""
        return _OwnPiece(piece, self._slices.index(piece.index))


class _OwnPiece:
    def __init__(self, piece: PieceLike, index: int) -> None:
        self._piece, self.index, self.rows = piece, index, piece.rows

    @property
    def batch(self) -> Any:
        return self._piece.batch

    def randomness(self) -> AbstractContextManager[None]:
        return self._piece.randomness()
