"""Buffers of every version of the weights, as the first server keeps them in the memory that all see."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from manyhands.parallel.model.step_buffers import ForeignState, StepBuffers, changing_state
from manyhands.parameter_server.memory.versioned_memory import ServedMemory
from manyhands.parameter_server.protocol.shard import Contribution

__all__ = ["ServedBuffers"]


class ServedBuffers:
    """The first server replays what slices made of the buffers, so that every version has its own."""

    def __init__(
        self, model: nn.Module, foreign: ForeignState, served: ServedMemory, version: int, *, apart: bool
    ) -> None:
        """`apart`: slices may have begun with the buffers of earlier versions."""
        self._served, self._apart = served, apart
        self._live = changing_state(model, served.params)
        self._copy(self._live, served.buffers(version))
        self._replay = StepBuffers(model, foreign)

    def update(self, version: int, due: Sequence[Contribution], slices: Sequence[Tensor]) -> None:
        """Make the buffers of the version after this one; done again, it makes the same."""
        if not self._live:
            return
        self._copy(self._live, self._served.buffers(version))
        self._replay.refresh()
        self._replay.begin(len(slices), 2)
        self._replay.commit(slices, apart=self._apart)
        for one in due:
            if one.place == 0 and one.changes:
                self._replay.apply_first_changes(one.changes)
        self._copy(self._served.buffers(version + 1), self._live)

    @staticmethod
    def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
