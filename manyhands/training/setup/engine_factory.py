"""Which engine does a strategy's work: the one place where the name that a user wrote becomes the object that trains.

An engine has the verbs of `strategies.base`. `make_engine` puts one together from the run's settings and this worker's
place in it; setting it up with a model is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from manyhands.comm.axis import Axis
from manyhands.comm.codecs import Bf16
from manyhands.control.membership.state import parse_generation
from manyhands.control.session.session import Session
from manyhands.embedding.replicated_rows import SparseStep
from manyhands.errors import SpecError
from manyhands.parallel.averaging.outer_optimizer import OuterStep
from manyhands.parallel.averaging.rounds import Rounds
from manyhands.parallel.model.activation_checkpointing import recompute
from manyhands.parallel.model.precision import Precision
from manyhands.parallel.replicas.model_parallel_replica import Spread
from manyhands.parallel.weights.shared_memory_group import Sharing
from manyhands.parameter_server.engine.local_steps_engine import Stretched, way_of
from manyhands.parameter_server.engine.served import Served
from manyhands.parameter_server.worker.hybrid_rows import ServedStep
from manyhands.parameter_server.worker.local_access import Local
from manyhands.parameter_server.worker.remote_access import Remote
from manyhands.parameter_server.worker.server_access import Reach
from manyhands.parameter_server.worker.server_connection import Link
from manyhands.strategies.base import Engine
from manyhands.strategies.central_storage import OneCopy
from manyhands.strategies.choices import LocalSGD, ParameterServer, Sharded
from manyhands.strategies.local_sgd import Averaged, Averaging
from manyhands.strategies.model_parallel import Mesh, as_sharded
from manyhands.strategies.replicated import Replicated
from manyhands.training.setup.divide_model import Sample, spread_of
from manyhands.training.setup.user_model import Parts, foreign_state
from manyhands.training.step.step_requests import END_FIT
from manyhands.training.step.straggler_tracking import Pacing
from manyhands.training.worker.strategy_lookup import StrategyChoice
from manyhands.training.worker.worker import Worker

__all__ = ["AnyEngine", "make_engine"]

AnyEngine = Engine | Served
"""Served workers do not take steps in turns."""


def make_engine(
    worker: Worker,
    parts: Parts,
    model: nn.Module,
    pacing: Pacing,
    *,
    joining: bool,
    sample: Callable[[], Sample | None],
) -> AnyEngine:
    """The engine of this worker's strategy. With `joining`, the other workers are training already.

    `sample` gives some data, where there is any, for strategies that look at it before they divide the model.
    """
    if worker.is_server:  # it goes on to a later training, and takes no steps
        return _replicated(worker, parts, model, pacing, joining=True)
    if isinstance(worker.strategy, Mesh) and worker.strategy.level is not None:
        return _sharded_mesh(worker, worker.strategy, parts, model, pacing, sample)
    if worker.is_divided:
        return _replicated(worker, parts, model, pacing, joining, spread=spread_of(worker, parts.loss, sample))
    _recompute(worker.strategy, model)
    return _MAKERS[worker.strategy.name](worker, parts, model, pacing, joining)


def _recompute(choice: StrategyChoice, model: nn.Module) -> None:
    """Of whole models; where layers are divided, that comes first."""
    if choice.recompute is not None:
        recompute(model, choice.recompute, f"mh.{type(choice).__name__}(recompute=...)")


def _replicated(
    worker: Worker,
    parts: Parts,
    model: nn.Module,
    pacing: Pacing,
    joining: bool,
    rows: Callable[[nn.Module, int], SparseStep] = SparseStep,
    kind: type[Replicated] = Replicated,
    spread: Spread | None = None,
    sharing: Sharing | None = None,
) -> Replicated:
    """With `sharing`, what the worker has in common with others is known; asking it connects to them anew."""
    spec = worker.resolved.spec
    return kind(
        Axis(0, 1) if joining else worker.replicas,
        parts.loss,
        Precision(spec.train.precision, worker.device),
        lambda count: pacing.division.shares(count),
        clip_norm=spec.train.clip_norm,
        bucket_bytes=spec.comm.bucket_bytes,
        reducer=spec.comm.reducer,
        check_every=spec.train.check_every,
        audit_seed=spec.run.seed if spec.train.audit else None,
        exact=spec.train.exact,
        seed=spec.run.seed,
        sharing=None if joining else sharing or (worker.sharing if not worker.is_divided else None),
        network=lambda: worker.replicas if worker.is_divided else worker.network,
        tell=worker.warn,
        foreign=foreign_state(model),
        rows=rows,
        spread=spread,
    )


def _stored_once(worker: Worker, parts: Parts, model: nn.Module, pacing: Pacing, joining: bool) -> Replicated:
    if worker.world_size == 1:
        return _replicated(worker, parts, model, pacing, joining)
    sharing = worker.sharing
    if sharing is None:
        raise SpecError(
            f"The workers share no memory that could hold the weights: {worker.why_no_plane}.",
            where="mh.CentralStorage",
            fix=['strategy=mh.Sharded("optimizer")', 'strategy="mirrored"'],
        )
    return _replicated(worker, parts, model, pacing, joining, kind=OneCopy, sharing=sharing)


def _sharded_mesh(
    worker: Worker,
    choice: Mesh,
    parts: Parts,
    model: nn.Module,
    pacing: Pacing,
    sample: Callable[[], Sample | None],
) -> Replicated:
    plain = as_sharded(choice, worker.grid)
    if plain is not None:
        _recompute(choice, model)
        return _sharded_as(plain, worker, parts, model, pacing, joining=False)
    spread = spread_of(worker, parts.loss, sample)
    keep_whole = choice.level != "parameters"
    return _fully_sharded(worker, parts, model, pacing, keep_whole=keep_whole, offload=False, spread=spread)


def _sharded(worker: Worker, parts: Parts, model: nn.Module, pacing: Pacing, joining: bool) -> Replicated:
    assert isinstance(worker.strategy, Sharded)
    return _sharded_as(worker.strategy, worker, parts, model, pacing, joining)


def _sharded_as(
    choice: Sharded, worker: Worker, parts: Parts, model: nn.Module, pacing: Pacing, joining: bool
) -> Replicated:
    offload = choice.offload is not None and worker.device.type != "cpu"
    if choice.offload is not None and not offload:
        worker.warn('offload="host" changes nothing here: the workers compute in the host\'s memory.')
    if worker.world_size == 1:
        worker.warn("There is one worker, and nobody to divide its memory with: mh run -n 2")
        return _replicated(worker, parts, model, pacing, joining)
    sharing = worker.sharing if choice.level != "parameters" else None
    if sharing is not None:
        return _replicated(worker, parts, model, pacing, joining, kind=OneCopy, sharing=sharing)
    return _fully_sharded(worker, parts, model, pacing, keep_whole=choice.level != "parameters", offload=offload)


def _fully_sharded(
    worker: Worker,
    parts: Parts,
    model: nn.Module,
    pacing: Pacing,
    *,
    keep_whole: bool,
    offload: bool,
    spread: Spread | None = None,
) -> Replicated:
    # Torch's part of it takes a second to import, and all other strategies do without.
    from manyhands.parallel.sharding.fsdp_backend import Sharding
    from manyhands.strategies.fully_sharded import FullySharded

    spec = worker.resolved.spec
    return FullySharded(
        worker.replicas,
        parts.loss,
        Precision(spec.train.precision, worker.device),
        lambda count: pacing.division.shares(count),
        Sharding(keep_whole, offload),
        clip_norm=spec.train.clip_norm,
        seed=spec.run.seed,
        device=worker.device,
        foreign=foreign_state(model),
        network=lambda: worker.replicas if worker.is_divided else worker.network,
        tell=worker.warn,
        bucket_bytes=spec.comm.bucket_bytes,
        spread=spread,
    )


def _with_servers(worker: Worker, parts: Parts, model: nn.Module, pacing: Pacing, joining: bool) -> AnyEngine:
    session, choice = worker.session, worker.strategy
    assert isinstance(session, Session), "parameter servers need an agent"
    assert isinstance(choice, ParameterServer)
    link = _link(worker)
    if choice.takes_local_steps:
        return _stretched(worker, choice, link, parts, model, joining)
    if choice.mode != "hybrid":
        return _served(worker, session, choice, link, parts, model, joining)

    reach, train = _reach(worker, link, clips=False), worker.resolved.spec.train

    def rows(model: nn.Module, seed: int) -> ServedStep:
        return ServedStep(
            model,
            seed,
            link,
            None if reach.is_away else reach.memory,
            shares=not reach.is_away,
            num_servers=lambda: session.servers_wanted,
            are_up=reach.are_up,
            next_number=lambda: worker.script.next_course(parse_generation(worker.group.generation)),
            entered=worker.script.enter_course,
            wait_for_chief=worker.wait_for_chief,
            training=worker.number,
            needs_norm=train.clip_norm is not None or train.precision == "fp16",
        )

    return _replicated(worker, parts, model, pacing, joining, rows)


def _served(
    worker: Worker,
    session: Session,
    choice: ParameterServer,
    link: Link,
    parts: Parts,
    model: nn.Module,
    joining: bool,
) -> Served:
    spec, seat = worker.resolved.spec, session.seat
    served = Served(
        Axis(0, 1) if joining else worker.axis,
        parts.loss,
        Precision(spec.train.precision, worker.device),
        choice,
        link,
        _reach(worker, link, clips=spec.train.clip_norm is not None),
        seed=spec.run.seed,
        clip_norm=spec.train.clip_norm,
        num_servers=lambda: worker.session.servers_wanted,
        worker=seat.incarnation,
        most_workers=worker.most_workers,
        foreign=foreign_state(model),
        wait_for_chief=worker.wait_for_chief,
    )
    served.training = worker.number
    return served


def _link(worker: Worker) -> Link:
    session = worker.session
    assert isinstance(session, Session), "servers need an agent"
    name = f"worker {session.seat.incarnation}, training {worker.number}"  # two of one name would be taken for one
    return Link(session.server_endpoint, name.encode(), session.curve)


def _stretched(
    worker: Worker, choice: ParameterServer | LocalSGD, link: Link, parts: Parts, model: nn.Module, joining: bool
) -> Stretched:
    spec, session, way = worker.resolved.spec, worker.session, way_of(choice)
    assert isinstance(session, Session), "servers need an agent"
    stretched = Stretched(
        Axis(0, 1) if joining else worker.axis,
        parts.loss,
        Precision(spec.train.precision, worker.device),
        choice if isinstance(choice, ParameterServer) else ParameterServer(),
        link,
        _reach(worker, link, clips=False),
        way=way,
        clip_norm=spec.train.clip_norm,
        network=lambda: worker.network,
        seed=spec.run.seed,
        num_servers=lambda: 1 if way.quorum is not None else worker.session.servers_wanted,
        worker=session.seat.incarnation,
        most_workers=worker.most_workers,
        foreign=foreign_state(model),
        wait_for_chief=worker.wait_for_chief,
    )
    stretched.training = worker.number
    return stretched


def _reach(worker: Worker, link: Link, *, clips: bool) -> Reach:
    """Servers of this host share memory with its workers; others are reached by their addresses."""
    session = worker.session
    assert isinstance(session, Session), "servers need an agent"
    if session.server_endpoint(0).startswith("tcp:"):
        return Remote(link, session.seat.incarnation, clips=clips)
    return Local(link, worker.shared_memory)


def _averaged(worker: Worker, parts: Parts, model: nn.Module, pacing: Pacing, joining: bool) -> AnyEngine:
    spec, strategy, foreign = worker.resolved.spec, worker.strategy, foreign_state(model)
    assert isinstance(strategy, LocalSGD)
    if strategy.leases:
        return _stretched(worker, strategy, _link(worker), parts, model, joining)
    local = Replicated(
        Axis(0, 1),
        parts.loss,
        Precision(spec.train.precision, worker.device),
        lambda count: [range(count)],
        clip_norm=spec.train.clip_norm,
        bucket_bytes=spec.comm.bucket_bytes,
        tell=worker.warn,
        foreign=foreign,
    )
    return Averaged(
        local,
        Axis(0, 1) if joining else worker.axis,
        lambda: worker.network,
        lambda count: pacing.division.shares(count),
        averaging_of(strategy),
        loss_fn=parts.loss,
        seed=spec.run.seed,
        codec=Bf16() if spec.comm.reducer == "bf16" else None,
        ends_with=END_FIT,
        statistics=[one for norm in foreign.norms for one in (*norm.averages, norm.calls) if one is not None],
    )


def averaging_of(strategy: LocalSGD) -> Averaging:
    """What a user's words come to."""
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


_MAKERS: dict[str, Callable[[Worker, Parts, nn.Module, Pacing, bool], AnyEngine]] = {
    "single": _replicated,
    "mirrored": _replicated,
    "multi_worker": _replicated,
    "parameter_server": _with_servers,
    "local_sgd": _averaged,
    "sharded": _sharded,
    "central_storage": _stored_once,
}
