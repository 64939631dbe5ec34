"""What `mh check` asks of the workers that it starts: how many steps, under which layout."""

from __future__ import annotations

from typing import Any

import msgspec

from manyhands.spec.load import checked

__all__ = ["CheckOrder", "order_of_this_worker"]


class CheckOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    steps: int
    strategy: str
    settings: dict[str, Any] = {}
    """What the strategy is made with."""
    nudged: bool = False
    """Begin with weights that differ in their last bits, to see what rounding alone comes to."""


def order_of_this_worker() -> CheckOrder | None:
    """None where `mh check` did not start it."""
    text = checked()
    return msgspec.json.decode(text, type=CheckOrder) if text else None
