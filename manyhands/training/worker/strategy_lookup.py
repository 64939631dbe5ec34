"""The strategy that a user chose, by name or as an object, and whether the run as it was started supports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from manyhands.errors import SpecError
from manyhands.spec import load
from manyhands.spec.probe_requests import GraphOrder
from manyhands.spec.run import RunSpec
from manyhands.spec.strategy_names import STRATEGY_NAMES, strategy_name
from manyhands.spec.worker_identity import WorkerIdentity
from manyhands.strategies.choices import LocalSGD, Mirrored
from manyhands.strategies.model_parallel import DIVIDED, Mesh, PipelineParallel, TensorParallel, grid_of, replica_of
from manyhands.strategies.registry import PRESETS, STRATEGIES, StrategyChoice
from manyhands.strategies.settings import StrategySettings

__all__ = [
    "Planned",
    "StrategyChoice",
    "as_strategy",
    "check_grid",
    "check_promises",
    "check_strategy",
    "in_place_of",
]


class Planned(NamedTuple):
    """What `mh plan show` and `mh graph` read from the script."""

    strategy: StrategyChoice
    workers: int
    slices: int | None
    path: str
    graph: GraphOrder | None = None
    """Set under `mh graph`."""


def as_strategy(strategy: str | StrategyChoice | None) -> StrategyChoice:
    if strategy is None:
        return Mirrored()
    if isinstance(strategy, StrategySettings):
        return strategy
    if not isinstance(strategy, str):
        raise _not_a_strategy(strategy)
    return _named(strategy)()


def in_place_of(chosen: StrategyChoice, name: str, **settings: Any) -> StrategyChoice:
    """Another strategy with the common settings of `chosen`: devices, threads, dtypes, memory_limit."""
    shared = {field.name: getattr(chosen, field.name) for field in msgspec.structs.fields(StrategySettings)}
    return _named(name)(**shared, **settings)


def _named(name: str) -> Callable[..., StrategyChoice]:
    same = strategy_name(name)
    if same in STRATEGIES:
        return STRATEGIES[same].settings
    if same not in PRESETS:
        near = load.nearest(name, [*STRATEGY_NAMES, *PRESETS]) or STRATEGY_NAMES
        raise SpecError(f"There is no strategy {name!r}.", fix=[f'strategy="{one}"' for one in near])
    return PRESETS[same]


def _not_a_strategy(given: Any) -> SpecError:
    if isinstance(given, type) and issubclass(given, StrategySettings):
        return SpecError(f"strategy is the class {given.__name__}.", fix=[f"strategy=mh.{given.__name__}(...)"])
    return SpecError(
        f"strategy is {given!r}, which is no strategy.", fix=['strategy="mirrored"', "strategy=mh.Mirrored(workers=2)"]
    )


def check_grid(strategy: TensorParallel | PipelineParallel | Mesh, identity: WorkerIdentity) -> None:
    """`SpecError` if the number of workers does not fit the mesh. An elastic run may have fewer replicas, not more."""
    if not identity.most_workers or not isinstance(strategy, Mesh):
        grid_of(strategy, identity.world_size)
    elif strategy.level is not None:
        raise SpecError(
            "Replicas of a sharded mesh shard their common state: if one is lost, no other has its shard.",
            where="elastic",
            fix=["sharded=False", "no elastic="],
        )
    elif identity.most_workers != strategy.workers:
        raise SpecError(
            f"elastic allows up to {identity.most_workers} workers, but the mesh has {strategy.workers}.",
            where="elastic",
            fix=[f"--elastic {min(identity.least_workers, strategy.workers)}:{strategy.workers}"],
        )
    elif identity.least_workers < (replica := replica_of(strategy, 0)).size:
        raise SpecError(
            f"elastic allows {identity.least_workers} workers, but a replica of the mesh has {replica.tensor} (tensor) "
            f"x {replica.pipeline} (pipeline) = {replica.size}.",
            where="elastic",
            fix=[f"--elastic {replica.size}:{strategy.workers}"],
        )


def check_promises(strategy: StrategyChoice, spec: RunSpec) -> None:
    """`SpecError` for settings that the strategy's mode cannot keep, or would ignore.

    What its name rules out is in `spec.strategy_names`. With hybrid servers workers are replicas, and support all that
    replicas do. With servers that lease slices or batches, workers send nothing to each other; results are the same
    for any number of workers only if all workers wait for each other.
    """
    _check_reducer(strategy, spec)
    if not strategy.leases:
        return
    if spec.train.exact and not strategy.waits_for_all:
        raise SpecError(
            f"exact promises the same bits for any number of workers, but with {strategy.lease_mode} the result "
            "depends on which worker is how fast.",
            where=f"mh.{type(strategy).__name__}",
            fix=['mode="sync", of mh.ParameterServer', 'strategy="mirrored"', "exact=False"],
        )
    for name, value, default, why in (
        ("reducer", spec.comm.reducer, "exact", "gradients are sent to servers as they are"),
        ("audit", spec.train.audit, False, "no second worker computes a slice for comparison"),
        ("balance", spec.train.balance, False, "a worker takes its next slice or batch when it has finished one"),
    ):
        if value != default:
            raise SpecError(
                f"{name} is {value!r}, but with {strategy.lease_mode} {why}.",
                where=f"mh.{type(strategy).__name__}",
                fix=[f"{name}={default!r}", strategy.without_leases, 'strategy="mirrored"'],
            )


def _check_reducer(strategy: StrategyChoice, spec: RunSpec) -> None:
    """`SpecError` for settings that change gradients before a user's function has combined them."""
    if not callable(getattr(strategy, "reducer", None)):
        return
    for name, value, usual, why in (
        ("reducer", spec.comm.reducer, "exact", "a function that gets every slice's gradients replaces the sum"),
        ("precision", spec.train.precision == "fp16", False, "fp16 scales the loss, and the function's gradients too"),
        ("audit", spec.train.audit, False, "a slice's gradients are combined before they could be compared"),
    ):
        if value != usual:
            raise SpecError(
                f"reducer is a function, which {name} does not go with: {why}.",
                where=f"mh.{type(strategy).__name__}(reducer=...)",
                fix=["no reducer=" if name != "precision" else 'precision="bf16"', f"no {name}="],
            )


