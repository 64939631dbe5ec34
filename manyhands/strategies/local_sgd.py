"""Workers that train weights of their own, and bring them together now and then: local SGD, EASGD, DiLoCo.

Within a round a worker is an engine of one rank, `local`, over its own slices of every batch. What is averaged when is
in `parallel.averaging.rounds`, how weights move in `parallel.averaging.outer_optimizer`; `Averaged` has them take
place. Start reading at `Averaged.train_step`, then `_average`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.checkpoint.tensor_names import plain_name
from manyhands.comm.axis import Axis
from manyhands.comm.codecs import Codec
from manyhands.errors import PeerLost, SpecError
from manyhands.parallel.averaging.combine_ranks import to_first_rank
from manyhands.parallel.averaging.local_worker_state import (
    OwnState,
    check_optimizer,
    load_optimizer,
    mean_of_weights,
    states_of_optimizer,
)
from manyhands.parallel.averaging.outer_optimizer import AgreedWeights, OuterStep, mean_of_ranks_
from manyhands.parallel.averaging.rounds import Rounds, fragments_of, pairs
from manyhands.parallel.replicas.divergence import Hashes
from manyhands.parallel.replicas.phase_timer import Phases
from manyhands.parallel.replicas.step_exchange import NO_TIMES, Note
from manyhands.parallel.weights.replica_backend import Holding
from manyhands.parallel.weights.shared_memory_group import Sharing
from manyhands.strategies.base import Engine, LossFn, MetricFn, PieceLike, PieceResult, StepLike, StepStats
from manyhands.strategies.loss_check import FirstLook
from manyhands.strategies.losses import as_loss
from manyhands.strategies.own_part import OwnPart
from manyhands.strategies.step_notes import own_times, tell_all

__all__ = ["Averaged", "Averaging"]


class Averaging(NamedTuple):
    """What was asked for."""

    rounds: Rounds
    outer: OuterStep
    in_pairs: bool = False
    """Two and two, another pair each round, instead of all."""


class Averaged:
    """Each rank trains on its own slices of every batch; weights come together after every round.

    Promises: after a round, weights are bitwise equal on every rank, unless the rule leaves each its own (EASGD, pairs,
    fragments: there they are when an epoch or the steps end); the result is a function of the seed, the slices and the
    number of ranks.
    Costs: the weights' bytes once per round, and a few numbers per step. Unlike with replicas, the result depends on
    the number of ranks.
    """

    def __init__(
        self,
        local: Engine,
        axis: Axis,
        network: Callable[[], Axis],
        shares: Callable[[int], Sequence[range]],
        asked: Averaging,
        *,
        loss_fn: LossFn | None,
        seed: int,
        codec: Codec | None = None,
        ends_with: int,
        statistics: Sequence[Tensor] = (),
    ) -> None:
        """`local` is an engine of one rank. Steps end for good where one's `stop` is `ends_with`.

        `statistics` are tensors that a forward pass changes, besides the model's buffers.
        """
        self._local, self._axis, self._network, self.shares = local, axis, network, shares
        self._rounds, self._outer, self._in_pairs = asked
        self.averaging = repr(asked)
        self._loss_fn, self._seed, self._codec, self._ends_with = loss_fn, seed, codec, ends_with
        self._statistics = statistics
        self._times: Sequence[float] = NO_TIMES
        self._gathered: list[OwnState] = []
        self._at_rest = self.round_closed = True
        self._began: dict[int, int] = {}

    def setup(self, model: nn.Module, optimizer: Optimizer, *, joining: bool = False) -> None:
        check_optimizer(optimizer)
        self._optimizer = optimizer
        self._local.setup(model, optimizer, joining=joining)
        self._agree()
        if not joining:
            self.synchronise()

    def _agree(self) -> None:
        """Divide the weights that are trained into fragments."""
        trained = [(name, param) for name, param in self.model.named_parameters() if param.requires_grad]
        names, params = [plain_name(name) for name, _ in trained], [param for _, param in trained]
        fragments = fragments_of(names, [param.numel() for param in params], self._rounds.fragments)
        if not all(fragments):
            most = sum(map(bool, fragments))
            raise SpecError(
                f"fragments is {len(fragments)}, but the model has {most} modules with weights of their own.",
                where="mh.LocalSGD",
                fix=[f"fragments={most}"],
            )
        self._trained: list[Tensor] = list(params)
        self._agreed = AgreedWeights(params, fragments, self._outer, self._codec)
        self._forget_rows()

    def _forget_rows(self) -> None:
        """How many rows each rank has trained on since each fragment was last averaged."""
        self._rows = [[0] * self._axis.size for _ in range(self._rounds.fragments)]

    @property
    def model(self) -> nn.Module:
        return self._local.model

    @property
    def held(self) -> Holding:
        return self._local.held

    @property
    def phases(self) -> Phases:
        return self._local.phases

    @phases.setter
    def phases(self, phases: Phases) -> None:
        self._local.phases = phases

    @contextmanager
    def editing(self) -> Iterator[nn.Module]:
        """Change weights by hand. On leaving, every rank has rank 0's, and they are the agreed ones."""
        with self._local.editing() as model:
            yield model
        self._agree()
        self.synchronise()

    def synchronise(self) -> None:
        self._local.synchronise()
        self._axis.broadcast_([*self.model.parameters(), *self.model.buffers()], "weights of rank 0")
        self._axis.barrier("weights of rank 0")
        self._agreed.accept()
        self._local.restore({})  # buffers have other values now
        self._at_rest = self.round_closed = True

    # Ranks that come and go: whoever stays goes back to where the last round closed, and its steps are taken again.

    goes_back, can_go_on, compares_copies, has_residuals, served_rows = True, False, False, True, None

    def abandon(self) -> None:
        self._local.abandon()

    def put_down(self) -> Callable[[], None]:
        return self._local.put_down()

    def take_up(self) -> None:
        """Ranks may differ in a round under way: each goes on with its own weights."""
        self._local.held.divide()

    def regroup(self, axis: Axis, sharing: Sharing | None) -> None:
        self._axis, self._times, self._gathered = axis, NO_TIMES, []
        self._agreed.drop()
        self._forget_rows()

    def round_closes_with(self, step: int) -> bool:
        return self._rounds.closes(step)

    def resume_step(self) -> StepStats:
        raise AssertionError("a round that was interrupted begins anew")

    def lost_slices(self) -> list[int]:
        raise AssertionError("a round that was interrupted begins anew")

    def hashes(self) -> Hashes:
        return self._local.hashes()

    def compare(self, told: Sequence[Hashes]) -> None:
        self._local.compare(told)

    # The step, and its parts for those who write their own loop.

    def look_first(self, look: FirstLook) -> None:
        self._local.look_first(look)

    def loss_of(self, step: StepLike, piece: PieceLike) -> Any:
        return self._local.loss_of(step, piece)

    def train_step(self, step: StepLike, *, stop: int = 0, collect: bool = False) -> StepStats:
        assert self._loss_fn is not None
        self.begin_step(step, stop=stop, collect=collect)
        for piece in step.mine():
            self.phases.mark("load")
            with self.slice_context(piece):
                result = self.loss_of(step, piece)
            self.phases.mark("forward")
            self.backward(piece, result)
            self.phases.mark("backward")
        return self.end_step()

    def begin_step(self, step: StepLike, *, stop: int = 0, collect: bool = False) -> None:
        self._step, self._stop, self._collect = step, stop, collect
        self._weight = 0.0
        self._own = OwnPart(step, self.shares(step.num_slices)[self._axis.rank])
        self._lost: PeerLost | None = None
        if self._rounds.overlap and not self._at_rest:
            try:
                self._begin(self._rounds.begins(step.number - 1))
            except PeerLost as lost:
                self._lost = lost  # `end_step` is where a loop of the user's own sees to it
        self._at_rest = self.round_closed = False
        if self._own.num_slices:
            self._local.begin_step(self._own)
        self.phases.begin([self._axis.waiting, self._network().waiting], step.load_s)

    def slice_context(self, piece: PieceLike) -> AbstractContextManager[None]:
        return self._local.slice_context(self._own.piece(piece))

    def backward(self, piece: PieceLike, result: Any) -> None:
        self._weight += as_loss(result, piece.rows)[2]
        self._local.backward(self._own.piece(piece), result)

    def end_step(self) -> StepStats:
        """This rank's own update; then all tell each other of it, and average what is due."""
        if self._lost is not None:
            raise self._lost
        step, own = self._step, self._own
        stats = self._local.end_step() if own.num_slices else StepStats(loss=0.0, rows=0, skipped=True)
        sent = self._agreed.bytes_sent
        note = Note(self._stop, self._collect, self._times)
        tell_all(self._axis, stats, self._weight, note, f"losses of step {step.number}")
        for row in self._rows:
            for rank, share in enumerate(self.shares(step.num_slices)):
                row[rank] += sum(step.bounds[v][1] - step.bounds[v][0] for v in share)
        self._average(step.number, last=step.last or stats.stop == self._ends_with)
        self.phases.mark("reduce")
        stats.rows, stats.bytes_sent = step.rows, self._agreed.bytes_sent - sent
        stats.seconds, stats.lr = self.phases.seconds, float(self._optimizer.param_groups[0]["lr"])
        self._times = own_times(self.phases, step)
        return stats

    # Averaging.

    def _average(self, number: int, *, last: bool) -> None:
        """What is due after a step. After the `last` for now, everybody has the agreed weights."""
        closes = self._rounds.closes(number)
        if last:
            self._come_together()
        elif not self._in_pairs:
            self._average_fragments(number)
        elif closes:
            self._meet(number)
        if last or (closes and not self._in_pairs):
            self._average_buffers()
        self.round_closed = last or (closes and not self._agreed.under_way)
        self._at_rest = last or (closes and self._leaves_all_alike)

    @property
    def _leaves_all_alike(self) -> bool:
        """Whether the end of a round makes all weights the same, by itself."""
        one_by_one = self._rounds.fragments > 1 or self._rounds.overlap > 0
        return not self._in_pairs and not one_by_one and self._outer.kind != "elastic"

    def _average_fragments(self, number: int) -> None:
        rounds = self._rounds
        if not rounds.overlap:
            self._begin(rounds.begins(number))
        for fragment in rounds.ends(number):
            if fragment in self._agreed.under_way:  # it is not where all came together since
                self._agreed.apply(fragment, self._axis.size)
        for fragment in self._agreed.under_way:
            if number - self._began[fragment] >= (rounds.overlap - 1) // 2:
                self._agreed.advance(fragment)

    def _begin(self, fragments: Iterable[int]) -> None:
        for fragment in fragments:
            rows, self._rows[fragment] = self._rows[fragment], [0] * self._axis.size
            weights = rows if any(rows) else [1] * len(rows)
            name = f"weights after step {self._step.number}"
            self._agreed.begin(fragment, self._network(), [float(weight) for weight in weights], name)
            self._began[fragment] = self._step.number

    def _come_together(self) -> None:
        for fragment in self._agreed.under_way:
            self._agreed.apply(fragment, self._axis.size)
        everything = range(self._rounds.fragments)
        self._begin(everything)
        for fragment in everything:
            self._agreed.apply(fragment, self._axis.size, wholly=True)

    def _meet(self, number: int) -> None:
        drawn = pairs(self._seed, number, range(self._axis.size))
        partners = dict(drawn) | {b: a for a, b in drawn}
        self._agreed.meet(self._network(), partners.get(self._axis.rank), f"pairs after step {number}")

    def _average_buffers(self) -> None:
        if buffers := self._buffers():
            mean_of_ranks_(buffers, self._network(), f"buffers after step {self._step.number}")
            self._local.restore({})

    def _buffers(self) -> list[Tensor]:
        found = {id(one): one for one in [*self.model.buffers(), *self._statistics]}
        return list(found.values())

    # Evaluation looks at what all workers have together.

    def eval_step(self, pieces: Iterable[PieceLike], metrics: Mapping[str, MetricFn]) -> list[PieceResult]:
        with self._together():
            return self._local.eval_step(pieces, metrics)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with self._together(), self._local.evaluating():
            yield

    @contextmanager
    def _together(self) -> Iterator[None]:
        """In the middle of a round, the mean of all ranks' weights; training then goes on from its own."""
        if self._at_rest or self._axis.size == 1:
            yield
            return
        live = self._own_tensors()
        own = [one.detach().clone() for one in live]
        mean_of_ranks_(live, self._network(), "weights to evaluate")
        try:
            yield
        finally:
            _copy_(live, own)

    def _own_tensors(self) -> list[Tensor]:
        return [*(param.detach() for param in self._trained), *self._buffers()]

    @contextmanager
    def using_loss(self, loss_fn: LossFn) -> Iterator[None]:
        with self._local.using_loss(loss_fn):
            yield

    # Checkpoints.

    def gather_state(self) -> None:
        """Before `state`, on every rank: what is under way arrives, what ranks have to themselves comes to rank 0."""
        self._agreed.receive()
        if self._axis.size == 1:
            return
        weights = [] if self._at_rest else self._own_tensors()
        own = OwnState(weights, states_of_optimizer(self._optimizer), self._local.state())
        gathered = to_first_rank(own.pack(), self._network(), "what each worker has to itself")
        self._gathered = [OwnState.unpack(data) for data in gathered]

    def state(self) -> dict[str, Any]:
        gathered, self._gathered = self._gathered, []
        return {
            **self._local.state(),
            **self._agreed.state(),
            "at_rest": self._at_rest,
            "began": {str(fragment): step for fragment, step in self._began.items()},
            "rows": self._rows,
            "workers": [own.tree() for own in gathered],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """After weights and optimizer, which are one rank's; a checkpoint tells what this rank had.

        With another number of ranks all start from the mean of what those had, and rank r with the optimizer's states
        of rank r of them, counted around.
        """
        self._local.restore(state)
        if "agreed" not in state:
            self._agreed.accept()
            return
        self._agreed.restore(state)
        self._at_rest = self.round_closed = bool(state["at_rest"])
        self._began = {int(fragment): step for fragment, step in state["began"].items()}
        self._forget_rows()
        if state["rows"] and len(state["rows"][0]) == self._axis.size:
            self._rows = [list(row) for row in state["rows"]]
        if told := [OwnState.from_tree(tree) for tree in state["workers"]]:
            self._take(told)

    def _take(self, told: Sequence[OwnState]) -> None:
        own = told[max(self._axis.rank, 0) % len(told)]
        weights = own.weights if len(told) == self._axis.size else mean_of_weights(told)
        if weights:
            _copy_(self._own_tensors(), weights)
        load_optimizer(self._optimizer, own.optimizer)
        self._local.restore(own.extra)

    def close(self) -> None:
        self._axis.close()


def _copy_(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
