"""Lightning Fabric on Gloo, taking turns: `python -m bench.peers.lightning_side WORKLOAD`, with torchrun's variables.

Fabric and not Lightning's Trainer: the same strategy, with the caller's loop.
"""

from __future__ import annotations

import os
import sys

import lightning
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import DDPStrategy

from bench.driver.turns import Turns, take_turns
from bench.programs.models import HandLoop, make_data, make_model, optimizer_of
from bench.programs.workloads import WORKLOADS


def main() -> None:
    workload, workers = sys.argv[1], int(os.environ["WORLD_SIZE"])
    strategy = DDPStrategy(
        process_group_backend="gloo", gradient_as_bucket_view=True, cluster_environment=LightningEnvironment()
    )
    fabric = Fabric(accelerator="cpu", devices=workers, strategy=strategy)
    fabric.launch()
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ["RANK"]))
    model = make_model(workload)
    model, optimizer = fabric.setup(model, optimizer_of(workload)(model.parameters()))
    assert fabric.world_size == workers
    batch = WORKLOADS[workload].batch
    loop = HandLoop(model, optimizer, make_data(workload), batch, backward=fabric.backward)
    versions = {"lightning": lightning.__version__, "torch": torch.__version__}
    take_turns(Turns(threads=torch.get_num_threads(), versions=versions, how="Fabric, Gloo"), loop.run)


if __name__ == "__main__":
    main()