def check_strategy(strategy: StrategyChoice, identity: WorkerIdentity, spec: RunSpec) -> None:
    if strategy.name == "single" and identity.world_size > 1:
        raise SpecError(
            f'strategy="single" runs one worker, but this run has {identity.world_size}.',
            fix=['strategy="mirrored"', "mh run -n 1"],
        )
    if strategy.name == "central_storage" and identity.num_hosts > 1:
        raise SpecError(
            f'strategy="central_storage" keeps all weights on one host, but this run has {identity.num_hosts} hosts.',
            fix=['strategy=mh.Sharded("optimizer")', 'strategy="mirrored"'],
        )
    if strategy.on_servers and not identity.num_servers:
        workers = getattr(strategy, "workers", None) or identity.local_world_size
        servers = "a parameter server" if spec.num_servers == 1 else f"{spec.num_servers} parameter servers"
        raise SpecError(
            f"The script asks for {servers}, but the run was started without any.",
            fix=[f"mh run --servers {spec.num_servers} -n {workers} ..."],
        )
    if isinstance(strategy, DIVIDED):
        check_grid(strategy, identity)
    if isinstance(strategy, LocalSGD) and strategy.quorum is not None and identity.num_servers > 1:
        raise SpecError(
            f"With a quorum one server decides which workers are in a round, but this run has {identity.num_servers}.",
            where="quorum",
            fix=["mh run --servers 1"],
        )
    if not strategy.on_servers and identity.num_servers:
        raise SpecError(
            f'This run has {identity.num_servers} parameter servers, but strategy="{strategy.name}" does not use any.',
            fix=["strategy=mh.ParameterServer(...)", "mh run without --servers"],
        )
