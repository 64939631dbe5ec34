"""A worker killed while encoded gradients are under way: the run ends soon, and says who it was."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

MH = [sys.executable, "-m", "manyhands.cli.main"]

pytestmark = [pytest.mark.slow, pytest.mark.faults]

# In step 3, rank 1 is gone as soon as its backward reaches the first layer: the last layer's gradients were sent.
SCRIPT = """
import os, signal
import torch, manyhands as mh

class Deadly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if trainer.step == 2 and os.environ["RANK"] == "1":
            sums = trainer._run.ready().engine.held.gradients
            assert 0 < sums._launched < len(sums._buckets), "in the middle of the exchange"
            os.kill(os.getpid(), signal.SIGKILL)
        return grad

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 512), torch.nn.Linear(512, 512)

    def forward(self, x):
        return self.last(Deadly.apply(self.first(x)))

trainer = mh.Trainer(
    Model, lambda model, x: model(x).square().mean(), lambda p: torch.optim.SGD(p, lr=0.1), slices=3, seed=0
)
trainer.fit(torch.ones(96, 64), steps=8, batch_size=24)
"""


@pytest.mark.parametrize("reducer", [pytest.param("bf16", marks=pytest.mark.long), "int8"])
def test_a_worker_killed_in_the_middle_of_a_coded_exchange_is_named_soon(tmp_path: Path, reducer: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    # No survivor waits for the whole timeout, which is longer than this test does.
    options = (
        "--timeout",
        "300",
        "--reducer",
        reducer,
        "--bucket-bytes",
        "65536",
        "--max-restarts",
        "0",
        "--run-dir",
        "run",
    )
    done = subprocess.run(
        [*MH, "run", "-n", "3", *options, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 4, done.stderr
    assert re.search(r"first failure +rank 1 on .*SIGKILL", done.stderr), done.stderr
    assert re.search(r"Rank [02] lost a peer in 'gradients of step 3", done.stderr), "where the others were"
    left = [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)]
    assert not left, left
