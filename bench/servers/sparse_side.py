"""Embeddings of 10 M ids, as sides that take turns: `-m bench.servers.sparse_side served` under `mh run`, or `torch`.

A batch is 1,024 rows of 26 ids; one epoch has every id once. "served" stores rows on parameter servers, and is measured
once an epoch has created all of them; "torch" is `nn.Embedding(sparse=True)` in one process, which runs the batches of
all workers one after another. Plain SGD: the fastest that both have.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

import manyhands as mh
from bench.driver.turns import TurnHook, Turns, take_turns
from bench.programs.workloads import SPARSE_BATCH, SPARSE_DIM, SPARSE_IDS, SPARSE_PER_ROW

LEARNING_RATE = 0.01
WORKERS = 2


class Scores(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.out = table, nn.Linear(SPARSE_DIM, 1, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.out(self.table(ids).mean(1))
        return scores


def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    scores: Tensor = model(batch[0])
    return (scores - 1.0).square().mean()


def make_ids() -> Tensor:
    order = torch.randperm(SPARSE_IDS, generator=torch.Generator().manual_seed(0))
    return order[: SPARSE_IDS // SPARSE_PER_ROW * SPARSE_PER_ROW].view(-1, SPARSE_PER_ROW)


def _descend(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LEARNING_RATE)


class _AfterFirstEpoch:
    """Steps are measured once every id has its row."""

    def __init__(self, hook: TurnHook, num_updates: int) -> None:
        self._hook, self._num_updates = hook, num_updates

    def after_step(self, trainer: Any, step: int, stats: Any) -> None:
        if step > self._num_updates:
            self._hook.after_step(trainer, step, stats)


def _served() -> None:
    turns = TurnHook(
        lambda: Turns(threads=torch.get_num_threads(), versions={"manyhands": version("manyhands")}),
        updates_per_step=int(os.environ["WORLD_SIZE"]),
    )
    trainer = mh.Trainer(
        lambda: Scores(mh.nn.Embedding(SPARSE_DIM, name="ids", optimizer=mh.optim.rows.SGD(lr=LEARNING_RATE))),
        loss,
        _descend,
        mh.ParameterServer(mode="async"),
        hooks=[_AfterFirstEpoch(turns, -(-SPARSE_IDS // (SPARSE_PER_ROW * SPARSE_BATCH)))],
    )
    trainer.fit((make_ids(),), steps=10**9, batch_size=SPARSE_BATCH)


def _torch() -> None:
    torch.set_num_threads(1)
    model, ids = Scores(nn.Embedding(SPARSE_IDS, SPARSE_DIM, sparse=True)), make_ids()
    optimizer, batches = _descend(model.parameters()), iter(())

    def run(num_steps: int) -> None:
        nonlocal batches
        for _ in range(num_steps * WORKERS):
            batch = next(batches, None)
            if batch is None:
                batches = iter(torch.randperm(len(ids)).split(SPARSE_BATCH))
                batch = next(batches)
            optimizer.zero_grad(set_to_none=True)
            loss(model, (ids[batch],)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    take_turns(Turns(threads=1, versions={"torch": torch.__version__}), run)


if __name__ == "__main__":
    _served() if sys.argv[1] == "served" else _torch()
