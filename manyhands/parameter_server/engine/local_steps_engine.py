"""Workers that run local steps on ranges of batches, and push to servers after each range: Downpour, asynchronous
EASGD, and averaging rounds that do not wait for all workers.

A range is leased, pushed and applied as one step of `LeasedEngine`; a rule (`parameter_server.engine.local_rules`)
decides how to train on it and what to push. For LocalSGD, each worker has the user's optimizer, and servers have
another one, for the agreed weights. Start reading at `LocalStepsEngine.train_range`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.embedding.row_layer import TableGradient
from manyhands.errors import SpecError
from manyhands.parallel.averaging.local_worker_state import (
    LocalWorkerState,
    check_optimizer,
    gather_states,
    load_optimizer,
    states_of_optimizer,
)
from manyhands.parallel.averaging.rounds import Downpour, Quorum
from manyhands.parallel.gradients.gradient_norm import clip_factor, global_norm
from manyhands.parallel.gradients.network_sum import total_weight
from manyhands.parameter_server.engine.leased_engine import LeasedEngine, LeaseHolder, Servers
from manyhands.parameter_server.engine.local_rules import Accrue, Drift, Elastic, LocalRule, Pull
from manyhands.parameter_server.protocol.leases import Interval, Lease
from manyhands.parameter_server.protocol.messages import Filled, Number, Open
from manyhands.parameter_server.worker.server_connection import PushedGradient
from manyhands.strategies.base import SliceLike, StepLike
from manyhands.strategies.choices import LocalSGD, ParameterServer
from manyhands.strategies.engine_parts import ModelSide, Ranks, StepSettings
from manyhands.torch_private import foreach_mul_

__all__ = ["LocalStepsEngine", "LocalWay", "way_of"]


class LocalWay(NamedTuple):
    """How the strategy trains locally and combines the results."""

    every: int
    """Batches per range."""
    make_rule: Callable[[Sequence[nn.Parameter], Pull, Optimizer], LocalRule]
    description: str
    """Text that is saved in checkpoints: a run can only be resumed with the same description."""
    make_outer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None
    """The servers' optimizer; None: servers use the user's optimizer."""
    quorum: Quorum | None = None
    """If not None, ranges are averaged in rounds."""


def way_of(strategy: ParameterServer | LocalSGD) -> LocalWay:
    if isinstance(strategy, ParameterServer):
        periods, lr = Downpour(strategy.pull_every, strategy.push_every), strategy.local_lr
        make_rule = partial(Accrue, periods=periods, lr=lr)
        return LocalWay(strategy.push_every, make_rule, f"{periods}, local_lr={lr}")
    assert strategy.leases, "it averages without servers"
    if strategy.asynchronous:
        description = f"asynchronous elastic averaging, every={strategy.every}, pull={strategy.pull}"
        return LocalWay(strategy.every, partial(Elastic, beta=strategy.pull), description, outer_sgd)
    return _rounds_of(strategy)


def _rounds_of(strategy: LocalSGD) -> LocalWay:
    assert strategy.quorum is not None and strategy.deadline_s is not None
    quorum = Quorum(
        least=strategy.quorum,
        deadline_s=strategy.deadline_s,
        rule=strategy.rule,  # type: ignore[arg-type]  # checked where it was written
        trim=strategy.trim,
    )
    lr, momentum, how = 1.0, 0.0, "the mean"
    if strategy.outer == "nesterov":
        lr, momentum = strategy.outer_lr, strategy.outer_momentum
        how = f"nesterov {lr} {momentum}"
    make_outer = partial(outer_sgd, lr=lr, momentum=momentum)
    return LocalWay(strategy.every, Drift, f"to {how}, every={strategy.every}, {quorum}", make_outer, quorum)


def outer_sgd(params: Iterable[nn.Parameter], lr: float = 1.0, momentum: float = 0.0) -> Optimizer:
    """Servers subtract what workers push from the agreed weights; with other settings, DiLoCo's outer step."""
    return torch.optim.SGD(params, lr=lr, momentum=momentum, nesterov=momentum > 0)


