"""Whole replicas of a model between their steps: set up, made alike, edited, compared, saved and restored.

`replicated` adds the step itself. Start reading at `Replicas.setup` and `Replicas.synchronise`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.comm.axis import Axis
from manyhands.comm.codecs import Bf16, Codec, Int8
from manyhands.embedding.replicated_rows import SparseStep
from manyhands.errors import TrainingFailed
from manyhands.parallel.model.precision import Precision
from manyhands.parallel.model.step_buffers import ForeignState, StepBuffers
from manyhands.parallel.replicas.divergence import CopiesDiffer, Hashes, verdict
from manyhands.parallel.replicas.fingerprint import fingerprint, states_of
from manyhands.parallel.replicas.model_parallel_replica import Divided, Division, Spread
from manyhands.parallel.weights.fused_shared_weights import SharedWeights
from manyhands.parallel.weights.replica_backend import Holding
from manyhands.parallel.weights.shared_memory_group import Sharing
from manyhands.parameter_server.worker.hybrid_rows import ServedStep
from manyhands.strategies.base import LossFn
from manyhands.strategies.closure_optimizers import refuse_closures
from manyhands.strategies.loss_check import FirstLook
from manyhands.strategies.loss_computation import Computing

__all__ = ["Replicas"]

_CODECS: dict[str, Callable[[], Codec]] = {"bf16": Bf16, "int8": Int8}


class Replicas(Computing):
    """The same weights, buffers and optimizer's states on every rank of an axis."""

    def __init__(
        self,
        axis: Axis,
        loss_fn: LossFn | None,
        precision: Precision,
        *,
        bucket_bytes: int,
        reducer: str = "exact",
        check_every: int = 0,
        seed: int = 0,
        foreign: ForeignState | None = None,
        sharing: Sharing | None = None,
        network: Callable[[], Axis] | None = None,
        tell: Callable[[str], None] = lambda text: None,
        rows: Callable[[nn.Module, int], SparseStep] = SparseStep,
        spread: Spread | None = None,
    ) -> None:
        """With `spread`, each replica is spread over several ranks, and `axis` are those with the same part of it.

        `sharing` is given where ranks share memory; `network` is then an axis that does without. Rows of embeddings
        start with what follows from `seed`, and live where `rows` has them.
        """
        super().__init__(loss_fn, precision)
        self._axis, self._bucket_bytes, self._foreign = axis, bucket_bytes, foreign or ForeignState()
        self._codec = _CODECS[reducer]() if reducer != "exact" else None
        self._gathered: dict[int, Tensor] = {}
        self._sharing, self._network, self._tell = sharing, network or (lambda: axis), tell
        self._check_every, self._redone, self._seed, self._make_rows = check_every, 0, seed, rows
        self.spread, self._local = spread, nn.Module()
        self._held: Holding | None = None

    def setup(self, model: nn.Module, optimizer: Optimizer, *, joining: bool = False) -> None:
        """With `joining`, the other ranks are training already: `held.attach` is what comes next.

        Where each has a part of the model, `take_part` does that, too.
        """
        self._whole, self._model, self._local, self._optimizer = model, model, model, optimizer
        if self.spread is not None:
            refuse_closures(optimizer, "divided")
            if joining:
                return
            divided = self.spread.divide_(model, optimizer)
            self._model, self._local = divided.stand_in, divided.local
        self._make_ready(optimizer)
        if not joining:
            self.synchronise()

    def look_first(self, look: FirstLook) -> None:
        if self.spread is None:
            super().look_first(look)

    @property
    def _users_model(self) -> nn.Module:
        return self._whole

    def take_part(self, axis: Axis, known: Division) -> Divided:
        """Have a place beside ranks that are training, who have the model divided like this."""
        assert self.spread is not None
        divided = self.spread.divide_(self._model, self._optimizer, known)
        self._axis, self._model, self._local = axis, divided.stand_in, divided.local
        self._make_ready(self._optimizer)
        self.held.attach(None)
        return divided

    @property
    def has_part(self) -> bool:
        return self._held is not None

    def _make_ready(self, optimizer: Optimizer) -> None:
        self._held = self._hold(self._local, optimizer)
        self._buffers = StepBuffers(self._local, self._foreign)
        self._rows = self._make_rows(self._local, self._seed)
        self._tell_where_rows_are()
        if self._rows:
            refuse_closures(optimizer, "rows")
        if self.has_residuals:
            refuse_closures(optimizer, "residuals")

    def _hold(self, model: nn.Module, optimizer: Optimizer) -> Holding:
        return Holding(
            model,
            optimizer,
            self._axis,
            self._sharing,
            self._network,
            self._codec,
            bucket_bytes=self._bucket_bytes,
            check_every=self._check_every,
            tell=self._tell,
            reduction=self.spread.reduction if self.spread is not None else None,
        )

    @property
    def divided(self) -> Divided | None:
        """What this rank has of the model, where that is not all of it."""
        return self.spread.divided if self.spread is not None else None

    def _tell_where_rows_are(self) -> None:
        if self._rows and self._rows.are_here:
            self._tell("no parameter servers in this strategy: every worker keeps all rows of the embeddings")
        elif not self._rows and not self._rows.are_here:
            self._tell("the parameter servers have nothing to do: no layer is an mh.Embedding or mh.EmbeddingBag")

    @property
    def served_rows(self) -> ServedStep | None:
        """Rows that parameter servers have, if the model has any."""
        return self._rows if self._rows and isinstance(self._rows, ServedStep) else None

    @property
    def held(self) -> Holding:
        """Where gradients are summed and weights held."""
        assert self._held is not None, "setup comes first"
        return self._held

    @contextmanager
    def editing(self) -> Iterator[nn.Module]:
        """Change weights by hand, or which of them are trained. On leaving, every rank has rank 0's."""
        self._check_editable()
        alone = self.held.common.editing() if self.held.common is not None else nullcontext()
        with torch.no_grad(), alone:
            yield self._model
        self.synchronise()

    def _check_editable(self) -> None:
        if self.spread is not None:
            raise TrainingFailed(
                "No worker has all of the model's weights, so none can edit them.",
                fix=["change the weights before the trainer has them", "trainer.load(FILE), of whole weights"],
            )

    def synchronise(self) -> None:
        """Give every rank rank 0's weights and buffers, and look again at which parameters take gradients."""
        for param in self._local.parameters():
            param.grad = None  # one that is frozen now must not be updated with its last gradient for ever
        self.held.divide()
        shared = set(map(id, self.held.gradients.params)) if self.held.common is not None else set()
        own = [param for param in self._local.parameters() if id(param) not in shared]
        self._axis.broadcast_([*own, *self._local.buffers()], "weights of rank 0")
        self._axis.barrier("weights of rank 0")
        self.held.accept_weights()
        self._rows.synchronise(self._axis)
        self._buffers = StepBuffers(self._local, self._foreign)

    # Ranks that come and go.

    def abandon(self) -> None:
        """Leave the model alone: setting up has failed, and there will be another engine."""
        if self._held is not None:
            self._held.abandon()

    def put_down(self) -> Callable[[], None]:
        if self._held is None:
            return lambda: None
        self._rows.put_down()
        return self._held.put_down()

    def take_up(self) -> None:
        self._rows.take_up()
        self.synchronise()

    def regroup(self, axis: Axis, sharing: Sharing | None) -> None:
        """Go on with other ranks. Rows of a step under way stay, where they lie in shared memory."""
        self._axis, self._sharing, self._redone = axis, sharing, 0
        if self._held is not None:
            self._held.regroup(axis, sharing)

    round_closed, goes_back, averaging = True, False, "none"

    def round_closes_with(self, step: int) -> bool:
        return True

    @property
    def can_go_on(self) -> bool:
        """Whether a step that was interrupted can be finished after `regroup`, from what is in shared memory.

        Gradients of embeddings' rows do not lie there.
        """
        return self.held.shared is not None and self.held.shared.keeps_rows and not self._rows

    # Copies that should be the same.

    @property
    def compares_copies(self) -> bool:
        return self._check_every > 0 and self._axis.size > 1 and self.spread is None

    def hashes(self) -> Hashes:
        """What this rank says of its copy: hashes of weights, buffers and the optimizer's states."""
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
        of_host = shared.digest_of_part() if isinstance(shared, SharedWeights) and self.held.ranks_per_copy else 0
        return Hashes(fingerprint(own, [groups, scale, *self._rows.sparse.digests()]), of_host)

    def compare(self, told: Sequence[Hashes]) -> None:
        """`CopiesDiffer` on every rank, unless these, of all ranks, are the same."""
        found = verdict(told, self.held.ranks_per_copy)
        if not found.agrees:
            self._redone += 1  # whoever is lost when the step is done again must not seem to have done its part
            raise CopiesDiffer(found)

    # What is kept of a run besides its weights.

    @property
    def has_residuals(self) -> bool:
        """Whether each rank has state of its own, so that `gather_state` needs all of them."""
        return self._codec is not None and self._codec.feeds_back

    def gather_state(self) -> None:
        """Before `state`, on every rank: what ranks have of their own comes to rank 0."""
        if self.has_residuals:
            assert self.held.coded is not None
            self._gathered = self.held.coded.gather_residuals()

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if self.served_rows is not None:
            state["rows"] = self.served_rows.state()
        if self._precision.scale:
            state["loss_scale"] = self._precision.scale.state()
        if (coded := self.held.coded) is not None:
            names, order = self.held.trained_names(), coded.settled_order
            state["order"] = [names[index] for index in order] if order is not None else None
            state["residuals"] = {names[index]: rows for index, rows in self._gathered.items()}
            self._gathered = {}  # as large as the weights, times the workers
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """After the weights themselves."""
        self.held.accept_weights()
        self._buffers = StepBuffers(self._local, self._foreign)  # they have other values now
        if self.served_rows is not None:
            self.served_rows.restore(state.get("rows", {}))
        if self._precision.scale and "loss_scale" in state:
            self._precision.scale.restore(state["loss_scale"])
        if (coded := self.held.coded) is not None and "residuals" in state:
            place = {name: index for index, name in enumerate(self.held.trained_names())}
            order = [place[name] for name in state["order"] or () if name in place]
            rows = {place[name]: rows for name, rows in state["residuals"].items() if name in place}
            coded.restore(order if order and len(order) == len(place) else None, rows)

    def close(self) -> None:
        if self._held is not None and isinstance(self._rows, ServedStep):
            self._rows.close()
        self._axis.close()
