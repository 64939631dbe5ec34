"""Each worker trains its own copy of the weights, and all average them periodically: local SGD, EASGD, DiLoCo.

Within an averaging round each worker runs an engine of one rank, `local`, on its own slices of every batch.
`parallel.averaging.rounds` decides what is averaged when, `parallel.averaging.outer_optimizer` how weights move;
`LocalSGDEngine` carries out both. Start reading at `LocalSGDEngine.train_step`, then `_average`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.checkpoint.tensor_names import plain_name
from manyhands.comm.axis import Axis
from manyhands.comm.codecs import codec_of
from manyhands.errors import PeerLost, SpecError
from manyhands.parallel.averaging.local_worker_state import (
    LocalWorkerState,
    check_optimizer,
    gather_states,
    load_optimizer,
    mean_of_weights,
    states_of_optimizer,
)
from manyhands.parallel.averaging.outer_optimizer import AgreedWeights, OuterStep, mean_of_ranks_
from manyhands.parallel.averaging.rounds import Rounds, fragments_of, pairs
from manyhands.parallel.replicas.divergence import Hashes
from manyhands.parallel.replicas.phase_timer import Phases
from manyhands.parallel.replicas.step_exchange import NO_TIMES, StepRequest
from manyhands.parallel.weights.replica_backend import ReplicaBackend
from manyhands.parallel.weights.shared_memory_group import SharedMemoryGroup
from manyhands.strategies.base import Engine, LossFn, MetricFn, SliceLike, SliceResult, StepLike, StepStats
from manyhands.strategies.engine_parts import Ranks, StepSettings
from manyhands.strategies.loss_check import LossCheck
from manyhands.strategies.losses import as_loss

__all__ = ["Averaging", "LocalSGDEngine", "OwnSlices", "exchange_stats"]


class OwnSlices:
    """The slices of `step` in `share` that have rows. Their randomness stays that of the whole step's slices."""

    def __init__(self, step: StepLike, share: range) -> None:
        self._step = step
        self._slices = [v for v in share if step.bounds[v][0] < step.bounds[v][1]]
        self.number, self.bounds = step.number, [step.bounds[v] for v in self._slices]
        self.num_slices, self.rows = len(self._slices), sum(high - low for low, high in self.bounds)
        self.fetched_together, self.last = step.fetched_together, step.last

    @property
    def load_s(self) -> float:
        return self._step.load_s

    def mine(self) -> Iterator[SliceLike]:
        return map(self.piece, self._step.mine())

    def slice(self, v: int) -> SliceLike:
        return self.piece(self._step.slice(self._slices[v]))

    def piece(self, piece: SliceLike) -> SliceLike:
        """A slice of the whole step, numbered among this rank's slices."""
        return _OwnSlice(piece, self._slices.index(piece.index))


class _OwnSlice:
    def __init__(self, piece: SliceLike, index: int) -> None:
        self._piece, self.index, self.rows = piece, index, piece.rows

    @property
    def batch(self) -> Any:
        return self._piece.batch

    def randomness(self) -> AbstractContextManager[None]:
        return self._piece.randomness()


def exchange_stats(axis: Axis, stats: StepStats, weight: float, request: StepRequest, name: str) -> None:
    """Combine `stats` over all ranks, in place: the loss over the whole batch, the ranks' requests, their times.

    A step counts as skipped where every rank skipped it; the gradient norm is the largest of the ranks'.
    """
    norm = -1.0 if stats.grad_norm is None else stats.grad_norm
    flags = [float(request.stop), float(request.collect), float(stats.skipped)]
    mine = torch.tensor([stats.loss * weight, weight, norm, *flags, *request.times], dtype=torch.float64)
    total, weights, norms, stops, collects, skipped, *times = axis.all_gather(mine, name).T.tolist()
    stats.loss = sum(total) / sum(weights)
    stats.grad_norm = None if max(norms) < 0 or any(map(math.isnan, norms)) else max(norms)
    stats.stop, stats.collect, stats.skipped = int(max(stops)), any(collects), all(skipped)
    stats.times = list(zip(*times, strict=True)) if axis.size > 1 else ()


