"""Everything that a checkpoint holds, in one place: model, optimizer, schedule, hooks and how far the run has come.

`Training` is shared by the trainer and by a user's own loop. It knows how to become a snapshot and how to become
again what a snapshot was; when that happens is `saving`'s business.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
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
from manyhands.events import StepDone
from manyhands.native import why_not
from manyhands.parallel.replicas.model_parallel_replica import Division
from manyhands.parameter_server.engine.served import Served
from manyhands.strategies.base import Engine, StepStats
from manyhands.strategies.replicated import Replicated
from manyhands.training.setup.engine_factory import AnyEngine
from manyhands.training.setup.user_model import load_weights, read_weights
from manyhands.training.state.checkpoint_broadcast import Incoming
from manyhands.training.state.gathered_state import WholeState
from manyhands.training.step.garbage_collection import Garbage
from manyhands.training.step.hooks import Hooks
from manyhands.training.step.pipeline_report import report_pipeline
from manyhands.training.step.resource_meter import Meter
from manyhands.training.step.straggler_tracking import Pacing
from manyhands.training.step.stragglers import report_pace
from manyhands.training.worker.worker import Worker

__all__ = ["Progress", "Training"]

# How much the newest step counts in the speed that is told.
SMOOTHING = 0.1


class Progress(msgspec.Struct):
    """How far the run has come. Steps and epochs count over all calls of `fit`."""

    step: int = 0
    epoch: int = 0
    row: int = 0
    """Rows of the current epoch that are consumed."""
    call: int = 0
    """The public call that is running."""
    call_step: int = 0
    """The step at which it began, and below, the epoch."""
    call_epoch: int = 0
    history: list[dict[str, float]] = []
    """Results of the running call, a row for each epoch or validation."""
    epoch_loss: float = 0.0
    epoch_rows: int = 0
    """Sums for the mean training loss of the epoch under way."""
    epoch_mean: float = 0.0
    """The mean of the last epoch that has ended."""
    row_loss: float = 0.0
    row_rows: int = 0
    """The same since the newest row of the history."""
    ended: bool = False
    """The running call has been asked to end, or has stopped early: no step of it follows."""
    best: float | None = None
    """The best result of the running call, by what the best checkpoint is chosen by."""
    order: str = ""
    """In which the rows of the current epoch are taken; empty: shuffled, or as they come."""
    agreed: int = 0
    """The last step after which the workers' copies of the state were known to be the same."""
    results: dict[str, float] = {}
    """Of the weights as they are now, if they were evaluated: they decide which checkpoint is the best."""


