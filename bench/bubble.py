"""`python -m bench.bubble [--json]`: the waiting of a real pipeline beside the schedule's theory.

Blocks sleep for a known time, so what is measured is the schedule and the stages' own cost, whatever else the machine
does: a forward sleeps once, a backward twice, each of its halves once.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import FileStore

from manyhands.comm.axis import connect
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


def run(store: str, rank: int, ranks: int, name: str, microbatches: int, seconds: float) -> list[list[Span]]:
    device = torch.device("cpu")
    axis = connect(FileStore(store, ranks), rank, ranks, address="127.0.0.1", device=device, timeout_s=60)
    stages = make_schedule(name, ranks, 1).stages
    model = nn.Sequential(*(Sleeper(seconds * ranks / stages) for _ in range(stages)))
    runner = StageRunner(
        axis, model, Chain(model).parts(range(stages)), lambda model, x: model(x).sum(), Nothing(), schedule=name
    )
    found = []
    for step in range(STEPS + 1):
        pieces = [Piece(v, torch.ones(2, 4)) for v in range(microbatches)]
        axis.barrier("before the step")
        runner.train(pieces, f"step {step}")
        found.append(runner.spans)
    return found[1:]  # the first has what is done once


def seated_run(*args: Any) -> list[list[Span]]:
    from manyhands.runtime.worker import _seated

    session, _ = _seated.get()
    return run(args[0], session.seat.rank, *args[1:])


def measure(ranks: int, microbatches: int, seconds: float) -> list[dict[str, Any]]:
    pool, rows = RankPool(), []
    try:
        for name in SCHEDULES:
            with tempfile.TemporaryDirectory() as folder:
                store = str(Path(folder) / "store")
                told = pool(ranks, seated_run, store, ranks, name, microbatches, seconds, deadline_s=300.0)
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
