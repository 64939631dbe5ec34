"""A training on `mh.Dataset` chains whose workers kill themselves, for tests/training/test_dataset_runs.py.

`python dataset_training.py '{"kills": [[1, 4], [0, 9]]}'`: worker 1 in step 4, worker 0 in step 9.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import manyhands as mh

WIDTH, ROWS = 6, 75


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, (x.sum(1) > 0).long()


def disturbed(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 0.1 * torch.randn(WIDTH), y


def is_usual(x: torch.Tensor, y: torch.Tensor) -> bool:
    return bool(x[0] < 1.5)


def together(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x - x.mean(0) * torch.rand(()), y


def chains() -> dict[str, mh.Dataset]:
    data = mh.Dataset.from_tensor_slices(rows())
    return {
        "by position": data.shuffle("full").map(disturbed).batch(16),
        "forward": data.filter(is_usual).shuffle(20).map(disturbed).batch(16),
        "forward, ahead": data.filter(is_usual).shuffle(20).map(disturbed, num_parallel_calls=1).batch(16),
        "batch, then map": data.shuffle(30).batch(16).map(together).repeat(2),
        "even batches, then map": data.shuffle(30).batch(16, drop_remainder=True).map(together).prefetch(2),
    }


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2))


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y)


def make_trainer(**more: Any) -> mh.Trainer:
    return mh.Trainer(make_model(), loss, lambda p: torch.optim.AdamW(p, lr=0.01), slices=6, exact=True, seed=5, **more)


def digest(trainer: mh.Trainer) -> str:
    whole = hashlib.sha256()
    for value in trainer.model.state_dict().values():
        whole.update(value.numpy().tobytes())
    return whole.hexdigest()


def train(kinds: list[str], hooks: list[Any], **more: Any) -> dict[str, Any]:
    trainer = make_trainer(hooks=hooks, **more)
    history = [list(trainer.fit(chains()[kind], epochs=2)) for kind in kinds]
    evaluated = [trainer.evaluate(chains()[kind]) for kind in kinds]
    return {"history": history, "evaluated": evaluated, "digest": digest(trainer), "step": trainer.step}


class Kill:
    """Ends a worker with SIGKILL in the middle of a step, once for each pair of rank and step."""

    def __init__(self, kills: list[list[int]]) -> None:
        self._kills = kills

    def before_step(self, trainer: Any, step: int) -> None:
        for rank, at in self._kills:
            done = Path(f"killed-{rank}-{at}")
            if (trainer._run.worker.rank, step) == (rank, at) and not done.exists():
                done.touch()
                os.kill(os.getpid(), signal.SIGKILL)


class Result:
    """Keeps the trainer: which worker is the chief at the end is not known before."""

    trainer: Any = None

    def begin(self, trainer: Any) -> None:
        Result.trainer = trainer


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    result = train(asked["kinds"], [Kill(asked["kills"]), Result()])
    if Result.trainer.is_chief:
        print("RESULT " + json.dumps(result), flush=True)
