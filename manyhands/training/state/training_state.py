"""The state that a checkpoint contains: model, optimizer, learning-rate schedule, hooks and progress.

The trainer and user loops share `TrainingState`. It provides its state for a snapshot and loads it from one;
`checkpointing` decides when, and `training/loop/step_lifecycle.py` when a step is committed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from manyhands.checkpoint.reader import Stored, check_model
from manyhands.checkpoint.state_packing import (
    load_model_state,
    model_state,
    optimizer_state,
    pack,
    restore_optimizer,
    restore_rng,
    rng_state,
    unpack,
)
from manyhands.checkpoint.tensor_names import plain_name
from manyhands.data.batches import Step
from manyhands.data.sample_order import Position
from manyhands.errors import CheckpointMismatch
from manyhands.native import why_not
from manyhands.parallel.replicas.model_parallel_replica import PartitionSpec
from manyhands.parameter_server.engine.leased_engine import LeasedEngine
from manyhands.strategies.base import Engine, StepStats
from manyhands.strategies.replicated import Replicated
from manyhands.training.setup.engine_factory import AnyEngine
from manyhands.training.setup.user_model import load_weights, read_weights
from manyhands.training.state.checkpoint_broadcast import CheckpointBroadcast
from manyhands.training.state.gathered_state import WholeState
from manyhands.training.step.garbage_collection import GarbageCollection
from manyhands.training.step.hooks import Hooks
from manyhands.training.worker.worker import Worker

__all__ = ["Progress", "TrainingState"]


class Progress(msgspec.Struct):
    """Progress of a training. Steps and epochs count over all calls of `fit`."""

    step: int = 0
    epoch: int = 0
    row: int = 0
    """Rows of the current epoch that have been consumed."""
    call: int = 0
    """The public call that is running."""
    call_step: int = 0
    """The step at which that call began; `call_epoch` is the epoch."""
    call_epoch: int = 0
    history: list[dict[str, int | float]] = []
    """Results of the running call, an entry for each epoch or validation."""
    epoch_loss: float = 0.0
    epoch_rows: int = 0
    """Sums for the mean training loss of the current epoch."""
    epoch_mean: float = 0.0
    """Mean training loss of the last finished epoch."""
    row_loss: float = 0.0
    row_rows: int = 0
    """Sums for the mean training loss since the newest entry of the history."""
    ended: bool = False
    """The running call was requested to end, or has stopped early: it takes no further step."""
    best: float | None = None
    """The best value, in the running call, of the result by which the best checkpoint is chosen."""
    order: str = ""
    """The custom order of the rows of the current epoch; empty: shuffled, or in the order of the data."""
    agreed: int = 0
    """The last step after which the workers' copies of the state were known to be equal."""
    results: dict[str, float] = {}
    """Results of the current weights, if they were evaluated; they decide which checkpoint is the best."""


