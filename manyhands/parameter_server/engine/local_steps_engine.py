"""Workers that train on stretches of batches by themselves, and push to servers in between: Downpour, asynchronous
EASGD, and rounds of averaging that do not wait for everybody.

A stretch is leased, pushed and applied as one step of `Served`; what happens in it, and what is pushed, is a rule's
business (`parameter_server.engine.local_rules`). Where the rule is LocalSGD's, the user's optimizer is each worker's
own, and servers have another one, for the weights that all agree on. Start reading at `Stretched.train_stretch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.comm.axis import Axis
from manyhands.embedding.row_layer import Contribution
from manyhands.errors import SpecError
from manyhands.parallel.averaging.combine_ranks import to_first_rank
from manyhands.parallel.averaging.local_worker_state import (
    OwnState,
    check_optimizer,
    load_optimizer,
    states_of_optimizer,
)
from manyhands.parallel.averaging.rounds import Downpour, Quorum
from manyhands.parallel.gradients.gradient_norm import clip_factor, global_norm
from manyhands.parallel.gradients.network_sum import total_weight
from manyhands.parameter_server.engine.local_rules import Accrue, Drift, Elastic, LocalRule, Pull
from manyhands.parameter_server.engine.served import Served
from manyhands.parameter_server.protocol.interval import Course
from manyhands.parameter_server.protocol.leases import Held
from manyhands.parameter_server.protocol.messages import Filled, Number, Open
from manyhands.parameter_server.worker.server_connection import Pushed
from manyhands.strategies.base import PieceLike, StepLike
from manyhands.strategies.choices import LocalSGD, ParameterServer
from manyhands.torch_private import foreach_mul_

__all__ = ["LocalWay", "Stretched", "way_of"]


class LocalWay(NamedTuple):
    """What was asked for."""

    every: int
    """Batches of a stretch."""
    make_rule: Callable[[Sequence[nn.Parameter], Pull, Optimizer], LocalRule]
    told: str
    """In words that a checkpoint keeps: a run goes on in the way it began."""
    make_outer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None
    """The servers' optimizer; None: the user's is theirs."""
    quorum: Quorum | None = None
    """Stretches are put together in rounds."""


def way_of(strategy: ParameterServer | LocalSGD) -> LocalWay:
    if isinstance(strategy, ParameterServer):
        periods, lr = Downpour(strategy.pull_every, strategy.push_every), strategy.local_lr
        return LocalWay(
            strategy.push_every,
            lambda params, pull, optimizer: Accrue(params, pull, optimizer, periods, lr),
            f"{periods}, local_lr={lr}",
        )
    assert strategy.leases, "it averages without servers"
    if strategy.asynchronous:
        beta, told = strategy.pull, f"asynchronous elastic averaging, every={strategy.every}, pull={strategy.pull}"
        return LocalWay(
            strategy.every, lambda params, pull, optimizer: Elastic(params, pull, optimizer, beta), told, to_the_mean
        )
    return _rounds_of(strategy)


def _rounds_of(strategy: LocalSGD) -> LocalWay:
    assert strategy.quorum is not None and strategy.deadline_s is not None
    quorum = Quorum(
        least=strategy.quorum,
        deadline_s=strategy.deadline_s,
        rule=strategy.rule,  # type: ignore[arg-type]  # checked where it was written
        trim=strategy.trim,
    )
    outer, how = to_the_mean, "the mean"
    if strategy.outer == "nesterov":
        outer, how = partial(beyond_the_mean, strategy), f"nesterov {strategy.outer_lr} {strategy.outer_momentum}"
    return LocalWay(strategy.every, Drift, f"to {how}, every={strategy.every}, {quorum}", outer, quorum)


def to_the_mean(params: Iterable[nn.Parameter]) -> Optimizer:
    """Moves the agreed weights by what workers push, and no farther."""
    return torch.optim.SGD(params, lr=1.0)


def beyond_the_mean(strategy: LocalSGD, params: Iterable[nn.Parameter]) -> Optimizer:
    """DiLoCo's outer step."""
    momentum = strategy.outer_momentum
    return torch.optim.SGD(params, lr=strategy.outer_lr, momentum=momentum, nesterov=momentum > 0)


