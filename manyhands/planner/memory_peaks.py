"""What a worker needs when it starts, in a step and in a save: arithmetic over what was counted; the most is its peak.

Each kind of layout holds other things at a time, and `divided`, `one_copy` and the others say which. Nothing here
knows torch; the parts that no count gives, what a backward pass has for a moment and what the allocator keeps between
pieces, are numbers with a name. Start reading at `Peaks`.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Counted", "Peaks", "divided", "gathered", "in_shards", "one_copy", "replica"]

FRESH = 3
"""How many gradients of its largest tensor a backward pass has at a time: those of two uses, and their sum."""
GATHERED = 4
"""A block's values twice while they come together, its gradients, and those in one piece to be summed."""
BETWEEN_PIECES = 1.1
"""What an allocator that keeps freed memory takes for what is asked of it."""


class Counted(NamedTuple):
    """Bytes of one worker's own part, and of the whole model."""

    weights: int
    gradients: int
    """Of one slice."""
    states: int
    """The optimizer's."""
    activations: int
    """What is kept for backward, at the most."""
    whole: int
    """The whole model's weights and buffers, which every worker builds."""
    largest: int
    """The largest tensor of the whole model."""
    partials: int = 1
    """How many slices' gradients, or sums of them, this worker holds at once."""
    is_chief: bool = False


class Peaks(NamedTuple):
    """Bytes beside the interpreter, torch and the program."""

    start: int
    step: int
    save: int

    @property
    def largest(self) -> str:
        return max(self._fields, key=lambda phase: int(getattr(self, phase)))


def divided(own: Counted, *, largest: int, tied: int, replicas: int) -> Peaks:
    """Each worker has a part of its replica. `largest` is that of its own tensors.

    `tied` are all stages' gradients of tied weights, and their sums, which come when backward is over.
    """
    summed = 0 if replicas == 1 else 1 if replicas == 2 else 3  # what travels is put together, and taken apart
    backward = own.partials * own.gradients + own.activations + FRESH * largest
    step = own.weights + own.states + summed * own.gradients + max(backward, own.gradients + tied)
    save = own.weights + own.gradients + own.states + 2 * own.largest * own.is_chief
    return _peaks(own.whole + 2 * own.largest, step, save)


def one_copy(own: Counted, *, workers: int) -> Peaks:
    """The workers of a host look at one copy of the weights, at one another's gradients, and at parts of the states."""
    mine = -(-own.states // workers)
    shared = own.weights + own.partials * own.gradients + own.gradients * (workers - 1) // workers + mine
    step = shared + int(BETWEEN_PIECES * (own.activations + FRESH * own.largest))
    copy = own.weights + own.states + (own.states - mine) if own.is_chief else 0
    return Peaks(own.whole + own.weights, step, step + copy)


def replica(own: Counted) -> Peaks:
    """A whole copy of everything. While the chief writes one down, training goes on beside it."""
    step = own.weights + own.partials * own.gradients + own.states + own.activations + FRESH * own.largest
    return _peaks(own.whole, step, step + (own.weights + own.states) * own.is_chief)


def in_shards(own: Counted, *, block: int, gradients: int) -> Peaks:
    """A part of everything, and `block` bytes of it whole while they are computed with.

    `gradients` are all of the model's, which a worker with several slices adds up before they travel.
    """
    start = own.whole + own.weights + 2 * block
    step = own.weights + own.gradients + own.states + own.activations + GATHERED * block
    step += (own.partials - 1) * gradients
    return _peaks(start, step, own.weights + own.gradients + own.states + 2 * own.largest * own.is_chief)


def gathered(own: Counted, *, weights: int, gradients: int) -> Peaks:
    """A part of everything, and in a step `weights` and `gradients`, which are all of a stage's, or of a replica's."""
    step = own.weights + weights + own.partials * gradients + own.states + own.activations + FRESH * own.largest
    save = own.weights + own.gradients + own.states + 2 * own.largest * own.is_chief
    return _peaks(own.whole + own.weights + weights, step, save)


def _peaks(*phases: int) -> Peaks:
    return Peaks(*(int(BETWEEN_PIECES * one) for one in phases))
