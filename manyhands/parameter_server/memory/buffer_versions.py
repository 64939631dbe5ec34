"""The model's buffers (batch statistics, ...) of every version of the weights, which the first server maintains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from manyhands.parallel.model.step_buffers import ForeignState, StepBuffers, changing_state
from manyhands.parameter_server.memory.versioned_memory import VersionedMemory
from manyhands.parameter_server.protocol.shard import SliceGradient

__all__ = ["BufferVersions"]


class BufferVersions:
    """The first server replays the slices' changes to buffers, so that every version of the weights has its own."""

    def __init__(
        self, model: nn.Module, foreign: ForeignState, served: VersionedMemory, version: int, *, mixed_versions: bool
    ) -> None:
        """`mixed_versions`: slices may have begun with the buffers of earlier versions."""
        self._served, self._mixed_versions = served, mixed_versions
        self._live = changing_state(model, served.params)
        self._copy(self._live, served.buffers(version))
        self._replay = StepBuffers(model, foreign)

    def update(self, version: int, due: Sequence[SliceGradient], slices: Sequence[Tensor]) -> None:
        """Compute the buffers of the version after this one; repeating it gives the same."""
        if not self._live:
            return
        self._copy(self._live, self._served.buffers(version))
        self._replay.refresh()
        self._replay.begin(len(slices), 2)
        self._replay.commit(slices, apart=self._mixed_versions)
        for one in due:
            if one.place == 0 and one.changes:
                self._replay.apply_first_changes(one.changes)
        self._copy(self._served.buffers(version + 1), self._live)

    @staticmethod
    def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
