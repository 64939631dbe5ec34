"""The trainer: a model, a loss and an optimizer, trained by any number of workers with the same result.

This file is the public object and what its calls mean; getting ready is in `run`, the loop in `fit_history`, the step
in `strategies`. Start reading at `Trainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyhands.data.custom_orders import Order
from manyhands.data.randomness import drawn_unseeded, seed_all
from manyhands.data.sources.as_source import Source, gives_items, split
from manyhands.data.sources.row_source import RowSource
from manyhands.errors import DataError, SpecError
from manyhands.parameter_server.engine.local_steps_engine import Stretched
from manyhands.parameter_server.engine.served import Served
from manyhands.parameter_server.loop.leased_source import ServedFit
from manyhands.parameter_server.loop.local_steps_fit import StretchedFit
from manyhands.parameter_server.loop.server_main import serve
from manyhands.planner.measure.plan_request import tell_plan
from manyhands.spec.load import nearest
from manyhands.spec.probe_requests import order_of_this_worker
from manyhands.strategies.base import LossFn, MetricFn
from manyhands.training.enter_run import enter
from manyhands.training.history import History, html_table
from manyhands.training.keyword_check import checked_keywords
from manyhands.training.loop.fit_history import TRAINED, Fit, FitSettings
from manyhands.training.loop.run import EVAL_BATCH, Run
from manyhands.training.loop.setting_checks import by_step, check_counts
from manyhands.training.loop.step_lifecycle import Steps
from manyhands.training.setup.user_model import assemble, check_ending, load_weights, save_model, set_precision_
from manyhands.training.state.checkpointing import Checkpoints, Saver, check_checkpoints
from manyhands.training.step import evaluation
from manyhands.training.step.hooks import EarlyStop, Hooks
from manyhands.training.step.validation_schedule import (
    Validations,
    check_train_metrics,
    check_validations,
    only_at_the_end,
)
from manyhands.training.worker.strategy_lookup import StrategyChoice
from manyhands.trials.check_recording import Recording

__all__ = ["History", "Trainer"]

UNSEEDED = (
    "The model was made before the trainer, and torch was not seeded: seed= has no part in its first weights, which "
    "may be others in every run. Give a function that makes it, model=lambda: Net(), or call torch.manual_seed before."
)


class Trainer:
    """Trains `model` so that the result does not depend on how many workers did it.

    Public calls are numbered: in a restarted script, those that the run has already finished return their recorded
    result at once. Every worker runs the script from the top and makes the same calls.

    Args:
        model: An `nn.Module`, a function that makes one (then its first weights are a function of `seed`), or the path
            of a `.keras` file. A compiled Keras model brings its own loss, optimizer and metrics.
        loss: `loss(model, batch)` returns the mean over the batch, or a (sum, weight) pair where examples count
            differently. Only a Keras model may leave it out.
        optimizer: A function of the parameters that makes a torch optimizer, a ready one, or a dict of such functions
            by names of submodules, one for the parameters below each.
        strategy: How the work is divided: a name ("mirrored", "sharded", "pipeline", ...) or an object such as
            `mh.Mirrored(workers=2)`. Default: "mirrored".
        precision: "fp32" (the default), "bf16" or "fp16": forward passes run under autocast, weights and sums stay
            fp32; fp16 scales the loss. "fp64": weights, gradients and the data's floats are double.
        seed: Of all randomness and the data order, 0 by default. The same seed gives the same run. It sets the first
            weights of a model that is made here, by a function; a ready one has those it has.
        metrics: Functions `metric(model, batch)` that return one value per example, by name; computed by `evaluate` and
            for validation data.
        slices: V, the pieces that every global batch is cut into; workers take whole slices. Fix it where results must
            not depend on the number of workers and the model has dropout or BatchNorm. Default: `accumulate` x workers.
        accumulate: Slices per worker and step, where `slices` is not given: for batches that do not fit into memory.
        exact: The same bits for every number of workers from 1 to V: one thread per worker, deterministic kernels.
            Slower; replicas and synchronous parameter servers only.
        scheduler: A function of the optimizer that makes a learning rate scheduler.
        scheduler_every: When it is stepped: after every "step" (the default) or "epoch".
        clip_norm: Scale the gradient down to this global norm where it is longer. Default: never.
        balance: Move slices from slow workers to fast ones; results stay the same. Needs more slices than workers.
        audit: Have one slice of every step computed by two workers, to find one whose gradients are wrong. For machines
            that are under suspicion: it costs up to one slice of time per step.
        check_loss: Before the first step compare the loss of a few rows with those of their parts, and warn, with what
            to write, where it is no mean over examples. On by default; it costs a small forward pass.
        hooks: Objects with any of the methods that docs/guide.md lists, called on every worker in this order, or on the
            chief alone where `chief_only` is true.
        run_dir: Where checkpoints, events and logs go. Default: runs/<time>-<script>. The same one again resumes.
        tune: In a script started by hand, do what `mh tune` does before training, and go on with what was fastest, with
            several workers if that is it; the maths stays the same. Under `mh run` it does nothing.
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

    def __repr__(self) -> str:
        shown = self._described()
        if "run_dir" in shown:
            workers, step = shown["workers"], shown["step"]
            shown |= {
                "workers": "1 worker" if workers == "1" else f"{workers} workers",
                "step": f"step {step}",
                "run_dir": f"in {shown['run_dir']}",
            }
        return f"<mh.Trainer: {', '.join(shown.values())}>"

    def _repr_html_(self) -> str:
        return html_table([[("th", name), ("td", value)] for name, value in self._described().items()])

    def _described(self) -> dict[str, str]:
        """Of a trainer that has not begun yet, too: it joins no run for this."""
        run, model = self._run, self._run.parts.model
        size = sum(one.numel() for one in model.parameters())
        shown = {
            "model": f"{type(model).__name__} of {size:,} parameters",
            "strategy": run.worker.strategy.name,
            "precision": run.spec.train.precision,
        }
        if run.is_ready:
            shown |= {"workers": str(run.worker.world_size), "step": str(run.ready().progress.step)}
            shown["run_dir"] = str(run.worker.run_dir)
        return shown

    @property
    def model(self) -> nn.Module:
        """The model. Change its weights inside `with trainer.editing():` only."""
        self._run.look_back()
        return self._run.parts.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; `param_groups[0]["lr"]` is the learning rate."""
        return self._run.ready().optimizer

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the one that writes and prints for all: true on one worker of a run."""
        return bool(self._run.worker.is_chief)

    @property
    def run_dir(self) -> Path:
        """Where the run keeps its checkpoints, events and logs."""
        self._run.ready()
        return self._run.worker.run_dir

    @property
    def home(self) -> Path:
        """Where this trainer's checkpoints, records and summaries are: the run directory; for the N-th Trainer or join
        of a script, its folder `trainings/N`."""
        self._run.ready()
        return self._run.worker.home

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
        batched: bool | None = None,
        order: Order | None = None,
        checkpoint: Checkpoints | None = None,
        early_stop: EarlyStop | None = None,
        validate_every: int | None = None,
        validate_every_s: float | None = None,
        train_metrics: int | None = None,
        resume: str = "auto",
    ) -> History:
        """Train for `epochs`, or for `steps` more steps. Returns a row for each epoch or validation.

        Continues an unfinished run of the same directory unless `resume="never"`. All workers must call it.

        Args:
            data: A tuple or dict of tensors or arrays, a Dataset, a DataLoader, a generator function, a function of
                `mh.InputContext`, or a glob of files; docs/data.md has all kinds. The order is a function of `seed` and
                epoch.
            epochs: So many passes over the data. Either this or `steps`.
            steps: So many optimizer updates more.
            batch_size: Rows of the global batch, over all workers. Default: a DataLoader's own.
            batch_per_worker: Rows per worker instead, times the workers that the run began with: then results depend on
                their number.
            validation: Data to evaluate on at the end of every epoch, and where the training ends; its results are
                named "val_...".
            validation_split: The fraction of `data` to hold out for that instead, from 0 to 1.
            collate: Makes a batch of a list of examples, as a DataLoader's `collate_fn` does. Default: torch's.
            num_workers: Loader processes per worker, for datasets whose `__getitem__` is slow. Default: a DataLoader's
                own, else 0: read ahead in a thread.
            batched: True: each item of the data is one global batch, and there is no `batch_size`; batches may differ
                in size. False: an item is one example, where its form leaves that open.
            order: Which rows an epoch takes, such as `mh.order.Weighted(weights)`. Default: each once, shuffled.
            checkpoint: When to save and what to keep. Default: every 600 seconds, the last three.
            early_stop: End when a result no longer improves. Default: never.
            validate_every: Validate after so many steps of this call, instead of at the end of epochs. Early stopping,
                the best checkpoint and the rows of the history go by the same.
            validate_every_s: The same in seconds, by the chief's clock; both may be given.
            train_metrics: Compute the metrics on so many rows of the training data, too, each time; drawn once. A
                forward pass over them in evaluation mode is what it costs. Default: none.
            resume: "auto": go on where an unfinished run of this directory stopped. "never": begin anew.
        """
        run = self._run
        if resume not in ("auto", "never"):
            raise SpecError(f"resume is {resume!r}.", fix=['"auto"', '"never"'])
        check_counts(batch_size=batch_size, batch_per_worker=batch_per_worker, epochs=epochs, steps=steps)
        check_counts(num_workers=num_workers)
        check_checkpoints(checkpoint)
        asked = {"validate_every": validate_every, "validate_every_s": validate_every_s}
        check_validations(asked, validates=validation is not None or validation_split is not None)
        check_train_metrics(train_metrics, run.parts.metrics)
        run.offer(data, collate, batch_size or batch_per_worker, batched=batched)
        if run.worker.planned is not None:
            tell_plan(run.worker.planned, run.parts, run.sample())
        run.check_memory()
        training = run.begin_call("fit", resume=resume == "auto")
        if run.calls.already_done:
            return History(run.calls.recorded())
        reading = {"collate": collate, "num_workers": num_workers}
        source, held_out = _sources(run, data, validation, validation_split, reading, batched, order)
        evaluated = _evaluated(run, source, held_out, train_metrics)
        if early_stop is not None:
            validated = ["loss", *run.parts.metrics] if held_out is not None else []
            _check_early_stop(early_stop, validated, list(run.parts.metrics) if train_metrics else [])
        size = run.batch_size(source, batch_size, batch_per_worker)
        joined = run.worker.is_waiting
        if joined and not run.regrouping.wait_for_admission():
            return History(run.calls.recorded())
        validations = Validations(every_steps=validate_every, every_s=validate_every_s, by_steps=steps is not None)
        settings = FitSettings(
            scheduler_every=self._scheduler_every,
            early_stop=early_stop,
            goes_on=joined or run.calls.goes_on,
            validate=(lambda: run.validate(evaluated, size)) if evaluated else None,
            validations=validations,
            epochs=epochs,
        )
        saver = Saver(run.worker, training, checkpoint or run.spec.checkpoint)
        taken = Steps(training, lambda: run.batches(source, size, epochs, steps), saver, run.regrouping)
        self._fit = _kind_of_fit(training.engine)(self, training, taken, run.regrouping, settings)
        if not joined:
            run.announce("fit", taken.total_steps, source)
            num_steps = taken.total_steps and taken.total_steps - training.progress.call_step
            if once := only_at_the_end(validations, num_steps):
                run.worker.warn(once)
            run.look_first()
        with run.regrouping.listening(taken.regrouped), run.worker.interruptible():
            history = History(self._fit.run())
        run.put_on_record(lambda: run.calls.finish(list(history)))
        return history

    @checked_keywords
    def evaluate(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        collate: Any = None,
        num_workers: int | None = None,
        batched: bool | None = None,
    ) -> dict[str, float]:
        """Loss and metrics, each a mean over all examples; every example counts once, whatever the workers.

        All workers must call it, and all get the result.

        Args:
            data: As for `fit`; its own order, unshuffled.
            batch_size: Rows of a global batch, 256 by default; larger is faster until memory ends. The result is the
                same.
            batched: True: each item of the data is one batch, and there is no `batch_size`.
            collate: As for `fit`.
            num_workers: As for `fit`.
        """
        run = self._run
        check_counts(batch_size=batch_size, num_workers=num_workers)
        run.offer(data, collate, batch_size or EVAL_BATCH, batched=batched)
        run.begin_call("evaluate")
        if run.is_call_over():
            return dict(run.calls.recorded())
        source = run.source(data, collate=collate, num_workers=num_workers, shuffle=False, batched=batched)
        results = run.evaluate(source, run.piece_size(source, batch_size))
        run.put_on_record(lambda: run.calls.finish(results))
        return results

    @checked_keywords
    def predict(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        collate: Any = None,
        num_workers: int | None = None,
        batched: bool | None = None,
    ) -> Any:
        """The model's outputs for all rows of `data`, in its order, computed by all workers and returned on each.

        Args:
            data: As for `fit`, unshuffled. Where a batch is a pair, its first element is the model's input; a dict is
                keyword arguments.
            batch_size: Rows of a global batch, 256 by default.
            collate: As for `fit`.
            num_workers: As for `fit`.
            batched: True: each item of the data is one batch, and there is no `batch_size`.
        """
        run = self._run
        check_counts(batch_size=batch_size, num_workers=num_workers)
        run.offer(data, collate, batch_size or EVAL_BATCH, batched=batched, with_loss=False)
        run.begin_call("predict")
        path = run.calls.tensors_path()
        if run.is_call_over():
            return evaluation.from_file(path, run.calls.recorded())
        source = run.source(data, collate=collate, num_workers=num_workers, shuffle=False, batched=batched)
        outputs = run.predict(source, run.piece_size(source, batch_size))

        def keep() -> None:
            if self.is_chief:
                run.calls.finish_with(lambda: evaluation.to_file(path, outputs))

        run.put_on_record(keep)
        return outputs

    def save(self, path: str | Path) -> None:
        """Write the weights, whole or not at all. All workers must call it; the chief writes.

        Args:
            path: A file. Its ending says what it becomes: `.safetensors`, `.pt` and `.pth` (what torch.load reads); of
                a Keras model also `.keras` and `.h5`. Any other ending is refused. What is there is replaced.
        """
        run = self._run
        check_ending(run.parts.model, Path(path))
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
        """Read weights written by `save`, and give every worker the chief's. All workers must call it.

        Args:
            path: The file; only the chief's host needs it.
        """
        run = self._run
        training = run.begin_call("load")
        if run.is_call_over():
            if run.worker.is_waiting:  # the others have, and what the script looks at next is this model
                load_weights(training.model, Path(path))
            return
        run.regrouping.agreed(lambda: training.load_weights(Path(path)))
        run.put_on_record(lambda: run.calls.finish(None))

    @contextmanager
    def editing(self) -> Iterator[nn.Module]:
        """Change weights by hand, or which of them are trained. On leaving, every worker has the chief's weights."""
        training = self._run.use()
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


