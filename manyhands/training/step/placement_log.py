"""Writes `placement.txt` in the run directory: which worker has which tensors, or shards, of a divided model."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from manyhands.parallel.model.tensor_shard import TensorShard
from manyhands.private_files import write_private
from manyhands.training.worker.worker import Worker

__all__ = ["log_placement"]

FILE = "placement.txt"


class _WorkerTensors(msgspec.Struct):
    device: str
    tensors: dict[str, TensorShard]


def log_placement(worker: Worker, mine: Mapping[str, TensorShard]) -> None:
    """`mine` has this worker's tensors by name, and its shard of each. Collective."""
    gathered = worker.axis.all_gather_bytes(
        "placement", msgspec.msgpack.encode(_WorkerTensors(str(worker.device), dict(mine)))
    )
    if worker.is_chief:
        text = _text([msgspec.msgpack.decode(one, type=_WorkerTensors) for one in gathered])
        write_private(worker.home / FILE, text.encode())


def _text(workers: list[_WorkerTensors]) -> str:
    names = dict.fromkeys(name for worker in workers for name in worker.tensors)
    lines = [f"rank {rank}: {worker.device}" for rank, worker in enumerate(workers)]
    for name in names:
        shards: dict[str, list[int]] = {}
        for rank, worker in enumerate(workers):
            if name in worker.tensors:
                shards.setdefault(_shard_text(worker.tensors[name]), []).append(rank)
        text = "; ".join(f"{shard} on {', '.join(map(str, ranks))}" for shard, ranks in shards.items())
        lines.append(f"{name}  {text}")
    return "\n".join(lines) + "\n"


def _shard_text(shard: TensorShard) -> str:
    """Such as [0:8, :] of (16, 4)."""
    if shard.is_whole:
        return f"all of {shard.shape}"
    cuts = dict(shard.cuts)
    dims = ["+".join(f"{a}:{b}" for a, b in cuts[dim]) if dim in cuts else ":" for dim in range(len(shard.shape))]
    return f"[{', '.join(dims)}] of {shard.shape}"
