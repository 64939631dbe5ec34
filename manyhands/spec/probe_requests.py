"""Requests that `mh check` and `mh plan show` pass through the environment to the processes that they start."""

from __future__ import annotations

from typing import Any

import msgspec

from manyhands.spec.load import PLAN_VARIABLE, checked, environment

__all__ = ["CheckOrder", "PlanOrder", "order_of_this_worker", "plan_order"]


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