class _Stretch:
    """What is told of one, besides its row."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.rows = 0
        self.statistics: list[Tensor] = []
        self.changes = b""


class Stretched(Served):
    """One worker among several that train by themselves, and push now and then.

    Promises: every stretch counts exactly once on every server, whoever dies; nobody waits for anybody, but where all
    meet. A worker that dies loses the stretch it is in, which somebody else begins anew.
    Costs: the weights' bytes once for each push and each pull. The result depends on who was when how fast.
    """

    def __init__(
        self,
        *served: Any,
        way: LocalWay,
        clip_norm: float | None,
        network: Callable[[], Axis],
        **named: Any,
    ) -> None:
        """`served` and `named` are `Served`'s. Clipping is each worker's own, of every local step."""
        super().__init__(*served, clip_norm=None, **named)
        self._way, self._clip, self._network = way, clip_norm, network
        self.averaging = way.told
        self._version = 0
        self._inner: Optimizer | None = None
        self._gathered: list[OwnState] = []

    def setup(self, model: nn.Module, optimizer: Optimizer, *, joining: bool = False) -> None:
        if self._way.make_outer is not None:
            check_optimizer(optimizer)
            self._inner, optimizer = optimizer, self._way.make_outer(model.parameters())
        super().setup(model, optimizer, joining=joining)
        if self._rows:
            raise SpecError(
                "Rows of mh.Embedding and mh.EmbeddingBag are on servers, where local steps cannot change them.",
                fix=['mh.ParameterServer(mode="async"), without push_every and pull_every', "torch.nn.Embedding"],
            )
        if joining:
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Weights are others than those that this worker has trained, or other ones are trained."""
        trained = self._trained()
        self._rule = self._way.make_rule(trained, self._fetch, self._inner or self._optimizer)
        self._grads = [torch.empty_like(param) for param in trained]

    def synchronise(self) -> None:
        super().synchronise()
        self._begin_anew()

    @property
    def updates(self) -> int:
        """How many stretches servers have applied, in all courses that are over."""
        return self._version

    @property
    def every(self) -> int:
        return self._way.every

    @property
    def has_rounds(self) -> bool:
        return self._way.quorum is not None

    def come_together(self) -> None:
        """Go on from the weights that all agree on."""
        self._rule.take([])

    # ---- courses ----

    def open(self, number: Number, course: Course, scheduler: Any, *, scheduled: bool) -> None:
        if self._inner is not None:
            scheduler, scheduled = None, False  # it is the workers' own
        self._gathered = []  # for a checkpoint that was not written
        super().open(number, course, scheduler, scheduled=scheduled)
        self._rule.enter(len(self._course_now.workers))

    def _install(
        self, number: Number, course: Course, workers: dict[int, bool], scheduler: Any, scheduled: bool
    ) -> Open:
        opened = super()._install(number, course, workers, scheduler, scheduled)
        every = self._way.every
        alone = -(-opened.alone // every)
        return msgspec.structs.replace(opened, batches_per_step=every, alone=alone, quorum=self._way.quorum)

    # ---- between two meetings ----

    def train_stretch(self, steps: Iterable[StepLike], work: Held) -> None:
        """Train on what was leased, and push what came of it."""
        stretch = _Stretch()
        for step in steps:
            self._local_step(step, stretch)
        served, _ = self._memory_now()
        row = self._reach.row(work)
        served.begin_filling(row, work.filling)
        based_on, absent = self._rule.fill(served.row(row).views)
        served.write_statistics(row, [self._buffers.joined(stretch.statistics)])
        self.phases.mark("update")
        filled = Filled(
            number=self._course_now.number,
            worker=self._worker,
            held=work,
            based_on=based_on,
            total=stretch.loss,
            weight=float(stretch.rows),
            absent=absent,
            changes=stretch.changes,
        )
        self._push(Pushed(filled))
        self.phases.mark("reduce")

    def _local_step(self, step: StepLike, stretch: _Stretch) -> None:
        _, filler = self._memory_now()
        self._rule.before_step()
        self.phases.mark("reduce")
        pieces = [step.slice(v) for v in range(step.num_slices)]
        self.phases.mark("load")
        filler.begin(self._grads, len(pieces))
        self._buffers.begin(len(pieces), 2)
        results = [self._computed(piece, step) for piece in pieces]
        absent = set(filler.finish())
        total = sum(total for total, _, _, _ in results)
        weight = total_weight((weight for _, weight, _, _ in results), step.number)
        self._rule.step(self._scaled([i not in absent for i in range(len(self._grads))], step.rows / weight))
        self.phases.mark("update")
        if not stretch.rows:
            stretch.changes = self._changes()
        stretch.statistics += [statistics for _, _, statistics, _ in results]
        stretch.loss += total / weight * step.rows
        stretch.rows += step.rows

    def _computed(self, piece: PieceLike, step: StepLike) -> tuple[float, float, Tensor, list[Contribution]]:
        """A slice, with the loss that this worker has."""
        assert self._loss_fn is not None
        slices = self._slice(piece, step)
        try:
            slices.send(self.loss_of(step, next(slices)))
        except StopIteration as ended:
            return ended.value  # type: ignore[no-any-return]
        raise AssertionError("a slice has one loss")

    def _scaled(self, present: Sequence[bool], factor: float) -> list[Tensor | None]:
        """The gradients of a step as its rule sees them."""
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
        """By all workers: what each has to itself comes to the chief."""
        super().gather_state()
        if self._inner is not None:
            own = OwnState(self._rule.own(), states_of_optimizer(self._inner))
            gathered = to_first_rank(own.pack(), self._network(), "what each worker has to itself")
            self._gathered = [OwnState.unpack(data) for data in gathered]

    def state(self) -> dict[str, Any]:
        gathered, self._gathered = self._gathered, []
        told = {**super().state(), "updates": self._version}
        if self._inner is not None:
            told["workers"] = [own.tree() for own in gathered]
            told["outer"] = {} if told["in_memory"] else states_of_optimizer(self._optimizer)
        return told

    def restore(self, state: dict[str, Any]) -> None:
        """With another number of workers each begins with the agreed weights; the optimizer's states go round."""
        super().restore(state)
        self._version = state.get("updates", 0)
        self._rule.take([])
        if self._inner is None:
            return
        if not state["in_memory"]:
            load_optimizer(self._optimizer, state["outer"])
        if told := [OwnState.from_tree(tree) for tree in state["workers"]]:
            own = told[max(self._axis.rank, 0) % len(told)]
            self._rule.take(own.weights if len(told) == self._axis.size else [])
            load_optimizer(self._inner, own.optimizer)
