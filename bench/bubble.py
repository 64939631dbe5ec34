"""`python -m bench.bubble [--json]`: the waiting of a real pipeline beside the schedule's theory.

Blocks sleep for a known time, so what is measured is the schedule and the stages' own cost, whatever else the machine
does: a forward sleeps once, a backward twice, each of its halves once.
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

from manyhands.comm.plane_axis import PlaneAxis, connect_plane
from manyhands.comm.shared_values import SharedValues
from manyhands.parallel.cutting import Chain
from manyhands.parallel.schedule import SCHEDULES, make_schedule
from manyhands.parallel.stage import StageRunner
from manyhands.parallel.timeline import Span, Timeline, play
from manyhands.testing import RankPool

STEPS = 3


class _Nap(torch.autograd.Function):
    """Passes on, both ways; backward takes its time."""

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


class Piece(NamedTuple):
    index: int
    batch: Tensor


class Nothing:
    """An engine that does nothing with its slices."""

    @contextmanager
    def slice_context(self, piece: Piece) -> Iterator[None]:
        yield

    def weigh(self, piece: Piece, result: Tensor) -> Tensor:
        return result

    def slice_done(self, piece: Piece) -> None:
        pass


def line() -> tuple[PlaneAxis, SharedValues]:
    """This pool's ranks, as workers of one host are connected."""
    from manyhands.runtime.worker import _seated

    session, _ = _seated.get()
    rank, size, memory = session.seat.rank, session.seat.world_size, session.shared_memory
    axis = connect_plane(lambda num_bytes: memory("plane", num_bytes, size), rank, size, timeout_s=120, missing=str)
    return axis, SharedValues(rank, range(size), lambda name, num_bytes: memory(name, num_bytes, 2), timeout_s=120)


def run(name: str, microbatches: int, seconds: float) -> list[list[Span]]:
    axis, messages = line()
    ranks = axis.size
    stages = make_schedule(name, ranks, 1).stages
    model = nn.Sequential(*(Sleeper(seconds * ranks / stages) for _ in range(stages)))
    runner = StageRunner(
        messages, model, Chain(model).parts(range(stages)), lambda model, x: model(x).sum(), Nothing(), schedule=name
    )
    found = []
    for step in range(STEPS + 1):
        pieces = [Piece(v, torch.ones(2, 4)) for v in range(microbatches)]
        axis.barrier("before the step")
        runner.train(pieces, f"step {step}")
        found.append(runner.spans)
    axis.barrier("the end")  # before the first rank takes the memory away
    return found[1:]  # the first has what is done once


def measure(ranks: int, microbatches: int, seconds: float) -> list[dict[str, Any]]:
    pool, rows = RankPool(), []
    try:
        for name in SCHEDULES:
            told = pool(ranks, run, name, microbatches, seconds, deadline_s=300.0)
            bubbles = [Timeline(tuple(map(tuple, step)), ()).bubble for step in zip(*told, strict=True)]
            theory = play(make_schedule(name, ranks, microbatches)).bubble
            rows.append({"schedule": name, "theory": theory, "measured": median(bubbles), "each": bubbles})
    finally:
        pool.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.2, help="that a rank's forward of a slice sleeps")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = measure(asked.ranks, asked.microbatches, asked.seconds)
    if asked.json:
        print(json.dumps(rows))
        return
    for row in rows:
        off = 100 * (row["measured"] - row["theory"])
        print(f"{row['schedule']:12} theory {row['theory']:6.1%}  measured {row['measured']:6.1%}  {off:+.1f} points")


if __name__ == "__main__":
    main()
