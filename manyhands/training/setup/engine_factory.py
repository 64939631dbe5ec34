"""Makes the engine of a strategy: the one place where the strategy that a user chose becomes the object that trains.

An engine has the methods of `strategies.base`. `make_engine` builds one from the run's settings and this worker's ranks
in it; the caller then sets it up with a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from manyhands.comm.axis import Axis
from manyhands.control.membership.state import parse_generation
from manyhands.embedding.replicated_rows import SparseStep
from manyhands.errors import SpecError
from manyhands.parallel.averaging.outer_optimizer import OuterStep
from manyhands.parallel.averaging.rounds import Rounds
from manyhands.parallel.model.activation_checkpointing import recompute
from manyhands.parallel.model.precision import Precision
from manyhands.parallel.replicas.model_parallel_replica import ModelParallelReplica
from manyhands.parallel.sharding.sharded_backend import ShardedBackend
from manyhands.parallel.weights.shared_memory_group import SharedMemoryGroup
from manyhands.parameter_server.engine.leased_engine import LeasedEngine, LeaseHolder, Servers
from manyhands.parameter_server.engine.local_steps_engine import LocalStepsEngine, way_of
from manyhands.parameter_server.worker.hybrid_rows import HybridStep
from manyhands.parameter_server.worker.remote_access import RemoteAccess
from manyhands.parameter_server.worker.server_access import LocalAccess, ServerAccess
from manyhands.parameter_server.worker.server_connection import ServerConnection
from manyhands.strategies.base import Engine
from manyhands.strategies.choices import LocalSGD, ParameterServer, Sharded
from manyhands.strategies.engine_parts import ModelSide, Ranks, StepSettings
from manyhands.strategies.local_sgd import Averaging, LocalSGDEngine
from manyhands.strategies.model_parallel import Mesh, as_sharded
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategies.replicated import Replicated
from manyhands.training.setup.divide_model import Sample, model_parallel_replica
from manyhands.training.setup.keras_models import has_layers
from manyhands.training.setup.user_model import Parts, foreign_state
from manyhands.training.step.step_requests import END_FIT
from manyhands.training.step.stragglers import StragglerTracker
from manyhands.training.worker.strategy_lookup import StrategyChoice
from manyhands.training.worker.worker import Worker

__all__ = ["AnyEngine", "make_engine"]

AnyEngine = Engine | LeasedEngine
"""A `LeasedEngine` has no `train_step`: its workers do not take steps together."""


class EngineRequest(NamedTuple):
    """What every engine is built from."""

    worker: Worker
    side: ModelSide
    settings: StepSettings
    shares: Callable[[int], Sequence[range]]
    """The slices of each rank, for a step with this number of slices; they may change between steps."""
    joining: bool
    """The other workers are training already: the engine begins with this rank alone."""

    def replicas(self, shared: SharedMemoryGroup | None = None) -> Ranks:
        """The ranks that have the same part of the model as this one."""
        worker = self.worker
        axis = Axis(0, 1) if self.joining else worker.replicas
        network = (lambda: worker.replicas) if worker.is_divided else (lambda: worker.network)
        return Ranks(axis, network, None if self.joining else shared)

    def workers(self) -> Ranks:
        """All workers, without memory that they share."""
        return Ranks(Axis(0, 1) if self.joining else self.worker.axis, lambda: self.worker.network)


def make_engine(
    worker: Worker,
    parts: Parts,
    model: nn.Module,
    pacing: StragglerTracker,
    *,
    joining: bool,
    sample: Callable[[], Sample | None],
) -> AnyEngine:
    """The engine of this worker's strategy. With `joining`, the other workers are training already.

    `sample` returns some data, if there is any, for strategies that need it to divide the model.
    """
    choice, spec = worker.strategy, worker.resolved.spec
    side = ModelSide(parts.loss, Precision(spec.train.precision, worker.device), foreign_state(model, parts.sums))
    request = EngineRequest(worker, side, StepSettings.of(spec), lambda count: pacing.division.shares(count), joining)
    if worker.is_server:  # the script has a further training on a server; it takes no steps
        return _replicated(request._replace(joining=True))
    if isinstance(choice, Mesh) and (plain := as_sharded(choice, worker.grid)):
        _recompute(choice, model)
        return _sharded_as(plain, request._replace(joining=False))
    if worker.is_divided:
        replica = model_parallel_replica(worker, parts.loss, sample)
        level = choice.level if isinstance(choice, Mesh) else None
        return _replicated(request, spread=replica) if level is None else _fully_sharded(request, level, spread=replica)
    _recompute(choice, model)
    return MAKERS[STRATEGIES[choice.name].engine](request)


def _recompute(choice: StrategyChoice, model: nn.Module) -> None:
    """Activation checkpointing of models that are not divided; `divide_model` does it for the others."""
    if choice.recompute is not None:
        recompute(model, choice.recompute, f"mh.{type(choice).__name__}(recompute=...)")


def _replicated(
    request: EngineRequest,
    rows: Callable[[nn.Module, int], SparseStep] = SparseStep,
    spread: ModelParallelReplica | None = None,
    one_copy: SharedMemoryGroup | None = None,
) -> Replicated:
    """`one_copy` is the shared memory that must hold the weights; without it, workers of a host share what they can."""
    worker = request.worker
    reducer = getattr(worker.strategy, "reducer", None)
    shared = None if request.joining else one_copy or (worker.sharing if not worker.is_divided else None)
    return Replicated(
        request.replicas(shared),
        request.side,
        request.settings,
        request.shares,
        rows=rows,
        spread=spread,
        one_copy=one_copy is not None,
        reducer=reducer if callable(reducer) else None,  # else it is the name of a codec
        warn=worker.events.warn,
    )


def _central_storage(request: EngineRequest) -> Replicated:
    worker = request.worker
    if worker.world_size == 1:
        return _replicated(request)
    if (shared := worker.sharing) is None:
        raise SpecError(
            f"The workers share no memory that could hold the weights: {worker.why_no_plane}.",
            where="mh.CentralStorage",
            fix=['strategy=mh.Sharded("optimizer")', 'strategy="mirrored"'],
        )
    return _replicated(request, one_copy=shared)


def _sharded(request: EngineRequest) -> Replicated:
    assert isinstance(request.worker.strategy, Sharded)
    return _sharded_as(request.worker.strategy, request)


def _sharded_as(choice: Sharded, request: EngineRequest) -> Replicated:
    worker = request.worker
    offload = choice.offload is not None and worker.device.type != "cpu"
    if choice.offload is not None and not offload:
        worker.events.warn('offload="host" has no effect: the workers compute in the host\'s memory.')
    if worker.world_size == 1:
        worker.events.warn("Nothing is sharded: the run has one worker. For two: mh run -n 2")
        return _replicated(request)
    shared = worker.sharing if choice.level != "parameters" else None
    if shared is not None:
        return _replicated(request, one_copy=shared)
    return _fully_sharded(request, choice.level, offload=offload)


def _fully_sharded(
    request: EngineRequest, level: str, *, offload: bool = False, spread: ModelParallelReplica | None = None
) -> Replicated:
    """Each rank has a shard of the weights; stages of a pipeline gather theirs for a whole step."""
    # torch's FSDP takes a second to import, and no other strategy needs it.
    from manyhands.parallel.sharding.fsdp_backend import FsdpBackend, Sharding
    from manyhands.parallel.sharding.gather_per_step import GatherPerStep

    worker, ranks = request.worker, request._replace(joining=False).replicas()
    settings = request.settings._replace(check_every=0)  # ranks have no copies to compare

    def backend(model: nn.Module, optimizer: Optimizer, axis: Axis) -> ShardedBackend:
        common = model, optimizer, axis, ranks.network
        is_staged = spread is not None and spread.divided.passes is not None
        if is_staged or has_layers(model):  # torch's FSDP replaces parameters, and Keras's layers keep theirs
            return GatherPerStep(*common, warn=worker.events.warn, bucket_bytes=settings.bucket_bytes)
        return FsdpBackend(
            *common, Sharding(level != "parameters", offload), device=worker.device, warn=worker.events.warn
        )

    return Replicated(
        ranks, request.side, settings, request.shares, spread=spread, backend=backend, warn=worker.events.warn
    )


def _with_servers(request: EngineRequest) -> AnyEngine:
    worker, choice = request.worker, request.worker.strategy
    assert isinstance(choice, ParameterServer)
    if choice.takes_local_steps:
        return _with_local_steps(request, choice)
    train = worker.resolved.spec.train
    if choice.mode != "hybrid":
        servers = _servers(worker, clips=train.clip_norm is not None)
        return LeasedEngine(request.workers(), request.side, request.settings, choice, servers, _lease_holder(worker))
    link, access, num_servers = _servers(worker, clips=False)

    def rows(model: nn.Module, seed: int) -> HybridStep:
        return HybridStep(
            model,
            seed,
            link,
            None if access.is_away else access.memory,
            shares=not access.is_away,
            num_servers=num_servers,
            are_up=access.are_up,
            next_number=lambda: worker.script.next_interval(parse_generation(worker.group.generation)),
            entered=worker.script.enter_interval,
            wait_for_chief=worker.wait_for_chief,
            training=worker.number,
            needs_norm=train.clip_norm is not None or train.precision == "fp16",
        )

    return _replicated(request, rows)


def _with_local_steps(request: EngineRequest, choice: ParameterServer | LocalSGD) -> LocalStepsEngine:
    worker, way = request.worker, way_of(choice)
    servers = _servers(worker, clips=False)
    if way.quorum is not None:
        servers = servers._replace(num_wanted=lambda: 1)
    settings = choice if isinstance(choice, ParameterServer) else ParameterServer()
    return LocalStepsEngine(
        request.workers(), request.side, request.settings, settings, servers, _lease_holder(worker), way=way
    )


def _lease_holder(worker: Worker) -> LeaseHolder:
    incarnation = worker.session.identity.incarnation
    return LeaseHolder(incarnation, worker.most_workers, worker.number, worker.wait_for_chief)


def _servers(worker: Worker, *, clips: bool) -> Servers:
    """Servers on this host share memory with its workers; others are reached over TCP."""
    session = worker.agent_session
    name = f"worker {session.identity.incarnation}, training {worker.number}"  # unique: servers identify workers by it
    link = ServerConnection(session.server_endpoint, name.encode(), session.curve)
    is_remote = session.server_endpoint(0).startswith("tcp:")
    access: ServerAccess = (
        RemoteAccess(link, session.identity.incarnation, clips=clips)
        if is_remote
        else LocalAccess(link, worker.shared_memory)
    )
    return Servers(link, access, lambda: session.servers_wanted)


def _averaged(request: EngineRequest) -> AnyEngine:
    worker, strategy, side, settings = request.worker, request.worker.strategy, request.side, request.settings
    assert isinstance(strategy, LocalSGD)
    if strategy.leases:
        return _with_local_steps(request, strategy)
    alone = Axis(0, 1)
    local = Replicated(
        Ranks(alone, lambda: alone),
        side,
        StepSettings(settings.clip_norm, settings.bucket_bytes),
        lambda count: [range(count)],
        warn=worker.events.warn,
    )
    return LocalSGDEngine(
        local,
        request.workers(),
        settings,
        request.shares,
        averaging_of(strategy),
        ends_with=END_FIT,
        statistics=[one for norm in side.foreign.norms for one in (*norm.averages, norm.calls) if one is not None],
    )


def averaging_of(strategy: LocalSGD) -> Averaging:
    """The averaging that the user's settings describe."""
    return Averaging(
        Rounds(
            every=strategy.every,
            post_local=strategy.post_local,
            fragments=strategy.fragments,
            overlap=strategy.overlap,
        ),
        OuterStep(
            kind=strategy.outer,  # type: ignore[arg-type]  # checked where it was written
            rule=strategy.rule,  # type: ignore[arg-type]
            trim=strategy.trim,
            lr=strategy.outer_lr,
            momentum=strategy.outer_momentum,
            pull=strategy.pull,
            own_share=strategy.own_share if strategy.overlap else 0.0,
        ),
        in_pairs=strategy.peers == "pairs",
    )


MAKERS: dict[str, Callable[[EngineRequest], AnyEngine]] = {
    "replicas": _replicated,
    "central storage": _central_storage,
    "shards": _sharded,
    "servers": _with_servers,
    "averages": _averaged,
}
"""By the `engine` of `strategies.registry`. For strategies that divide the model, `make_engine` does not use it."""
