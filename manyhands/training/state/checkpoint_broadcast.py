"""Broadcasts a checkpoint from the chief to all workers, so that only the chief's host needs its files.

A worker with a part of the model gets only a few tensors at a time. Start reading at `CheckpointBroadcast`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from torch import Tensor

from manyhands.checkpoint.format import Manifest, TensorEntry, decode_state, encode_state
from manyhands.checkpoint.reader import Stored
from manyhands.checkpoint.tensor_file import empty_tensor
from manyhands.training.worker.worker import Worker

__all__ = ["CheckpointBroadcast", "announce"]

BATCH_BYTES = 32 * 2**20
"""Small tensors are broadcast together, up to this size."""


class _Message(msgspec.Struct):
    manifest: Manifest | None = None
    state: bytes = b"{}"
    """Encoded as in its file: other encodings lose nan, infinities or large integers."""


def announce(worker: Worker, stored: Stored | None) -> CheckpointBroadcast | None:
    """The checkpoint that the chief has found, on every worker; None if there is none."""
    if worker.world_size == 1:
        return CheckpointBroadcast(worker, stored.manifest, stored.state, stored) if stored is not None else None
    message = _Message(stored.manifest, encode_state(stored.state)) if stored is not None else _Message()
    data = msgspec.msgpack.encode(message) if worker.is_chief else b""
    message = msgspec.msgpack.decode(worker.axis.all_gather_bytes("checkpoint state", data)[0], type=_Message)
    if message.manifest is None:
        return None
    return CheckpointBroadcast(worker, message.manifest, decode_state(message.state), stored)


class CheckpointBroadcast:
    """Tensors are broadcast when all workers call `all`, or all call `one_by_one`."""

    def __init__(self, worker: Worker, manifest: Manifest, state: dict[str, Any], stored: Stored | None) -> None:
        """`stored` is the checkpoint on disk; None on workers other than the chief."""
        self.manifest, self.state = manifest, state
        self._worker, self._stored = worker, stored
        self._all: dict[str, Tensor] = {}

    def all(self) -> dict[str, Tensor]:
        """Every tensor, for a worker that keeps all of them. On the chief they are mapped from the files."""
        if not self._all:
            entries = self.manifest.tensors
            self._all = self._stored.tensors() if self._stored is not None else _empty(entries)
            self._worker.axis.broadcast_((self._all[name] for name in entries), "checkpoint tensors")
        return self._all

    def one_by_one(self) -> Iterator[tuple[str, Tensor]]:
        """One tensor after another, for a worker that keeps a shard of each."""
        if self._all:
            yield from self._all.items()
            return
        for entries in _batches(self.manifest.tensors):
            found = {n: self._stored.tensor(n) for n in entries} if self._stored is not None else _empty(entries)
            self._worker.axis.broadcast_(found.values(), "checkpoint tensors")
            for name in entries:
                yield name, found.pop(name)


def _empty(entries: Mapping[str, TensorEntry]) -> dict[str, Tensor]:
    return {name: empty_tensor(entry.dtype, entry.shape) for name, entry in entries.items()}


def _batches(entries: Mapping[str, TensorEntry]) -> Iterator[dict[str, TensorEntry]]:
    batch: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        if batch and sum(one.num_bytes for one in batch.values()) + entry.num_bytes > BATCH_BYTES:
            yield batch
            batch = {}
        batch[name] = entry
    if batch:
        yield batch
