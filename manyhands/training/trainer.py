"""The trainer: a model, a loss and an optimizer, trained by any number of workers with the same result.

This file has the public object and its calls; setup is in `loop/run.py`, the loop in `loop/fit.py`, the step in
`strategies`. Start reading at `Trainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyhands.data.custom_orders import Order
from manyhands.data.randomness import drawn_unseeded, seed_all
from manyhands.data.sources.as_source import Source, gives_items, split
from manyhands.data.sources.row_source import RowSource
from manyhands.errors import DataError, SpecError
from manyhands.parameter_server.loop.leased_source import leased_source
from manyhands.parameter_server.loop.server_main import serve
from manyhands.planner.measure.plan_request import write_plan
from manyhands.spec.keyword_check import checked_keywords
from manyhands.spec.load import nearest
from manyhands.spec.probe_requests import order_of_this_worker
from manyhands.strategies.base import LossFn, MetricFn
from manyhands.training.enter_run import enter
from manyhands.training.history import History, html_table
from manyhands.training.loop.fit import LockstepSource, run_fit
from manyhands.training.loop.fit_history import TRAINED, FitSettings
from manyhands.training.loop.run import EVAL_BATCH, Run
from manyhands.training.loop.setting_checks import by_step, check_counts
from manyhands.training.loop.step_lifecycle import StepLifecycle
from manyhands.training.setup import keras_models
from manyhands.training.setup.user_model import assemble, check_ending, load_weights, save_model, set_precision_
from manyhands.training.state.checkpointing import Checkpoints, check_checkpoints
from manyhands.training.state.foreign_optimizer import whole_in_place
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
    "The model was made before the trainer, and torch was not seeded: its initial weights do not depend on seed= and "
    "may differ between runs. Give a function that makes it, model=lambda: Net(), or call torch.manual_seed before."
)


class Trainer:
    """Trains `model` so that the result does not depend on the number of workers.

    Public calls are numbered: in a restarted script, those that the run has already finished return their recorded
    result at once. Every worker runs the script from the top and makes the same calls.

    Args:
        model: An `nn.Module`, a function that makes one (then its initial weights are a function of `seed`), or the
            path of a `.keras` file. A compiled Keras model has a loss, an optimizer and metrics already.
        loss: `loss(model, batch)` returns the mean over the batch, or a (sum, weight) pair where examples count
            differently. Only a Keras model may leave it out.
        optimizer: A function of the parameters that makes a torch optimizer, a ready optimizer, or a dict of such
            functions by names of submodules, one for the parameters of each.
        strategy: How the work is divided: a name ("mirrored", "sharded", "pipeline", ...) or an object such as
            `mh.Mirrored(workers=2)`. Default: "mirrored".
        precision: "fp32" (the default), "bf16" or "fp16": forward passes run under autocast, weights and sums stay
            fp32; fp16 scales the loss. "fp64": weights, gradients and the data's floats are double.
        seed: The seed of all randomness and of the data order, 0 by default. The same seed gives the same run. It sets
            the initial weights of a model that is made here, by a function; a ready model keeps its weights.
        metrics: Functions `metric(model, batch)` that return one value per example, by name; computed by `evaluate` and
            for validation data.
        slices: V, the pieces that every global batch is cut into; workers take whole slices. Fix it where results must
            not depend on the number of workers and the model has dropout or BatchNorm. Default: `accumulate` x workers.
        accumulate: Slices per worker and step, where `slices` is not given: for batches that do not fit into memory.
        exact: Bitwise the same result for every number of workers from 1 to V: one thread per worker, deterministic
            kernels. Slower; replicas and synchronous parameter servers only.
        scheduler: A function of the optimizer that makes a learning rate scheduler.
        scheduler_every: When it is stepped: after every "step" (the default) or "epoch".
        clip_norm: Scale the gradient down to this global norm if its norm is larger. Default: never.
        balance: Move slices from slow workers to fast ones; results stay the same. Needs more slices than workers.
        audit: Have one slice of every step computed by two workers, to find a worker whose gradients are wrong. For
            machines that you suspect of errors: it costs up to the time of one slice per step.
        check_loss: Before the first step compare the loss of a few rows with the losses of parts of them, and warn,
            with what to write instead, if it is not a mean over examples. On by default; it costs a small forward pass.
        hooks: Objects with any of the methods that docs/guide.md lists, called on every worker in this order, or only
            on the chief if `chief_only` is true.
        run_dir: Where checkpoints, events and logs go. Default: runs/<time>-<script>. Giving the same one again resumes
            the run.
        tune: In a script started by hand, first measure settings as `mh tune` does, and train with the fastest, with
            several workers if that is faster; the maths stays the same. Under `mh run` it does nothing.
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
        self._run = Run(worker, parts, Hooks(hooks, self, is_chief=lambda: worker.is_chief), scheduler)
        if unseeded:
            self._run.warn_when_ready(UNSEEDED)
        self._scheduler_every = scheduler_every
        self._lifecycle: StepLifecycle | None = None

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
        self._run.load_newest_weights()
        return self._run.parts.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; `param_groups[0]["lr"]` is the learning rate."""
        return self._run.ready().optimizer

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the chief, which writes and prints for all: true on one worker of a run. An evaluator
        is never the chief."""
        worker = self._run.worker
        return bool(worker.is_chief) and not worker.is_evaluator

    @property
    def run_dir(self) -> Path:
        """Where the run keeps its checkpoints, events and logs."""
        self._run.ready()
        return self._run.worker.run_dir

    @property
    def home(self) -> Path:
        """The folder of this trainer's checkpoints, records and summaries: the run directory, or its folder
        `trainings/N` for the N-th Trainer or join of a script."""
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

        Continues an unfinished run of the same run directory unless `resume="never"`. All workers must call it. On an
        evaluator it trains nothing: it evaluates `validation` for each checkpoint that the run commits.

        Args:
            data: A tuple or dict of tensors or arrays, an `mh.Dataset`, a torch Dataset, a DataLoader, a generator
                function, a function of `mh.InputContext`, or a glob of files; docs/data.md has all kinds. The order is
                a function of `seed` and epoch.
            epochs: The number of passes over the data. Either this or `steps`.
            steps: The number of further optimizer updates.
            batch_size: Rows of the global batch, over all workers. Default: that of a DataLoader or `mh.Dataset`.
            batch_per_worker: Rows per worker instead, times the number of workers with which the run began: then
                results depend on that number.
            validation: Data to evaluate on at the end of every epoch, and at the end of the training; the results are
                named "val_...".
            validation_split: The fraction of `data` to hold out for validation instead, from 0 to 1.
            collate: Makes a batch of a list of examples, as a DataLoader's `collate_fn` does. Default: torch's.
            num_workers: Loader processes per worker, for datasets whose `__getitem__` is slow. Default: that of a
                DataLoader, otherwise 0: prefetch in a thread.
            batched: True: each item of the data is one global batch, and there is no `batch_size`; batches may differ
                in size. False: each item is one example, for data that could be either.
            order: Which rows an epoch takes, such as `mh.order.Weighted(weights)`. Default: each once, shuffled.
            checkpoint: When to save and what to keep. Default: every 600 seconds, the last three.
            early_stop: End when a result no longer improves. Default: never.
            validate_every: Validate every this many steps of the call, instead of at the end of epochs. Early stopping,
                the best checkpoint and the rows of the history follow these validations.
            validate_every_s: The same in seconds, by the chief's clock; both may be given.
            train_metrics: With every validation, also compute the metrics on this many rows of the training data, the
                same rows each time. Costs a forward pass over them in evaluation mode. Default: none.
            resume: "auto": continue an unfinished run of this run directory. "never": start from the beginning.
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
        reading = {"collate": collate, "num_workers": num_workers}
        if run.worker.is_evaluator:
            run.begin_call("fit")
            source, held_out = _sources(run, data, validation, validation_split, reading, batched, order)
            size = run.batch_size(source, batch_size, batch_per_worker)
            return History(run.follow(_to_evaluate(held_out), size, ends_with_call=resume == "auto"))
        run.offer(data, collate, batch_size or batch_per_worker, batched=batched)
        if run.graph is not None:
            run.graph.call_model(run.sample().batch)
        if run.worker.planned is not None:
            write_plan(run.worker.planned, run.parts, run.sample())
        run.check_memory()
        run.begin_call("fit", resume=resume == "auto")
        if run.calls.already_done:
            return History(run.calls.recorded())
        source, held_out = _sources(run, data, validation, validation_split, reading, batched, order)
        evaluated = _evaluated(run, source, held_out, train_metrics)
        if early_stop is not None:
            validated = ["loss", *run.parts.metrics] if held_out is not None else []
            _check_early_stop(early_stop, validated, list(run.parts.metrics) if train_metrics else [])
        size = run.batch_size(source, batch_size, batch_per_worker)
        joined = run.worker.is_waiting
        if joined and not run.regrouping.wait_for_admission():
            return History(run.calls.recorded())
        settings = FitSettings(
            scheduler_every=self._scheduler_every,
            early_stop=early_stop,
            validate=(lambda: run.validate(evaluated, size)) if evaluated else None,
            validations=Validations(every_steps=validate_every, every_s=validate_every_s, by_steps=steps is not None),
            epochs=epochs,
        )
        self._lifecycle = run.lifecycle(lambda: run.batches(source, size, epochs, steps), checkpoint, settings)
        return _take_steps(run, self._lifecycle, settings.validations, source, joined=joined)

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
        """Loss and metrics, each a mean over all examples. Every example counts once, for any number of workers.

        All workers must call it, and all get the result.

        Args:
            data: As for `fit`; unshuffled.
            batch_size: Rows of a global batch, 256 by default; a larger one is faster if it fits into memory. The
                result is the same.
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
        run.record_result(lambda: run.calls.finish(results))
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
        """The model's outputs for all rows of `data`, in its order, computed by all workers and returned on all.

        Args:
            data: As for `fit`, unshuffled. If a batch is a tuple or list, its first element is the model's input; a
                dict is keyword arguments.
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

        run.record_result(keep)
        return outputs

    def save(self, path: str | Path) -> None:
        """Write the weights to a file, atomically. All workers must call it; the chief writes.

        Args:
            path: The file. Its suffix decides the format: `.safetensors`, `.pt` and `.pth` (for torch.load); for a
                Keras model also `.keras` and `.h5`. Any other suffix is refused. An existing file is replaced.
        """
        run = self._run
        check_ending(run.parts.model, Path(path))
        training = run.begin_call("save")
        if run.is_call_over():
            return

        def work() -> None:
            is_foreign = Path(path).suffix in keras_models.SUFFIXES
            weights = None if is_foreign else training.whole_weights()
            with whole_in_place(training) if is_foreign else nullcontext():
                if self.is_chief and not run.worker.in_trial:
                    save_model(training.model, Path(path), weights)
                run.worker.wait_for_chief("save")

        run.regrouping.agreed(work)
        run.record_result(lambda: run.calls.finish(None))

    def load(self, path: str | Path) -> None:
        """Load weights written by `save`: the chief reads them and sends them to all. All workers must call it.

        Args:
            path: The file; only the chief's host needs to have it.
        """
        run = self._run
        training = run.begin_call("load")
        if run.is_call_over():
            if run.worker.is_waiting:  # the other workers have loaded it; the script may use this model next
                load_weights(training.model, Path(path))
            return
        run.regrouping.agreed(lambda: training.load_weights(Path(path)))
        run.record_result(lambda: run.calls.finish(None))

    @contextmanager
    def editing(self) -> Iterator[nn.Module]:
        """Inside, change weights by hand, or which of them are trained. On exit all workers get the chief's weights."""
        training = self._run.use()
        if self._run.worker.is_waiting:  # the other workers have done it, and this one receives their weights
            with torch.no_grad():
                yield training.model
            return
        with training.engine.editing() as model:
            yield model

    def request_stop(self) -> None:
        """End `fit` after the current step, on every worker. For hooks."""
        if self._lifecycle is not None:
            self._lifecycle.end_requested = True