def _check_early_stop(early_stop: EarlyStop, validated: list[str], trained: Sequence[str] = ()) -> None:
    """One that looks at a result which no row has would never stop anything."""
    there, metric = validated or ["loss", *trained], early_stop.metric
    if metric in there or metric in [f"val_{name}" for name in validated]:
        return
    fix = [f"metric={name!r}" for name in nearest(metric, there) or there]
    raise SpecError(
        f"Early stopping looks at {metric!r}, but the results of an epoch are {', '.join(there)}.",
        where="mh.EarlyStop",
        fix=fix if validated else [*fix, "validation=..., for metrics"],
    )


def _sources(
    run: Run,
    data: Any,
    validation: Any,
    validation_split: float | None,
    reading: dict[str, Any],
    batched: bool | None,
    order: Order | None,
) -> tuple[Source, Source | None]:
    """What to train on, and what to evaluate on, if there is anything. Tensors are no batches, whatever trains."""
    source = run.source(data, **reading, batched=batched, order=order)
    if validation_split is None and validation is None:
        return source, None
    if validation_split is None:
        of_batches = batched if gives_items(validation) else None
        return source, run.source(validation, **reading, shuffle=False, batched=of_batches)
    if validation is not None:
        raise DataError("validation and validation_split were both given.", fix=["one of them"])
    return split(source, validation_split)


def _evaluated(run: Run, source: Source, held_out: Source | None, train_metrics: int | None) -> dict[str, Source]:
    """What rows of the history are computed on, by what the names of its results begin with."""
    evaluated = {} if held_out is None else {"": held_out}
    if train_metrics is None:
        return evaluated
    if not isinstance(source, RowSource) or source.shared:
        raise DataError(
            "train_metrics draws rows of the training data by number, but this data is a stream, or some workers lack "
            "some of it.",
            fix=["validation=, of some training data", "no train_metrics="],
        )
    return {**evaluated, TRAINED: source.sample(train_metrics, run.spec.run.seed)}


def _kind_of_fit(engine: object) -> type[Fit]:
    if not isinstance(engine, Served):
        return Fit
    return StretchedFit if isinstance(engine, Stretched) else ServedFit
