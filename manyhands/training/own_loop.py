"""Your own loop: `mh.join` gives you `Hands`, and the batch comes one slice at a time.

The loop is the user's; which slices this worker gets, their randomness, weights, the sum over all workers, checkpoints
and resuming are ours. Loops may differ in length between workers: one that has no slice in a step takes part in it
without running the loop's body. How a step is taken: `lockstep_own_loop`; where servers lease slices,
`leased_own_loop`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from manyhands.data.custom_orders import Order
from manyhands.data.randomness import seed_all
from manyhands.data.sources.as_source import as_source
from manyhands.errors import SpecError, UsageError
from manyhands.events import Logged
from manyhands.parallel.model.per_part_optimizers import SeveralOptimizers
from manyhands.parameter_server.engine.served import Served
from manyhands.parameter_server.loop.leased_own_loop import LeasedLoop, refuse_apart
from manyhands.parameter_server.loop.server_main import serve
from manyhands.strategies.base import LossFn, MetricFn, PieceLike
from manyhands.training.enter_run import enter
from manyhands.training.keyword_check import checked_keywords
from manyhands.training.loop.lockstep_own_loop import SteppedLoop
from manyhands.training.loop.run import Run
from manyhands.training.loop.setting_checks import by_step, check_counts
from manyhands.training.loop.step_lifecycle import Steps
from manyhands.training.setup.user_model import Parts, optimizer_maker, set_precision_
from manyhands.training.state.checkpointing import Checkpoints, Saver, check_checkpoints
from manyhands.training.state.training_state import Training
from manyhands.training.step import evaluation, worker_means
from manyhands.training.step.hooks import Hooks
from manyhands.training.worker.strategy_lookup import StrategyChoice

__all__ = ["Hands", "join"]


@checked_keywords
def join(
    strategy: str | StrategyChoice | None = None,
    *,
    precision: str | None = None,
    seed: int | None = None,
    slices: int | None = None,
    accumulate: int | None = None,
    exact: bool | None = None,
    clip_norm: float | None = None,
    balance: bool | None = None,
    run_dir: str | Path | None = None,
    checkpoint: Checkpoints | None = None,
    tune: bool = False,
) -> Hands:
    """Take this process's place in the run. With several workers asked for outside a cluster, starts them and exits.

    Args:
        strategy: As for `mh.Trainer`; no pipeline, which only the trainer can run.
        precision: "fp32" (the default), "bf16" or "fp16": forward passes run under autocast, weights and sums stay
            fp32; fp16 scales the loss. "fp64": weights, gradients and the data's floats are double.
        seed: Of all randomness and the data order, 0 by default. The same seed gives the same run. Python's, numpy's
            and torch's global generators start from it here: make the model after this call, and its first weights are
            the same in every run.
        slices: V, the pieces that every global batch is cut into; workers take whole slices. Fix it where results must
            not depend on the number of workers and the model has dropout or BatchNorm. Default: `accumulate` x workers.
        accumulate: Slices per worker and step, where `slices` is not given: for batches that do not fit into memory.
        exact: The same bits for every number of workers from 1 to V: one thread per worker, deterministic kernels.
            Slower; replicas and synchronous parameter servers only.
        clip_norm: Scale the gradient down to this global norm where it is longer. Default: never.
        balance: Move slices from slow workers to fast ones; results stay the same. Needs more slices than workers.
        run_dir: Where checkpoints, events and logs go. Default: runs/<time>-<script>. The same one again resumes.
        checkpoint: When to save and what to keep. Default: every 600 seconds, the last three.
        tune: First measure which settings to go on with, as in `mh.Trainer`.
    """
    arguments = {
        "precision": precision,
        "seed": seed,
        "slices": slices,
        "accumulate": accumulate,
        "exact": exact,
        "clip_norm": clip_norm,
        "balance": balance,
        "run_dir": str(run_dir) if run_dir is not None else None,
    }
    check_checkpoints(checkpoint)
    worker = enter(strategy, arguments, tune=tune, kind="join")
    seed_all(worker.resolved.spec.run.seed)
    return Hands(worker, checkpoint)


class Hands:
    """A worker in a loop of your own. Made by `mh.join`."""

    def __init__(self, worker: Any, checkpoint: Checkpoints | None) -> None:
        self._worker, self._checkpoint = worker, checkpoint
        self._run: Run | None = None
        self._taken: Steps | None = None
        self._piece: PieceLike | None = None
        self._backward_done = False
        self._loop: SteppedLoop | LeasedLoop | None = None
        """The one under way, or the last."""
        self._leased: LeasedLoop | None = None
        """The loop under way, where servers lease slices."""
        self._was_left = False
        self._crossed = 0
        self._takers: list[list[nn.Parameter]] = []
        """The parameters of each optimizer, where several take turns."""
        self.turn = 0
        """Which of the optimizers has its turn."""
        self.stepped = False
        """Whether the last call of `step` updated the weights."""

    rank = property(lambda self: self._worker.rank)
    world_size = property(lambda self: self._worker.world_size)
    is_chief = property(lambda self: self._worker.is_chief)
    device = property(lambda self: self._worker.device)

    @property
    def run_dir(self) -> Path:
        """Where the run keeps its checkpoints, events and logs."""
        return Path(self._worker.run_dir)

    @property
    def steps_done(self) -> int:
        """Committed steps, over all loops."""
        return self._training.progress.step

    @property
    def loss(self) -> float:
        """The mean loss over the last step's whole batch."""
        return self._loop.loss if self._loop is not None else float("nan")

    @checked_keywords
    def setup(self, model: Any, optimizer: Any, scheduler: Any = None) -> tuple[Any, Any]:
        """Hand over model, optimizer and scheduler, which come back ready; all workers get the chief's weights.

        Lists of models and optimizers, as of a GAN, have the optimizers take turns: each batch comes once for every
        optimizer, in their order, and `turn` says whose turn it is. Only its parameters take gradients then.

        In a parameter server's process this does not return, unless workers go on to another training.

        Args:
            model: The `nn.Module`, or a list of them. Use what is returned.
            optimizer: A torch optimizer of its parameters, or a list of optimizers that take turns.
            scheduler: A learning rate scheduler of it, stepped once per update. Default: none.
        """
        _refuse_own_loop(self._worker)
        if isinstance(optimizer, list | tuple):
            self._takers = takers_of(self._worker, optimizer, scheduler)
            whole: nn.Module = nn.ModuleList(model) if isinstance(model, list | tuple) else model
            joint: Any = SeveralOptimizers({str(place): one for place, one in enumerate(optimizer)})
        else:
            whole, joint = model, optimizer
        set_precision_(whole, self._worker.resolved.spec.train.precision)
        parts = Parts(whole, _no_loss, {}, optimizer_maker(joint), lambda m, batch: m(batch))
        schedule = by_step(lambda _: scheduler)
        if self._worker.is_server:
            serve(self._worker, parts, schedule)
        self._run = Run(self._worker, parts, Hooks((), is_chief=lambda: self.is_chief), schedule)
        self._run.ready(resume=False)
        return model, optimizer

    def resume(self) -> bool:
        """Go on from the newest checkpoint of the run directory, if there is one. Call after `setup`.

        A worker that comes to a running run gets the others' state instead.
        """
        return self._worker.is_waiting or self._known_run.resume()

    @checked_keywords
    def batches(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None,
        batched: bool | None = None,
        order: Order | None = None,
    ) -> Iterator[Any]:
        """This worker's slices, one after the other, from where the run stands. Call `backward` and `step` for each.

        Under parameter servers slices are leased, and a fast worker gets more of them; in async a worker gets all
        slices of a batch, one by default. To end the loop early, on every worker, call `request_stop`.

        Args:
            data: As for `mh.Trainer.fit`.
            batch_size: Rows of the global batch, over all workers. Default: a DataLoader's own.
            epochs: So many passes over the data. Either this or `steps`.
            steps: So many optimizer updates more.
            collate: Makes a batch of a list of examples, as a DataLoader's `collate_fn` does. Default: torch's.
            num_workers: Loader processes per worker. Default: a DataLoader's own, else 0.
            batched: As for `mh.Trainer.fit`.
            order: As for `mh.Trainer.fit`.
        """
        check_counts(batch_size=batch_size, epochs=epochs, steps=steps, num_workers=num_workers)
        run = self._all_workers("batches")
        training = run.begin_call("batches")
        if run.calls.already_done:
            return
        source = run.source(data, collate=collate, num_workers=num_workers, batched=batched, order=order)
        size = run.batch_size(source, batch_size)
        joined = self._worker.is_waiting
        if joined and not run.regrouping.wait_for_admission():
            return
        saver = Saver(self._worker, training, self._checkpoint or run.spec.checkpoint)
        turns = len(self._takers) or 1
        make = lambda: run.batches(source, size, epochs, steps, turns)  # noqa: E731
        self._taken = taken = Steps(training, make, saver, run.regrouping)
        if not joined:
            run.announce("batches", taken.total_steps, source)
        with run.regrouping.listening(taken.regrouped):
            try:
                if not joined and not run.calls.goes_on:
                    taken.save("first checkpoint", required=True)
                yield from self._slices(training, taken)
                self._worker.end_trial()
                taken.checking.at_end()
                taken.save("end of batches", required=True)
            except GeneratorExit:  # the loop was left by `break`
                self._worker.end_trial()
                self._was_left = self._leased is not None and self._leased.leave()
                raise
            finally:
                taken.end()
                self._give_turn(None)
                if isinstance(self._loop, SteppedLoop):
                    self._loop.leave_slice()
                self._leased = None
                taken.close()
        run.put_on_record(lambda: run.calls.finish(None))

    def backward(self, loss: Tensor, weight: float | Tensor | None = None) -> None:
        """Backward of this slice's loss.

        Args:
            loss: The mean over the slice; with `weight`, a sum.
            weight: What the sum is to be divided by, such as the number of tokens. Default: `loss` is a mean over rows.
        """
        if self._piece is None or self._backward_done:
            raise UsageError("backward was called twice for one slice, or outside the loop over batches().")
        assert self._loop is not None
        self._loop.backward(loss if weight is None else (loss, weight))
        self._give_turn(None)
        self._backward_done = True

    def step(self) -> None:
        """Update the weights when this was the worker's last slice of the step; else do nothing.

        In an elastic run the worker may be given further slices of the same step: those of one that was lost. Under
        parameter servers this sends the gradient off, and waits for the next slice: `stepped` if servers have made
        updates meanwhile, one or many, of this gradient or others'.
        """
        if not self._backward_done:
            raise UsageError("step was called without backward for this slice.", fix=["hands.backward(loss)"])
        assert self._loop is not None
        before = self.steps_done
        self.stepped = self._loop.step()
        self._crossed, self._piece = self.steps_done - before, None

    def every(self, steps: int) -> bool:
        """Whether the last call of `step` took the run past a multiple of `steps`. Elsewhere: whether it is at one.

        Args:
            steps: Updates between two times that it is true.
        """
        return self.steps_done % steps < max(1, self._crossed)

    def request_stop(self) -> None:
        """Have the loop over batches end on every worker: after the next step, or the work that is handed out."""
        if self._loop is not None:
            self._loop.stop_asked = True

    def log(self, **values: float | Tensor) -> None:
        """Record values with the step's number; the chief's are kept, in the run's events.

        Args:
            values: Numbers or tensors of one element, by name: `hands.log(loss=hands.loss)`.
        """
        numbers = {name: worker_means.number(value) for name, value in values.items()}
        self._worker.emit(Logged(time_s=time.time(), step=self.steps_done, values=numbers))

    def mean(self, value: float | Tensor) -> float:
        """The mean of `value` over the workers that had a slice in this step, weighted by their rows.

        All of those workers must call it, after `step`; the others need not. Where parameter servers lease slices, no
        worker waits for another: it is the mean of `value` and of what the other living workers gave last, each
        weighted by the rows of its last slice. `loss` is exact there, too.

        Args:
            value: This worker's number, or a tensor of one element.
        """
        if self._loop is None or (self._leased is None and isinstance(self._loop, LeasedLoop)):
            raise UsageError("mean was called outside the loop.", fix=["hands.mean(value) in the loop"])
        return self._loop.mean(worker_means.number(value))

    def save(self) -> None:
        """Start a checkpoint beside the training; the chief writes it.

        After the next step, where workers have state of their own: with reducer="int8", and with `LocalSGD`. Where
        parameter servers lease slices, once what they have handed out is applied; only the chief's call counts.
        """
        if self._taken is None:
            raise UsageError("save was called outside the loop over batches().")
        self._taken.saver.save_soon()

    @checked_keywords
    def evaluate(
        self,
        data: Any,
        loss: LossFn,
        *,
        metrics: Mapping[str, MetricFn] | None = None,
        batch_size: int | None = None,
        collate: Any = None,
        batched: bool | None = None,
    ) -> dict[str, float]:
        """Loss and per-example metrics over all of `data`, every example once. All workers must call it.

        But in a loop where parameter servers lease slices: there a worker that calls it, after `step`, evaluates all of
        it alone, with the weights that it has for its next slice, while the others go on.

        Args:
            data: As for `batches`, unshuffled.
            loss: `loss(model, batch)`, as for `mh.Trainer`.
            metrics: Functions `metric(model, batch)` that return one value per example, by name.
            batch_size: Rows of a global batch, 256 by default. The result is the same.
            collate: As for `batches`.
            batched: True: each item of the data is one batch, and there is no `batch_size`.
        """
        if self._leased is not None:
            self._check_slice_done()
            source = as_source(data, collate=collate, num_workers=0, shuffle=False, batched=batched)
            size = self._known_run.piece_size(source, batch_size)
            return self._leased.evaluate(source, size, loss, metrics or {})
        run, engine = self._all_there("evaluate"), self._training.engine
        source = run.source(data, collate=collate, shuffle=False, batched=batched)
        size = run.piece_size(source, batch_size)
        with engine.using_loss(loss):
            results, _ = run.regrouping.agreed(
                lambda: evaluation.evaluate(engine, self._worker.axis, run.pieces(source, size), metrics or {})
            )
        return results

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every worker's tensor, in rank order. All workers must call it.

        Args:
            tensor: This worker's; shapes may differ.
        """
        return self._gather("gather", tensor)

    def _gather(self, what: str, tensor: Tensor) -> list[Tensor]:
        return self._all_there(what).regrouping.agreed(lambda: evaluation.gather_tensors(self._worker.axis, tensor))

    def reduce(self, value: Tensor, op: Literal["sum", "mean"] = "sum") -> Tensor:
        """Sum or mean over the workers, the same bits on each. All workers must call it.

        Args:
            value: This worker's tensor, of the same shape on all.
            op: "sum" (the default) or "mean".
        """
        parts = self._gather("reduce", value)
        total = torch.stack(parts).sum(0)
        return total / len(parts) if op == "mean" else total

    def _all_workers(self, what: str) -> Run:
        """The run, for something that all workers do together."""
        refuse_apart(what, in_loop=self._leased is not None, was_left=self._was_left)
        self._known_run.use()
        return self._known_run

    def _all_there(self, what: str) -> Run:
        """The same for what nobody who comes later can know."""
        run = self._all_workers(what)
        if self._worker.is_waiting:
            raise UsageError(
                f"This worker came to a running run, whose workers had called {what} outside of a loop before: what "
                "it gave is not on record.",
                fix=[f"hands.{what}(...) in the loop over batches(), or after the last one", "mh.Trainer"],
            )
        return run

    @property
    def _known_run(self) -> Run:
        if self._run is None:
            raise UsageError("The model is not known yet.", fix=["model, optimizer = hands.setup(model, optimizer)"])
        return self._run

    @property
    def _training(self) -> Training:
        return self._known_run.ready()

    def _slices(self, training: Training, taken: Steps) -> Iterator[Any]:
        for piece in self._new_loop(training, taken):
            self._piece, self._backward_done = piece, False
            if self._takers and isinstance(self._loop, SteppedLoop):
                self.turn = (self._loop.number - 1) % len(self._takers)
                self._give_turn(self.turn)
            yield piece.batch
            self._check_slice_done()

    def _new_loop(self, training: Training, taken: Steps) -> Iterator[PieceLike]:
        regrouping = self._known_run.regrouping
        if isinstance(training.engine, Served):
            self._loop = self._leased = LeasedLoop(training, taken, regrouping)
            return self._leased.slices()
        if not isinstance(self._loop, SteppedLoop):
            self._loop = SteppedLoop(training, regrouping, self._known_run.spec.comm.timeout_s)
        return self._loop.slices(taken)

    def _give_turn(self, turn: int | None) -> None:
        """Have only that optimizer's parameters take gradients; None: those of all."""
        for place, params in enumerate(self._takers):
            for param in params:
                param.requires_grad_(turn in (None, place))

    def _check_slice_done(self) -> None:
        if self._piece is not None:
            missing = "step()" if self._backward_done else "backward(loss) and step()"
            raise UsageError(
                f"The loop went on without hands.{missing} for a slice.", fix=[f"hands.{missing} in the loop"]
            )


