"""Replicas with one copy of the weights on each host: what `Replicated` does by itself in shared memory, as a promise.

The engine of `CentralStorage`, and of `Sharded` at the levels that keep parameters whole, where workers share memory.
"""

from __future__ import annotations

from manyhands.errors import TrainingFailed
from manyhands.strategies.replicated import Replicated

__all__ = ["OneCopy"]


class OneCopy(Replicated):
    """Replicas that promise to have one copy of the weights on each host, and the optimizer's states divided."""

    def synchronise(self) -> None:
        super().synchronise()
        if self.held.common is None:
            raise TrainingFailed(
                f"Updates of {type(self._optimizer).__name__} cannot be divided: every worker would keep a copy of the "
                "weights and of all states.",
                fix=["torch.optim.AdamW, or another of torch's own", 'strategy="mirrored"'],
            )
