"""What is said where ranks came to the same exchange for different things, and took nothing for something else."""

from __future__ import annotations

from collections.abc import Mapping

from manyhands.errors import TrainingFailed

__all__ = ["do_different_things"]


def do_different_things(names: Mapping[int, str]) -> TrainingFailed:
    """`names`: by rank, what each came for."""
    told = ", ".join(f"rank {rank} {name!r}" for rank, name in names.items())
    return TrainingFailed(
        f"The workers do different things at the same time: {told}.",
        fix=["what all workers do together (reduce, gather, mean, evaluate) where each of them comes to it, in turn"],
    )
