"""Refuses combinations of flags that cannot work, before any process starts; workers would refuse them later. Pure.

Only flags are checked: nothing overrides them, while the script may still override what the environment or a file says.
Conflicts within a section or between two settings are checked where the settings are declared, in `run`.
"""

from __future__ import annotations

from collections.abc import Iterator

from manyhands.errors import SpecError
from manyhands.spec.load import Resolved
from manyhands.spec.placement import Placement
from manyhands.spec.strategy_names import WITH_RESIDUALS, WITH_SERVERS

__all__ = ["check_flags"]


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
    if strategy is not None and strategy not in WITH_SERVERS and servers:
        yield SpecError(
            f"--servers {servers} asks for parameter servers, but --strategy {strategy} does not use any.",
            where="--servers",
            fix=["--strategy parameter_server", "no --servers"],
        )
    if strategy == "central_storage" and placement.num_hosts > 1:
        yield SpecError(
            f"--strategy central_storage keeps all weights in the memory of one host, but this run has "
            f"{placement.num_hosts} hosts.",
            where="--strategy",
            fix=["--strategy sharded", "--strategy mirrored"],
        )
    if strategy == "central_storage" and workers > 1 and given.get("comm.plane") == "gloo":
        yield SpecError(
            "--strategy central_storage keeps the weights in memory that workers share, but with --plane gloo they "
            "share none.",
            where="--plane",
            fix=["--plane auto", "--strategy sharded"],
        )
    if given.get("launch.elastic") and (reducer := given.get("comm.reducer")) in WITH_RESIDUALS:
        yield SpecError(
            f"--reducer {reducer} keeps a residual (error feedback) on every worker, which is lost with the worker.",
            where="--elastic",
            fix=["--reducer bf16", "no --elastic"],
        )
