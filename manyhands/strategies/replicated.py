"""Replicas of the model: the engine of every strategy in which all ranks run every step together.

`Single`, `Mirrored`, `CentralStorage`, `Sharded`, model parallelism and hybrid parameter servers differ in where the
weights are between steps and how gradients are summed, which a backend decides (`parallel.weights`,
`parallel.sharding`), and in whether a replica spans several ranks. One rank is not a special case: the same lines run,
and the collectives do nothing. Start reading at `Replicated.train_step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.comm.axis import Axis
from manyhands.comm.codecs import codec_of
from manyhands.embedding.replicated_rows import SparseStep
from manyhands.errors import TrainingFailed
from manyhands.parallel.gradients.custom_reduction import own_reduction
from manyhands.parallel.gradients.gradient_norm import clip_factor
from manyhands.parallel.gradients.network_sum import total_weight
from manyhands.parallel.gradients.reduce_scatter_sum import ShardedSum
from manyhands.parallel.gradients.shared_memory_sum import stamp_of
from manyhands.parallel.model.precision import LossScale
from manyhands.parallel.model.step_buffers import StepBuffers
from manyhands.parallel.replicas.divergence import CopiesDiffer, Hashes, verdict
from manyhands.parallel.replicas.fingerprint import fingerprint, states_of
from manyhands.parallel.replicas.model_parallel_replica import (
    ModelParallelReplica,
    PartitionSpec,
    ReplicaPart,
    StagePasses,
)
from manyhands.parallel.replicas.phase_timer import Phases
from manyhands.parallel.replicas.slice_audit import HALF_TOLERANCE, TOLERANCE, Audit
from manyhands.parallel.replicas.step_exchange import NO_TIMES, SliceReport, StepExchange, StepReplies, StepRequest
from manyhands.parallel.weights.fused_shared_weights import FusedSharedWeights
from manyhands.parallel.weights.replica_backend import ReplicaBackend
from manyhands.parallel.weights.shared_memory_group import SharedMemoryGroup
from manyhands.parameter_server.worker.hybrid_rows import HybridStep
from manyhands.strategies.base import SliceLike, StepLike, StepStats
from manyhands.strategies.closure_optimizers import refuse_closures, wants_closure
from manyhands.strategies.engine_parts import ModelSide, Ranks, StepSettings
from manyhands.strategies.loss_check import LossCheck
from manyhands.strategies.loss_computation import LossComputation
from manyhands.strategies.pipeline_slices import PipelineSlices

__all__ = ["Replicated", "SliceNumbers", "number_slices"]


class SliceNumbers(NamedTuple):
    """How a step's slices are numbered. Empty slices contribute nothing: the slice tree covers those that have rows."""

    bounds: Sequence[tuple[int, int]]
    divided: Sequence[range]
    """Each rank's slices."""
    positions: dict[int, int]
    """Slice index -> its position among the slices that have rows."""
    shares: list[range]
    """Each rank's positions."""


def number_slices(bounds: Sequence[tuple[int, int]], shares: Sequence[range]) -> SliceNumbers:
    present = [v for v, (low, high) in enumerate(bounds) if high > low]
    positions = {v: number for number, v in enumerate(present)}
    owned = [[positions[v] for v in share if v in positions] for share in shares]
    ranges = [range(mine[0], mine[-1] + 1) if mine else range(0) for mine in owned]
    return SliceNumbers(bounds, shares, positions, ranges)


