"""Rounds of a process that updates a table as fast as it can, until it is killed: `python row_rounds.py N SEED`.

At least N rounds, and up to five times as many until enough kills have fallen into an update, which depends on the
speed of the machine.

Each round forks from this process, which has no threads of torch's. The table lies in memory that both map; what the
killed one leaves must be, to the bit, what as many undisturbed updates make. The next round continues from there: so
kills fall into updates, into sweeps and into moves to a larger region.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter

import torch

from manyhands.comm.host_memory import Segment
from manyhands.embedding.row_optimizers import Adam, TableSpec
from manyhands.embedding.row_table import RowTable, most_room

SPEC = TableSpec(name="items", dim=16, optimizer=Adam(), admit_after=2, keep_steps=60, max_bytes=3_000_000)
BATCH = 3_000
REGIONS = 60
ENOUGH_UNDONE = 5


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """More and more ids, so that the table has to grow, and then to let some go."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 50 * number + BATCH, (BATCH,), generator=generator).unique() * 7919 - 100
    return ids, torch.sin(ids[:, None] * 0.37 + torch.arange(16.0) + number)


class Regions:
    """Memory by name that outlives the processes that map it; file descriptors that all rounds inherit."""

    def __init__(self) -> None:
        self._fds = [os.memfd_create(f"region {number}") for number in range(REGIONS)]

    def __call__(self, name: str, num_bytes: int) -> Segment:
        number = int(name.split("region ")[1].split()[0]) if "region" in name else 0
        if os.fstat(self._fds[number]).st_size < num_bytes:
            os.ftruncate(self._fds[number], num_bytes)
        return Segment(self._fds[number], num_bytes)


def update_until_killed(regions: Regions, say: int) -> None:
    table = RowTable(SPEC, regions, num_rows=64)
    prepared = [batch(table.number + later) for later in range(1, 61)]
    os.write(say, b"!")
    for number, (ids, gradients) in enumerate(prepared, table.number + 1):
        table.update(number, ids, gradients)
    signal.pause()


def kill_one(regions: Regions, delay_s: float) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            update_until_killed(regions, write)
        finally:
            os._exit(1)
    os.close(write)
    assert os.read(read, 1) == b"!"
    os.close(read)
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def same(left: RowTable, right: RowTable) -> bool:
    a, b = left.snapshot(), right.snapshot()
    return all(torch.equal(a[name], b[name]) for name in a)


def main(rounds: int, seed: int) -> None:
    torch.set_num_threads(1)
    regions, right = Regions(), RowTable(SPEC)
    RowTable(SPEC, regions, num_rows=64)
    draw, found = random.Random(seed), Counter[str]()
    for done in range(5 * rounds):
        if done >= rounds and found["undone"] >= ENOUGH_UNDONE:
            break
        kill_one(regions, draw.uniform(0.0, 0.02))
        table = RowTable(SPEC, regions)
        for number in range(right.number + 1, table.number + 1):
            right.update(number, *batch(number))
        assert same(table, right), f"after update {table.number}"
        assert table.lookup(batch(3)[0]).equal(right.lookup(batch(3)[0]))
        found["undone"] += table.recovered
    found["updates"] = right.number
    found["full"] = int(len(right) > most_room(SPEC).rows * 7 // 8)
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
