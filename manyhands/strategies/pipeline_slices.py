"""What a pipeline asks of an engine for each slice that passes through this rank's layers.

Forward passes of several slices are under way at a time, and a rank may have several stages, so a slice's statistics
come in parts; losses are known where the last stage is. Start reading at `StagedSlices`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from manyhands.parallel.gradients.network_sum import GradientSum
from manyhands.parallel.gradients.reduce_scatter_sum import ShardedSum
from manyhands.parallel.model.step_buffers import StepBuffers
from manyhands.parallel.replicas.step_exchange import Report
from manyhands.strategies.base import PieceLike
from manyhands.torch_private import preserve_version_counter

__all__ = ["StagedSlices"]


class StagedSlices:
    """Of one step. `place` numbers the slices that have rows, as gradients and statistics count them."""

    def __init__(
        self,
        place: Mapping[int, int],
        buffers: StepBuffers,
        gradients: GradientSum | ShardedSum,
        around: Callable[[PieceLike], AbstractContextManager[None]],
        weigh: Callable[[PieceLike, Any], tuple[float, float, Tensor]],
    ) -> None:
        self._place, self._buffers, self._gradients = place, buffers, gradients
        self._around, self._weigh = around, weigh
        self._statistics: dict[int, Tensor] = {}
        self._losses: dict[int, tuple[float, float]] = {}

    @contextmanager
    def slice_context(self, piece: PieceLike) -> Iterator[None]:
        """Around a forward pass of one slice through one stage: the step's buffers, and the slice's randomness.

        Buffers go back to the step's values at once, for the next slice. Autograd would take that for a change of what
        the backward of this one needs; moving averages it does not need, so they keep their version.
        """
        place = self._place[piece.index]
        with preserve_version_counter(self._buffers.statistics):
            self._buffers.enter(place)
            with self._around(piece):
                yield
            made = self._buffers.leave(place)
            before = self._statistics.get(place)
            self._statistics[place] = made if before is None else self._buffers.united(before, made)
            self._buffers.put_back()

    def weigh(self, piece: PieceLike, result: Any) -> Tensor:
        """What backward begins with."""
        total, weight, scaled = self._weigh(piece, result)
        self._losses[self._place[piece.index]] = total, weight
        return scaled

    def slice_done(self, piece: PieceLike) -> None:
        """This slice's gradients, and no others, are in `.grad`; slices come in ascending order."""
        place = self._place[piece.index]
        self._gradients.before_backward(place)
        self._gradients.after_backward(place)

    def reports(self) -> list[Report]:
        """In slice order; losses are 0 where another rank knows them."""
        return [
            Report(*self._losses.get(place, (0.0, 0.0)), self._statistics.get(place, torch.empty(0)))
            for place in sorted(self._statistics)
        ]
