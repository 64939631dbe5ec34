"""Peak memory of a worker at the start, in a step and in a save: arithmetic over counted bytes.

Each kind of layout has other tensors in memory at a time; `divided`, `one_copy` and the other functions say which.
Imports no torch. What cannot be counted, such as temporary gradients of a backward pass and allocator overhead, is a
named constant. Start reading at `Peaks`.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Counted", "Peaks", "divided", "gathered", "in_shards", "one_copy", "replica"]

TEMPORARIES = 3
"""How many gradients of its largest tensor a backward pass has at a time: those of two uses, and their sum. A tensor
that is used once has one."""
GATHERED = 4
"""A block's values twice while they are gathered, its gradients, and those flattened for the reduction."""
ALLOCATOR_OVERHEAD = 1.1
"""Overhead factor of an allocator that keeps freed memory."""


class Counted(NamedTuple):
    """Bytes of one worker's part, and of the whole model."""

    weights: int
    gradients: int
    """For one slice."""
    states: int
    """Optimizer state."""
    activations: int
    """Peak bytes kept for backward."""
    whole: int
    """The whole model's weights and buffers, which every worker builds."""
    largest: int
    """The largest tensor of the whole model."""
    partials: int = 1
    """How many slices' gradients, or sums of them, this worker has at once."""
    is_chief: bool = False


class Peaks(NamedTuple):
    """Bytes in addition to the interpreter, torch and the program."""

    start: int
    step: int
    save: int

    @property
    def largest(self) -> str:
        return max(self._fields, key=lambda phase: int(getattr(self, phase)))


def divided(own: Counted, *, largest: int, tied: int, replicas: int, used_twice: bool) -> Peaks:
    """Each worker has a part of its replica. `largest`: the largest tensor of that part, `used_twice`: that or another.

    `tied`: all stages' gradients of tied weights, and their sums, which are made after backward.
    """
    summed = 0 if replicas == 1 else 1 if replicas == 2 else 3  # gradients are flattened for sending, and split again
    # Backward frees activations as it makes a slice's gradients: it ends with the ones, and began with the others.
    slices = (own.partials - 1) * own.gradients + max(own.gradients, own.activations)
    backward = slices + (TEMPORARIES if used_twice else 1) * largest
    step = own.weights + own.states + summed * own.gradients + max(backward, own.gradients + tied)
    save = own.weights + own.gradients + own.states + 2 * own.largest * own.is_chief
    return _peaks(own.whole + 2 * own.largest, step, save)


def one_copy(own: Counted, *, workers: int) -> Peaks:
    """The workers of a host share one copy of the weights and one another's gradients; optimizer state is sharded."""
    own_states = -(-own.states // workers)
    shared = own.weights + own.partials * own.gradients + own.gradients * (workers - 1) // workers + own_states
    step = shared + int(ALLOCATOR_OVERHEAD * (own.activations + TEMPORARIES * own.largest))
    copy = own.weights + own.states + (own.states - own_states) if own.is_chief else 0
    return Peaks(own.whole + own.weights, step, step + copy)


def replica(own: Counted) -> Peaks:
    """A whole copy of everything. While the chief writes a checkpoint from a copy, training continues."""
    step = own.weights + own.partials * own.gradients + own.states + own.activations + TEMPORARIES * own.largest
    return _peaks(own.whole, step, step + (own.weights + own.states) * own.is_chief)


def in_shards(own: Counted, *, block: int, gradients: int) -> Peaks:
    """A shard of everything, and `block` bytes gathered while they are used.

    `gradients`: those of the whole model, which a worker with several slices sums before it sends them.
    """
    start = own.whole + own.weights + 2 * block
    step = own.weights + own.gradients + own.states + own.activations + GATHERED * block
    step += (own.partials - 1) * gradients
    return _peaks(start, step, own.weights + own.gradients + own.states + 2 * own.largest * own.is_chief)


def gathered(own: Counted, *, weights: int, gradients: int) -> Peaks:
    """A shard of everything, and in a step the gathered `weights` and `gradients` of a whole stage or replica."""
    step = own.weights + weights + own.partials * gradients + own.states + own.activations + TEMPORARIES * own.largest
    save = own.weights + own.gradients + own.states + 2 * own.largest * own.is_chief
    return _peaks(own.whole + own.weights + weights, step, save)


def _peaks(*phases: int) -> Peaks:
    return Peaks(*(int(ALLOCATOR_OVERHEAD * one) for one in phases))