class _LocalRange:
    """What is sent for one range, in addition to its gradient buffer."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.rows = 0
        self.statistics: list[Tensor] = []
        self.changes = b""


class LocalStepsEngine(LeasedEngine):
    """One worker among several that run local steps, and push periodically.

    Promises: every range counts exactly once on every server, even if workers or servers die; workers wait for each
    other at sync points only. When a worker dies, another worker repeats its current range from the beginning.
    Costs: the bytes of the weights once for each push and each pull. The result depends on the speed of each worker.
    """

    def __init__(
        self,
        ranks: Ranks,
        side: ModelSide,
        settings: StepSettings,
        choice: ParameterServer,
        servers: Servers,
        holder: LeaseHolder,
        *,
        way: LocalWay,
    ) -> None:
        """Each worker clips the gradient of every local step; servers do not clip."""
        super().__init__(ranks, side, settings._replace(clip_norm=None), choice, servers, holder)
        self._way, self._clip, self._network = way, settings.clip_norm, ranks.network
        self.averaging = way.description
        self._version = 0
        self._inner: Optimizer | None = None
        self._gathered: list[LocalWorkerState] = []

    def setup(self, model: nn.Module, optimizer: Optimizer, *, joining: bool = False) -> None:
        if self._way.make_outer is not None:
            check_optimizer(optimizer)
            self._inner, optimizer = optimizer, self._way.make_outer(model.parameters())
        super().setup(model, optimizer, joining=joining)
        if self._rows:
            raise SpecError(
                "Rows of mh.nn.Embedding and mh.nn.EmbeddingBag are on servers, where local steps cannot change them.",
                fix=['mh.ParameterServer(mode="async"), without push_every and pull_every', "torch.nn.Embedding"],
            )
        if joining:
            self._reset_rule()

    def _reset_rule(self) -> None:
        """Make a new rule, after the weights were replaced or the set of trained parameters has changed."""
        trained = self._trained()
        self._rule = self._way.make_rule(trained, self._fetch, self._inner or self._optimizer)
        self._grads = [torch.empty_like(param) for param in trained]

    def synchronise(self) -> None:
        super().synchronise()
        self._reset_rule()

    @property
    def updates(self) -> int:
        """How many ranges servers have applied, in all finished intervals."""
        return self._version

    @property
    def every(self) -> int:
        return self._way.every

    @property
    def has_rounds(self) -> bool:
        return self._way.quorum is not None

    def use_agreed_weights(self) -> None:
        """Continue from the agreed weights."""
        self._rule.take([])

    # ---- intervals ----

    def open(self, number: Number, interval: Interval, scheduler: Any, *, scheduled: bool) -> None:
        if self._inner is not None:
            scheduler, scheduled = None, False  # each worker has its own
        self._gathered = []  # may be left from a checkpoint that was not written
        super().open(number, interval, scheduler, scheduled=scheduled)
        self._rule.enter(len(self._current.workers))

    def _install(
        self, number: Number, interval: Interval, workers: dict[int, bool], scheduler: Any, scheduled: bool
    ) -> Open:
        opened = super()._install(number, interval, workers, scheduler, scheduled)
        every = self._way.every
        alone = -(-opened.alone // every)
        return msgspec.structs.replace(opened, batches_per_step=every, alone=alone, quorum=self._way.quorum)

    # ---- between two sync points ----

    def train_range(self, steps: Iterable[StepLike], work: Lease) -> None:
        """Train on a leased range of batches, and push the result."""
        local_range = _LocalRange()
        for step in steps:
            self._local_step(step, local_range)
        memory, _ = self._memory_now()
        buffer = self._reach.row(work)
        memory.begin_filling(buffer, work.filling)
        based_on, absent = self._rule.fill(memory.row(buffer).views)
        memory.write_statistics(buffer, [self._buffers.joined(local_range.statistics)])
        self.phases.mark("update")
        filled = Filled(
            number=self._current.number,
            worker=self._worker,
            held=work,
            based_on=based_on,
            total=local_range.loss,
            weight=float(local_range.rows),
            absent=absent,
            changes=local_range.changes,
        )
        self._push(PushedGradient(filled))
        self.phases.mark("reduce")

    def _local_step(self, step: StepLike, local_range: _LocalRange) -> None:
        _, writer = self._memory_now()
        self._rule.before_step()
        self.phases.mark("reduce")
        pieces = [step.slice(v) for v in range(step.num_slices)]
        self.phases.mark("load")
        writer.begin(self._grads, len(pieces))
        self._buffers.begin(len(pieces), 2)
        results = [self._computed(piece, step) for piece in pieces]
        absent = set(writer.finish())
        total = sum(total for total, _, _, _ in results)
        weight = total_weight((weight for _, weight, _, _ in results), step.number)
        self._rule.step(self._scaled([i not in absent for i in range(len(self._grads))], step.rows / weight))
        self.phases.mark("update")
        if not local_range.rows:
            local_range.changes = self._changes()
        local_range.statistics += [statistics for _, _, statistics, _ in results]
        local_range.loss += total / weight * step.rows
        local_range.rows += step.rows

    def _computed(self, piece: SliceLike, step: StepLike) -> tuple[float, float, Tensor, list[TableGradient]]:
        """Compute a slice with this worker's loss function."""
        assert self._loss_fn is not None
        slices = self._slice(piece, step)
        try:
            slices.send(self.loss_of(step, next(slices)))
        except StopIteration as ended:
            return ended.value  # type: ignore[no-any-return]
        raise AssertionError("a slice has one loss")

    def _scaled(self, present: Sequence[bool], factor: float) -> list[Tensor | None]:
        """The gradients of a step, scaled and clipped, for the rule."""
        grads = [grad for grad, there in zip(self._grads, present, strict=True) if there]
        factor *= clip_factor(factor * global_norm(grads), self._clip) if self._clip is not None else 1.0
        if factor != 1.0 and grads:
            foreach_mul_(grads, factor)
        return [grad if there else None for grad, there in zip(self._grads, present, strict=True)]

    def _fetch(self) -> tuple[Sequence[Tensor], int]:
        """The newest weights of every server, and the oldest version among them."""
        weights, versions = self._reach.pull()
        self._take_buffers(versions[0])
        return weights, min(versions)

    # ---- checkpoints ----

    def gather_state(self) -> None:
        """Called by all workers: the chief receives the state of each worker."""
        super().gather_state()
        if self._inner is not None:
            own = LocalWorkerState(self._rule.own(), states_of_optimizer(self._inner))
            self._gathered = gather_states(own, self._network())

    def state(self) -> dict[str, Any]:
        gathered, self._gathered = self._gathered, []
        state = {**super().state(), "updates": self._version}
        if self._inner is not None:
            state["workers"] = [own.tree() for own in gathered]
            state["outer"] = {} if state["in_memory"] else states_of_optimizer(self._optimizer)
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """With another number of workers, each begins with the agreed weights and the optimizer state of rank r % n."""
        super().restore(state)
        self._version = state.get("updates", 0)
        self._rule.take([])
        if self._inner is None:
            return
        if not state["in_memory"]:
            load_optimizer(self._optimizer, state["outer"])
        if workers := [LocalWorkerState.from_tree(tree) for tree in state["workers"]]:
            own = workers[max(self._axis.rank, 0) % len(workers)]
            self._rule.take(own.weights if len(workers) == self._axis.size else [])
            load_optimizer(self._inner, own.optimizer)
