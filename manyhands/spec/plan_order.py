"""What `mh plan show` asks of the script that it starts: to say how its model would be divided, and end."""

from __future__ import annotations

import msgspec

from manyhands.spec.load import PLAN_VARIABLE, environment

__all__ = ["PlanOrder", "plan_order"]


class PlanOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    """Where the plan is to be written."""
    strategy: str = ""
    """In place of the script's own, if given."""
    workers: int = 0
    """In place of as many as the script asks for, if given."""


def plan_order() -> PlanOrder | None:
    """None where `mh plan show` did not start this process."""
    text = environment().get(PLAN_VARIABLE, "")
    return msgspec.json.decode(text, type=PlanOrder) if text else None
