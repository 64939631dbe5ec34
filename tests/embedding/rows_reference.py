"""A table of rows as a dict: what native/rows.c is held against. Rows change by plain SGD, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from manyhands.embedding.row_optimizers import TableSpec
from manyhands.embedding.row_table import RowTable, most_room


class DictTable:
    """Rows, how often ids without a row were seen, and which update touched either last."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec, self.number, self._most = spec, 0, most_room(spec)
        self.rows: dict[int, Any] = {}
        self.seen: dict[int, int] = {}
        self.touched: dict[int, int] = {}
        self._fresh = RowTable(spec)

    def start(self, one: int) -> Any:
        return self._fresh.lookup(torch.tensor([one])).numpy()[0]

    def lookup(self, ids: list[int]) -> Any:
        return np.stack([self.rows[one] if one in self.rows else self.start(one) for one in ids])

    def update(self, number: int, ids: list[int], gradients: Any) -> None:
        self._expire(number, set(ids))
        self._evict(set(ids))
        for one, gradient in zip(ids, gradients, strict=True):
            self.touched[one] = number
            if one not in self.rows:
                self.seen[one] = self.seen.get(one, 0) + 1
                if self.seen[one] < self.spec.admit_after:
                    continue
                del self.seen[one]
                self.rows[one] = self.start(one)
            self.rows[one] = self.rows[one] - np.float32(self.spec.optimizer.lr) * gradient
        self.number = number

    def _expire(self, number: int, now: set[int]) -> None:
        keep = self.spec.keep_steps
        if not keep or number // max(keep // 8, 1) == self.number // max(keep // 8, 1):
            return
        for one in [one for one, last in self.touched.items() if number - last > keep and one not in now]:
            self._drop(one)

    def _evict(self, now: set[int]) -> None:
        made = [one for one in now if one not in self.rows and self.seen.get(one, 0) + 1 >= self.spec.admit_after]
        noted = [one for one in now if one not in self.rows and one not in self.seen and one not in made]
        admitted = len([one for one in made if one in self.seen])
        self._make_room(self.rows, len(made), self._most.rows, now)
        self._make_room(self.seen, len(noted), self._most.candidates + admitted, now)

    def _make_room(self, held: dict[int, Any], more: int, room: int, now: set[int]) -> None:
        if len(held) + more <= room:
            return
        loose = sorted((one for one in held if one not in now), key=lambda one: (self.touched[one], one))
        surplus = len(held) + more - room
        assert surplus <= len(loose)
        for one in loose[: surplus + room // 16]:
            self._drop(one)

    def _drop(self, one: int) -> None:
        self.rows.pop(one, None)
        self.seen.pop(one, None)
        del self.touched[one]

    def listing(self) -> tuple[Any, ...]:
        rows, seen = sorted(self.rows), sorted(self.seen)
        return (
            *(self.number, rows, [self.touched[one] for one in rows]),
            *(seen, [self.seen[one] for one in seen], [self.touched[one] for one in seen]),
        )


def listing(table: RowTable) -> tuple[Any, ...]:
    saved = table.snapshot()
    names = ("ids", "updates", "candidates", "sightings", "candidate_updates")
    return (int(saved["number"]), *(saved[name].tolist() for name in names))
