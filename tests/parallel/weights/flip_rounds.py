"""Rounds of two ranks that update shared weights as fast as they can, until one is killed: `python flip_rounds.py N`.

Each round forks its ranks from this process, which has no threads of torch's; so a round takes milliseconds. The
survivor says where it was and what it found in memory; both must be exactly what an undisturbed training has there.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from typing import Any

import torch
from torch import nn

from manyhands.comm.host_memory import HostMemory, Segment
from manyhands.comm.shared_memory import Plane
from manyhands.errors import PeerLost
from manyhands.launcher.worker_process.lazy_compiler import load_compiler_late
from manyhands.parallel.gradients.shared_memory_sum import SharedMemorySum
from manyhands.parallel.weights.fused_shared_weights import FusedSharedWeights
from manyhands.parallel.weights.fused_update import Fused

MAX_STEPS = 400


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((300, 500), (7,), (64, 1000))]


def gradients(step: int, rank: int) -> list[torch.Tensor | None]:
    """Cheap to make, different for every step and rank; one parameter has none in every third step."""
    made: list[torch.Tensor | None] = [torch.full_like(p, 0.01 * (step % 7 - 3) + rank) for p in parameters_once]
    if step % 3 == 0:
        made[1] = None
    return made


parameters_once = parameters()


def digest(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for param in params:
        found.update(param.detach().numpy().tobytes())
        # Not the count of steps: every rank counts for itself, when it begins an update.
        for name in ("exp_avg", "exp_avg_sq"):
            found.update(optimizer.state[param].get(name, torch.zeros_like(param)).numpy().tobytes())
    return found.hexdigest()


def undisturbed() -> list[str]:
    """The digest after every number of steps."""
    params = parameters()
    optimizer = torch.optim.AdamW(params, lr=0.01)
    fused, found = Fused(optimizer), [digest(params, optimizer)]
    for step in range(1, MAX_STEPS + 1):
        for param, left, right in zip(params, gradients(step, 0), gradients(step, 1), strict=True):
            param.grad = None if left is None or right is None else left + right
        fused.apply()
        found.append(digest(params, optimizer))
    return found


def rank(number: int, memory: HostMemory, say: int) -> None:
    params = parameters()
    optimizer = torch.optim.AdamW(params, lr=0.01)
    segment = Segment(memory.fd, Plane.num_bytes(2), memory.allot("plane", Plane.num_bytes(2), 2))
    plane = Plane(segment, number, 2, timeout_s=60)

    def ask(name: str, num_bytes: int) -> Segment:
        return Segment(memory.fd, num_bytes, OFFSETS[name])

    rows = SharedMemorySum(params, plane, ask)
    weights = FusedSharedWeights(rows, optimizer, plane, ask, copies=2)
    weights.watch(1, ["first", "second", "third"])
    os.write(say, b"up\n")
    step = 0
    try:
        for step in range(1, MAX_STEPS + 1):
            rows.begin(2, SHARES, f"step {step}")
            rows.before_backward(number)
            for param, grad in zip(params, gradients(step, number), strict=True):
                param.grad = grad
            rows.after_backward(number)
            rows.finish()
            weights.scale(1.0)
            weights.apply()
    except PeerLost as error:
        found: dict[str, Any] = {"step": step, "error": str(error), "before": digest(params, optimizer)}
        if "new weights" in str(error):
            weights.finish_for(1)
            weights._flip()
            found["after"] = digest(params, optimizer)
        os.write(say, json.dumps(found).encode() + b"\n")
        os._exit(0)
    os.write(say, json.dumps({"step": MAX_STEPS, "error": "", "before": digest(params, optimizer)}).encode() + b"\n")
    os._exit(0)


SHARES = [range(1), range(1, 2)]
OFFSETS: dict[str, int] = {}


def allot_everything(memory: HostMemory) -> None:
    """What the agent does on request: here, ahead of the fork."""
    OFFSETS.clear()

    sizes = {f"gradients 0 of slot {slot}": 4 * 260_000 for slot in range(2)}
    sizes |= {f"messages of 4096 of slot {slot}": 4096 for slot in range(2)}
    for name in ("weights", "state exp_avg", "state exp_avg_sq"):
        for copy in range(2):
            sizes[f"{name}, copy {copy}"] = 4 * 260_000
    sizes["alarm"] = 4096
    memory.allot("plane", Plane.num_bytes(2), 2)
    for name, num_bytes in sizes.items():
        OFFSETS[name] = memory.allot(name, num_bytes)


def round_of(delay_s: float) -> dict[str, Any]:
    memory = HostMemory()
    allot_everything(memory)
    read, write = os.pipe()
    pids = []
    for number in range(2):
        pid = os.fork()
        if pid == 0:
            os.close(read)
            try:
                rank(number, memory, write)
            except BaseException as error:
                os.write(write, json.dumps({"crash": repr(error)}).encode() + b"\n")
            os._exit(1)
        pids.append(pid)
    os.close(write)
    with os.fdopen(read) as said:
        assert (said.readline(), said.readline()) == ("up\n", "up\n")
        time.sleep(delay_s)
        os.kill(pids[1], signal.SIGKILL)
        os.waitpid(pids[1], 0)
        memory.lose(1)
        found: dict[str, Any] = json.loads(said.readline())
    os.waitpid(pids[0], 0)
    memory.close()
    return found


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    load_compiler_late()
    right = undisturbed()
    draw, where = random.Random(int(sys.argv[2])), Counter[str]()
    for number in range(rounds):
        found = round_of(draw.uniform(0.0, 0.06))
        assert "crash" not in found, found
        step = found["step"]
        if not found["error"]:
            where["ended"] += 1
            assert found["before"] == right[step]
            continue
        assert "rank 1 was lost" in found["error"], found
        assert found["before"] == right[step - 1], (number, found)
        if "after" in found:
            assert found["after"] == right[step], (number, found)
        where["in an update" if "after" in found else "before it"] += 1
    print(json.dumps(where))


if __name__ == "__main__":
    main(int(sys.argv[1]))
