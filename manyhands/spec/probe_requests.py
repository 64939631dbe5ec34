"""Requests of `mh check`, `mh plan show`, `mh profile`, `mh graph` and `mh evaluate` to the processes that they start.

They are passed through the environment.
"""

from __future__ import annotations

from typing import Any

import msgspec

from manyhands.spec.load import EVALUATE_VARIABLE, GRAPH_VARIABLE, PLAN_VARIABLE, checked, environment, profiled

__all__ = [
    "CheckOrder",
    "EvaluateOrder",
    "GraphOrder",
    "PlanOrder",
    "ProfileOrder",
    "evaluate_order",
    "graph_order",
    "order_of_this_worker",
    "plan_order",
    "profile_order",
]


class CheckOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    steps: int
    strategy: str
    settings: dict[str, Any] = {}
    """Constructor arguments of the strategy."""
    nudged: bool = False
    """Start with weights that differ in their last bits, to measure the effect of rounding alone."""


def order_of_this_worker() -> CheckOrder | None:
    """None where `mh check` did not start this process."""
    text = checked()
    return msgspec.json.decode(text, type=CheckOrder) if text else None


class PlanOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    """The file to write the plan to."""
    strategy: str = ""
    """If given, overrides the script's strategy."""
    workers: int = 0
    """If given, overrides the script's number of workers."""


def plan_order() -> PlanOrder | None:
    """None where `mh plan show` did not start this process."""
    text = environment().get(PLAN_VARIABLE, "")
    return msgspec.json.decode(text, type=PlanOrder) if text else None


class ProfileOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a trial of `mh profile` differs from the run as it is."""

    data_ready: int = 0
    """If given, fetch the data of this many steps before the first of them, and end after the last."""
    share: tuple[int, int] | None = None
    """(r, n): train alone, on the slices that worker r of n has."""
    start_gate: str = ""
    """With `share`: a directory in which the n trials wait for each other before their first step."""
    loaders: int | None = None
    """If given, overrides the number of loader processes."""
    trace: tuple[int, int] | None = None
    """If given, record these steps, the first and the last of them counted from 1, with torch's profiler."""


def profile_order() -> ProfileOrder | None:
    """None where `mh profile` did not start this process."""
    text = profiled()
    return msgspec.json.decode(text, type=ProfileOrder) if text else None


class GraphOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    """The file to write the graph to."""
    strategy: str = ""
    """If given, overrides the script's strategy."""
    workers: int = 0
    """If given, overrides the script's number of workers."""
    modules_only: bool = False
    """Do not export the model: record its modules' calls."""


def graph_order() -> GraphOrder | None:
    """None where `mh graph` did not start this process."""
    text = environment().get(GRAPH_VARIABLE, "")
    return msgspec.json.decode(text, type=GraphOrder) if text else None


class EvaluateOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Evaluate the checkpoints of a run with the script's trainer, and train nothing."""

    flags: dict[str, Any] = {}
    """Settings from the command line, by dotted key; the run directory among them, unless the script sets it."""
    as_json: bool = False
    """Print events as JSON lines on stdout."""


def evaluate_order() -> EvaluateOrder | None:
    """None where neither `mh evaluate` nor `mh run`, as the evaluator of a cluster, started this process."""
    text = environment().get(EVALUATE_VARIABLE, "")
    return msgspec.json.decode(text, type=EvaluateOrder) if text else None
