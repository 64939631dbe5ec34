"""Constructor arguments that all engines share: the ranks to train with, the user's loss and precision, settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from manyhands.comm.axis import Axis
from manyhands.parallel.model.precision import Precision
from manyhands.parallel.model.step_buffers import ForeignState
from manyhands.parallel.weights.shared_memory_group import SharedMemoryGroup
from manyhands.spec.run import RunSpec
from manyhands.strategies.base import LossFn

__all__ = ["ModelSide", "Ranks", "StepSettings"]


class Ranks(NamedTuple):
    """Ranks that train together; where a replica spans several ranks, those that have the same part of it."""

    axis: Axis
    network: Callable[[], Axis]
    """The same ranks over sockets, even where `axis` uses shared memory; the first call connects them."""
    shared: SharedMemoryGroup | None = None
    """Where they share memory."""


class ModelSide(NamedTuple):
    """The user's loss, the precision it is computed in, and state that is not in a module's buffers."""

    loss: LossFn | None
    """None in a user loop."""
    precision: Precision
    foreign: ForeignState = ForeignState()


class StepSettings(NamedTuple):
    """The run's settings that apply to every step."""

    clip_norm: float | None = None
    bucket_bytes: int = 0
    reducer: str = "exact"
    check_every: int = 0
    """Every so many steps, ranks compare their replicas; on a difference `train_step` raises `CopiesDiffer` on all."""
    audit_seed: int | None = None
    """If not None, one slice of every step is computed twice, and the results must agree: bitwise if `exact`."""
    exact: bool = False
    seed: int = 0
    """Determines the initial values of embedding rows."""

    @classmethod
    def of(cls, spec: RunSpec) -> StepSettings:
        return cls(
            clip_norm=spec.train.clip_norm,
            bucket_bytes=spec.comm.bucket_bytes,
            reducer=spec.comm.reducer,
            check_every=spec.train.check_every,
            audit_seed=spec.run.seed if spec.train.audit else None,
            exact=spec.train.exact,
            seed=spec.run.seed,
        )
