"""From `srun` to the first step: `srun -N2 mh run` beside `srun -N2 torchrun`, the same script, in turn.

`python -m bench.hosts.first_step` starts a Slurm of three nodes in namespaces of this machine, as the tests do. The
script is plain PyTorch (DistributedDataParallel on Gloo), so both launch the same; a second row has `mh.Trainer`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.launcher.placers.real_slurm import SlurmCluster, slurm_cluster, why_not

BIN = Path(sys.executable).parent
ONE_EACH = ("srun", "-N2", "--nodelist=n1,n2", "--ntasks-per-node=1", "--exclusive")
TORCHRUN = (
    f"exec {BIN}/torchrun --nnodes=2 --nproc-per-node=1 --node-rank=$SLURM_NODEID --master-addr=n1 "
    '--master-port=$((20000 + SLURM_JOB_ID)) "$@"'
)
PLAIN = """
import os
import torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(4, 8)).sum().backward()
optimizer.step()
print("first step", flush=True)
dist.barrier()
os._exit(0)  # torch's own clean-up aborts now and then, which is not what is measured
"""
TRAINER = """
import torch
import manyhands as mh
class Said:
    def after_step(self, trainer, step, stats):
        if step == 1:
            print("first step", flush=True)
torch.manual_seed(0)
data = torch.randn(64, 8), torch.randint(0, 3, (64,))
trainer = mh.Trainer(model=lambda: torch.nn.Linear(8, 3), hooks=[Said()],
                     loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
                     optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
trainer.fit(data, steps=2, batch_size=8)
"""


def seconds(slurm: SlurmCluster, words: tuple[str, ...], folder: Path) -> float:
    """From the start of srun to the first step on the first host; the step is then left to end."""
    slurm.make_idle()  # else srun waits for the nodes that the step before has just left
    begun = time.monotonic()
    step = slurm.start(*ONE_EACH, *words, cwd=folder, GLOO_SOCKET_IFNAME="eth0")
    assert step.stdout is not None
    lines, seen = [], 0.0
    for line in step.stdout:
        lines.append(line)
        seen = seen or ("first step" in line) * time.monotonic()
    if step.wait(60) != 0 or not seen:
        raise SystemExit(f"{words} failed:\n{''.join(lines)}")
    return seen - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    if (reason := why_not()) is not None:
        print(reason)
        return 3
    with tempfile.TemporaryDirectory() as place, slurm_cluster() as slurm:
        folder = Path(place)
        (folder / "plain.py").write_text(PLAIN)
        (folder / "trainer.py").write_text(TRAINER)
        ours = (str(BIN / "mh"), "run", "--ui", "plain", "--overwrite")
        ways = {
            "torchrun, plain script": ("sh", "-c", TORCHRUN, "torchrun", "plain.py"),
            "mh run, plain script": (*ours, "plain.py"),
            "mh run, mh.Trainer": (*ours, "trainer.py"),
            "torchrun again": ("sh", "-c", TORCHRUN, "torchrun", "plain.py"),
        }
        took: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, words in ways.items():
                took[name].append(seconds(slurm, words, folder))
                print(f"  {name:24} {took[name][-1]:5.2f} s", flush=True)
        for name, values in took.items():
            print(f"{name:24} median {statistics.median(values):5.2f} s  ({min(values):.2f} to {max(values):.2f})")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error}\n{error.stderr}")
