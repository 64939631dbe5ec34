"""Waiting for other ranks: seconds spent, the mark for hang detection, and the error for different collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from manyhands.errors import TrainingFailed

__all__ = ["MARK", "Waiting", "different_collectives", "waits_for_peers"]


def different_collectives(names: Mapping[int, str]) -> TrainingFailed:
    """`names`: what each rank called, by rank."""
    calls = ", ".join(f"rank {rank} {name!r}" for rank, name in names.items())
    return TrainingFailed(
        f"Ranks called different collectives at the same time: {calls}.",
        fix=["call reduce, gather, mean and evaluate on every worker, in the same order"],
    )


P = ParamSpec("P")
R = TypeVar("R")

MARK = "waiting_for_peers"
"""Name of the stack frame above every function that waits for another process of the run."""


def waits_for_peers(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of every function that blocks until another worker, a server or the agent has answered.

    Hang detection reads the stacks of workers that make no progress (`control.membership.hang_detection`). A worker
    whose stack has this mark waits for the worker that hangs and is not killed; one without the mark counts as hung.
    """

    def waiting_for_peers(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    assert waiting_for_peers.__code__.co_name == MARK
    return functools.wraps(function)(waiting_for_peers)


class Waiting:
    """Total seconds that one thread has spent waiting for other ranks; it only grows."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0
