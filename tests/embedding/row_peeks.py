"""One process updates a table as fast as it can while this one looks rows up in it: `python row_peeks.py`.

Every update adds 1 to every row, so rows of one moment are all the same number, and later ones are never smaller. New
ids come with every update: the table moves to larger regions while it is read. In the end the writer is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter

import torch

from manyhands.embedding.row_optimizers import SGD, TableSpec
from manyhands.embedding.row_reader import RowReader
from manyhands.embedding.row_table import RowTable
from tests.embedding.row_rounds import Regions

SPEC = TableSpec(name="items", dim=32, optimizer=SGD(lr=1.0), init="zeros")
WATCHED = torch.arange(400) * 7919
ENOUGH = 50


def update_until_killed(regions: Regions, say: int) -> None:
    table, number = RowTable(SPEC, regions, num_rows=64), 0
    while True:
        number += 1
        more = torch.arange(number * 10, number * 10 + 10) * -3 - 1 if number < 2_000 else WATCHED[:0]
        ids = torch.cat([WATCHED, more])
        table.update(number, ids, torch.full((len(ids), SPEC.dim), -1.0))
        if number == 1:
            os.write(say, b"!")
        os.sched_yield()  # on a busy machine, let the other one look now, not always in the middle of an update


def main() -> None:
    torch.set_num_threads(1)
    regions, found, before = Regions(), Counter[str](), 0.0
    read, write = os.pipe()
    writer = os.fork()
    if writer == 0:
        try:
            update_until_killed(regions, write)
        finally:
            os._exit(1)
    assert os.read(read, 1) == b"!"
    reader, rows = RowReader(SPEC, regions), torch.empty(len(WATCHED), SPEC.dim)
    while min(found["newer"], found["changing"]) < ENOUGH:
        whole = reader.look_up(WATCHED, rows)
        found["whole" if whole else "changing"] += 1
        if whole:
            now = float(rows[0, 0])
            assert torch.equal(rows, torch.full_like(rows, now)), "torn"
            assert now >= before, f"{now} after {before}"
            found["newer"] += now > before
            before = now
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    table = RowTable(SPEC, regions)  # undoes what it was killed in, and lets readers in again
    assert reader.look_up(WATCHED, rows) and torch.equal(rows, table.lookup(WATCHED))
    assert float(rows[0, 0]) == table.number
    found["regions"] = table._generation
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
