"""Our side where sides take turns: `mh run -n 2 -m bench.trainer_side WORKLOAD`."""

from __future__ import annotations

import sys
from importlib.metadata import version

import torch

import manyhands as mh
from bench.models import loss, make_data, make_model, optimizer_of
from bench.turns import TurnHook, Turns
from bench.workloads import WORKLOADS


def main() -> None:
    name, strategy, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
    hook = TurnHook(lambda: Turns(threads=torch.get_num_threads(), versions={"manyhands": version("manyhands")}))
    trainer = mh.Trainer(lambda: make_model(name), loss, optimizer_of(name), strategy, hooks=[hook])
    trainer.fit(make_data(name), steps=10**9, batch_size=WORKLOADS[name].batch * workers)


if __name__ == "__main__":
    main()
