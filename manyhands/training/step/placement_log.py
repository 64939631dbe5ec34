"""Which worker has what of a divided model, written down for people: `placement.txt` in the run directory."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from manyhands.parallel.model.tensor_shard import Share
from manyhands.private_files import write_private
from manyhands.training.worker.worker import Worker

__all__ = ["log_placement"]

FILE = "placement.txt"


class _Has(msgspec.Struct):
    device: str
    tensors: dict[str, Share]


def log_placement(worker: Worker, mine: Mapping[str, Share]) -> None:
    """`mine` are this worker's tensors, and which part of each it has. By all workers."""
    told = worker.axis.all_gather_bytes("placement", msgspec.msgpack.encode(_Has(str(worker.device), dict(mine))))
    if worker.is_chief:
        text = _text([msgspec.msgpack.decode(one, type=_Has) for one in told])
        write_private(worker.home / FILE, text.encode())


def _text(workers: list[_Has]) -> str:
    names = dict.fromkeys(name for worker in workers for name in worker.tensors)
    lines = [f"rank {rank}: {worker.device}" for rank, worker in enumerate(workers)]
    for name in names:
        parts: dict[str, list[int]] = {}
        for rank, worker in enumerate(workers):
            if name in worker.tensors:
                parts.setdefault(_words(worker.tensors[name]), []).append(rank)
        told = "; ".join(f"{part} on {', '.join(map(str, ranks))}" for part, ranks in parts.items())
        lines.append(f"{name}  {told}")
    return "\n".join(lines) + "\n"


def _words(share: Share) -> str:
    """Such as [0:8, :] of (16, 4)."""
    if share.is_whole:
        return f"all of {share.shape}"
    cuts = dict(share.cuts)
    dims = ["+".join(f"{a}:{b}" for a, b in cuts[dim]) if dim in cuts else ":" for dim in range(len(share.shape))]
    return f"[{', '.join(dims)}] of {share.shape}"
