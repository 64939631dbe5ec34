"""Replicas that keep a part of the model each, and have the rest only while they compute with it.

It is the engine of `Sharded` where parameters themselves are divided, or where ranks share no memory; who shares memory
has one copy of the weights anyway, and divides states: that is `central_storage`. In a `Mesh` a replica is several
ranks, and those with the same part of it divide that part; stages of a pipeline have it whole during a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.comm.axis import Axis
from manyhands.errors import TrainingFailed
from manyhands.parallel.gradients.reduce_scatter_sum import ShardedSum
from manyhands.parallel.model.precision import Precision
from manyhands.parallel.model.step_buffers import ForeignState, StepBuffers
from manyhands.parallel.replicas.model_parallel_replica import Divided, Spread
from manyhands.parallel.sharding.fsdp_backend import FullyShardedHolding, Sharding
from manyhands.parallel.sharding.gather_per_step import WholeInSteps
from manyhands.strategies.base import LossFn, PieceLike, StepLike, StepStats
from manyhands.strategies.loss_check import FirstLook
from manyhands.strategies.replicated import Replicated

__all__ = ["FullySharded"]


class FullySharded(Replicated):
    """Replicas in all but where weights, gradients and states are: each rank has a part of every one.

    Promises: what `Replicated` does, to the bit; sums follow the same tree.
    Costs: all parameters are gathered for each forward and backward pass, or once per step, and gradients travel once.
    All ranks make as many passes: one with fewer slices computes some of them for nobody, while the others compute.
    """

    def __init__(
        self,
        axis: Axis,
        loss_fn: LossFn | None,
        precision: Precision,
        shares: Callable[[int], Sequence[range]],
        sharding: Sharding,
        *,
        clip_norm: float | None,
        seed: int,
        device: torch.device,
        foreign: ForeignState,
        network: Callable[[], Axis],
        tell: Callable[[str], None],
        bucket_bytes: int = 0,
        spread: Spread | None = None,
    ) -> None:
        """`network` is an axis over sockets, whatever `axis` is.

        With `spread` a replica is spread over several ranks, and what each has of it is divided along `axis`.
        """
        super().__init__(
            axis,
            loss_fn,
            precision,
            shares,
            clip_norm=clip_norm,
            bucket_bytes=bucket_bytes,
            seed=seed,
            foreign=foreign,
            network=network,
            tell=tell,
            spread=spread,
        )
        self._sharding, self._device = sharding, device
        self._spare: PieceLike | None = None

    def _hold(self, model: nn.Module, optimizer: Optimizer) -> FullyShardedHolding | WholeInSteps:
        if self.spread is not None and self.spread.divided.passes is not None:
            return WholeInSteps(
                model, optimizer, self._axis, self._network, bucket_bytes=self._bucket_bytes, tell=self._tell
            )
        return FullyShardedHolding(
            model, optimizer, self._axis, self._network, self._sharding, device=self._device, tell=self._tell
        )

    @property
    def _holding(self) -> FullyShardedHolding | WholeInSteps:
        assert isinstance(self.held, FullyShardedHolding | WholeInSteps)
        return self.held

    @property
    def _sum(self) -> ShardedSum:
        assert isinstance(self.held.gradients, ShardedSum)
        return self.held.gradients

    @property
    def divided(self) -> Divided:
        before = self.spread.divided if self.spread is not None else Divided(self._model, self._model)
        return before.again(self._users_model, self._holding.shares)

    def synchronise(self) -> None:
        """Give every rank rank 0's weights and buffers; the first time, its part of them."""
        self._layout, divided = None, self._holding.shares
        whole = [param for param in self._local.parameters() if id(param) not in divided]
        self._axis.broadcast_([*whole, *self._local.buffers()], "weights of rank 0")
        self._holding.divide()
        self._axis.barrier("weights of rank 0")
        self._rows.synchronise(self._axis)
        self._foreign = replace(self._foreign, divided=self._holding.divided_frozen)
        self._buffers = StepBuffers(self._local, self._foreign)

    def put_down(self) -> Callable[[], None]:
        """Every rank keeps its part, of a model that no other training may have."""
        return lambda: None

    def take_up(self) -> None: ...

    @contextmanager
    def editing(self) -> Iterator[nn.Module]:
        """Change weights by hand, which are whole meanwhile. On leaving, every rank has its part of rank 0's."""
        self._check_editable()
        assert isinstance(self._holding, FullyShardedHolding), "no stages, as nothing is spread"
        with torch.no_grad(), self._holding.whole_weights():
            yield self._model
        self.synchronise()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Ranks may have different numbers of batches, so parameters are gathered once for all of them."""
        with self._holding.gathered(), super().evaluating():
            yield

    def train_step(self, step: StepLike, *, stop: int = 0, collect: bool = False) -> StepStats:
        super().begin_step(step, stop=stop, collect=collect)
        self._holding.before_step()
        self._compute_mine(step)
        while self._sum.passes_left:
            self._accompany(self._spare or step.slice(next(iter(self._place))))
        return self.end_step()

    def begin_step(self, step: StepLike, *, stop: int = 0, collect: bool = False, within: bool = False) -> None:
        """For loops of the user's own, which make the passes that there are slices for."""
        super().begin_step(step, stop=stop, collect=collect, within=within)
        self._holding.before_step()
        assert self._layout is not None
        if self._sum.passes_left and len(set(map(len, self._layout.shares))) > 1:  # the same on every rank
            raise TrainingFailed(
                f"Step {step.number} has {len(self._place)} slices for {self._axis.size} workers, but all must make as "
                "many passes, and only mh.Trainer knows how to make one that does not count.",
                fix=["data and batch_size that leave no short batch", f"slices={self._axis.size}", "mh.Trainer"],
            )

    def look_first(self, look: FirstLook) -> None:
        """A forward pass gathers the parameters from all ranks: none can make one alone."""

    def _compute(self, piece: PieceLike) -> None:
        self._spare = piece
        super()._compute(piece)

    def _enter_slice(self, place: int) -> None:
        self._holding.before_pass()
        super()._enter_slice(place)

    def _accompany(self, piece: PieceLike) -> None:
        """A pass that counts for nothing, beside one of the others': they need this rank's part of the parameters."""
        assert self._loss_fn is not None
        self._holding.before_pass()
        self._buffers.enter(-1)
        try:
            with self._around(piece):
                result = self._loss_fn(self._model, piece.batch)
            _, _, scaled = self.weigh(piece, result, self._step.rows)
            self._buffers.leave(-1)
            self._sum.before_backward(None)
            scaled.backward()  # type: ignore[no-untyped-call]
            self._sum.after_backward(None)
        finally:
            self._buffers.put_back()
            self._rows.sparse.drop()

    def _norm(self) -> float:
        if self.spread is None:
            return super()._norm()
        return self.spread.norm(self.held.gradients.params, self._axis)

    def end_step(self) -> StepStats:
        self._holding.rest()
        return super().end_step()
