"""Four processes write a shard each into one draft; the fifth, the chief, commits what they report."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import torch

from manyhands.checkpoint.commit import CheckpointFacts, ShardRecord, begin, commit, write_shard
from manyhands.checkpoint.file_ops import FileSystem
from manyhands.checkpoint.format import encode_state


def write_one(directory: Path, rank: int, report: int) -> None:
    record = write_shard(directory, rank, 4, {f"model/part-{rank}": torch.full((8,), float(rank))})
    os.write(report, msgspec.json.encode(record))
    os._exit(0)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    with begin(root, 7, FileSystem()) as draft:
        pipes = []
        for rank in (1, 2, 3, 4):
            read, write = os.pipe()
            if os.fork() == 0:
                write_one(draft.path, rank, write)
            os.close(write)
            pipes.append(read)
        shards = [msgspec.json.decode(os.read(pipe, 65536), type=ShardRecord) for pipe in pipes]
        facts = CheckpointFacts(run="four", generation=(1, 1), step=7, epoch=0, world_size=4, slices=4)
        commit(draft, facts, encode_state({"written by": 4}), shards, FileSystem())
    for _ in pipes:
        assert os.wait()[1] == 0
