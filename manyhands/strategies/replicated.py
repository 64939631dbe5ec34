"""Whole replicas of the model: `Single`, `Mirrored` and `MultiWorker` are one strategy over one, or many, ranks.

The three names a user writes are plain settings, in `choices`; `Replicated` does the work: the steps, here, and what is
between them, in `replica_state`. One rank is not a special case: the same lines run, and the collectives have nothing
to do. Start reading at `Replicated.train_step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.comm.axis import Axis
from manyhands.embedding.replicated_rows import SparseStep
from manyhands.parallel.gradients.buffer_headers import stamp_of
from manyhands.parallel.gradients.gradient_norm import clip_factor
from manyhands.parallel.gradients.network_sum import GradientSum, total_weight
from manyhands.parallel.gradients.reduce_scatter_sum import ShardedSum
from manyhands.parallel.model.precision import LossScale, Precision
from manyhands.parallel.model.step_buffers import ForeignState
from manyhands.parallel.replicas.divergence import Hashes
from manyhands.parallel.replicas.model_parallel_replica import Passes, Spread
from manyhands.parallel.replicas.phase_timer import Phases
from manyhands.parallel.replicas.slice_audit import HALF_TOLERANCE, TOLERANCE, Audit
from manyhands.parallel.replicas.step_exchange import NO_TIMES, Exchange, Heard, Note, Report
from manyhands.parallel.weights.shared_memory_group import Sharing
from manyhands.strategies.base import LossFn, PieceLike, StepLike, StepStats
from manyhands.strategies.closure_optimizers import refuse_closures, wants_closure
from manyhands.strategies.pipeline_slices import StagedSlices
from manyhands.strategies.places import Places, places_of
from manyhands.strategies.replica_state import Replicas

__all__ = ["Replicated"]


class Replicated(Replicas):
    """Whole replicas; the batch's slices are shared out, their gradients summed once per step.

    Promises: after `train_step`, parameters and buffers are bitwise equal on every rank of `axis`; and, whatever the
    number of ranks, they match one process that took the same slices.
    Costs: one reduction of the gradient bytes per step, begun while backward still runs. A `reducer` other than "exact"
    shrinks that and gives up the second promise, never the first.
    """

    def __init__(
        self,
        axis: Axis,
        loss_fn: LossFn | None,
        precision: Precision,
        shares: Callable[[int], Sequence[range]],
        *,
        clip_norm: float | None,
        bucket_bytes: int,
        reducer: str = "exact",
        check_every: int = 0,
        audit_seed: int | None = None,
        exact: bool = False,
        seed: int = 0,
        foreign: ForeignState | None = None,
        sharing: Sharing | None = None,
        network: Callable[[], Axis] | None = None,
        tell: Callable[[str], None] = lambda text: None,
        rows: Callable[[nn.Module, int], SparseStep] = SparseStep,
        spread: Spread | None = None,
    ) -> None:
        """`shares` are each rank's slices of a step that has so many; the rest is as `Replicas` has it.

        After every `check_every` steps ranks compare their copies; `train_step` raises `CopiesDiffer` on all of them.
        With `audit_seed` a slice of every step is computed twice, and must come out the same: to the bit if `exact`.
        """
        super().__init__(
            axis,
            loss_fn,
            precision,
            bucket_bytes=bucket_bytes,
            reducer=reducer,
            check_every=check_every,
            seed=seed,
            foreign=foreign,
            sharing=sharing,
            network=network,
            tell=tell,
            rows=rows,
            spread=spread,
        )
        self.shares, self._clip_norm = shares, clip_norm
        tolerance = 0.0 if exact else TOLERANCE if precision.name in ("fp32", "fp64") else HALF_TOLERANCE
        self._audit = Audit(audit_seed, tolerance) if audit_seed is not None else None
        self._layout: Places | None = None
        self._reports: list[Report] = []
        self._lost: list[int] = []
        self._exchange: Exchange
        self._times: Sequence[float] = NO_TIMES
        self.phases = Phases()

    def setup(self, model: nn.Module, optimizer: Optimizer, *, joining: bool = False) -> None:
        if self._audit is not None:
            refuse_closures(optimizer, "audit")
        super().setup(model, optimizer, joining=joining)

    def synchronise(self) -> None:
        self._layout = None
        super().synchronise()

    # Ranks that come and go, between steps or in the middle of one.

    def regroup(self, axis: Axis, sharing: Sharing | None) -> None:
        self._layout, self._times = None, NO_TIMES
        if self._audit is not None:
            self._audit.cancel()
        super().regroup(axis, sharing)
        if self.has_part:
            self._buffers.drop()  # a rank that waited for a lost one may have done so in the middle of a slice

    def resume_step(self) -> StepStats:
        """Finish the step that was interrupted: after `regroup`, by all ranks, each of which was in it."""
        for v in self.lost_slices():
            self._compute(self._step.slice(v))
        return self.end_step()

    def lost_slices(self) -> list[int]:
        """Slices of ranks that are lost, which this one computes in their place. What they had done, stays done."""
        gradients, exchange = self.held.shared, self._exchange
        assert gradients is not None
        exchange.move(self._axis)
        slice_at = {place: v for v, place in self._place.items()}
        found: list[int] = []
        self._lost = gradients.lost_seats()
        for turn, seat in enumerate(self._lost):
            is_whole = gradients.notes.is_complete(seat) and exchange.is_whole(seat)
            if is_whole or turn % self._axis.size != self._axis.rank:
                continue
            found += [slice_at[place] for place in exchange.shares[seat]]
            if not exchange.shares[seat]:
                self._take_seat(seat)
                exchange.post(())
        return found

    def _take_seat(self, seat: int) -> None:
        assert self.held.shared is not None
        self.held.shared.leave_seat()
        self.held.shared.take_seat(seat)
        self._mine, self._reports = self._exchange.shares[seat], []

    # The step, and its parts for those who write their own loop.

    def train_step(self, step: StepLike, *, stop: int = 0, collect: bool = False) -> StepStats:
        assert self._loss_fn is not None
        if wants_closure(self._optimizer):
            return self._train_step_with_closure(step, stop, collect)
        self.begin_step(step, stop=stop, collect=collect)
        self._compute_mine(step)
        return self.end_step()

    def _compute_mine(self, step: StepLike) -> None:
        if self.spread is not None and self.spread.divided.passes is not None:
            self._run_stages(self.spread, self.spread.divided.passes, list(step.mine()))
            return
        for piece in step.mine():
            self._compute(piece)

    def _run_stages(self, spread: Spread, passes: Passes, pieces: Sequence[PieceLike]) -> None:
        """This rank's layers see every slice of the replica; the loss is known at their end."""
        assert isinstance(self.held.gradients, GradientSum | ShardedSum) and self._loss_fn is not None
        slices = StagedSlices(self._place, self._buffers, self.held.gradients, self._around, self._weigh)
        self.phases.mark("load")
        passes.run(pieces, slices, f"step {self._step.number}")
        self.phases.mark("backward")
        self.phases.divide("backward", passes.computed, rest="reduce")
        self._exchange.post(spread.told(slices.reports()))

    def _weigh(self, piece: PieceLike, result: Any) -> tuple[float, float, Tensor]:
        return self.weigh(piece, result, self._step.rows)

    def _compute(self, piece: PieceLike) -> None:
        self.phases.mark("load")
        result = self._forward(piece)
        self.phases.mark("forward")
        self.backward(piece, result)
        self.phases.mark("backward")

    def begin_step(self, step: StepLike, *, stop: int = 0, collect: bool = False, within: bool = False) -> None:
        """With `within`, weights have changed since the step before: copies are compared at steps' ends only."""
        waits, divided = self.held.gradients.waits, self.shares(step.num_slices)
        self.phases.begin(waits if self._axis.waiting in waits else [*waits, self._axis.waiting], step.load_s)
        self._step, self._met_s = step, step.load_s if step.fetched_together else 0.0
        if self._layout is None or self._layout.bounds != step.bounds or self._layout.divided != divided:
            self._layout = places_of(step.bounds, divided)
        self._place, shares = self._layout.place, self._layout.shares
        self._mine = shares[self._axis.rank]
        self._reports, self._lost = [], []
        if self.held.shared is not None:
            generation = self.held.sharing.generation if self.held.sharing is not None else ""
            self.held.shared.notes.stamp = stamp_of(generation, step.number, self._redone)
        self.held.gradients.begin(len(self._place), shares, f"step {step.number}")
        self._buffers.begin(len(self._place), self._axis.size)
        self._rows.begin()
        if self._audit is not None:
            self._audit.begin(step.number, shares)
        due = self.compares_copies and (step.number - 1) % self._check_every == 0 and not within
        hashes = self.hashes().numbers() if due else ()
        note = Note(stop, collect, self._times)
        staged = self.spread is not None and self.spread.divided.passes is not None
        self._exchange = Exchange(
            self._axis, self.held.gradients, shares, note, self._buffers, step.number, hashes, may_ride=not staged
        )

    def _forward(self, piece: PieceLike) -> Any:
        """Forward of one slice: the step's buffers, the slice's randomness, the run's precision."""
        with self.slice_context(piece):
            return self.loss_of(self._step, piece)

    def _enter_slice(self, place: int) -> None:
        if place not in self._mine:
            [seat] = [seat for seat, share in enumerate(self._exchange.shares) if place in share]
            assert seat in self._lost, f"slice {place} of step {self._step.number} is another rank's"
            self._take_seat(seat)
        self._buffers.enter(place)

    @contextmanager
    def slice_context(self, piece: PieceLike) -> Iterator[None]:
        """The same around a forward that somebody else runs."""
        self._enter_slice(self._place[piece.index])
        with self._around(piece):
            yield

    @contextmanager
    def _around(self, piece: PieceLike) -> Iterator[None]:
        with piece.randomness(), self._calling(), self._foreign.in_slice():
            yield

    def backward(self, piece: PieceLike, result: Any) -> None:
        """Backward of one slice, weighted so that the sum over all slices is the gradient of the batch's mean."""
        total, weight, scaled = self.weigh(piece, result, self._step.rows)
        place = self._place[piece.index]
        self._reports.append(Report(total, weight, self._buffers.leave(place)))
        self.held.gradients.before_backward(place)
        if place == self._mine[-1]:
            self._exchange.post(self._reports)  # travels while backward runs
        audited = self._audit is not None and self._audit.is_mine(place, self._axis.rank)
        try:
            with self._audit.watching(self.held.gradients.params) if audited and self._audit else nullcontext():
                scaled.backward()  # type: ignore[no-untyped-call]
            self.held.gradients.after_backward(place)
            self._rows.leave(place)
        finally:
            self._buffers.put_back()

    def _compute_again(self) -> None:
        """The slice that is audited, for its gradients alone: after this rank's own, whose gradients are put away."""
        assert self._audit is not None and self._audit.appointment is not None and self._loss_fn is not None
        place = self._audit.appointment.place
        piece = self._step.slice(next(v for v, number in self._place.items() if number == place))
        self._buffers.enter(place)
        try:
            with self._around(piece):
                result = self._loss_fn(self._model, piece.batch)
            _, _, scaled = self.weigh(piece, result, self._step.rows)
            self._buffers.leave(-1)  # whatever it made of the buffers, another rank tells
            with self._audit.watching(self.held.gradients.params):
                scaled.backward()  # type: ignore[no-untyped-call]
        finally:
            self._buffers.put_back()
            self._rows.sparse.drop()
            for param in self.held.gradients.params:
                param.grad = None

    def end_step(self) -> StepStats:
        """Sum, update, and only then let go of what was before: whatever fails until then has changed nothing."""
        stats = StepStats(loss=math.nan, rows=self._step.rows)
        if not self._exchange.posted:  # no slice of its own
            self._exchange.post(())
        if self._audit is not None:
            self._audit.compare(self._axis, self._compute_again)
        reduced = self._reduce()
        stats.loss, stats.bytes_sent = reduced.loss, self.held.gradients.bytes_sent
        stats.stop, stats.collect, stats.times = reduced.heard.stop, reduced.heard.collect, reduced.heard.times
        stats.agreed = bool(self._exchange.hashes)
        self.phases.mark("reduce")
        self._scale_gradients(reduced, stats)
        if not stats.skipped:
            self.held.update.apply()
            self._rows.apply(self._step.number)
        self._take_over(reduced, stats)
        self.phases.mark("update")
        stats.seconds = self.phases.seconds
        stats.lr = float(self._optimizer.param_groups[0]["lr"])
        self._times = self._own_times()
        return stats

    def _own_times(self) -> Sequence[float]:
        """What this rank tells the others of its step: time at work by phase, and time of waiting for them."""
        if self._exchange.moved:  # it took over slices, after a while
            return NO_TIMES
        seconds, busy = self.phases.seconds, self.phases.busy
        busy["load"] -= self._met_s  # rows that some ranks lack were sent around: nobody was faster than the last
        return *busy.values(), sum(seconds.values()) - sum(busy.values())

    def _train_step_with_closure(self, step: StepLike, stop: int, collect: bool) -> StepStats:
        """LBFGS and its kind evaluate the loss several times per step; each evaluation covers the whole batch."""
        assert self._loss_fn is not None
        pieces = list(step.mine())
        stats = StepStats(loss=math.nan, rows=step.rows)

        def closure() -> float:
            self.begin_step(step, stop=stop, collect=collect, within=not math.isnan(stats.loss))
            for piece in pieces:
                self.backward(piece, self._forward(piece))
            reduced = self._reduce()
            stats.stop, stats.collect = reduced.heard.stop, reduced.heard.collect
            stats.agreed = stats.agreed or bool(self._exchange.hashes)
            self._scale_gradients(reduced, stats)
            self._take_over(reduced, stats)
            if math.isnan(stats.loss):
                stats.loss = reduced.loss
            return reduced.loss

        self._optimizer.step(closure)
        self.phases.mark("update")
        stats.seconds, stats.lr = self.phases.seconds, float(self._optimizer.param_groups[0]["lr"])
        return stats

    def _reduce(self) -> _Reduced:
        """Sum gradients, losses and statistics over the ranks."""
        if not self._exchange.posted:  # no slice of its own
            self._exchange.post(())
        self.held.gradients.finish()
        heard = self._exchange.finish()
        if self.spread is not None:
            self.spread.settle()
            heard = self.spread.agree(heard)
        self._rows.exchange(self._axis, self._step.number)
        if self._exchange.hashes:
            self.compare([Hashes.of(numbers) for numbers in self._exchange.hashes])
        reports = heard.reports
        if self.held.shared is not None and self.held.common is None:
            self.held.shared.collect()
        total = sum(report.total for report in reports)  # in slice order
        weight = total_weight((report.weight for report in reports), self._step.number)
        loss = total / weight
        if not math.isfinite(loss) and not self._precision.scale:
            self.raise_non_finite(f"The loss of step {self._step.number} is {loss}")
        return _Reduced(loss, weight, heard)

    def _scale_gradients(self, reduced: _Reduced, stats: StepStats) -> None:
        """Divide out loss scale and weights, clip; an fp16 overflow means that the step is skipped."""
        scale = self._precision.scale
        factor = self._step.rows / reduced.weight / (scale.value if scale else 1.0)
        self.held.update.scale(factor)
        self._rows.factor = factor
        if self._clip_norm is None and scale is None:
            return
        stats.grad_norm = math.hypot(self._norm(), self._rows.norm())
        if not math.isfinite(stats.grad_norm):
            if scale is None:
                self.raise_non_finite(f"The gradient of step {self._step.number} is not finite")
            stats.skipped = True
            return
        clip = clip_factor(stats.grad_norm, self._clip_norm)
        self.held.update.clip(clip)
        self._rows.factor *= clip

    def _norm(self) -> float:
        """Of the whole gradient."""
        return self.held.update.norm() if self.spread is None else self.spread.norm(self.held.gradients.params)

    def _take_over(self, reduced: _Reduced, stats: StepStats) -> None:
        """What the step made of everything but the weights, on this rank."""
        self._redone = 0
        self._buffers.commit([report.statistics for report in reduced.heard.reports])
        self._buffers.apply_first_changes(reduced.heard.changes)
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
    """What all ranks know of a step once they have told each other."""

    loss: float
    weight: float
    heard: Heard
