"""Requests that a worker attaches to a step, or to its request for a lease: what all workers do after it.

The largest value is carried out. It includes the smaller ones, except for CHECKPOINT_HOOKS, REOPEN, REGROUP and
VALIDATE, which are requested again. Where all workers take each step together, only the chief requests those below
END_FIT.
"""

from __future__ import annotations

__all__ = [
    "CHECKPOINT_HOOKS",
    "END_FIT",
    "LEAVE",
    "REGROUP",
    "REOPEN",
    "SAVE",
    "SAVE_AND_VALIDATE",
    "VALIDATE",
    "saves",
    "validates",
]

# CHECKPOINT_HOOKS: every worker calls its hooks with the checkpoints that the chief has committed.
# REOPEN: parameter servers begin a new interval, with other servers or other optimizer settings.
CHECKPOINT_HOOKS, REOPEN, REGROUP, VALIDATE, SAVE, SAVE_AND_VALIDATE, END_FIT, LEAVE = range(1, 9)


def saves(stop: int) -> bool:
    return stop in (SAVE, SAVE_AND_VALIDATE)


def validates(stop: int) -> bool:
    return stop in (VALIDATE, SAVE_AND_VALIDATE)
