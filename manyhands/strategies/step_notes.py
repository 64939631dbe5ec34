"""What workers with weights of their own tell each other of a step: a few numbers each, and no gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from manyhands.comm.axis import Axis
from manyhands.parallel.replicas.phase_timer import Phases
from manyhands.parallel.replicas.step_exchange import Note
from manyhands.strategies.base import StepLike, StepStats

__all__ = ["own_times", "tell_all"]


def tell_all(axis: Axis, stats: StepStats, weight: float, note: Note, name: str) -> None:
    """Make this rank's `stats` those of all ranks: the loss over the whole batch, what anyone wants, who is slow.

    A step counts as skipped where every rank skipped its own; the gradient's norm is the largest one.
    """
    norm = -1.0 if stats.grad_norm is None else stats.grad_norm
    wants = [float(note.stop), float(note.collect), float(stats.skipped)]
    mine = torch.tensor([stats.loss * weight, weight, norm, *wants, *note.times], dtype=torch.float64)
    everyone = torch.empty(axis.size, len(mine), dtype=torch.float64)
    axis.all_gather_start(everyone.view(-1), mine, name).wait()
    total, weights, norms, stops, collects, skipped, *times = everyone.T.tolist()
    stats.loss = sum(total) / sum(weights)
    stats.grad_norm = None if max(norms) < 0 or any(map(math.isnan, norms)) else max(norms)
    stats.stop, stats.collect, stats.skipped = int(max(stops)), any(collects), all(skipped)
    stats.times = list(zip(*times, strict=True)) if axis.size > 1 else ()


def own_times(phases: Phases, step: StepLike) -> Sequence[float]:
    """What a rank tells of its step with the next one: time at work by phase, and time of waiting for the others."""
    seconds, busy = phases.seconds, dict(phases.busy)
    if step.fetched_together:  # rows that some ranks lack were sent around: nobody was faster than the last
        busy["load"] = 0.0
    return *busy.values(), sum(seconds.values()) - sum(busy.values())