def _take_steps(
    run: Run, lifecycle: StepLifecycle, validations: Validations, source: Source, *, joined: bool
) -> History:
    """Train for one call of `fit` and record its history. `joined`: the other workers had begun the call before."""
    steps_from = leased_source(lifecycle) if run.worker.strategy.leases else LockstepSource(lifecycle)
    if not joined:
        run.announce("fit", lifecycle.total_steps, source)
        num_steps = lifecycle.total_steps and lifecycle.total_steps - lifecycle.training.progress.call_step
        if once := only_at_the_end(validations, num_steps):
            run.worker.events.warn(once)
        run.check_first_loss()
    with run.regrouping.listening(lifecycle.regrouped), run.worker.session.interruptible():
        history = History(run_fit(lifecycle, steps_from, resumed=joined or run.calls.is_resumed))
    run.record_result(lambda: run.calls.finish(list(history)))
    return history


def _check_early_stop(early_stop: EarlyStop, validated: list[str], trained: Sequence[str] = ()) -> None:
    """`SpecError` if no row of the history has the result that `early_stop` looks at."""
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
    """The data to train on, and the data to validate on, if there is any. `batched` does not apply to tensors."""
    source = run.source(data, **reading, batched=batched, order=order)
    if validation_split is None and validation is None:
        return source, None
    if validation_split is None:
        has_batches = batched if gives_items(validation) else None
        return source, run.source(validation, **reading, shuffle=False, batched=has_batches)
    if validation is not None:
        raise DataError("validation and validation_split were both given.", fix=["one of them"])
    return split(source, validation_split)


def _to_evaluate(held_out: Source | None) -> Source:
    if held_out is None:
        raise DataError(
            "This process evaluates the run's checkpoints, but its fit has nothing to evaluate them on.",
            where="fit",
            fix=["validation=(x, y), data that is not trained on", "validation_split=0.1"],
        )
    return held_out


def _evaluated(run: Run, source: Source, held_out: Source | None, train_metrics: int | None) -> dict[str, Source]:
    """The data on which rows of the history are computed, by the prefix of their results' names."""
    evaluated = {} if held_out is None else {"": held_out}
    if train_metrics is None:
        return evaluated
    if not isinstance(source, RowSource) or source.shared:
        raise DataError(
            "train_metrics draws rows of the training data by number, but this data is a stream, or some workers do "
            "not have all of it.",
            fix=["validation=, with some training data", "no train_metrics="],
        )
    return {**evaluated, TRAINED: source.sample(train_metrics, run.spec.run.seed)}
