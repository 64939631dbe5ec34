"""The modes that `mh demo` shows, as plain values: strategy, settings and number of workers. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["MODES", "Mode", "command_of"]

PROGRAM = "manyhands.recipes.every_strategy"
ASYNC = {"servers": 1, "mode": "async", "warm_steps": 46, "damping": True}
"""Two epochs without staleness, as the first gradients of a network are too large to be applied late; then late ones
count for less."""


class Mode(NamedTuple):
    name: str
    strategy: str
    workers: int = 2
    servers: int = 0
    settings: Mapping[str, Any] = {}
    is_alike: bool = True
    """Whether it promises the weights of one process, but for rounding."""


MODES = (
    Mode("single", "single", workers=1),
    Mode("mirrored", "mirrored"),
    Mode("central_storage", "central_storage"),
    Mode("servers_sync", "parameter_server", servers=1, settings={"servers": 1, "mode": "sync"}),
    Mode("servers_async", "parameter_server", servers=1, settings=ASYNC, is_alike=False),
    Mode("local_sgd", "local_sgd", settings={"every": 8}, is_alike=False),
    Mode("tensor", "tensor"),
    Mode("pipeline", "pipeline", settings={"microbatches": 2}),
    Mode("sharded", "sharded", settings={"level": "parameters"}),
    Mode("mesh", "mesh", workers=4, settings={"data": 2, "tensor": 2}),
)


def command_of(mode: Mode) -> list[str]:
    """What a user types to run it."""
    servers = ["--servers", str(mode.servers)] if mode.servers else []
    return ["mh", "run", "-n", str(mode.workers), *servers, "-m", PROGRAM, mode.name]
