"""A checkpoint on its way to all workers: the chief reads its files, so that only its host needs them.

A worker that keeps a part of the model is never handed more than a few tensors at a time. Start reading at `Incoming`.
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

__all__ = ["Incoming", "announce"]

TOGETHER_BYTES = 32 * 2**20
"""Small tensors travel together, up to this."""


class _Message(msgspec.Struct):
    manifest: Manifest | None = None
    state: bytes = b"{}"
    """As in its file: other encodings lose nan, infinities or large integers on the way."""


def announce(worker: Worker, stored: Stored | None) -> Incoming | None:
    """What the chief has found, for every worker; None where that is nothing."""
    if worker.world_size == 1:
        return Incoming(worker, stored.manifest, stored.state, stored) if stored is not None else None
    message = _Message(stored.manifest, encode_state(stored.state)) if stored is not None else _Message()
    data = msgspec.msgpack.encode(message) if worker.is_chief else b""
    message = msgspec.msgpack.decode(worker.axis.all_gather_bytes("checkpoint state", data)[0], type=_Message)
    if message.manifest is None:
        return None
    return Incoming(worker, message.manifest, decode_state(message.state), stored)


class Incoming:
    """Its tensors come when they are asked for, by all workers alike, and in one way or the other."""

    def __init__(self, worker: Worker, manifest: Manifest, state: dict[str, Any], stored: Stored | None) -> None:
        """`stored` is what the chief reads from."""
        self.manifest, self.state = manifest, state
        self._worker, self._stored = worker, stored
        self._all: dict[str, Tensor] = {}

    def all(self) -> dict[str, Tensor]:
        """Every tensor, for a worker that keeps them all. On the chief they are mapped from the files."""
        if not self._all:
            entries = self.manifest.tensors
            self._all = self._stored.tensors() if self._stored is not None else _empty(entries)
            self._worker.axis.broadcast_((self._all[name] for name in entries), "checkpoint tensors")
        return self._all

    def one_by_one(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in turn, for a worker that keeps a part of each."""
        if self._all:
            yield from self._all.items()
            return
        for entries in _together(self.manifest.tensors):
            found = {n: self._stored.tensor(n) for n in entries} if self._stored is not None else _empty(entries)
            self._worker.axis.broadcast_(found.values(), "checkpoint tensors")
            for name in entries:
                yield name, found.pop(name)


def _empty(entries: Mapping[str, TensorEntry]) -> dict[str, Tensor]:
    return {name: empty_tensor(entry.dtype, entry.shape) for name, entry in entries.items()}


def _together(entries: Mapping[str, TensorEntry]) -> Iterator[dict[str, TensorEntry]]:
    some: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        if some and sum(one.num_bytes for one in some.values()) + entry.num_bytes > TOGETHER_BYTES:
            yield some
            some = {}
        some[name] = entry
    if some:
        yield some
