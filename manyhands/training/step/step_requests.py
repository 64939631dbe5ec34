"""What workers tell each other with every step that they want done after it.

The largest wins. Each includes those before it, but for TELL, REGROUP and VALIDATE, which are asked for again. The
first five are the chief's alone.
"""

from __future__ import annotations

__all__ = ["END_FIT", "LEAVE", "REGROUP", "SAVE", "SAVE_AND_VALIDATE", "TELL", "VALIDATE", "saves", "validates"]

# TELL: hooks of every worker are called with the checkpoints that the chief has committed.
TELL, REGROUP, VALIDATE, SAVE, SAVE_AND_VALIDATE, END_FIT, LEAVE = 1, 2, 3, 4, 5, 6, 7


def saves(stop: int) -> bool:
    return stop in (SAVE, SAVE_AND_VALIDATE)


def validates(stop: int) -> bool:
    return stop in (VALIDATE, SAVE_AND_VALIDATE)
