"""The trainer: a model, a loss and an optimizer, trained by any number of workers with the same result.

This file is the public object and what its calls mean; getting ready is in `run`, the loop in `fitting`, the step in
`strategies`. Start reading at `Trainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyhands.data.randomness import drawn_unseeded, seed_all
from manyhands.data.source import Source, split
from manyhands.errors import DataError, SpecError
from manyhands.runtime import evaluating
from manyhands.runtime.check_record import Recording
from manyhands.runtime.entering import enter
from manyhands.runtime.fitting import Fit, FitSettings
from manyhands.runtime.hooks import EarlyStop, Hooks
from manyhands.runtime.keywords import checked_keywords
from manyhands.runtime.models import assemble, save_model, set_precision_
from manyhands.runtime.plan_show import tell_plan
from manyhands.runtime.run import Run
from manyhands.runtime.run_checks import by_step, check_counts
from manyhands.runtime.saving import Checkpoints, Saver, check_checkpoints
from manyhands.runtime.served_fitting import ServedFit
from manyhands.runtime.serving import serve
from manyhands.runtime.steps import Steps
from manyhands.runtime.strategy_names import StrategyChoice
from manyhands.runtime.stretched_fitting import StretchedFit
from manyhands.spec.check_order import order_of_this_worker
from manyhands.spec.load import nearest
from manyhands.strategies.base import LossFn, MetricFn
from manyhands.strategies.served import Served
from manyhands.strategies.stretched import Stretched

__all__ = ["History", "Trainer"]

EVAL_BATCH = 256
UNSEEDED = (
    "The model was made before the trainer, and torch was not seeded: seed= has no part in its first weights, which "
    "may be others in every run. Give a function that makes it, model=lambda: Net(), or call torch.manual_seed before."
)


class History(list[dict[str, float]]):
    """One dict per epoch: epoch, step, loss, and val_... for what validation found."""


class Trainer:
    """Trains `model` so that the result does not depend on how many workers did it.

    `model` is an `nn.Module`, a function that makes one or a `.keras` file; `loss(model, batch)` returns the mean over
    the batch or a (sum, weight) pair; `optimizer` is a function of the parameters or a ready torch optimizer. A
    compiled Keras model brings its own loss, optimizer and metrics. `seed` sets the first weights of a model that is
    made here, by a function; a ready one has those it has. Public calls are numbered: in a restarted script,
    those that the run has already finished return their recorded result at once.

    `audit=True` has one slice of every step computed by two workers, and finds the one whose gradients are wrong.

    Before the first step the loss of a few rows is compared with those of their parts, and a warning says what to
    write where it is no mean over examples; `check_loss=False` leaves that out.

    `tune=True`, in a script started by hand, does what `mh tune` does before it trains, and goes on with what was
    fastest, with several workers if that is it; nothing is changed that changes the maths. Under `mh run`, and so in
    the workers and trials that come of it, it does nothing.
    """

    @checked_keywords
    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module] | str | Path,
        loss: LossFn | None = None,
        optimizer: Callable[[Any], torch.optim.Optimizer]
        | torch.optim.Optimizer
        | Mapping[str, Callable[[Any], torch.optim.Optimizer]]
        | None = None,
        strategy: str | StrategyChoice | None = None,
        *,
        precision: str | None = None,
        metrics: Mapping[str, MetricFn] | None = None,
        seed: int | None = None,
        slices: int | None = None,
        accumulate: int | None = None,
        exact: bool | None = None,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        scheduler_every: str = "step",
        clip_norm: float | None = None,
        balance: bool | None = None,
        audit: bool | None = None,
        check_loss: bool | None = None,
        hooks: Sequence[Any] = (),
        run_dir: str | Path | None = None,
        tune: bool = False,
    ) -> None:
        if scheduler_every not in ("step", "epoch"):
            raise SpecError(f"scheduler_every is {scheduler_every!r}.", fix=['"step"', '"epoch"'])
        arguments = {
            "precision": precision,
            "seed": seed,
            "slices": slices,
            "accumulate": accumulate,
            "exact": exact,
            "clip_norm": clip_norm,
            "balance": balance,
            "audit": audit,
            "check_loss": check_loss,
            "run_dir": str(run_dir) if run_dir is not None else None,
        }
        worker = enter(strategy, arguments, tune=tune)
        if scheduler is not None and scheduler_every == "step":
            scheduler = by_step(scheduler)
        unseeded = (
            isinstance(model, nn.Module) and worker.resolved.origins["run.seed"] != "default" and drawn_unseeded()
        )
        seed_all(worker.resolved.spec.run.seed)  # a model made by a function starts the same in every run
        parts = assemble(model, loss, optimizer, metrics)
        set_precision_(parts.model, worker.resolved.spec.train.precision)
        if worker.is_server:
            serve(worker, parts, scheduler)
        order = order_of_this_worker()
        if order is not None:
            hooks = [*hooks, Recording(order, lambda: self._run)]
        self._run = Run(worker, parts, Hooks(hooks, is_chief=lambda: worker.is_chief), scheduler)
        if unseeded:
            self._run.warn_when_ready(UNSEEDED)
        self._scheduler_every = scheduler_every
        self._fit: Fit | None = None

    @property
    def model(self) -> nn.Module:
        return self._run.parts.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._run.ready().optimizer

    @property
    def is_chief(self) -> bool:
        return bool(self._run.worker.is_chief)

    @property
    def run_dir(self) -> Path:
        self._run.ready()
        return self._run.worker.run_dir

    @property
    def step(self) -> int:
        """Committed steps, over all calls of `fit`."""
        return self._run.ready().progress.step

    @checked_keywords
    def fit(
        self,
        data: Any,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        batch_per_worker: int | None = None,
        validation: Any = None,
        validation_split: float | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None,
        checkpoint: Checkpoints | None = None,
        early_stop: EarlyStop | None = None,
        resume: str = "auto",
    ) -> History:
        """Train for `epochs`, or for `steps` more steps. `batch_size` is the global batch, whatever the workers.

        Continues an unfinished run of the same directory unless `resume="never"`. Returns the epochs' results.
        """
        run = self._run
        if resume not in ("auto", "never"):
            raise SpecError(f"resume is {resume!r}.", fix=['"auto"', '"never"'])
        check_counts(batch_size=batch_size, batch_per_worker=batch_per_worker, epochs=epochs, steps=steps)
        check_counts(num_workers=num_workers)
        check_checkpoints(checkpoint)
        run.offer(data, collate, batch_size or batch_per_worker)
        if run.worker.planned is not None:
            tell_plan(run.worker.planned, run.parts, run.sample())
        run.check_memory()
        training = run.begin_call("fit", resume=resume == "auto")
        if run.calls.already_done:
            return History(run.calls.recorded())
        reading = {"collate": collate, "num_workers": num_workers}
        source, held_out = _sources(run, data, validation, validation_split, reading)
        if early_stop is not None:
            _check_early_stop(early_stop, ["loss", *run.parts.metrics] if held_out is not None else [])
        size = run.batch_size(source, batch_size, batch_per_worker)
        joined = run.worker.is_waiting
        if joined and not run.regrouping.wait_for_admission():
            return History(run.calls.recorded())
        settings = FitSettings(
            scheduler_every=self._scheduler_every,
            early_stop=early_stop,
            goes_on=joined or run.calls.goes_on,
            validate=None if held_out is None else lambda: run.evaluate(held_out, size, in_fit=True),
        )
        saver = Saver(run.worker, training, checkpoint or run.spec.checkpoint)
        taken = Steps(training, lambda: run.batches(source, size, epochs, steps), saver, run.regrouping)
        self._fit = _kind_of_fit(training.engine)(self, training, taken, run.regrouping, settings)
        if not joined:
            run.announce("fit", taken.total_steps)
            run.look_first()
        with run.regrouping.listening(taken.regrouped):
            history = History(self._fit.run())
        run.put_on_record(lambda: run.calls.finish(list(history)))
        return history

    @checked_keywords
    def evaluate(
        self, data: Any, *, batch_size: int = EVAL_BATCH, collate: Any = None, num_workers: int | None = None
    ) -> dict[str, float]:
        """Loss and metrics, each a mean over all examples; every example counts once, whatever the workers."""
        run = self._run
        check_counts(batch_size=batch_size, num_workers=num_workers)
        run.offer(data, collate, batch_size)
        run.begin_call("evaluate")
        if run.is_call_over():
            return dict(run.calls.recorded())
        source = run.source(data, collate=collate, num_workers=num_workers, shuffle=False)
        results = run.evaluate(source, batch_size)
        run.put_on_record(lambda: run.calls.finish(results))
        return results

    @checked_keywords
    def predict(
        self, data: Any, *, batch_size: int = EVAL_BATCH, collate: Any = None, num_workers: int | None = None
    ) -> Any:
        """The model's outputs for all rows of `data`, in its order, computed by all workers and returned on each.

        Where a batch is a pair, its first element is the model's input; a dict is keyword arguments.
        """
        run = self._run
        check_counts(batch_size=batch_size, num_workers=num_workers)
        run.offer(data, collate, batch_size, with_loss=False)
        run.begin_call("predict")
        path = run.calls.tensors_path()
        if run.is_call_over():
            return evaluating.from_file(path, run.calls.recorded())
        source = run.source(data, collate=collate, num_workers=num_workers, shuffle=False)
        outputs = run.predict(source, batch_size)

        def keep() -> None:
            if self.is_chief:
                run.calls.finish(evaluating.to_file(path, outputs))

        run.put_on_record(keep)
        return outputs

    def save(self, path: str | Path) -> None:
        """Write the weights as safetensors (`.pt`, `.pth`, `.keras` by that ending), whole or not at all: the chief."""
        run = self._run
        training = run.begin_call("save")
        if run.is_call_over():
            return

        def work() -> None:
            weights = training.whole_weights()
            if self.is_chief and not run.worker.in_trial:
                save_model(training.model, Path(path), weights)
            run.worker.wait_for_chief("save")

        run.regrouping.agreed(work)
        run.put_on_record(lambda: run.calls.finish(None))

    def load(self, path: str | Path) -> None:
        """Read weights written by `save`, and give every worker the chief's."""
        run = self._run
        training = run.begin_call("load")
        if run.is_call_over():
            return
        run.regrouping.agreed(lambda: training.load_weights(Path(path)))
        run.put_on_record(lambda: run.calls.finish(None))

    @contextmanager
    def editing(self) -> Iterator[nn.Module]:
        """Change weights by hand, or which of them are trained. On leaving, every worker has the chief's weights."""
        training = self._run.ready()
        if self._run.worker.is_waiting:  # the others have done it, and it gets their weights
            with torch.no_grad():
                yield training.model
            return
        with training.engine.editing() as model:
            yield model

    def request_stop(self) -> None:
        """Have `fit` end after the step under way, on every worker. For hooks."""
        if self._fit is not None:
            self._fit.stop_asked = True


def _check_early_stop(early_stop: EarlyStop, validated: list[str]) -> None:
    """One that looks at a result which no epoch has would never stop anything."""
    there, metric = validated or ["loss"], early_stop.metric
    if metric in there or metric in [f"val_{name}" for name in validated]:
        return
    fix = [f"metric={name!r}" for name in nearest(metric, there) or there]
    raise SpecError(
        f"Early stopping looks at {metric!r}, but the results of an epoch are {', '.join(there)}.",
        where="mh.EarlyStop",
        fix=fix if validated else [*fix, "validation=..., for metrics"],
    )


def _sources(
    run: Run, data: Any, validation: Any, validation_split: float | None, reading: dict[str, Any]
) -> tuple[Source, Source | None]:
    """What to train on, and what to evaluate on, if there is anything."""
    source = run.source(data, **reading)
    if validation_split is None:
        return source, None if validation is None else run.source(validation, **reading, shuffle=False)
    if validation is not None:
        raise DataError("validation and validation_split were both given.", fix=["one of them"])
    return split(source, validation_split)


def _kind_of_fit(engine: object) -> type[Fit]:
    if not isinstance(engine, Served):
        return Fit
    return StretchedFit if isinstance(engine, Stretched) else ServedFit
