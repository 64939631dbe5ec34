"""The script that `overhead` measures: a trainer in one process, and the same training by hand between its steps."""

from __future__ import annotations

import argparse
import json

import torch

import manyhands as mh
from bench.driver.interleave import Interleave
from bench.programs.models import loss, make_data, make_model, optimizer_of
from bench.programs.torch_side import hand_loop
from bench.programs.workloads import WORKLOADS
from bench.results.table import OURS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--block-s", type=float, required=True)
    parser.add_argument("--run-dir", required=True)
    given = parser.parse_args()
    name, batch = given.workload, WORKLOADS[given.workload].batch
    data = make_data(name)
    peers = {side: hand_loop(name, make_model(name), data).run for side in ("by hand", "by hand again")}
    hook = Interleave(peers, num_blocks=given.blocks, block_s=given.block_s)
    trainer = mh.Trainer(lambda: make_model(name), loss, optimizer_of(name), hooks=[hook], run_dir=given.run_dir)
    trainer.fit(data, steps=10**9, batch_size=batch)
    print(json.dumps({"seconds": hook.seconds, "steps": hook.steps_per_block, "threads": torch.get_num_threads()}))
    assert len(hook.seconds[OURS]) == given.blocks


if __name__ == "__main__":
    main()
