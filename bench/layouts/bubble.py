"""`python -m bench.layouts.bubble [--json]`: the bubble of a real pipeline, compared with the schedule's theory.

Blocks sleep for a known time, so the schedule and the overhead of the stages are measured independently of other load
on the machine: a forward sleeps once, a backward twice, each of its halves once. With `--rows` blocks compute instead,
with so many rows per microbatch, all the same amount: `--ranks 2 --rows 128`, on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyhands.comm.shared_memory_axis import PlaneAxis, connect_plane
from manyhands.comm.shared_memory_messages import SharedMemoryPointToPoint
from manyhands.parallel.pipeline.partition import Chain
from manyhands.parallel.pipeline.schedule import SCHEDULES, make_schedule
from manyhands.parallel.pipeline.stage_runner import StageRunner
from manyhands.parallel.pipeline.timeline import Timeline, TimelineSpan, play
from manyhands.testing import RankPool

STEPS = 3
LAYERS, SIDE = 12, 1024
"""Layers of a model that computes: divisible by two, three, four and six stages."""


class _Nap(torch.autograd.Function):
    """The identity; its backward sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class Sleeper(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight, self.entry = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return _Nap.apply(x + self.entry, self.seconds) * _Nap.apply(self.weight, self.seconds)


class Layer(nn.Module):
    """A layer that computes; its input gradient is computed even in the first layer of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.linear = nn.Parameter(torch.zeros(SIDE)), nn.Linear(SIDE, SIDE)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x + self.entry).relu()
        return y


class Piece(NamedTuple):
    index: int
    batch: Tensor


class Nothing:
    """An engine that does nothing with slices."""

    @contextmanager
    def slice_context(self, piece: Piece) -> Iterator[None]:
        yield

    def weigh(self, piece: Piece, result: Tensor) -> Tensor:
        return result

    def slice_done(self, piece: Piece) -> None:
        pass


class Adding(Nothing):
    """Adds up the slices' gradients."""

    def __init__(self, model: nn.Module) -> None:
        self._params, self._sums = list(model.parameters()), dict[nn.Parameter, Tensor]()

    def slice_done(self, piece: Piece) -> None:
        for param in self._params:
            if param.grad is not None:
                before = self._sums.get(param)
                self._sums[param] = param.grad if before is None else before.add_(param.grad)
                param.grad = None


def line() -> tuple[PlaneAxis, SharedMemoryPointToPoint]:
    """Connects this pool's ranks as the workers of one host."""
    from manyhands.training.worker.worker import _current_session

    session, _ = _current_session.get()
    rank, size, memory = session.identity.rank, session.identity.world_size, session.shared_memory
    axis = connect_plane(lambda num_bytes: memory("plane", num_bytes, size), rank, size, timeout_s=120, missing=str)
    return axis, SharedMemoryPointToPoint(
        rank, range(size), lambda name, num_bytes: memory(name, num_bytes, 2), timeout_s=120
    )


def run(name: str, microbatches: int, seconds: float, rows: int, steps: int) -> list[list[TimelineSpan]]:
    axis, messages = line()
    ranks = axis.size
    stages = make_schedule(name, ranks, 1).stages
    blocks = [Layer() for _ in range(LAYERS)] if rows else [Sleeper(seconds * ranks / stages) for _ in range(stages)]
    model = nn.Sequential(*blocks)
    parts = Chain(model).parts(range(0, len(blocks), len(blocks) // stages))
    engine = Adding(model) if rows else Nothing()
    runner = StageRunner(messages, model, parts, lambda model, x: model(x).sum(), engine, schedule=name)
    batch = torch.ones(rows, SIDE) if rows else torch.ones(2, 4)
    found = []
    for step in range(steps + 1):
        pieces = [Piece(v, batch) for v in range(microbatches)]
        axis.barrier("before the step")
        runner.train(pieces, f"step {step}")
        found.append(runner.spans)
    axis.barrier("the end")  # before the first rank frees the memory
    return found[1:]  # without the first, which includes one-time work


def measure(asked: argparse.Namespace) -> list[dict[str, Any]]:
    pool, found = RankPool(), []
    ranks, microbatches = asked.ranks, asked.microbatches
    try:
        for name in SCHEDULES:
            spans = pool(ranks, run, name, microbatches, asked.seconds, asked.rows, asked.steps, deadline_s=600.0)
            bubbles = [Timeline(tuple(map(tuple, step)), ()).bubble for step in zip(*spans, strict=True)]
            theory = play(make_schedule(name, ranks, microbatches)).bubble
            found.append({"schedule": name, "theory": theory, "measured": median(bubbles), "each": bubbles})
    finally:
        pool.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.2, help="that a rank's forward of a slice sleeps")
    parser.add_argument("--rows", type=int, default=0, help="compute with so many per microbatch, in place of sleeping")
    parser.add_argument("--steps", type=int, default=STEPS, help="of which the median counts")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = measure(asked)
    if asked.json:
        print(json.dumps(rows))
        return
    for row in rows:
        off = 100 * (row["measured"] - row["theory"])
        print(f"{row['schedule']:12} theory {row['theory']:6.1%}  measured {row['measured']:6.1%}  {off:+.1f} points")


if __name__ == "__main__":
    main()
