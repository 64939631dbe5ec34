"""Accelerate on Gloo, taking turns: `python -m bench.peers.accelerate_side WORKLOAD`, with torchrun's variables.

Its DDP gets `gradient_as_bucket_view`, as the plain one does.
Data is indexed directly: its data loader would only cost time.
"""

from __future__ import annotations

import os
import sys

import accelerate
import torch
from accelerate.utils import DistributedDataParallelKwargs

from bench.driver.turns import Turns, take_turns
from bench.programs.models import HandLoop, make_data, make_model, optimizer_of
from bench.programs.workloads import WORKLOADS


def main() -> None:
    workload = sys.argv[1]
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ["RANK"]))
    accelerator = accelerate.Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    )
    model = make_model(workload)
    model, optimizer = accelerator.prepare(model, optimizer_of(workload)(model.parameters()))
    assert accelerator.num_processes == int(os.environ["WORLD_SIZE"])
    batch = WORKLOADS[workload].batch
    loop = HandLoop(model, optimizer, make_data(workload), batch, backward=accelerator.backward)
    versions = {"accelerate": accelerate.__version__, "torch": torch.__version__}
    take_turns(Turns(threads=torch.get_num_threads(), versions=versions, how="Accelerator, Gloo"), loop.run)
    accelerator.end_training()


if __name__ == "__main__":
    main()
