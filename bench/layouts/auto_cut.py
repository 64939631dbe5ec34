"""`python -m bench.layouts.auto_cut [--json]`: the automatic cut of 12 uneven blocks, compared with all cuts.

Two stages, each a process with one thread. All eleven cuts run in turn, so that a busy moment of the machine affects
all; the automatic one is among them, and its time is compared with that of the fastest.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import torch
from torch import nn

from bench.layouts.bubble import Nothing, Piece, line
from manyhands.parallel.pipeline.build_stages import cut, measure
from manyhands.parallel.pipeline.partition import Chain, Inputs
from manyhands.parallel.pipeline.stage_runner import StageRunner
from manyhands.testing import RankPool

WIDTHS = (64, 512, 256, 1024, 128, 768, 2048, 96, 384, 640, 160, 896)
"""The hidden size of each block: no two blocks cost the same."""
ROWS, SIDE, MICROBATCHES = 64, 512, 8
ROUNDS = 7


def uneven() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(SIDE, width), nn.ReLU(), nn.Linear(width, SIDE)) for width in WIDTHS)
    )


class _Blocks(Chain):
    """Cuts between whole blocks only; a `Chain` would also cut inside them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        links = self.names
        self._starts = [links.index(f"{number}.0") for number in range(len(WIDTHS))]
        self._links, self.names = links, [str(number) for number in range(len(WIDTHS))]

    def parts(self, starts: Any) -> Any:
        blocks, self.names = self.names, self._links
        try:
            return super().parts([self._starts[start] for start in starts])
        finally:
            self.names = blocks


def run() -> dict[str, Any]:
    axis, messages = line()
    model = uneven()
    blocks = _Blocks(model)
    costs = torch.tensor(measure(blocks, Inputs((torch.randn(ROWS, SIDE),), {})), dtype=torch.float64)
    axis.broadcast_([costs], "costs")
    chosen = len(cut(blocks, 2, costs=costs.tolist())[0].names) // 3
    runners = {
        at: StageRunner(messages, model, blocks.parts([0, at]), lambda model, x: model(x).square().mean(), Nothing())
        for at in range(1, len(WIDTHS))
    }
    seconds: dict[int, list[float]] = {at: [] for at in runners}
    for number in range(ROUNDS + 1):
        for at, runner in runners.items():
            pieces = [Piece(v, torch.randn(ROWS, SIDE)) for v in range(MICROBATCHES)]
            axis.barrier("before the step")
            began = time.perf_counter()
            runner.train(pieces, f"round {number}")
            axis.barrier("after the step")
            seconds[at].append(time.perf_counter() - began)
    return {"chosen": chosen, "seconds": {at: median(each[1:]) for at, each in seconds.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    pool = RankPool()
    try:
        found = pool(2, run, deadline_s=600.0)[0]
    finally:
        pool.close()
    seconds, chosen = found["seconds"], found["chosen"]
    best = min(seconds, key=lambda at: seconds[at])
    found |= {"best": best, "ratio": seconds[chosen] / seconds[best]}
    if asked.json:
        print(json.dumps(found))
        return
    for at, each in seconds.items():
        marks = " chosen" * (at == chosen) + " quickest" * (at == best)
        print(f"cut before block {at:2}: {1000 * each:7.1f} ms{marks}")
    print(f"the automatic cut takes {found['ratio']:.3f} times as long as the quickest")


if __name__ == "__main__":
    main()
