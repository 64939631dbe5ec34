"""A process group for torch's device mesh that talks to nobody: whoever shards over the mesh brings an `Axis` to talk.

`fully_shard` wants a device mesh, and a mesh wants c10d's default group. Ours is there by name only: it opens nothing
and listens nowhere, and a collective that somebody calls on it is an error instead of a hang.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName

from manyhands.errors import TrainingFailed

__all__ = ["formal_mesh"]

_NAME = "manyhands"


class FormalGroup(dist.ProcessGroup):
    """Its collectives are those of the base class, which raise."""

    _registered_as = GroupName("")

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return _NAME

    def _set_group_name(self, name: str) -> None:
        self._registered_as = GroupName(name)

    @property
    def group_name(self) -> GroupName:
        return self._registered_as


@contextmanager
def formal_mesh(rank: int, size: int, device: torch.device) -> Iterator[DeviceMesh]:
    """A mesh over all ranks; what is sharded over it stays so after the end, when the default group is gone again."""
    if dist.is_initialized():
        raise TrainingFailed(
            "The script has a default process group of its own, which is in the way of the one that sharding needs.",
            fix=["no torch.distributed.init_process_group in the script", 'strategy="mirrored"'],
        )
    if _NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(_NAME, _make, devices=["cpu", "cuda"])
    dist.init_process_group(_NAME, store=HashStore(), rank=rank, world_size=size)
    try:
        yield DeviceMesh(device.type, torch.arange(size))
    finally:
        dist.destroy_process_group()


def _make(store: Store, rank: int, size: int, timeout: timedelta) -> FormalGroup:
    return FormalGroup(rank, size)  # type: ignore[call-arg]  # torch has this one, too
