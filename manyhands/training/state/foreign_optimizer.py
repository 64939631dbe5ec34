"""Another library's optimizer, whose own objects show its state: where workers have shards of it, or servers have it.

Files that the other library writes, and its users, read those objects. Start reading at `whole_in_place`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from torch import Tensor

from manyhands.parallel.sharding.gather_per_step import GatherPerStep
from manyhands.parameter_server.engine.leased_engine import LeasedEngine
from manyhands.training.state.training_state import TrainingState

__all__ = ["ForeignOptimizer", "show_states", "whole_in_place"]


@runtime_checkable
class ForeignOptimizer(Protocol):
    def show_states(self, whole: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Show the state as it is now. `whole(weight, part)`: the whole tensor of which this worker has a part."""


@contextmanager
def whole_in_place(training: TrainingState) -> Iterator[None]:
    """Inside, every worker's model has whole weights, and the optimizer's objects its whole state, to be read. Call it
    on all workers, between steps."""
    engine = training.engine
    if isinstance(engine, LeasedEngine):
        engine.gather_state()
        show_states(training)
        yield
    elif isinstance(engine.held, GatherPerStep):
        with engine.held.gathered():
            show_states(training)
            yield
    else:
        show_states(training)
        yield


def show_states(training: TrainingState) -> None:
    """The second part of that, for an optimizer of another library. All workers call it where they have shards."""
    held = getattr(training.engine, "held", None)

    def whole(weight: Tensor, part: Tensor) -> Tensor:
        share = held.shares.get(id(weight)) if isinstance(held, GatherPerStep) else None
        if share is None or tuple(part.shape) != share.local_shape or share.is_whole:
            return part
        assert isinstance(held, GatherPerStep)
        return held.gather(share, part)

    if isinstance(training.optimizer, ForeignOptimizer):
        training.optimizer.show_states(whole)
