"""The schedule of faults, their times and targets: a pure function of the seed and the size of the run.

The same arguments give the same schedule on every machine. A fault may not find its target: the run is real, and a
worker that should be killed may be dead already; see `fault_injection`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

__all__ = ["KINDS", "ON_ONE_HOST", "ON_SERVERS", "ON_TEMPLATE", "ON_WORKERS", "Fault", "Kind", "schedule"]

Kind = Literal[
    "kill",
    "stop",
    "hang",
    "slow",
    "coordinator",
    "disk",
    "agent",
    "kill-server",
    "stop-server",
    "kill-template",
    "stop-template",
]

KINDS: tuple[Kind, ...] = get_args(Kind)
ON_WORKERS: tuple[Kind, ...] = ("kill", "stop", "hang", "slow")
ON_SERVERS: tuple[Kind, ...] = ("kill-server", "stop-server")
ON_TEMPLATE: tuple[Kind, ...] = ("kill-template", "stop-template")
ON_ONE_HOST: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind != "agent" and kind not in ON_SERVERS)

LASTS_S = {"slow": 3.0, "disk": 3.0}


class Fault(msgspec.Struct, frozen=True):
    number: int
    at_s: float
    """After the first committed step."""
    kind: Kind
    slot: int | None = None
    """Number of the worker, server or agent that it hits; None for other kinds."""
    lasts_s: float = 0.0
    """0: it is permanent."""


def schedule(
    seed: int, *, mtbf_s: float, minutes: float, workers: int, servers: int = 0, kinds: Sequence[Kind] = ON_ONE_HOST
) -> tuple[Fault, ...]:
    """Faults with exponential gaps of mean `mtbf_s`; kinds, and workers or servers, are equally likely."""
    size = f"{workers}" + (f" {servers}" if servers else "")
    draw = random.Random(f"{seed} {mtbf_s:g} {minutes:g} {size} {' '.join(sorted(kinds))}")
    faults: list[Fault] = []
    at_s = draw.expovariate(1.0 / mtbf_s)
    while at_s < 60.0 * minutes:
        kind = draw.choice(sorted(kinds))
        slot = draw.randrange(servers if kind in ON_SERVERS else workers)
        victim = None if kind in ("coordinator", "disk", *ON_TEMPLATE) else slot
        faults.append(Fault(len(faults) + 1, round(at_s, 3), kind, victim, LASTS_S.get(kind, 0.0)))
        at_s += draw.expovariate(1.0 / mtbf_s)
    return tuple(faults)
