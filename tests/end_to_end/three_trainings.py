"""Three trainings in one script, the third made once the second's result is known; run by test_trainings.py."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import manyhands as mh
from manyhands.control.session.run_client import query

ASKED: dict[str, Any] = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}


class Kill:
    """Kill -9, once: the launcher, and with it everything, the worker in this slot, or the first parameter server."""

    def __init__(self, training: int) -> None:
        self._training = training

    def before_step(self, trainer: Any, step: int) -> None:
        if ASKED.get("kill") != [self._training, step]:
            return
        slot, flag = ASKED.get("slot"), Path(ASKED["flag"])
        if not flag.exists() and (slot is None or os.environ["RANK"] == str(slot)):
            flag.touch()
            if ASKED.get("whom") == "server":
                os.kill(query("run").servers[0].pid, 9)
                return
            os.kill(os.getppid() if slot is None else os.getpid(), 9)
            time.sleep(60.0)


def loss(model: nn.Module, batch: Any) -> Any:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def make_net(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))


def strategy_asked() -> Any:
    if ASKED.get("mesh"):
        return mh.Mesh(**ASKED["mesh"])
    return mh.ParameterServer(servers=1, mode="sync") if ASKED.get("servers") else "mirrored"


def train(training: int, model: Any, optimizer: Any) -> mh.Trainer:
    strategy = strategy_asked()
    return mh.Trainer(model, loss, optimizer, strategy, seed=training, slices=6, hooks=[Kill(training)])


def main() -> None:
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
    data = (x, x.sum(1, keepdim=True))
    first = train(1, lambda: make_net(16), lambda p: torch.optim.SGD(p, lr=0.05))
    results = [first.fit(data, epochs=2, batch_size=12), first.evaluate(data)]
    is_divided = "mesh" in ASKED  # then no worker has all of the first one's model
    second = train(2, (lambda: make_net(16)) if is_divided else first.model, lambda p: torch.optim.Adam(p, lr=0.01))
    results.append(second.fit(data, epochs=2, batch_size=12))
    width = 24 if results[-1][-1]["loss"] < results[0][-1]["loss"] else 8
    third = train(3, lambda: make_net(width), lambda p: torch.optim.AdamW(p, lr=0.02))
    results += [
        third.fit(data, epochs=2, batch_size=24),
        second.evaluate(data),
        second.fit(data, epochs=1, batch_size=12),
    ]
    weights = {} if is_divided else {name: one.tolist() for name, one in second.model.state_dict().items()}
    if first.is_chief:
        steps = [trainer.step for trainer in (first, second, third)]
        Path(ASKED["out"]).write_text(json.dumps([results, steps, weights]))


if __name__ == "__main__":
    main()
