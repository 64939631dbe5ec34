"""Flags that cannot go together, refused before any process starts; workers would refuse them seconds later. Pure.

Only flags are looked at: they have the last word, while what the environment or a file says may still be changed by the
script. What single sections and pairs of settings rule out by themselves stands where they are declared, in `run`.
"""

from __future__ import annotations

from collections.abc import Iterator

from manyhands.errors import SpecError
from manyhands.spec.load import Resolved
from manyhands.spec.placement import Placement

__all__ = ["check_flags"]

WITHOUT_SERVERS = {
    "single", "mirrored", "multi_worker", "tensor", "pipeline", "mesh", "sharded", "central_storage",
}  # fmt: skip


def check_flags(resolved: Resolved, placement: Placement) -> None:
    for conflict in _conflicts(resolved, placement):
        raise conflict


def _conflicts(resolved: Resolved, placement: Placement) -> Iterator[SpecError]:
    given = resolved.flags()
    strategy, servers = given.get("train.strategy"), given.get("launch.servers")
    workers = placement.total_workers or placement.workers * placement.num_hosts
    if strategy == "single" and workers > 1:
        yield SpecError(
            f"--strategy single is for one worker, but this run has {workers}.",
            where="--strategy",
            fix=["--strategy mirrored", "-n 1"],
        )
    if strategy in WITHOUT_SERVERS and servers:
        yield SpecError(
            f"--servers {servers} asks for parameter servers, but --strategy {strategy} has no use for them.",
            where="--servers",
            fix=["--strategy parameter_server", "no --servers"],
        )
    if strategy == "central_storage" and placement.num_hosts > 1:
        yield SpecError(
            f"--strategy central_storage has all weights in one host's memory, but this run has {placement.num_hosts}.",
            where="--strategy",
            fix=["--strategy sharded", "--strategy multi_worker"],
        )
    if strategy == "central_storage" and workers > 1 and given.get("comm.plane") == "gloo":
        yield SpecError(
            "--strategy central_storage keeps the weights in memory that workers share, but with --plane gloo they "
            "share none.",
            where="--plane",
            fix=["--plane auto", "--strategy sharded"],
        )
    if given.get("launch.elastic") and given.get("comm.reducer") == "int8":
        yield SpecError(
            "With --reducer int8 every worker keeps what it left out so far, which is lost when the worker is.",
            where="--elastic",
            fix=["--reducer bf16", "no --elastic"],
        )
