"""The names of strategies and reducers, and the settings that a strategy refuses; without torch.

`strategies.registry` and `comm.codecs` have the rest; tests/strategies/test_registry.py compares them with this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

__all__ = [
    "AVERAGING",
    "LIMITS",
    "REDUCERS",
    "SAME_STRATEGY",
    "STRATEGY_NAMES",
    "WITH_RESIDUALS",
    "WITH_SERVERS",
    "Limit",
    "ReducerName",
    "StrategyName",
    "strategy_name",
]

StrategyName = Literal[
    "single",
    "mirrored",
    "parameter_server",
    "local_sgd",
    "diloco",
    "tensor",
    "pipeline",
    "mesh",
    "sharded",
    "central_storage",
]
STRATEGY_NAMES: tuple[str, ...] = get_args(StrategyName)
AVERAGING = ("local_sgd", "diloco")
"""Strategies whose workers train separate weights between averaging rounds."""
WITH_SERVERS = ("parameter_server", *AVERAGING)
"""Strategies that may have parameter servers; the settings in the script decide."""

ReducerName = Literal["exact", "bf16", "int8"]
REDUCERS: tuple[str, ...] = get_args(ReducerName)
WITH_RESIDUALS = ("int8",)
"""Reducers that keep a residual (error feedback) on every worker: state that no other worker has."""

SAME_STRATEGY = {
    "ddp": "mirrored",
    "dp": "mirrored",
    "multiworker": "mirrored",
    "fsdp": "sharded",
    "zero3": "sharded",
    "tp": "tensor",
    "pp": "pipeline",
    "ps": "parameter_server",
}
"""Names of the same strategies in other libraries."""


def strategy_name(asked: str) -> str:
    """Our name of a strategy: "DDP" is "mirrored", "local-sgd" is "local_sgd"; other names are unchanged."""
    plain = asked.lower().replace("-", "_")
    return SAME_STRATEGY.get(plain.replace("_", ""), plain)


class Limit(NamedTuple):
    """A setting of which a strategy allows some values only."""

    why: str
    """Why other values are refused, after the setting's name; `{name}` is the strategy, `{value}` the refused value."""
    fix: Sequence[str]
    allowed: Sequence[Any] = (False, None)


MIRRORED = 'strategy = "mirrored"'
EXACT = "promises the same bits for any number of workers, "
TOGETHER = "moves slices between workers, but with {name} all workers compute every slice."
NO_CODECS = Limit("is {value}, which {name} does not support.", ['reducer = "exact"'], allowed=("exact",))

_AVERAGING = {
    "train.exact": Limit(
        f"{EXACT}but with {{name}} each worker trains separate weights, and the result depends on the number of "
        "workers.",
        ["exact = false", MIRRORED],
    ),
    "train.balance": Limit(
        "moves slices between workers, but with {name} the result depends on which worker trains on which slice.",
        ["balance = false"],
    ),
    "train.audit": Limit(
        "compares two workers' gradients of one slice, but with {name} their weights differ.", ["audit = false"]
    ),
    "comm.reducer": Limit(
        "is {value}, which sends its rounding errors with later steps (error feedback); {name} averages too rarely "
        "for that.",
        ['reducer = "bf16"'],
        allowed=[name for name in REDUCERS if name not in WITH_RESIDUALS],
    ),
}
# Workers split the model.
_DIVIDING = {
    "train.exact": Limit(
        f"{EXACT}but {{name}} splits sums inside the model, which changes rounding: the results agree to about 1e-6.",
        ["exact = false", MIRRORED],
    ),
    "train.audit": Limit(
        "recomputes a slice on another worker, but with {name} no worker has the whole model.", ["audit = false"]
    ),
    "train.balance": Limit(
        "moves slices between workers that each have the whole model, but with {name} the workers of a replica compute "
        "each slice together, and their times cannot be compared.",
        ["balance = false", MIRRORED],
    ),
    "comm.reducer": NO_CODECS,
}
# Replicas that shard weights or optimizer state.
_STORING = {
    "train.exact": Limit(f"{EXACT}which {{name}} does not.", ["exact = false", MIRRORED]),
    "train.audit": Limit(TOGETHER, ["audit = false", MIRRORED]),
    "train.balance": Limit(TOGETHER, ["balance = false", MIRRORED]),
    "comm.reducer": NO_CODECS,
    "launch.elastic": Limit(
        "is for workers that join and leave, but with {name} each worker holds state that no other has.",
        ['elastic = "none"', MIRRORED],
    ),
}
LIMITS: dict[str, dict[str, Limit]] = {
    "single": {
        "launch.elastic": Limit(
            "is for a changing number of workers, but strategy single has exactly one.",
            [MIRRORED, 'elastic = "none"'],
        )
    },
    "mirrored": {},
    "parameter_server": {},  # what each of its modes refuses, the script says
    "local_sgd": _AVERAGING,
    "diloco": _AVERAGING,
    "tensor": _DIVIDING,
    "pipeline": _DIVIDING,
    "mesh": _DIVIDING,
    "sharded": _STORING,
    "central_storage": _STORING,
}
"""By strategy and setting. A run is refused with the first one that it violates."""
