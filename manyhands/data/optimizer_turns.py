"""Alternating optimizers: each batch is used once per optimizer.

`Turns` converts between `Batches`, which counts batches, and a loop, which counts updates. Start reading there.
"""

from __future__ import annotations

from typing import Any

from manyhands.data.batches import Batches, FetchedSlice, Step
from manyhands.data.sample_order import Position, slice_key

__all__ = ["Turn", "Turns"]


class Turn(Step):
    """One optimizer's step on a batch. After every turn but the last, the run's position is still the batch's start."""

    def __init__(self, batch: Step, number: int, turn: int, turns: int, total: int | None) -> None:
        super().__init__(batch._batches, batch._plan)
        self._batch, self._total = batch, total
        self._fetched = batch._fetched  # the first turn uses them up, later ones fetch again
        self.load_s = batch.load_s if batch._fetched else 0.0
        self.number, self.turn = number, (turn, turns)
        self.last_of_epoch = self.last_of_epoch and turn == turns - 1

    @property
    def last(self) -> bool:
        return self.last_of_epoch or self.number == self._total

    @property
    def after(self) -> Position:
        turn, turns = self.turn
        position = self._batch.after
        return position if turn == turns - 1 else Position(position.seed, self.epoch, self.start)

    def slice(self, v: int) -> FetchedSlice:
        piece = super().slice(v)
        key = slice_key(self._batches.schedule.position.seed, self.number, v, "compute")
        return FetchedSlice(v, piece.batch, piece.rows, key, self.number)


class Turns:
    """The steps of `batches`, which began after `done` updates, with `turns` turns each."""

    def __init__(self, batches: Batches, turns: int, done: int) -> None:
        self._batches, self._turns, self._next = batches, turns, done + 1
        self._batch: Step | None = None
        self.total_steps = batches.total_steps * turns if batches.total_steps is not None else None

    def __iter__(self) -> Turns:
        return self

    def __next__(self) -> Turn:
        turn = (self._next - 1) % self._turns
        if self._batch is None or turn == 0:
            self._batch = next(self._batches)
        number, self._next = self._next, self._next + 1
        return Turn(self._batch, number, turn, self._turns, self.total_steps)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)
