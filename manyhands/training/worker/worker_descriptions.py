"""What is said of workers: the machine that one is on, and where others were last heard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from manyhands.control.messages.worker_messages import WorkerPosition
from manyhands.spec.run import AVERAGING
from manyhands.strategies.choices import Sharded
from manyhands.strategies.model_parallel import Mesh

if TYPE_CHECKING:
    from manyhands.training.worker.worker import Worker

__all__ = ["last_heard", "machine_of"]


def machine_of(worker: Worker) -> str:
    """What was chosen for this machine, for the run's first line."""
    _ = worker.axis  # only now is it known whether there is memory to share
    launch, reducer = worker.resolved.spec.launch, worker.resolved.spec.comm.reducer
    allocator = "freed memory kept" if launch.allocator == "keep" else "system allocator"
    machine = f"{worker.device}, {launch.memory_format} memory, {allocator}"
    if worker.world_size == 1:
        return machine
    backend = "NCCL" if worker.device.type == "cuda" else "Gloo"
    way = f"over {backend} ({worker.why_no_plane})" if worker.why_no_plane else "through shared memory"
    what = "weights" if worker.strategy.name in AVERAGING else "gradients"
    exchange = f", {what} exchanged as {reducer}" if reducer != "exact" else ""
    words = worker.strategy.divided if isinstance(worker.strategy, Sharded | Mesh) else ""
    divided = f", {words} divided" if words else ""
    return f"{machine}, workers talk {way}{exchange}{divided}"


def last_heard(positions: Mapping[int, WorkerPosition], *, but: int) -> str:
    """Of all ranks but one."""
    seen = {rank: place for rank, place in positions.items() if rank != but}
    if not seen:
        return "Nothing was heard of the others."
    return "Last heard: " + "; ".join(
        f"rank {rank} at step {place.step}, {place.phase}, {place.age_s:.0f} s ago"
        for rank, place in sorted(seen.items())
    )
