"""With NCCL for the tensors on cards, what is made on the CPU has to travel some other way."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from manyhands.comm.axis import Axis, gloo_options
from manyhands.comm.device_groups import GroupsByDevice


class Refusing:
    """As NCCL, which takes no tensor of the CPU."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> None:
            tensors = [one for arg in args for one in (arg if isinstance(arg, list) else [arg])]
            assert all(one.device.type != "cpu" for one in tensors if isinstance(one, torch.Tensor))
            self.calls.append(name)

        return call


def test_tensors_go_to_the_group_of_their_device() -> None:
    on_device, in_memory = Refusing(), object()
    group, away = GroupsByDevice(on_device, in_memory), torch.empty(2, device="meta")
    group.allreduce([away])
    group.alltoall_base(away, away, [1, 1], [1, 1])
    group._allgather_base(away, away)
    group.broadcast([away], None)
    group.send([away], 0, 1)
    group.recv([away], 0, 1)
    assert on_device.calls == ["allreduce", "alltoall_base", "_allgather_base", "broadcast", "send", "recv"]
    assert group._of(torch.empty(2)) is in_memory


def test_what_ranks_say_to_each_other_passes_by_a_group_that_takes_no_cpu_tensor() -> None:
    """Two ranks in two threads, over real Gloo beside a group like NCCL's."""
    store = dist.HashStore()

    def rank(number: int) -> tuple[list[bytes], float]:
        options = gloo_options("127.0.0.1", timedelta(seconds=60))
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), number, 2, options)
        axis = Axis(number, 2, GroupsByDevice(Refusing(), gloo), timeout_s=60.0)
        total = torch.tensor([float(number + 1)])
        axis.sum_start(total, "sum").wait()
        weight = torch.full((3,), float(number))
        axis.broadcast_([weight], "weights")
        assert weight.tolist() == [0.0] * 3
        return axis.all_gather_bytes("names", f"rank {number}".encode()), float(total)

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(rank, range(2)))
    assert results == [([b"rank 0", b"rank 1"], 3.0)] * 2
