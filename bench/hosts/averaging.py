"""Two hosts on a slow link: averaging weights every 32 steps, compared with summing gradients in each; speed and loss.

A step has the same number of tokens on both sides. Speed only matters if the loss after as many steps is as good, so
that is measured, too: on this machine without the link, which changes no value.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence

from bench.driver.baton import Baton, Process, Side, rotated, taking_turns
from bench.driver.child import ScriptFailed
from bench.driver.sides import MH, plain_environment, ranks
from bench.hosts.accuracy import run_to_end
from bench.hosts.hosts import REDUCER, Hosts, ddp_on, run_on, two_hosts, why_not
from bench.programs.workloads import WORKLOADS
from bench.results.compare import Measured, Size

__all__ = ["measure", "why_not"]

RATE, EVERY, MODEL = "100mbit", 32, "text"
# Any 32 steps of ours contain one average. The peer does the same work in each step, so a few of its steps are enough.
OUR_STEPS, PEER_STEPS = EVERY, 4
LOSS_STEPS, NUM_SEEDS = 320, 3


def measure(workload: str, size: Size) -> Measured:
    return _losses(size) if workload == "loss" else _speeds(size)


def _speeds(size: Size) -> Measured:
    with two_hosts(RATE) as hosts:
        ours = [_diloco(hosts, "DiLoCo", ()), _diloco(hosts, "DiLoCo, bf16", (REDUCER, "bf16"))]
        peers = [ddp_on(hosts, MODEL, name, port) for port, name in ((29503, "DDP"), (29504, "DDP again"))]
        with taking_turns([*ours, *peers]) as baton:
            steps = {side.name: OUR_STEPS for side in ours} | {side.name: PEER_STEPS for side in peers}
            seconds = _blocks(baton, steps, size.num_blocks)
            facts = {name: baton.facts(name) for name in steps}
    batch, model = 2 * WORKLOADS[MODEL].batch, WORKLOADS[MODEL].model
    settings = {"model": model, "batch": batch, "workers": 2, "threads": 1, "link": RATE, "of_sides": facts}
    return Measured([seconds], settings)


def _blocks(baton: Baton, steps: dict[str, int], count: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for name in steps:
        baton.run(name, 1)
    for turn in range(count):
        for name in rotated(list(steps), turn):
            seconds[name].append(baton.run(name, steps[name]))
    return seconds


def _diloco(hosts: Hosts, name: str, options: Sequence[str]) -> Side:
    script = ("-m", "bench.programs.trainer_side", MODEL, "diloco", "2")
    return Side(name, 2, lambda folder: run_on(hosts, folder, options, script))


def _losses(size: Size) -> Measured:
    seeds = range(min(NUM_SEEDS, size.num_blocks))
    found = {"DiLoCo": [_loss("diloco", seed) for seed in seeds], "DDP": [_loss("ddp", seed) for seed in seeds]}
    return Measured([found], {"workers": 2, "threads": 1, "steps": LOSS_STEPS, "seeds": len(seeds)})


def _loss(kind: str, seed: int) -> float:
    script = ("-m", "bench.hosts.text_loss_script", kind, str(LOSS_STEPS), str(seed))
    with tempfile.TemporaryDirectory(prefix="manyhands-bench-") as folder:
        run = ("run", "-n", "2", "--threads", "1", "--ui", "none", "--run-dir", f"{folder}/run")
        ours = [Process([*MH, *run, *script], plain_environment(allocator=False))]
        output = run_to_end(ours if kind == "diloco" else ranks((sys.executable, *script), plain_environment(), 2))
    for line in output.splitlines():
        if line.startswith("LOSS "):
            return float(line.removeprefix("LOSS "))
    raise ScriptFailed(output)
