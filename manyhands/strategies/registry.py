"""Every strategy by the name that a user writes: its settings, its engine, and its properties.

To add one: its settings (in `choices`, or next to its engine), an entry here, and in `spec.strategy_names` its name
with the settings that it cannot have. A new engine is also constructed in `training.setup.engine_factory`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from manyhands.strategies.choices import CentralStorage, LocalSGD, Mirrored, ParameterServer, Sharded, Single
from manyhands.strategies.model_parallel import Mesh, PipelineParallel, TensorParallel

__all__ = ["PRESETS", "STRATEGIES", "StrategyChoice", "StrategyEntry", "refused_without"]

StrategyChoice = (
    Single | Mirrored | ParameterServer | LocalSGD | TensorParallel | PipelineParallel | Mesh | Sharded | CentralStorage
)


class StrategyEntry(NamedTuple):
    settings: type[StrategyChoice]
    engine: str
    """The engine that trains: a key of `engine_factory.MAKERS`."""
    uses: tuple[str, ...] = ("groups",)
    """Features that depend on private names of torch, as `torch_private` calls them."""
    one_copy: bool = False
    """The workers of a host share one copy of the weights, and each has a shard of the optimizer state."""
    is_alike: bool = True
    """With its default settings it reaches the same result as one process."""


STRATEGIES = {
    "single": StrategyEntry(Single, "replicas", uses=()),
    "mirrored": StrategyEntry(Mirrored, "replicas", one_copy=True),
    "central_storage": StrategyEntry(CentralStorage, "central storage", one_copy=True),
    "sharded": StrategyEntry(Sharded, "shards", uses=("groups", "shards"), one_copy=True),
    "tensor": StrategyEntry(TensorParallel, "model parts", uses=("groups", "layers")),
    "pipeline": StrategyEntry(PipelineParallel, "model parts", uses=("groups", "stages")),
    "mesh": StrategyEntry(Mesh, "model parts", uses=("groups", "shards", "layers", "stages")),
    "parameter_server": StrategyEntry(ParameterServer, "servers", is_alike=False),
    "local_sgd": StrategyEntry(LocalSGD, "averages", is_alike=False),
}
PRESETS: dict[str, Callable[..., StrategyChoice]] = {
    "diloco": partial(LocalSGD, outer="nesterov"),
    "zero1": partial(Sharded, "optimizer"),
    "zero2": partial(Sharded, "gradients"),
}
"""Names for a strategy with some of its settings. Command-line flags and files accept only the first."""


def refused_without(features: Sequence[str]) -> list[str]:
    """The strategies that use any of these features."""
    return [name for name, entry in STRATEGIES.items() if set(entry.uses) & set(features)]
