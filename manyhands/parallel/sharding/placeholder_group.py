"""A process group for torch's device mesh that never communicates: sharding over the mesh communicates by an `Axis`.

`fully_shard` needs a device mesh, and a mesh needs c10d's default group. This one is a placeholder: it opens no
connection, and a collective on it raises an error instead of hanging.
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


class PlaceholderGroup(dist.ProcessGroup):
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
    """A mesh over all ranks. Modules stay sharded over it after the end, when the default group is destroyed."""
    if dist.is_initialized():
        raise TrainingFailed(
            "The script has initialised torch.distributed's default process group, but sharding needs to set its own.",
            fix=["no torch.distributed.init_process_group in the script", 'strategy="mirrored"'],
        )
    if _NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(_NAME, _make, devices=["cpu", "cuda"])
    dist.init_process_group(_NAME, store=HashStore(), rank=rank, world_size=size)
    try:
        yield DeviceMesh(device.type, torch.arange(size))
    finally:
        dist.destroy_process_group()


def _make(store: Store, rank: int, size: int, timeout: timedelta) -> PlaceholderGroup:
    return PlaceholderGroup(rank, size)  # type: ignore[call-arg]  # a constructor that torch's stubs lack
