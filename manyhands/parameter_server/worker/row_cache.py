"""Rows that a worker keeps of what servers on another host have told it, each with how many updates it has seen.

Who asks says how many it must have seen at least; what has seen fewer is not there. So nothing has to be taken back
when servers change rows. Every id has one place, and whoever comes later takes it over. No sockets, no clock.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["RowCache"]

_MIX = np.uint64(0xBF58476D1CE4E5B9)
_NOTHING = -1


class RowCache:
    """At most `num_rows` rows of one table."""

    def __init__(self, num_rows: int, dim: int) -> None:
        self._num_rows = num_rows
        self._ids, self._rows = np.zeros(num_rows, np.int64), np.zeros((num_rows, dim), np.float32)
        self._versions, self._winners = np.full(num_rows, _NOTHING), np.zeros(num_rows, np.int64)

    def find(self, ids: Tensor, at_least: int, to: Tensor) -> tuple[Tensor, int | None]:
        """Rows of `ids` that have seen so many updates, into `to`: which are not there, and what the oldest has seen.

        None: no row is there.
        """
        wanted = ids.numpy()
        places = self._places(wanted)
        are_here = (self._ids[places] == wanted) & (self._versions[places] >= max(at_least, 0))
        to.numpy()[are_here] = self._rows[places[are_here]]
        oldest = int(self._versions[places[are_here]].min()) if are_here.any() else None
        return torch.from_numpy(np.flatnonzero(~are_here)), oldest

    def put(self, ids: Tensor, version: int, rows: Tensor) -> None:
        """Rows of different ids, that have seen so many updates."""
        told, places = ids.numpy(), self._places(ids.numpy())
        order = np.arange(len(told))
        self._winners[places] = order  # of those with the same place, one
        stays = self._winners[places] == order
        places = places[stays]
        self._ids[places], self._versions[places], self._rows[places] = told[stays], version, rows.numpy()[stays]

    def clear(self) -> None:
        self._versions.fill(_NOTHING)

    def _places(self, ids: np.ndarray) -> np.ndarray:
        mixed = ids.view(np.uint64) * _MIX
        places: np.ndarray = ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(self._num_rows)).astype(np.int64)
        return places