class TrainingState:
    """The live state of a training on this worker."""

    def __init__(
        self,
        worker: Worker,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        engine: AnyEngine,
        hooks: Hooks,
        slices: int,
        whole: WholeState | None = None,
        sums: Sequence[Tensor] = (),
    ) -> None:
        """`whole` is set if this worker has only a part of the model; `sums` are those of its `Parts`."""
        self.whole, self._sums = whole, sums
        self.worker, self.model, self.optimizer, self.scheduler = worker, model, optimizer, scheduler
        self.engine, self.hooks, self.slices = engine, hooks, slices
        self.garbage = GarbageCollection(manage=worker.resolved.spec.train.manage_gc)
        self.progress = Progress()
        self.last_stats: StepStats | None = None
        """Statistics of the last committed step."""
        self._hook_states: list[Any] = []
        self._kept: tuple[dict[str, Any], dict[str, Tensor]] | None = None
        self._names = {id(param): plain_name(name) for name, param in model.named_parameters()}

    @property
    def in_step(self) -> Engine:
        """The engine of a strategy in which all workers take each step together."""
        assert not isinstance(self.engine, LeasedEngine)
        return self.engine

    def advance(self, step: Step, stats: StepStats) -> None:
        """Record the progress after a committed step."""
        self.last_stats = stats
        if stats.collect:
            stats.seconds["gc"] = self.garbage.collect()
        progress, after = self.progress, step.after
        progress.step, progress.epoch, progress.row = step.number, after.epoch, after.row
        if stats.agreed:
            progress.agreed = step.number - 1

    def advance_schedule(self, loss: float | None = None) -> None:
        """Advance the learning-rate schedule; one by results, such as ReduceLROnPlateau, by the `loss` of an epoch."""
        if self.scheduler is None:
            return
        if hasattr(self.scheduler, "patience") and loss is not None:
            self.scheduler.step(loss)
        else:
            self.scheduler.step()

    def position(self) -> Position:
        return Position(seed=self.worker.resolved.spec.run.seed, epoch=self.progress.epoch, row=self.progress.row)

    @property
    def saves_together(self) -> bool:
        """Whether a save needs all workers."""
        return self.engine.has_residuals or self.whole is not None

    def gather_state(self) -> None:
        """Before a save, send the chief the state that it lacks; of a partitioned model, only which rank has what.

        Call it on all workers.
        """
        self.engine.gather_state()
        if self.whole is not None:
            self.whole.exchange_layout(self.worker.saving)

    def whole_weights(self) -> dict[str, Tensor] | None:
        """All tensors of a partitioned model, on the chief; None if it is not partitioned. Call it on all workers."""
        if self.whole is None:
            return None
        return self.whole.weights(self.worker.saving)

    def whole_gradients(self) -> dict[str, Tensor]:
        """The gradients that the last step left in `.grad`, on the chief. Call it on all workers."""
        if self.whole is not None:
            return self.whole.gradients(self.worker.saving)
        named = self.model.named_parameters()
        return {plain_name(name): one.grad for name, one in named if one.grad is not None}

    def load_weights(self, path: Path) -> None:
        """Load weights from a file that the chief reads. Call it on all workers."""
        if self.whole is None:
            if self.worker.is_chief:
                load_weights(self.model, path)
        else:
            self.whole.load_weights(self._weights_of(self.whole.like(), path))
        self.engine.synchronise()

    def _weights_of(self, like: Mapping[str, Tensor], path: Path) -> Iterator[tuple[str, Tensor]]:
        """The weights of a file, on every worker, one after another."""
        found = read_weights(path) if self.worker.is_chief else {}
        missing = [name for name, one in like.items() if self.worker.is_chief and not _fits(found.get(name), one)]
        if missing:
            raise CheckpointMismatch(f"{path} does not fit the model: {', '.join(missing[:3])}.")
        for name, one in like.items():
            weight = torch.empty_like(one, device="cpu")
            if self.worker.is_chief:
                weight.copy_(found[name])
            self.worker.axis.broadcast_([weight], f"{name} of the file")
            yield name, weight

    def partition(self, known: PartitionSpec) -> None:
        """Partition the model as `known`, on a newcomer; on a worker that has its part, connect it in the new group."""
        assert self.whole is not None and isinstance(self.engine, Replicated)
        axis = self.worker.replicas
        if self.has_part:
            self.worker.connect_persistent_axes()
            self.engine.regroup(axis, None)
        else:
            part = self.engine.join_partition(axis, known)
            self.whole.divided(part.shares, part.present)

    @property
    def has_part(self) -> bool:
        """Whether this worker has its part of a partitioned model. A newcomer first has all of the model."""
        return isinstance(self.engine, Replicated) and self.engine.has_part

    @property
    def division(self) -> PartitionSpec | None:
        """How the model is partitioned, as far as settings do not determine it."""
        spread = getattr(self.engine, "spread", None)
        return spread.division if spread is not None and spread.is_divided else None

    def live_state(self, *, own: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The live tensors by name, and the rest as JSON-able values. The tensors are not copies.

        Tensors of a partitioned model are announced without values, which `whole.gather_tensors` sends. With `own`
        they are the ones that this worker has.
        """
        if self.whole is None:
            weights, aliases, extra = model_state(self.model)
            optimizer = optimizer_state(self.optimizer, self._names)
        else:
            weights, aliases, extra, optimizer = self.whole.local_state() if own else self.whole.gathered()
        tensors = {f"model/{name}": value for name, value in weights.items()}
        rest = {
            "model_extra": extra,
            "aliases": aliases,
            "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "strategy": self.engine.state(),
            "hooks": self.hooks.state(),
            "rng": rng_state(),
        }
        if self._sums:
            rest["sums"] = list(self._sums)
        return tensors, {
            "training": pack(rest, "training", tensors),
            "progress": msgspec.to_builtins(self.progress),
            "identity": self.identity(),
        }

    def identity(self) -> dict[str, Any]:
        """Settings that must stay the same when a run resumes, or its result would change."""
        spec = self.worker.resolved.spec
        identity: dict[str, Any] = {
            "seed": spec.run.seed,
            "exact": spec.train.exact,
            "precision": spec.train.precision,
            "reducer": spec.comm.reducer,
            "averaging": self.engine.averaging,
        }
        if spec.train.exact:
            identity["threads"] = self.worker.threads
            identity["fused updates"] = not why_not()  # fused updates round differently
        return identity

    def show(self, stored: Stored) -> None:
        """Load only the weights of a checkpoint into the model."""
        check_model(stored.manifest, model_state(self.model)[0])
        rest, tensors = unpack(stored.state["training"], stored.tensors()), stored.tensors()
        weights = {name.removeprefix("model/"): one for name, one in tensors.items() if name.startswith("model/")}
        tied = {name: weights[first] for name, first in rest["aliases"].items()}
        load_model_state(self.model, {**weights, **tied, **rest["model_extra"]})

    def restore(self, loaded: CheckpointBroadcast) -> None:
        """Load a checkpoint. Call it on all workers."""
        self._check_identity(loaded.state["identity"])
        check_model(loaded.manifest, model_state(self.model)[0] if self.whole is None else self.whole.like())
        tensors = loaded.all() if self.whole is None else self.whole.load_tensors(loaded.one_by_one())
        self.load_state(loaded.state, tensors, with_hooks=True)
        self.progress.agreed = self.progress.step  # every worker has the state that the chief has read

    def load_state(
        self, state: dict[str, Any], tensors: dict[str, Tensor], *, with_hooks: bool, own: bool = False
    ) -> None:
        """Load what `live_state` returned. Weights of a partitioned model are in place already, unless `own` is set."""
        rest = unpack(state["training"], tensors)
        if self.whole is not None and own:
            self.whole.load_local(tensors)
        if self.whole is None:
            named = ((name, one) for name, one in tensors.items() if name.startswith("model/"))
            weights = {name.removeprefix("model/"): one for name, one in named}
            tied = {name: weights[first] for name, first in rest["aliases"].items()}
            load_model_state(self.model, {**weights, **tied, **rest["model_extra"]})
        self._restore_optimizer(rest["optimizer"], whole=not own)
        if self.scheduler is not None and rest["scheduler"] is not None:
            self.scheduler.load_state_dict(rest["scheduler"])
        self.engine.restore(rest["strategy"])
        for mine, loaded in zip(self._sums, rest.get("sums", ()), strict=False):
            mine.copy_(loaded)
        self._hook_states = rest["hooks"] if with_hooks else []
        restore_rng(rest["rng"])
        self.progress = msgspec.convert(state["progress"], Progress)

    def keep(self) -> None:
        """Keep a copy of this state, if losing a worker rolls all ranks back to it; it replaces the copy before."""
        if self.worker.is_elastic and self.engine.rolls_back:
            tensors, state = self.live_state()
            self._kept = state, {name: value.clone() for name, value in tensors.items()}

    def forget(self) -> None:
        """Drop that copy: there is no rollback from here."""
        self._kept = None

    def roll_back(self) -> int:
        """Load the copy that `keep` made, if there is one; returns the number of steps undone."""
        if self._kept is None:
            return 0
        before = self.progress.step
        self.load_state(*self._kept, with_hooks=False)
        return before - self.progress.step

    def restore_hooks(self) -> None:
        """Restore the hooks' state; after their `begin`, which usually resets them."""
        self.hooks.restore(self._hook_states)
        self._hook_states = []

    def _restore_optimizer(self, saved: dict[str, Any], *, whole: bool) -> None:
        try:
            mine = self.whole.local_optimizer_state(saved) if self.whole is not None and whole else saved
            restore_optimizer(self.optimizer, mine, self._names)
        except (KeyError, ValueError) as error:
            raise CheckpointMismatch(
                f"The checkpoint's optimizer state does not fit this {type(self.optimizer).__name__}: {error}.",
                fix=[
                    "the optimizer and parameter groups that the run began with",
                    "a new run directory: --run-dir NEW",
                ],
            ) from error

    def _check_identity(self, saved: dict[str, Any]) -> None:
        mine = self.identity()
        # The first checkpoints lack these: there was one reducer, no averaging, and fused updates were not recorded.
        saved = {"reducer": "exact", "averaging": "none", "fused updates": mine.get("fused updates"), **saved}
        for name, now in mine.items():
            before = saved.get(name)
            if before != now:
                raise CheckpointMismatch(
                    f"The run began with {name}={before}, but now {name}={now}: the result would not be the same.",
                    fix=[f"{name}={before}", "a new run directory: --run-dir NEW"],
                )


def _fits(found: Any, wanted: Tensor) -> bool:
    return isinstance(found, Tensor) and found.shape == wanted.shape
