"""How long this process has waited for other ranks: added up where it waits, read by who tells work from waiting."""

from __future__ import annotations

__all__ = ["Waiting"]


class Waiting:
    """Seconds, ever growing; of one thread."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0