def _refuse_own_loop(worker: Any) -> None:
    """What only the trainer can do, because it knows how a slice is computed and what comes next."""
    if worker.resolved.spec.train.audit:
        raise SpecError(
            "audit computes a slice once more, and only mh.Trainer knows how: in a loop of your own, you do.",
            where="audit",
            fix=["audit = false", "mh.Trainer"],
        )
    if worker.grid.pipeline > 1:
        raise SpecError(
            "A pipeline runs several slices at a time through its stages, and a loop of your own has one: it could "
            "not say what comes next.",
            where="mh.join",
            fix=["mh.Trainer", "mh.Tensor, mh.Sharded or mh.Mesh without pipeline="],
        )
    if worker.is_divided and worker.is_elastic:
        raise SpecError(
            "A worker that takes the place of another in a divided model has to know the step, which in a loop of "
            "your own you do.",
            where="elastic",
            fix=["mh.Trainer", "no elastic="],
        )
    if worker.strategy.takes_local_steps:
        raise SpecError(
            "Servers lease several batches at a time, and steps on them are not taken together: a loop of your own "
            "could not tell when.",
            where="mh.join",
            fix=["mh.Trainer", "mh.LocalSGD(every=H), where workers average together"],
        )


def takers_of(worker: Any, optimizers: Sequence[Any], scheduler: Any) -> list[list[nn.Parameter]]:
    """The trained parameters of each of several optimizers that take turns, and refusals where they cannot."""
    if worker.strategy.name not in ("single", "mirrored", "multi_worker"):
        raise SpecError(
            f'strategy="{worker.strategy.name}" has one optimizer; several that take turns need whole replicas.',
            where="hands.setup",
            fix=['strategy="mirrored"', 'strategy="multi_worker"'],
        )
    if scheduler is not None:
        raise SpecError(
            "A scheduler is stepped after every update, but each of several optimizers makes only some of them.",
            where="hands.setup",
            fix=["no scheduler=, and scheduler.step() in the loop, after hands.step(), in its optimizer's turn"],
        )
    found = [[one for group in optimizer.param_groups for one in group["params"]] for optimizer in optimizers]
    every = [id(param) for params in found for param in params]
    if len(set(every)) != len(every):
        raise SpecError("A parameter has two optimizers.", where="hands.setup", fix=["each in one of them"])
    return [[param for param in params if param.requires_grad] for params in found]


def _no_loss(model: nn.Module, batch: Any) -> Any:
    raise AssertionError("a loop of the user's own computes its own loss")
