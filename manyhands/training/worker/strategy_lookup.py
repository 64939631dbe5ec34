"""Which strategies there are, by name and by object, and whether a run as it was started can have the one asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec

from manyhands.errors import SpecError
from manyhands.spec import load
from manyhands.spec.run import RunSpec, strategy_name
from manyhands.spec.worker_identity import Seat
from manyhands.strategies.choices import (
    CentralStorage,
    LocalSGD,
    Mirrored,
    MultiWorker,
    ParameterServer,
    Sharded,
    Single,
)
from manyhands.strategies.model_parallel import DIVIDED, Mesh, Pipeline, Tensor, grid_of, replica_of
from manyhands.strategies.settings import Settings

__all__ = [
    "Planned",
    "StrategyChoice",
    "as_strategy",
    "check_grid",
    "check_promises",
    "check_strategy",
    "in_place_of",
]

StrategyChoice = (
    Single | Mirrored | MultiWorker | ParameterServer | LocalSGD | Tensor | Pipeline | Mesh | Sharded | CentralStorage
)
STRATEGIES: dict[str, Callable[..., StrategyChoice]] = {
    "single": Single,
    "mirrored": Mirrored,
    "multi_worker": MultiWorker,
    "parameter_server": ParameterServer,
    "local_sgd": LocalSGD,
    "diloco": partial(LocalSGD, outer="nesterov"),
    "tensor": Tensor,
    "pipeline": Pipeline,
    "mesh": Mesh,
    "sharded": Sharded,
    "central_storage": CentralStorage,
}
LEVELS: dict[str, Callable[..., StrategyChoice]] = {
    "zero1": partial(Sharded, "optimizer"),
    "zero2": partial(Sharded, "gradients"),
}
"""In a script only: settings have the names above."""


class Planned(NamedTuple):
    """What `mh plan show` wants to know."""

    strategy: StrategyChoice
    workers: int
    slices: int | None
    path: str


def as_strategy(strategy: str | StrategyChoice | None) -> StrategyChoice:
    if strategy is None:
        return Mirrored()
    if isinstance(strategy, Settings):
        return strategy
    if not isinstance(strategy, str):
        raise _no_strategy(strategy)
    return _named(strategy)()


def in_place_of(chosen: StrategyChoice, name: str, **settings: Any) -> StrategyChoice:
    """Another strategy, with what all of them have as this one has it: devices, threads, dtypes, memory_limit."""
    shared = {field.name: getattr(chosen, field.name) for field in msgspec.structs.fields(Settings)}
    return _named(name)(**shared, **settings)


def _named(name: str) -> Callable[..., StrategyChoice]:
    known, same = STRATEGIES | LEVELS, strategy_name(name)
    if same not in known:
        near = load.nearest(name, known)
        raise SpecError(f"There is no strategy {name!r}.", fix=[f'strategy="{one}"' for one in near or STRATEGIES])
    return known[same]


def _no_strategy(given: Any) -> SpecError:
    if isinstance(given, type) and issubclass(given, Settings):
        return SpecError(f"strategy is the class {given.__name__}.", fix=[f"strategy=mh.{given.__name__}(...)"])
    return SpecError(
        f"strategy is {given!r}, which is no strategy.", fix=['strategy="mirrored"', "strategy=mh.Mirrored(workers=2)"]
    )


def check_grid(strategy: Tensor | Pipeline | Mesh, seat: Seat) -> None:
    """A run that workers leave and join may have fewer replicas than the mesh, but not more."""
    if not seat.most_workers or not isinstance(strategy, Mesh):
        grid_of(strategy, seat.world_size)
    elif strategy.level is not None:
        raise SpecError(
            "Replicas of a sharded mesh divide what they have in common: none has what is lost with another.",
            where="elastic",
            fix=["sharded=False", "no elastic="],
        )
    elif seat.most_workers != strategy.workers:
        raise SpecError(
            f"elastic allows up to {seat.most_workers} workers, and the mesh has {strategy.workers}.",
            where="elastic",
            fix=[f"--elastic {min(seat.least_workers, strategy.workers)}:{strategy.workers}"],
        )
    elif seat.least_workers < (replica := replica_of(strategy, 0)).size:
        raise SpecError(
            f"elastic allows {seat.least_workers} workers, and a replica of the mesh is {replica.tensor} (tensor) x "
            f"{replica.pipeline} (pipeline), that is {replica.size}.",
            where="elastic",
            fix=[f"--elastic {replica.size}:{strategy.workers}"],
        )


def check_promises(strategy: StrategyChoice, spec: RunSpec) -> None:
    """What the strategy's mode cannot keep, or would ignore. What its name rules out stands in `spec.run`.

    With hybrid servers workers are replicas, and have all that replicas have. With those that lease out slices or
    batches nothing travels from worker to worker; only where all workers wait for each other are results the same.
    """
    if not strategy.leases:
        return
    if spec.train.exact and not _waits_for_all(strategy):
        how = _mode_in_words(strategy)
        raise SpecError(
            f"exact promises the same bits for any number of workers, but with {how} the result depends on which "
            "worker is how fast.",
            where=f"mh.{type(strategy).__name__}",
            fix=['mode="sync", of mh.ParameterServer', 'strategy="mirrored"', "exact=False"],
        )
    for name, asked, usual, why in (
        ("reducer", spec.comm.reducer, "exact", "gradients go to servers as they are"),
        ("audit", spec.train.audit, False, "no second worker computes a slice to compare it"),
        ("balance", spec.train.balance, False, "a worker takes its next slice or batch when it is done with one"),
    ):
        if asked != usual:
            raise SpecError(
                f"{name} is {asked!r}, but with {_mode_in_words(strategy)} {why}.",
                where=f"mh.{type(strategy).__name__}",
                fix=[f"{name}={usual!r}", _without_leases(strategy), 'strategy="mirrored"'],
            )


def _waits_for_all(strategy: StrategyChoice) -> bool:
    if not isinstance(strategy, ParameterServer):
        return False
    return strategy.mode == "sync" or (strategy.mode == "ssp" and strategy.staleness == 0)


def _without_leases(strategy: StrategyChoice) -> str:
    return 'mode="hybrid"' if isinstance(strategy, ParameterServer) else "neither asynchronous= nor quorum="


def _mode_in_words(strategy: StrategyChoice) -> str:
    if isinstance(strategy, ParameterServer):
        ahead = f", staleness={strategy.staleness}" if strategy.mode == "ssp" else ""
        return f'mode="{strategy.mode}"{ahead}'
    assert isinstance(strategy, LocalSGD)
    return "asynchronous=True" if strategy.asynchronous else f"quorum={strategy.quorum}"


def check_strategy(strategy: StrategyChoice, seat: Seat, spec: RunSpec) -> None:
    if strategy.name == "single" and seat.world_size > 1:
        raise SpecError(
            f'strategy="single" runs one worker, but this run has {seat.world_size}.',
            fix=['strategy="mirrored"', "mh run -n 1"],
        )
    if strategy.name == "mirrored" and seat.num_hosts > 1:
        raise SpecError(
            f'strategy="mirrored" keeps to one host, but this run has {seat.num_hosts}.',
            fix=['strategy="multi_worker"', "no strategy=: over several hosts the default is multi_worker"],
        )
    if strategy.name == "central_storage" and seat.num_hosts > 1:
        raise SpecError(
            f'strategy="central_storage" has all weights in one host\'s memory, and this run has {seat.num_hosts}.',
            fix=['strategy=mh.Sharded("optimizer")', 'strategy="multi_worker"'],
        )
    if strategy.on_servers and not seat.num_servers:
        workers = getattr(strategy, "workers", None) or seat.local_world_size
        servers = "a parameter server" if spec.num_servers == 1 else f"{spec.num_servers} parameter servers"
        raise SpecError(
            f"The script asks for {servers}, but the launcher was not asked for any.",
            fix=[f"mh run --servers {spec.num_servers} -n {workers} ..."],
        )
    if isinstance(strategy, DIVIDED):
        check_grid(strategy, seat)
    if isinstance(strategy, LocalSGD) and strategy.quorum is not None and seat.num_servers > 1:
        raise SpecError(
            f"One server decides who is in a round, but this run has {seat.num_servers}.",
            where="quorum",
            fix=["mh run --servers 1"],
        )
    if not strategy.on_servers and seat.num_servers:
        raise SpecError(
            f'This run has {seat.num_servers} parameter servers, but strategy="{strategy.name}" has no use for them.',
            fix=["strategy=mh.ParameterServer(...)", "mh run without --servers"],
        )