class Averaging(NamedTuple):
    """How the user wants weights to be averaged."""

    rounds: Rounds
    outer: OuterStep
    in_pairs: bool = False
    """Average in pairs, drawn anew each round, instead of over all ranks."""


class LocalSGDEngine:
    """Each rank trains on its own slices of every batch; weights are averaged after every round.

    Promises: after a round, weights are bitwise equal on every rank, unless the rule lets each keep its own (EASGD,
    pairs, fragments: there they are equal when an epoch or the steps end); the result is a function of the seed, the
    slices and the number of ranks.
    Costs: the bytes of the weights once per round, and a few numbers per step. Unlike with replicas, the result depends
    on the number of ranks.
    """

    def __init__(
        self,
        local: Engine,
        ranks: Ranks,
        settings: StepSettings,
        shares: Callable[[int], Sequence[range]],
        averaging: Averaging,
        *,
        ends_with: int,
        statistics: Sequence[Tensor] = (),
    ) -> None:
        """`local` is an engine of one rank. The step in which `stop` is `ends_with` is the last one.

        `statistics` are tensors that a forward pass changes, in addition to the model's buffers.
        """
        self._local, self._axis, self._network, self.shares = local, ranks.axis, ranks.network, shares
        self._rounds, self._outer, self._in_pairs = averaging
        self.averaging = repr(averaging)
        self._seed, self._codec, self._ends_with = settings.seed, codec_of(settings.reducer), ends_with
        self._statistics = statistics
        self._times: Sequence[float] = NO_TIMES
        self._gathered: list[LocalWorkerState] = []
        self._all_equal = self.round_closed = True
        self._began: dict[int, int] = {}

    def setup(self, model: nn.Module, optimizer: Optimizer, *, joining: bool = False) -> None:
        check_optimizer(optimizer)
        self._optimizer = optimizer
        self._local.setup(model, optimizer, joining=joining)
        self._agree()
        if not joining:
            self.synchronise()

    def _agree(self) -> None:
        """Divide the trained weights into fragments."""
        trained = [(name, param) for name, param in self.model.named_parameters() if param.requires_grad]
        names, params = [plain_name(name) for name, _ in trained], [param for _, param in trained]
        fragments = fragments_of(names, [param.numel() for param in params], self._rounds.fragments)
        if not all(fragments):
            most = sum(map(bool, fragments))
            raise SpecError(
                f"fragments is {len(fragments)}, but only {most} modules of the model have trained weights.",
                where="mh.LocalSGD",
                fix=[f"fragments={most}"],
            )
        self._trained: list[Tensor] = list(params)
        self._agreed = AgreedWeights(params, fragments, self._outer, self._codec)
        self._forget_rows()

    def _forget_rows(self) -> None:
        """Reset how many rows each rank has trained on since each fragment was last averaged."""
        self._rows = [[0] * self._axis.size for _ in range(self._rounds.fragments)]

    @property
    def model(self) -> nn.Module:
        return self._local.model

    @property
    def held(self) -> ReplicaBackend:
        return self._local.held

    @property
    def phases(self) -> Phases:
        return self._local.phases

    @phases.setter
    def phases(self, phases: Phases) -> None:
        self._local.phases = phases

    @contextmanager
    def editing(self) -> Iterator[nn.Module]:
        """Change weights by hand. On exit every rank has rank 0's weights, and they are the agreed ones."""
        with self._local.editing() as model:
            yield model
        self._agree()
        self.synchronise()

    def synchronise(self) -> None:
        self._local.synchronise()
        self._axis.broadcast_([*self.model.parameters(), *self.model.buffers()], "weights of rank 0")
        self._axis.barrier("weights of rank 0")
        self._agreed.accept()
        self._local.restore({})  # the buffers have changed
        self._all_equal = self.round_closed = True

    # Elasticity: the remaining ranks return to the end of the last averaging round, and repeat the steps since then.

    rolls_back, can_finish_step, compares_copies, has_residuals, served_rows = True, False, False, True, None

    def abandon(self) -> None:
        self._local.abandon()

    def put_down(self) -> Callable[[], None]:
        return self._local.put_down()

    def take_up(self) -> None:
        """Within a round the ranks' weights may differ: each rank continues with its own."""
        self._local.held.divide()

    def adopt_rows(self) -> None:
        self._local.adopt_rows()

    def regroup(self, axis: Axis, sharing: SharedMemoryGroup | None) -> None:
        self._axis, self._times, self._gathered = axis, NO_TIMES, []
        self._agreed.drop()
        self._forget_rows()

    def round_closes_with(self, step: int) -> bool:
        return self._rounds.closes(step)

    def resume_step(self) -> StepStats:
        raise AssertionError("an interrupted averaging round is repeated from its beginning")

    def lost_slices(self) -> list[int]:
        raise AssertionError("an interrupted averaging round is repeated from its beginning")

    def hashes(self) -> Hashes:
        return self._local.hashes()

    def compare(self, hashes: Sequence[Hashes]) -> None:
        self._local.compare(hashes)

    # The step, and its parts for user loops.

    def check_first_loss(self, look: LossCheck) -> None:
        self._local.check_first_loss(look)

    def loss_of(self, step: StepLike, piece: SliceLike) -> Any:
        return self._local.loss_of(step, piece)

    def train_step(self, step: StepLike, *, stop: int = 0, collect: bool = False) -> StepStats:
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
        self._own = OwnSlices(step, self.shares(step.num_slices)[self._axis.rank])
        self._lost: PeerLost | None = None
        if self._rounds.overlap and not self._all_equal:
            try:
                self._begin(self._rounds.begins(step.number - 1))
            except PeerLost as lost:
                self._lost = lost  # a user loop handles it in `end_step`
        self._all_equal = self.round_closed = False
        if self._own.num_slices:
            self._local.begin_step(self._own)
        waits = [self._axis.waiting, self._network().waiting]
        self.phases.begin(waits, step.load_s, loaded_together=step.fetched_together)

    def slice_context(self, piece: SliceLike) -> AbstractContextManager[None]:
        return self._local.slice_context(self._own.piece(piece))

    def backward(self, piece: SliceLike, result: Any) -> None:
        self._weight += as_loss(result, piece.rows)[2]
        self._local.backward(self._own.piece(piece), result)

    def end_step(self) -> StepStats:
        """Apply this rank's update; then all ranks exchange losses and times, and average what is due."""
        if self._lost is not None:
            raise self._lost
        step, own = self._step, self._own
        stats = self._local.end_step() if own.num_slices else StepStats(loss=0.0, rows=0, skipped=True)
        sent = self._agreed.bytes_sent
        request = StepRequest(self._stop, self._collect, self._times)
        exchange_stats(self._axis, stats, self._weight, request, f"losses of step {step.number}")
        for row in self._rows:
            for rank, share in enumerate(self.shares(step.num_slices)):
                row[rank] += sum(step.bounds[v][1] - step.bounds[v][0] for v in share)
        self._average(step.number, last=step.last or stats.stop == self._ends_with)
        self.phases.mark("reduce")
        stats.rows, stats.bytes_sent = step.rows, self._agreed.bytes_sent - sent
        stats.seconds, stats.lr = self.phases.seconds, float(self._optimizer.param_groups[0]["lr"])
        self._times = self.phases.times()
        return stats

    # Averaging.

    def _average(self, number: int, *, last: bool) -> None:
        """Average the fragments that are due after a step. After the `last` one, every rank has the agreed weights."""
        closes = self._rounds.closes(number)
        if last:
            self._average_everything()
        elif not self._in_pairs:
            self._average_fragments(number)
        elif closes:
            self._average_pairs(number)
        if last or (closes and not self._in_pairs):
            self._average_buffers()
        self.round_closed = last or (closes and not self._agreed.under_way)
        self._all_equal = last or (closes and self._round_equalises)

    @property
    def _round_equalises(self) -> bool:
        """Whether the end of a round makes the weights equal on all ranks."""
        one_by_one = self._rounds.fragments > 1 or self._rounds.overlap > 0
        return not self._in_pairs and not one_by_one and self._outer.kind != "elastic"

    def _average_fragments(self, number: int) -> None:
        rounds = self._rounds
        if not rounds.overlap:
            self._begin(rounds.begins(number))
        for fragment in rounds.ends(number):
            if fragment in self._agreed.under_way:  # not if everything was averaged since
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

    def _average_everything(self) -> None:
        for fragment in self._agreed.under_way:
            self._agreed.apply(fragment, self._axis.size)
        everything = range(self._rounds.fragments)
        self._begin(everything)
        for fragment in everything:
            self._agreed.apply(fragment, self._axis.size, wholly=True)

    def _average_pairs(self, number: int) -> None:
        drawn = pairs(self._seed, number, range(self._axis.size))
        partners = dict(drawn) | {b: a for a, b in drawn}
        self._agreed.average_pair(self._network(), partners.get(self._axis.rank), f"pairs after step {number}")

    def _average_buffers(self) -> None:
        if buffers := self._buffers():
            mean_of_ranks_(buffers, self._network(), f"buffers after step {self._step.number}")
            self._local.restore({})

    def _buffers(self) -> list[Tensor]:
        found = {id(one): one for one in [*self.model.buffers(), *self._statistics]}
        return list(found.values())

    # Evaluation uses the mean of all workers' weights.

    def eval_step(self, pieces: Iterable[SliceLike], metrics: Mapping[str, MetricFn]) -> list[SliceResult]:
        with self._averaged():
            return self._local.eval_step(pieces, metrics)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with self._averaged(), self._local.evaluating():
            yield

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Within a round, use the mean of all ranks' weights; on exit, restore each rank's own weights."""
        if self._all_equal or self._axis.size == 1:
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
        """Before `state`, on every rank: pending averages are completed, and rank 0 receives every rank's state."""
        self._agreed.receive()
        if self._axis.size == 1:
            return
        weights = [] if self._all_equal else self._own_tensors()
        own = LocalWorkerState(weights, states_of_optimizer(self._optimizer), self._local.state())
        self._gathered = gather_states(own, self._network())

    def state(self) -> dict[str, Any]:
        gathered, self._gathered = self._gathered, []
        return {
            **self._local.state(),
            **self._agreed.state(),
            "at_rest": self._all_equal,
            "began": {str(fragment): step for fragment, step in self._began.items()},
            "rows": self._rows,
            "workers": [own.tree() for own in gathered],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Call after weights and optimizer, which are one rank's, were restored; the checkpoint has this rank's state.

        With another number of ranks, all start from the mean of the saved weights, and rank r from the optimizer state
        of saved rank r modulo their number.
        """
        self._local.restore(state)
        if "agreed" not in state:
            self._agreed.accept()
            return
        self._agreed.restore(state)
        self._all_equal = self.round_closed = bool(state["at_rest"])
        self._began = {int(fragment): step for fragment, step in state["began"].items()}
        self._forget_rows()
        if state["rows"] and len(state["rows"][0]) == self._axis.size:
            self._rows = [list(row) for row in state["rows"]]
        if workers := [LocalWorkerState.from_tree(tree) for tree in state["workers"]]:
            self._take(workers)

    def _take(self, workers: Sequence[LocalWorkerState]) -> None:
        own = workers[max(self._axis.rank, 0) % len(workers)]
        weights = own.weights if len(workers) == self._axis.size else mean_of_weights(workers)
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