class Replicated(LossComputation):
    """Replicas; the batch's slices are divided among the ranks, their gradients summed once per step.

    Promises: after `train_step`, parameters and buffers are bitwise equal on every rank of `axis`; and for any number
    of ranks they match one process that computed the same slices.
    Costs: one reduction of the gradient bytes per step, started while backward still runs. A `reducer` other than
    "exact" shrinks that and gives up the second promise, never the first. Where ranks have shards of the weights
    between steps, parameters are gathered for each pass, or once per step, and all ranks run the same number of passes:
    a rank with fewer slices runs dummy passes, whose gradients are discarded.
    """

    def __init__(
        self,
        ranks: Ranks,
        side: ModelSide,
        settings: StepSettings,
        shares: Callable[[int], Sequence[range]],
        *,
        rows: Callable[[nn.Module, int], SparseStep] = SparseStep,
        spread: ModelParallelReplica | None = None,
        backend: Callable[[nn.Module, Optimizer, Axis], ReplicaBackend] | None = None,
        one_copy: bool = False,
        reducer: Callable[[list[Tensor]], Tensor] | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`shares` maps the number of slices of a step to each rank's slices; `rows` decides where embedding rows are.

        With `spread`, each replica spans several ranks. `backend` stores weights elsewhere than in replicas. With
        `one_copy`, an optimizer whose updates ranks cannot divide is refused: each rank would need a copy of the
        weights. `reducer` is the user's function that combines the gradients of the slices, if there is one.
        """
        super().__init__(side)
        self._axis, self._network, self._sharing = ranks
        self._settings, self._codec, self.shares = settings, codec_of(settings.reducer), shares
        self._make_rows, self._make_backend, self._one_copy, self._warn = rows, backend, one_copy, warn
        self.spread, self._local, self._reducer = spread, nn.Module(), reducer
        self._backend: ReplicaBackend | None = None
        self._gathered: dict[int, Tensor] = {}
        tolerance = TOLERANCE if side.precision.name in ("fp32", "fp64") else HALF_TOLERANCE
        seed = settings.audit_seed
        self._audit = Audit(seed, 0.0 if settings.exact else tolerance) if seed is not None else None
        self._layout: SliceNumbers | None = None
        self._redone = 0
        self._dummy_piece: SliceLike | None = None
        """The slice that a dummy pass computes."""
        self._reports: list[SliceReport] = []
        self._lost: list[int] = []
        self._exchange: StepExchange
        self._times: Sequence[float] = NO_TIMES
        self.phases = Phases()

    def setup(self, model: nn.Module, optimizer: Optimizer, *, joining: bool = False) -> None:
        """With `joining`, the other ranks are training already: call `held.attach` next.

        Where each rank has a part of the model, call `join_partition` instead, which attaches as well.
        """
        if self._audit is not None:
            refuse_closures(optimizer, "audit")
        self._whole, self._model, self._local, self._optimizer = model, model, model, optimizer
        if self.spread is not None:
            refuse_closures(optimizer, "divided")
            if joining:
                return
            divided = self.spread.divide_(model, optimizer)
            self._model, self._local = divided.proxy, divided.local
        self._make_ready(optimizer)
        if not joining:
            self.synchronise()

    def check_first_loss(self, look: LossCheck) -> None:
        if self.spread is None and self.held.shares is None:
            super().check_first_loss(look)

    @property
    def _users_model(self) -> nn.Module:
        return self._whole

    def join_partition(self, axis: Axis, known: PartitionSpec) -> ReplicaPart:
        """Join ranks that are training with the model partitioned as in `known`."""
        assert self.spread is not None
        divided = self.spread.divide_(self._model, self._optimizer, known)
        self._axis, self._model, self._local = axis, divided.proxy, divided.local
        self._make_ready(self._optimizer)
        self.held.attach(None)
        return divided

    @property
    def has_part(self) -> bool:
        return self._backend is not None

    def _make_ready(self, optimizer: Optimizer) -> None:
        self._backend = self._new_backend(self._local, optimizer)
        self._buffers = StepBuffers(self._local, self._foreign)
        self._rows = self._make_rows(self._local, self._settings.seed)
        self._warn_about_rows()
        if self._rows:
            refuse_closures(optimizer, "rows")
        if self.has_residuals:
            refuse_closures(optimizer, "residuals")

    def _new_backend(self, model: nn.Module, optimizer: Optimizer) -> ReplicaBackend:
        if self._make_backend is not None:
            return self._make_backend(model, optimizer, self._axis)
        return ReplicaBackend(
            model,
            optimizer,
            self._axis,
            self._sharing,
            self._network,
            self._codec,
            bucket_bytes=self._settings.bucket_bytes,
            check_every=self._settings.check_every,
            warn=self._warn,
            reduction=own_reduction(self._reducer, optimizer),
            one_copy=self._one_copy,
        )

    @property
    def divided(self) -> ReplicaPart | None:
        """The part of the model that this rank has; None if it has all of it."""
        part, shares = self.spread.divided if self.spread is not None else None, self.held.shares
        if shares is None:
            return part
        return (part or ReplicaPart(self._model, self._model)).again(self._users_model, shares)

    def _warn_about_rows(self) -> None:
        if self._rows and self._rows.are_here:
            self._warn("no parameter servers in this strategy: every worker keeps all rows of the embeddings")
        elif not self._rows and not self._rows.are_here:
            self._warn("the parameter servers have nothing to do: no layer is an mh.nn.Embedding or mh.nn.EmbeddingBag")

    @property
    def served_rows(self) -> HybridStep | None:
        """Embedding rows on parameter servers, if the model has any."""
        return self._rows if self._rows and isinstance(self._rows, HybridStep) else None

    @property
    def held(self) -> ReplicaBackend:
        """The backend that sums gradients and stores weights."""
        assert self._backend is not None, "setup comes first"
        return self._backend

    @contextmanager
    def editing(self) -> Iterator[nn.Module]:
        """Change weights by hand, or which of them are trained. On exit every rank has rank 0's weights."""
        if self.spread is not None:
            raise TrainingFailed(
                "No worker has all of the model's weights, so none can edit them.",
                fix=["change the weights before the trainer has them", "trainer.load(FILE), of whole weights"],
            )
        with torch.no_grad(), self.held.editing():
            yield self._model
        self.synchronise()

    def synchronise(self) -> None:
        """Give every rank rank 0's weights and buffers, and find out again which parameters are trained."""
        self._layout = None
        self.held.synchronise()
        self._rows.synchronise(self._axis)
        self._foreign = replace(self._foreign, divided=self.held.divided_frozen)
        self._buffers = StepBuffers(self._local, self._foreign)
        if self._one_copy and self.held.common is None:
            raise TrainingFailed(
                f"Updates of {type(getattr(self._optimizer, 'keras', self._optimizer)).__name__} cannot be divided: "
                "every worker would keep a copy of the weights and of the whole optimizer state."
                + (f" {why}." if (why := getattr(self._optimizer, "why_whole", "")) else ""),
                fix=["torch.optim.AdamW, or another of torch's own", 'strategy="mirrored"'],
            )

    # Elasticity: ranks join and leave.

    def abandon(self) -> None:
        """Detach from the model: setup has failed, and another engine will be made."""
        if self._backend is not None:
            self._backend.abandon()

    def put_down(self) -> Callable[[], None]:
        if self._backend is None:
            return lambda: None
        self._rows.put_down()
        return self._backend.put_down()

    def take_up(self) -> None:
        self.adopt_rows()
        if self.held.shares is None:  # a rank keeps its shard, since no other training may use a sharded model
            self.synchronise()

    def adopt_rows(self) -> None:
        self._rows.take_up()

    def regroup(self, axis: Axis, sharing: SharedMemoryGroup | None) -> None:
        """Continue with other ranks. Gradients of the current step are kept if they are in shared memory."""
        self._axis, self._sharing, self._redone = axis, sharing, 0
        self._layout, self._times = None, NO_TIMES
        if self._audit is not None:
            self._audit.cancel()
        if self._backend is not None:
            self._backend.regroup(axis, sharing)
            self._buffers.drop()  # this rank may have been interrupted in the middle of a slice

    round_closed, rolls_back, averaging = True, False, "none"

    def round_closes_with(self, step: int) -> bool:
        return True

    @property
    def can_finish_step(self) -> bool:
        """Whether an interrupted step can be finished after `regroup`, from the gradients in shared memory.

        Gradients of embedding rows are not there.
        """
        return self.held.shared is not None and self.held.shared.keeps_rows and not self._rows

    # Comparing replicas, which should be equal.

    @property
    def compares_copies(self) -> bool:
        return self._settings.check_every > 0 and self._axis.size > 1 and self.spread is None

    def hashes(self) -> Hashes:
        """Hashes of this rank's weights, buffers and optimizer state."""
        shared = self.held.common
        seeds = {seed.data_ptr() for seed in self._foreign.seeds}
        names = {id(param): name for name, param in self._local.named_parameters()}
        with self._rows.sparse.hidden():
            weights = [(name, one) for name, one in self._local.state_dict().items() if isinstance(one, Tensor)]
        own = [
            (name, one)
            for name, one in [*weights, *states_of(self._optimizer, names)]
            if one.data_ptr() not in seeds and (shared is None or shared.where(one) is None)
        ]
        groups = [[v for v in group.values() if isinstance(v, int | float)] for group in self._optimizer.param_groups]
        scale = self._precision.scale.state() if self._precision.scale else None
        of_host = shared.digest_of_part() if isinstance(shared, FusedSharedWeights) and self.held.ranks_per_copy else 0
        return Hashes(fingerprint(own, [groups, scale, *self._rows.sparse.digests()]), of_host)

    def compare(self, hashes: Sequence[Hashes]) -> None:
        """Raise `CopiesDiffer` on every rank, unless the hashes of all ranks are equal."""
        found = verdict(hashes, self.held.ranks_per_copy)
        if not found.agrees:
            self._redone += 1  # so that a rank lost during the retry is not counted as having contributed
            raise CopiesDiffer(found)

    # Checkpointed state other than weights.

    @property
    def has_residuals(self) -> bool:
        """Whether each rank has state that the others lack, so that `gather_state` has to run on all of them."""
        return self._codec is not None and self._codec.feeds_back

    def gather_state(self) -> None:
        """Before `state`, on every rank: rank 0 receives the state of each rank."""
        if self.has_residuals:
            assert self.held.coded is not None
            self._gathered = self.held.coded.gather_residuals()

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if self.served_rows is not None:
            state["rows"] = self.served_rows.state()
        if self._precision.scale:
            state["loss_scale"] = self._precision.scale.state()
        state |= self.held.residual_state(self._gathered)
        self._gathered = {}  # as large as the weights, times the workers
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Call after the weights were restored."""
        self.held.accept_weights()
        self._buffers = StepBuffers(self._local, self._foreign)  # the buffers have changed
        if self.served_rows is not None:
            self.served_rows.restore(state.get("rows", {}))
        if self._precision.scale and "loss_scale" in state:
            self._precision.scale.restore(state["loss_scale"])
        self.held.restore_residuals(state)

    def close(self) -> None:
        if self._backend is not None and isinstance(self._rows, HybridStep):
            self._rows.close()
        self._axis.close()

    # A step that was interrupted by a lost rank.

    def resume_step(self) -> StepStats:
        """Finish the interrupted step, after `regroup`; all ranks, each of which had begun it, call this."""
        for v in self.lost_slices():
            self._compute(self._step.slice(v))
        return self.end_step()

    def lost_slices(self) -> list[int]:
        """Slices of lost ranks that this rank computes in their place. Finished shares are not computed again."""
        gradients, exchange = self.held.shared, self._exchange
        assert gradients is not None
        exchange.move(self._axis)
        slice_of = {position: v for v, position in self._positions.items()}
        found: list[int] = []
        self._lost = gradients.lost_shares()
        for turn, share in enumerate(self._lost):
            is_whole = gradients.notes.is_complete(share) and exchange.is_whole(share)
            if is_whole or turn % self._axis.size != self._axis.rank:
                continue
            found += [slice_of[position] for position in exchange.shares[share]]
            if not exchange.shares[share]:
                self._take_share(share)
                exchange.post(())
        return found

    def _take_share(self, share: int) -> None:
        assert self.held.shared is not None
        self.held.shared.finish_share()
        self.held.shared.take_share(share)
        self._mine, self._reports = self._exchange.shares[share], []

    # The step, and its parts for user loops.

    def train_step(self, step: StepLike, *, stop: int = 0, collect: bool = False) -> StepStats:
        assert self._loss_fn is not None
        if wants_closure(self._optimizer):
            return self._train_step_with_closure(step, stop, collect)
        self._begin(step, stop, collect)
        self._compute_mine(step)
        return self.end_step()

    def _compute_mine(self, step: StepLike) -> None:
        if self.spread is not None and self.spread.divided.passes is not None:
            self._run_stages(self.spread, self.spread.divided.passes, list(step.mine()))
            return
        for piece in step.mine():
            if self.held.passes_left:
                self._dummy_piece = piece
            self._compute(piece)
        while self.held.passes_left:
            self._dummy_pass(self._dummy_piece or step.slice(next(iter(self._positions))))

    def _run_stages(self, spread: ModelParallelReplica, passes: StagePasses, pieces: Sequence[SliceLike]) -> None:
        """Run every slice of the replica through this rank's layers; the last stage computes the loss."""
        assert self._loss_fn is not None
        slices = PipelineSlices(self._positions, self._buffers, self.held.gradients, self._around, self._weigh)
        self.phases.mark("load")
        passes.run(pieces, slices, f"step {self._step.number}")
        self.phases.mark("backward")
        self.phases.divide("backward", passes.computed, rest="reduce")
        self._exchange.post(spread.told(slices.reports()))

    def _weigh(self, piece: SliceLike, result: Any) -> tuple[float, float, Tensor]:
        return self.weigh(piece, result, self._step.rows)

    def _compute(self, piece: SliceLike) -> None:
        self.phases.mark("load")
        result = self._forward(piece)
        self.phases.mark("forward")
        self.backward(piece, result)
        self.phases.mark("backward")

    def begin_step(self, step: StepLike, *, stop: int = 0, collect: bool = False) -> None:
        """For user loops, which run one pass per slice."""
        self._begin(step, stop, collect)
        assert self._layout is not None
        if self.held.passes_left and len(set(map(len, self._layout.shares))) > 1:  # the same on every rank
            raise TrainingFailed(
                f"Step {step.number} has {len(self._positions)} slices for {self._axis.size} workers, but all workers "
                "must run the same number of passes, and only mh.Trainer can add the missing ones.",
                fix=["data and batch_size that leave no short batch", f"slices={self._axis.size}", "mh.Trainer"],
            )

    def _begin(self, step: StepLike, stop: int, collect: bool, *, within: bool = False) -> None:
        """With `within`, an optimizer step is in progress: replicas are compared only between steps."""
        waits, divided = self.held.gradients.waits, self.shares(step.num_slices)
        waits = waits if self._axis.waiting in waits else [*waits, self._axis.waiting]
        self.phases.begin(waits, step.load_s, loaded_together=step.fetched_together)
        self._step = step
        if self._layout is None or self._layout.bounds != step.bounds or self._layout.divided != divided:
            self._layout = number_slices(step.bounds, divided)
        self._positions, shares = self._layout.positions, self._layout.shares
        self._mine = shares[self._axis.rank]
        self._reports, self._lost = [], []
        if self.held.shared is not None:
            generation = self.held.sharing.generation if self.held.sharing is not None else ""
            self.held.shared.notes.stamp = stamp_of(generation, step.number, self._redone)
        self.held.gradients.begin(len(self._positions), shares, f"step {step.number}")
        self._buffers.begin(len(self._positions), self._axis.size)
        self._rows.begin()
        if self._audit is not None:
            self._audit.begin(step.number, shares)
        due = self.compares_copies and (step.number - 1) % self._settings.check_every == 0 and not within
        hashes = self.hashes().numbers() if due else ()
        request = StepRequest(stop, collect, self._times)
        staged = self.spread is not None and self.spread.divided.passes is not None
        self._exchange = StepExchange(
            self._axis, self.held.gradients, shares, request, self._buffers, step.number, hashes, may_ride=not staged
        )
        self.held.before_step()

    def _forward(self, piece: SliceLike) -> Any:
        """The forward pass of one slice, with the step's buffers, the slice's randomness and the run's precision."""
        with self.slice_context(piece):
            return self.loss_of(self._step, piece)

    def _enter_slice(self, position: int) -> None:
        self.held.before_pass()
        if position not in self._mine:
            [index] = [index for index, share in enumerate(self._exchange.shares) if position in share]
            assert index in self._lost, f"slice {position} of step {self._step.number} is another rank's"
            self._take_share(index)
        self._buffers.enter(position)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Ranks may have different numbers of batches, so sharded parameters are gathered once for all of them."""
        with self.held.gathered(), super().evaluating():
            yield

    @contextmanager
    def slice_context(self, piece: SliceLike) -> Iterator[None]:
        """The context of a slice's forward pass that the caller runs."""
        self._enter_slice(self._positions[piece.index])
        with self._around(piece):
            yield

    @contextmanager
    def _around(self, piece: SliceLike) -> Iterator[None]:
        with piece.randomness(), self._calling(), self._foreign.in_slice():
            yield

    def backward(self, piece: SliceLike, result: Any) -> None:
        """Backward of one slice, weighted so that the sum over all slices is the gradient of the batch's mean loss."""
        total, weight, scaled = self.weigh(piece, result, self._step.rows)
        position = self._positions[piece.index]
        self._reports.append(SliceReport(total, weight, self._buffers.leave(position)))
        self.held.gradients.before_backward(position)
        if position == self._mine[-1]:
            self._exchange.post(self._reports)  # sent while backward runs
        audited = self._audit is not None and self._audit.is_mine(position, self._axis.rank)
        try:
            with self._audit.watching(self.held.gradients.params) if audited and self._audit else nullcontext():
                scaled.backward()  # type: ignore[no-untyped-call]
            self.held.gradients.after_backward(position)
            self._rows.leave(position)
        finally:
            self._buffers.put_back()

    def _dummy_pass(self, piece: SliceLike) -> None:
        """A dummy pass while other ranks compute a slice: they need this rank's shard of the parameters."""
        assert self._loss_fn is not None and isinstance(self.held.gradients, ShardedSum)
        self.held.before_pass()
        self._buffers.enter(-1)
        try:
            with self._around(piece):
                result = self._loss_fn(self._model, piece.batch)
            _, _, scaled = self.weigh(piece, result, self._step.rows)
            self._buffers.leave(-1)
            self.held.gradients.before_backward(None)
            scaled.backward()  # type: ignore[no-untyped-call]
            self.held.gradients.after_backward(None)
        finally:
            self._buffers.put_back()
            self._rows.sparse.drop()

    def _compute_again(self) -> None:
        """Compute the audited slice for its gradients alone, after this rank's own slices."""
        assert self._audit is not None and self._audit.appointment is not None and self._loss_fn is not None
        position = self._audit.appointment.place
        piece = self._step.slice(next(v for v, number in self._positions.items() if number == position))
        self._buffers.enter(position)
        try:
            with self._around(piece):
                result = self._loss_fn(self._model, piece.batch)
            _, _, scaled = self.weigh(piece, result, self._step.rows)
            self._buffers.leave(-1)  # another rank reports the buffers of this slice
            with self._audit.watching(self.held.gradients.params):
                scaled.backward()  # type: ignore[no-untyped-call]
        finally:
            self._buffers.put_back()
            self._rows.sparse.drop()
            for param in self.held.gradients.params:
                param.grad = None

    def end_step(self) -> StepStats:
        """Sum, update, and only then drop the previous state: a failure before that changes nothing."""
        self.held.rest()
        stats = StepStats(loss=math.nan, rows=self._step.rows)
        if not self._exchange.posted:  # this rank has no slice
            self._exchange.post(())
        if self._audit is not None:
            self._audit.compare(self._axis, self._compute_again)
        reduced = self._reduce()
        stats.loss, stats.bytes_sent = reduced.loss, self.held.gradients.bytes_sent
        stats.stop, stats.collect, stats.times = reduced.replies.stop, reduced.replies.collect, reduced.replies.times
        stats.agreed = bool(self._exchange.hashes)
        self.phases.mark("reduce")
        self._scale_gradients(reduced, stats)
        if not stats.skipped:
            self.held.update.apply()
            self._rows.apply(self._step.number)
        self._commit(reduced, stats)
        self.phases.mark("update")
        stats.seconds = self.phases.seconds
        stats.lr = float(self._optimizer.param_groups[0]["lr"])
        # After taking over slices of a lost rank, its times do not compare with the others'.
        self._times = NO_TIMES if self._exchange.moved else self.phases.times()
        return stats

    def _train_step_with_closure(self, step: StepLike, stop: int, collect: bool) -> StepStats:
        """Optimizers such as LBFGS evaluate the loss several times per step; each evaluation covers the whole batch."""
        assert self._loss_fn is not None
        pieces = list(step.mine())
        stats = StepStats(loss=math.nan, rows=step.rows)

        def closure() -> float:
            self._begin(step, stop, collect, within=not math.isnan(stats.loss))
            for piece in pieces:
                self.backward(piece, self._forward(piece))
            reduced = self._reduce()
            stats.stop, stats.collect = reduced.replies.stop, reduced.replies.collect
            stats.agreed = stats.agreed or bool(self._exchange.hashes)
            self._scale_gradients(reduced, stats)
            self._commit(reduced, stats)
            if math.isnan(stats.loss):
                stats.loss = reduced.loss
            return reduced.loss

        self._optimizer.step(closure)
        self.phases.mark("update")
        stats.seconds, stats.lr = self.phases.seconds, float(self._optimizer.param_groups[0]["lr"])
        return stats

    def _reduce(self) -> _Reduced:
        """Sum gradients, losses and statistics over the ranks."""
        if not self._exchange.posted:  # this rank has no slice
            self._exchange.post(())
        self.held.gradients.finish()
        replies = self._exchange.finish()
        if self.spread is not None:
            self.spread.settle()
            replies = self.spread.agree(replies)
        self._rows.exchange(self._axis, self._step.number)
        if self._exchange.hashes:
            self.compare([Hashes.of(numbers) for numbers in self._exchange.hashes])
        reports = replies.reports
        if self.held.shared is not None and self.held.common is None:
            self.held.shared.collect()
        total = sum(report.total for report in reports)  # in slice order
        weight = total_weight((report.weight for report in reports), self._step.number)
        loss = total / weight
        if not math.isfinite(loss) and not self._precision.scale:
            self.raise_non_finite(f"The loss of step {self._step.number} is {loss}")
        return _Reduced(loss, weight, replies)

    def _scale_gradients(self, reduced: _Reduced, stats: StepStats) -> None:
        """Divide out the loss scale and weights, and clip; after an fp16 overflow the step is skipped."""
        scale = self._precision.scale
        factor = self._step.rows / reduced.weight / (scale.value if scale else 1.0)
        self.held.update.scale(factor)
        self._rows.factor = factor
        if self._settings.clip_norm is None and scale is None:
            return
        stats.grad_norm = math.hypot(self._norm(), self._rows.norm())
        if not math.isfinite(stats.grad_norm):
            if scale is None:
                self.raise_non_finite(f"The gradient of step {self._step.number} is not finite")
            stats.skipped = True
            return
        clip = clip_factor(stats.grad_norm, self._settings.clip_norm)
        self.held.update.clip(clip)
        self._rows.factor *= clip

    def _norm(self) -> float:
        """The norm of the whole gradient."""
        if self.spread is None:
            return self.held.update.norm()
        return self.spread.norm(self.held.gradients.params, None if self.held.shares is None else self._axis)

    def _commit(self, reduced: _Reduced, stats: StepStats) -> None:
        """Commit the step's changes to everything except the weights, on this rank."""
        self._redone = 0
        self._buffers.commit([report.statistics for report in reduced.replies.reports])
        self._buffers.apply_first_changes(reduced.replies.changes)
        if self._precision.scale:
            self._adapt_scale(self._precision.scale, stats.skipped)

    def _adapt_scale(self, scale: LossScale, skipped: bool) -> None:
        before = scale.value
        scale.update(overflow=skipped)
        if scale.value != before and self.held.coded is not None:
            self.held.coded.scale_residuals(scale.value / before)
        if scale.is_hopeless:
            self.raise_non_finite(f"{scale.skipped} steps in a row overflowed, up to step {self._step.number}")


class _Reduced(NamedTuple):
    """The results of a step that all ranks know after the exchange."""

    loss: float
    weight: float
    replies: StepReplies
