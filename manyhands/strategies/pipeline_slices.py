"""What a pipeline calls on an engine for each slice that passes through this rank's layers.

Forward passes of several slices run at a time, and a rank may have several stages, so a slice's statistics arrive in
parts; only the rank of the last stage knows the losses. Start reading at `PipelineSlices`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from manyhands.parallel.gradients.interface import Sum
from manyhands.parallel.model.step_buffers import StepBuffers
from manyhands.parallel.replicas.step_exchange import SliceReport
from manyhands.strategies.base import SliceLike
from manyhands.torch_private import preserve_version_counter

__all__ = ["PipelineSlices"]


class PipelineSlices:
    """The slices of one step. `positions` numbers those that have rows, as gradients and statistics count them."""

    def __init__(
        self,
        positions: Mapping[int, int],
        buffers: StepBuffers,
        gradients: Sum,
        around: Callable[[SliceLike], AbstractContextManager[None]],
        weigh: Callable[[SliceLike, Any], tuple[float, float, Tensor]],
    ) -> None:
        self._positions, self._buffers, self._gradients = positions, buffers, gradients
        self._around, self._weigh = around, weigh
        self._statistics: dict[int, Tensor] = {}
        self._losses: dict[int, tuple[float, float]] = {}

    @contextmanager
    def slice_context(self, piece: SliceLike) -> Iterator[None]:
        """The context of a forward pass of one slice through one stage: the step's buffers, the slice's randomness.

        Buffers are reset to the step's values at once, for the next slice. Autograd would refuse the backward of this
        slice because of that change; but backward does not need moving averages, so their version counters are kept.
        """
        position = self._positions[piece.index]
        with preserve_version_counter(self._buffers.statistics):
            self._buffers.enter(position)
            with self._around(piece):
                yield
            made = self._buffers.leave(position)
            before = self._statistics.get(position)
            self._statistics[position] = made if before is None else self._buffers.united(before, made)
            self._buffers.put_back()

    def weigh(self, piece: SliceLike, result: Any) -> Tensor:
        """The tensor to call backward on."""
        total, weight, scaled = self._weigh(piece, result)
        self._losses[self._positions[piece.index]] = total, weight
        return scaled

    def slice_done(self, piece: SliceLike) -> None:
        """The gradients of this slice alone are in `.grad`; call it for slices in ascending order."""
        position = self._positions[piece.index]
        self._gradients.before_backward(position)
        self._gradients.after_backward(position)

    def reports(self) -> list[SliceReport]:
        """In slice order; losses are 0 where another rank knows them."""
        return [
            SliceReport(*self._losses.get(position, (0.0, 0.0)), self._statistics.get(position, torch.empty(0)))
            for position in sorted(self._statistics)
        ]
