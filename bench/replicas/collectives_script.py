"""One rank of `collectives`: blocks of every side's calls, in turn, between barriers over Gloo.

`python -m bench.replicas.collectives_script RANK WORKLOAD BLOCKS SECONDS STORE PLANE DATA`, the last two as
FD:BYTES:OFFSET.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from bench.driver.baton import rotated, steps_per_block
from bench.replicas.collectives import NUM_BYTES, WORLD
from bench.results.table import OURS
from manyhands.comm.host_memory import Segment
from manyhands.comm.shared_memory import Plane
from manyhands.parallel.gradients.slice_tree import program

Call = Callable[[], object]

SUM = program([(0, rank) for rank in range(WORLD)], WORLD)
SETTLING_CALLS, TRIED_CALLS, MAX_CALLS = 4, 10, 200_000


def main() -> None:
    rank, workload, blocks, block_s = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    plane_memory, data = (Segment(*map(int, words.split(":"))) for words in sys.argv[6:])
    torch.set_num_threads(1)
    store = dist.FileStore(sys.argv[5], WORLD)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    plane = Plane(plane_memory, rank, WORLD)
    seconds, calls = _interleave(_sides(workload, plane, data), blocks, block_s)
    if rank == 0:
        print(json.dumps({"seconds": seconds, "calls": calls}))
    dist.destroy_process_group()


def _sides(workload: str, plane: Plane, data: Segment) -> dict[str, Call]:
    num_bytes = NUM_BYTES[workload]
    sides: dict[str, Call] = {}
    if workload == "shared":
        sides[OURS] = _shared_sum(plane, data, num_bytes)
    else:
        ours = _tensor(num_bytes)
        sides[OURS] = lambda: plane.all_reduce_(ours, SUM, "sum")
    for name in ("Gloo", "Gloo again"):
        tensor = _tensor(num_bytes)
        sides[name] = lambda tensor=tensor: dist.all_reduce(tensor)  # type: ignore[misc]
    if workload == "shared":
        for name in ("one copy", "one copy again"):
            source, target = _tensor(num_bytes), _tensor(num_bytes)
            # One rank copies alone; the other waits for the next barrier.
            sides[name] = lambda a=target, b=source: a.copy_(b) if plane.rank == 0 else None  # type: ignore[misc]
    return sides


def _shared_sum(plane: Plane, data: Segment, num_bytes: int) -> Call:
    """As in a training step: each rank sums its half of all gradients into the one result; then there is a barrier."""
    gradients = [_shared_tensor(data, i * num_bytes, num_bytes) for i in range(WORLD)]
    result = _shared_tensor(data, WORLD * num_bytes, num_bytes)
    for tensor in (gradients[plane.rank], result):
        tensor.fill_(0.0)
    mine = [tensor.chunk(WORLD)[plane.rank] for tensor in (result, *gradients)]

    def call() -> None:
        plane.sum_shared(mine[0], mine[1:], SUM)
        plane.barrier("sum")

    return call


def _tensor(num_bytes: int) -> Tensor:
    """Zeros stay zeros however often they are summed; written, because untouched zeros are all the same cached page."""
    return torch.empty(num_bytes // 4).fill_(0.0)


def _shared_tensor(memory: Segment, offset: int, num_bytes: int) -> Tensor:
    block = (ctypes.c_char * num_bytes).from_address(memory.address + offset)
    return torch.frombuffer(block, dtype=torch.float32)


def _interleave(sides: dict[str, Call], blocks: int, block_s: float) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds per call of each block, and how many calls a side's block has."""
    calls = {name: _calls_per_block(call, block_s) for name, call in sides.items()}
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(blocks):
        for name in rotated(list(sides), turn):
            found[name].append(_seconds(sides[name], calls[name]))
    return found, calls


def _seconds(call: Call, num_calls: int) -> float:
    dist.barrier()
    for _ in range(SETTLING_CALLS):
        call()
    started = perf_counter()
    for _ in range(num_calls):
        call()
    return (perf_counter() - started) / num_calls


def _calls_per_block(call: Call, block_s: float) -> int:
    """Rank 0's number, for every rank."""
    took_s = min(_seconds(call, TRIED_CALLS) for _ in range(3))
    agreed = torch.tensor([steps_per_block(took_s, block_s, MAX_CALLS)])
    dist.broadcast(agreed, 0)
    return int(agreed)


if __name__ == "__main__":
    main()