class Training:
    """The live state of a run on this worker."""

    def __init__(
        self,
        worker: Worker,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        engine: AnyEngine,
        hooks: Hooks,
        slices: int,
        pacing: Pacing,
        whole: WholeState | None = None,
    ) -> None:
        """With `whole`, this worker has a part of the model."""
        self.whole = whole
        self.worker, self.model, self.optimizer, self.scheduler = worker, model, optimizer, scheduler
        self.engine, self.hooks, self.slices, self.pacing = engine, hooks, slices, pacing
        self.garbage = Garbage(manage=worker.resolved.spec.train.manage_gc)
        self.progress = Progress()
        self.last_stats: StepStats | None = None
        """Of the last committed step."""
        self._hook_states: list[Any] = []
        self._kept: tuple[dict[str, Any], dict[str, Tensor]] | None = None
        self._names = {id(param): plain_name(name) for name, param in model.named_parameters()}
        self._step_s = 0.0
        self.meter = Meter(worker.rank, worker.world_size)
        self.start_clock()

    @property
    def in_step(self) -> Engine:
        """The engine, where all workers take each step together."""
        assert not isinstance(self.engine, Served)
        return self.engine

    def start_clock(self) -> None:
        """What was done until now is no part of the next step's time."""
        self._done_at = time.perf_counter()

    def step_done(self, step: Step, stats: StepStats, total_steps: int | None) -> None:
        """Move on to where the step left off, and tell watchers."""
        self.last_stats = stats
        if stats.collect:
            stats.seconds["gc"] = self.garbage.collect()
        progress, after = self.progress, step.after
        progress.step, progress.epoch, progress.row = step.number, after.epoch, after.row
        if stats.agreed:
            progress.agreed = step.number - 1
        now = time.perf_counter()
        took_s, self._done_at = now - self._done_at, now
        self._step_s = took_s if not self._step_s else self._step_s + SMOOTHING * (took_s - self._step_s)
        stats.samples_per_s = stats.rows / self._step_s
        self.worker.emit(
            StepDone(
                time_s=time.time(),
                step=step.number,
                epoch=step.epoch - progress.call_epoch,
                loss=stats.loss,
                rows=stats.rows,
                samples_per_s=stats.samples_per_s,
                phases=stats.seconds,
                lr=stats.lr,
                grad_norm=stats.grad_norm,
                eta_s=(total_steps - step.number) * self._step_s if total_steps is not None else None,
                total_steps=total_steps,
                took_s=took_s,
                start=stats.start or (step.epoch, step.start),
                generation=self.worker.group.generation,
                staleness=stats.staleness,
                batch=stats.batch,
                together=stats.together,
                turn=getattr(step, "turn", None),
            )
        )
        self.meter.add(stats)
        if self.meter.due(now):
            self.tell_used()
        verdict = self.pacing.add(step.shares, self.slices, stats.times)
        if verdict is not None:
            report_pace(self.worker, step.number, verdict)

    def regrouped(self) -> None:
        """This worker's rank, or their number, is another now."""
        self.meter.move(self.worker.rank, self.worker.world_size)
        self.pacing.regrouped(self.worker.num_replicas)

    def tell_used(self, *, ended: bool = False) -> None:
        """Tell watchers what this worker used since the meter was started."""
        used = self.meter.used(self.progress.step, ended=ended)
        if used is not None:
            self.worker.tell(used)

    def tell_layout(self) -> None:
        """What the layout cost in the last step, where there is something to tell. For all workers alike."""
        spread = getattr(self.engine, "spread", None)
        if spread is not None and spread.divided.passes is not None:
            report_pipeline(self.worker, spread.divided.passes.runner, self.progress.step)

    def position(self) -> Position:
        return Position(seed=self.worker.resolved.spec.run.seed, epoch=self.progress.epoch, row=self.progress.row)

    @property
    def saves_together(self) -> bool:
        """Whether a save needs all workers."""
        return self.engine.has_residuals or self.whole is not None

    def gather_state(self) -> None:
        """Before the chief saves: what it lacks comes to it, or in a divided model is known to it. For all alike."""
        self.engine.gather_state()
        if self.whole is not None:
            self.whole.meet(self.worker.saving)

    def whole_weights(self) -> dict[str, Tensor] | None:
        """All of the model's tensors, on the chief, where it has a part of them itself. For all workers alike."""
        if self.whole is None:
            return None
        return self.whole.weights(self.worker.saving)

    def whole_gradients(self) -> dict[str, Tensor]:
        """What the last step left in `.grad`, on the chief. For all workers alike."""
        if self.whole is not None:
            return self.whole.gradients(self.worker.saving)
        named = self.model.named_parameters()
        return {plain_name(name): one.grad for name, one in named if one.grad is not None}

    def load_weights(self, path: Path) -> None:
        """Have the weights of a file that the chief reads. For all workers alike."""
        if self.whole is None:
            if self.worker.is_chief:
                load_weights(self.model, path)
        else:
            self.whole.take(self._weights_of(self.whole.like(), path))
        self.engine.synchronise()

    def _weights_of(self, like: Mapping[str, Tensor], path: Path) -> Iterator[tuple[str, Tensor]]:
        """A file's, on every worker, one after the other."""
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

    def take_part(self, known: Division) -> None:
        """Of a model that others train already, divided like this; after that, have the same one in another group."""
        assert self.whole is not None and isinstance(self.engine, Replicated)
        axis = self.worker.replicas
        if self.has_part:
            self.worker.connect_lasting()
            self.engine.regroup(axis, None)
        else:
            divided = self.engine.take_part(axis, known)
            self.whole.divided(divided.shares, divided.present)

    @property
    def has_part(self) -> bool:
        """Of a divided model; before that, a newcomer has all of it, or is about to give up what is others'."""
        return isinstance(self.engine, Replicated) and self.engine.has_part

    @property
    def division(self) -> Division | None:
        """How the model is divided, as far as it follows from no setting."""
        spread = getattr(self.engine, "spread", None)
        return spread.division if spread is not None and spread.is_divided else None

    def parts(self, *, own: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The live tensors by name, and the rest as JSON-able values. The tensors are not copies.

        Of a divided model they are announced: `whole.bring` has their values. With `own` they are this worker's.
        """
        if self.whole is None:
            weights, aliases, extra = model_state(self.model)
            optimizer = optimizer_state(self.optimizer, self._names)
        else:
            weights, aliases, extra, optimizer = self.whole.own() if own else self.whole.gathered()
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
        return tensors, {
            "training": pack(rest, "training", tensors),
            "progress": msgspec.to_builtins(self.progress),
            "identity": self.identity(),
        }

    def identity(self) -> dict[str, Any]:
        """What must not change when a run goes on, or the result would."""
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
            identity["fused updates"] = not why_not()  # they round differently
        return identity

    def show(self, stored: Stored) -> None:
        """Have the weights of a checkpoint in the model, and nothing else of it."""
        check_model(stored.manifest, model_state(self.model)[0])
        rest, tensors = unpack(stored.state["training"], stored.tensors()), stored.tensors()
        weights = {name.removeprefix("model/"): one for name, one in tensors.items() if name.startswith("model/")}
        tied = {name: weights[first] for name, first in rest["aliases"].items()}
        self.model.load_state_dict({**weights, **tied, **rest["model_extra"]})

    def restore(self, loaded: Incoming) -> None:
        """For all workers alike."""
        self._check_identity(loaded.state["identity"])
        check_model(loaded.manifest, model_state(self.model)[0] if self.whole is None else self.whole.like())
        tensors = loaded.all() if self.whole is None else self.whole.keep(loaded.one_by_one())
        self.take(loaded.state, tensors, with_hooks=True)
        self.progress.agreed = self.progress.step  # everybody has what the chief has read

    def take(self, state: dict[str, Any], tensors: dict[str, Tensor], *, with_hooks: bool, own: bool = False) -> None:
        """Become what `parts` told of. A divided model's weights are in their places already, unless they are `own`."""
        rest = unpack(state["training"], tensors)
        if self.whole is not None and own:
            self.whole.take_own(tensors)
        if self.whole is None:
            named = ((name, one) for name, one in tensors.items() if name.startswith("model/"))
            weights = {name.removeprefix("model/"): one for name, one in named}
            tied = {name: weights[first] for name, first in rest["aliases"].items()}
            load_model_state(self.model, {**weights, **tied, **rest["model_extra"]})
        self._restore_optimizer(rest["optimizer"], whole=not own)
        if self.scheduler is not None and rest["scheduler"] is not None:
            self.scheduler.load_state_dict(rest["scheduler"])
        self.engine.restore(rest["strategy"])
        self._hook_states = rest["hooks"] if with_hooks else []
        restore_rng(rest["rng"])
        self.progress = msgspec.convert(state["progress"], Progress)

    def keep(self) -> None:
        """Remember this state, where a loss takes workers back to it; in place of what was remembered before."""
        if self.worker.is_elastic and self.engine.goes_back:
            tensors, state = self.parts()
            self._kept = state, {name: value.clone() for name, value in tensors.items()}

    def forget(self) -> None:
        """There is no going back from here."""
        self._kept = None

    def go_back(self) -> int:
        """Become what was remembered, if anything was; how many steps that takes back."""
        if self._kept is None:
            return 0
        before = self.progress.step
        self.take(*self._kept, with_hooks=False)
        return before - self.progress.step

    def restore_hooks(self) -> None:
        """After the hooks' own `begin`, which usually sets them to their start."""
        self.hooks.restore(self._hook_states)
        self._hook_states = []

    def _restore_optimizer(self, saved: dict[str, Any], *, whole: bool) -> None:
        try:
            mine = self.whole.part_of(saved) if self.whole is not None and whole else saved
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
        # The first checkpoints say nothing of these: there was one reducer, nobody averaged, who updated was not told.
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
