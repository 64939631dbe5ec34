"""User loops: `mh.join` returns `Hands`, whose `batches` yields this worker's slices one at a time.

The user writes the loop; this file decides which slices this worker gets, with their randomness and weights, and does
the sum over all workers, checkpoints and resuming. Loops may differ in length between workers: a worker without a slice
in a step joins its collectives without running the loop's body. How a step is taken: `lockstep_own_loop`; where servers
lease slices, `leased_own_loop`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
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
from manyhands.parameter_server.loop.leased_own_loop import LeasedOwnLoop, refuse_unsynchronised
from manyhands.parameter_server.loop.server_main import serve
from manyhands.spec.keyword_check import checked_keywords
from manyhands.strategies.base import LossFn, MetricFn, SliceLike
from manyhands.training.enter_run import enter
from manyhands.training.loop.lockstep_own_loop import LockstepOwnLoop
from manyhands.training.loop.run import Run
from manyhands.training.loop.setting_checks import by_step, check_counts
from manyhands.training.loop.step_lifecycle import StepLifecycle
from manyhands.training.setup.user_model import Parts, optimizer_maker, set_precision_
from manyhands.training.state.checkpointing import Checkpoints, check_checkpoints
from manyhands.training.state.training_state import TrainingState
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
    """Join the run as a worker. Outside of a run, a script that asks for several workers starts them here and exits.

    Args:
        strategy: As for `mh.Trainer`, except for pipelines, which only the trainer can run.
        precision: "fp32" (the default), "bf16" or "fp16": forward passes run under autocast, weights and sums stay
            fp32; fp16 scales the loss. "fp64": weights, gradients and the data's floats are double.
        seed: The seed of all randomness and of the data order, 0 by default. The same seed gives the same run. This
            call seeds the global generators of Python, numpy and torch: make the model after it, and its initial
            weights are the same in every run.
        slices: V, the pieces that every global batch is cut into; workers take whole slices. Fix it where results must
            not depend on the number of workers and the model has dropout or BatchNorm. Default: `accumulate` x workers.
        accumulate: Slices per worker and step, where `slices` is not given: for batches that do not fit into memory.
        exact: Bitwise the same result for every number of workers from 1 to V: one thread per worker, deterministic
            kernels. Slower; replicas and synchronous parameter servers only.
        clip_norm: Scale the gradient down to this global norm if its norm is larger. Default: never.
        balance: Move slices from slow workers to fast ones; results stay the same. Needs more slices than workers.
        run_dir: Where checkpoints, events and logs go. Default: runs/<time>-<script>. Giving the same one again resumes
            the run, with `hands.resume()`.
        checkpoint: When to save and what to keep. Default: every 600 seconds, the last three.
        tune: First measure which settings are fastest, as in `mh.Trainer`.
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
    """This worker, for a training loop that you write. Made by `mh.join`."""

    def __init__(self, worker: Any, checkpoint: Checkpoints | None) -> None:
        self._worker, self._checkpoint = worker, checkpoint
        self._run: Run | None = None
        self._lifecycle: StepLifecycle | None = None
        """The lifecycle of the current loop over batches, or the last one."""
        self._piece: SliceLike | None = None
        self._backward_done = False
        self._lockstep = LockstepOwnLoop(worker)
        self._loop: LockstepOwnLoop | LeasedOwnLoop | None = None
        """The current loop, or the last one."""
        self._leased: LeasedOwnLoop | None = None
        """The current loop, if servers lease slices."""
        self._was_left = False
        self._num_committed = 0
        """Steps that were committed during the last call of `step`."""
        self._turn_params: list[list[nn.Parameter]] = []
        """The parameters of each optimizer, if several take turns."""
        self.turn = 0
        """The index of the optimizer whose parameters this step updates."""
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
        """Prepare model, optimizer and scheduler for training; returns model and optimizer, with the chief's weights.

        Given lists of models and optimizers, as for a GAN, the optimizers take turns: each batch is yielded once for
        every optimizer, in their order, and `turn` is the index of the current one. Only its parameters get gradients.

        In the process of a parameter server this does not return, unless the workers begin another training.

        Args:
            model: The `nn.Module`, or a list of them. Use what is returned.
            optimizer: A torch optimizer of its parameters, or a list of optimizers that take turns.
            scheduler: A learning rate scheduler of the optimizer, stepped once per update. Default: none.
        """
        _refuse_own_loop(self._worker)
        if isinstance(optimizer, list | tuple):
            self._turn_params = _params_by_turn(self._worker, optimizer, scheduler)
            whole: nn.Module = nn.ModuleList(model) if isinstance(model, list | tuple) else model
            joint: Any = SeveralOptimizers({str(index): one for index, one in enumerate(optimizer)})
        else:
            whole, joint = model, optimizer
        set_precision_(whole, self._worker.resolved.spec.train.precision)
        parts = Parts(whole, _no_loss, {}, optimizer_maker(joint), lambda m, batch: m(batch))
        schedule = by_step(lambda _: scheduler)
        if self._worker.is_server:
            serve(self._worker, parts, schedule)
        self._run = Run(self._worker, parts, Hooks((), self, is_chief=lambda: self.is_chief), schedule)
        self._run.ready(resume=False)
        return model, optimizer

    def resume(self) -> bool:
        """Load the newest checkpoint of the run directory; False if there is none. Call after `setup`.

        A worker that joins a running run receives the state of the other workers instead.
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
        """Yield this worker's slices, from the run's current step on. Call `backward` and `step` for each.

        Under parameter servers slices are leased, and a fast worker gets more of them; in async a worker gets all
        slices of a batch, one by default. To end the loop early, on every worker, call `request_stop`.

        Args:
            data: As for `mh.Trainer.fit`.
            batch_size: Rows of the global batch, over all workers. Default: that of a DataLoader.
            epochs: The number of passes over the data. Either this or `steps`.
            steps: The number of further optimizer updates.
            collate: Makes a batch of a list of examples, as a DataLoader's `collate_fn` does. Default: torch's.
            num_workers: Loader processes per worker. Default: that of a DataLoader, otherwise 0.
            batched: As for `mh.Trainer.fit`.
            order: As for `mh.Trainer.fit`.
        """
        check_counts(batch_size=batch_size, epochs=epochs, steps=steps, num_workers=num_workers)
        run = self._for_collective("batches")
        run.begin_call("batches")
        if run.calls.already_done:
            return
        source = run.source(data, collate=collate, num_workers=num_workers, batched=batched, order=order)
        size = run.batch_size(source, batch_size)
        joined = self._worker.is_waiting
        if joined and not run.regrouping.wait_for_admission():
            return
        turns = len(self._turn_params) or 1
        make_batches = partial(run.batches, source, size, epochs, steps, turns)
        self._lifecycle = lifecycle = run.lifecycle(make_batches, self._checkpoint)
        if not joined:
            run.announce("batches", lifecycle.total_steps, source)
        with run.regrouping.listening(lifecycle.regrouped):
            yield from self._take_steps(run, lifecycle, joined=joined)
        run.record_result(lambda: run.calls.finish(None))

    def _take_steps(self, run: Run, lifecycle: StepLifecycle, *, joined: bool) -> Iterator[Any]:
        """The batches of one loop, with its first and last checkpoint. `joined`: the other workers had begun it."""
        try:
            if not joined and not run.calls.is_resumed:
                lifecycle.save("first checkpoint", required=True)
            yield from self._slices(lifecycle)
            self._worker.end_trial()
            lifecycle.compare_last()
            lifecycle.save("end of batches", required=True)
        except GeneratorExit:  # user code left the loop by `break`
            self._worker.end_trial()
            self._was_left = self._leased is not None and self._leased.leave()
            raise
        finally:
            lifecycle.end()
            self._give_turn(None)
            self._leased = None
            lifecycle.close()

    def backward(self, loss: Tensor, weight: float | Tensor | None = None) -> None:
        """Compute the gradient of this slice's loss.

        Args:
            loss: The mean over the slice; with `weight`, a sum.
            weight: The divisor of the sum, such as the number of tokens. Default: `loss` is a mean over rows.
        """
        if self._piece is None or self._backward_done:
            raise UsageError("backward was called twice for one slice, or outside the loop over batches().")
        assert self._loop is not None
        self._loop.backward(loss if weight is None else (loss, weight))
        self._give_turn(None)
        self._backward_done = True

    def step(self) -> None:
        """Update the weights if this was the worker's last slice of the step; otherwise do nothing.

        In an elastic run the worker may get further slices of the same step, if a worker is lost. Under parameter
        servers this sends the gradient and waits for the next slice; `stepped` is true if servers have made updates
        meanwhile, one or several, with this gradient or those of other workers.
        """
        if not self._backward_done:
            raise UsageError("step was called without backward for this slice.", fix=["hands.backward(loss)"])
        assert self._loop is not None
        before = self.steps_done
        self.stepped = self._loop.step()
        self._num_committed, self._piece = self.steps_done - before, None

    def every(self, steps: int) -> bool:
        """Whether the last call of `step` reached or passed a multiple of `steps`; without an update, whether the run
        is at one.

        Args:
            steps: Updates between two times that it is true.
        """
        return self.steps_done % steps < max(1, self._num_committed)

    def request_stop(self) -> None:
        """End the loop over batches on every worker: after the next step, or once all leased slices are done."""
        if self._lifecycle is not None:
            self._lifecycle.end_requested = True

    def log(self, **values: float | Tensor) -> None:
        """Record values with the step's number; those of the chief are written to the run's events.

        Args:
            values: Numbers or tensors of one element, by name: `hands.log(loss=hands.loss)`.
        """
        numbers = {name: worker_means.number(value) for name, value in values.items()}
        self._worker.events.emit(Logged(time_s=time.time(), step=self.steps_done, values=numbers))

    def mean(self, value: float | Tensor) -> float:
        """The mean of `value` over the workers that had a slice in this step, weighted by their rows.

        All of those workers must call it, after `step`; the others need not. Where parameter servers lease slices, no
        worker waits for another: it is the mean of `value` and of the last values of the other live workers, each
        weighted by the rows of its last slice. `loss` is exact there, too.

        Args:
            value: This worker's number, or a tensor of one element.
        """
        loop = self._leased if self._worker.strategy.leases else self._loop
        if loop is None:
            raise UsageError("mean was called outside the loop.", fix=["hands.mean(value) in the loop"])
        return loop.mean(worker_means.number(value))

    def save(self) -> None:
        """Start a checkpoint in the background; the chief writes it.

        It starts after the next step if workers have state that the others do not have: with reducer="int8", and with
        `LocalSGD`. Where parameter servers lease slices, it starts once all leased slices are applied; only the chief's
        call counts.
        """
        if self._lifecycle is None:
            raise UsageError("save was called outside the loop over batches().")
        self._lifecycle.saver.save_soon()

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

        Exception: in a loop where parameter servers lease slices, a worker that calls it, after `step`, evaluates all
        of `data` alone, with the weights that it has for its next slice, while the other workers train.

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
        run, engine = self._for_unrecorded_collective("evaluate"), self._training.engine
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
            tensor: This worker's tensor; shapes may differ between workers.
        """
        return self._gather("gather", tensor)

    def _gather(self, what: str, tensor: Tensor) -> list[Tensor]:
        run = self._for_unrecorded_collective(what)
        return run.regrouping.agreed(lambda: evaluation.gather_tensors(self._worker.axis, tensor))

    def reduce(self, value: Tensor, op: Literal["sum", "mean"] = "sum") -> Tensor:
        """Sum or mean over the workers, bitwise the same on all of them. All workers must call it.

        Args:
            value: This worker's tensor, of the same shape on all workers.
            op: "sum" (the default) or "mean".
        """
        parts = self._gather("reduce", value)
        total = torch.stack(parts).sum(0)
        return total / len(parts) if op == "mean" else total

    def _for_collective(self, what: str) -> Run:
        """The run, for a call that all workers make together."""
        refuse_unsynchronised(what, in_loop=self._leased is not None, was_left=self._was_left)
        self._known_run.use()
        return self._known_run

    def _for_unrecorded_collective(self, what: str) -> Run:
        """The same for a call whose result is not recorded, so that a worker that joins later cannot get it."""
        run = self._for_collective(what)
        if self._worker.is_waiting:
            raise UsageError(
                f"This worker joined a running run, whose workers had called {what} outside of a loop before: its "
                "result is not recorded.",
                fix=[f"hands.{what}(...) in the loop over batches(), or after the last one", "mh.Trainer"],
            )
        return run

    @property
    def _known_run(self) -> Run:
        if self._run is None:
            raise UsageError("The model is not known yet.", fix=["model, optimizer = hands.setup(model, optimizer)"])
        return self._run

    @property
    def _training(self) -> TrainingState:
        return self._known_run.ready()

    def _slices(self, lifecycle: StepLifecycle) -> Iterator[Any]:
        with closing(self._begin_loop(lifecycle)) as slices:
            for piece in slices:
                self._piece, self._backward_done = piece, False
                if self._turn_params:
                    self.turn = self.steps_done % len(self._turn_params)
                    self._give_turn(self.turn)
                yield piece.batch
                self._check_slice_done()

    def _begin_loop(self, lifecycle: StepLifecycle) -> Generator[SliceLike, None, None]:
        if self._worker.strategy.leases:
            self._loop = self._leased = LeasedOwnLoop(lifecycle)
            return self._leased.slices()
        self._loop = self._lockstep
        return self._lockstep.slices(lifecycle)

    def _give_turn(self, turn: int | None) -> None:
        """Set `requires_grad` for the parameters of that optimizer only; None: for those of all."""
        for index, params in enumerate(self._turn_params):
            for param in params:
                param.requires_grad_(turn in (None, index))

    def _check_slice_done(self) -> None:
        if self._piece is not None:
            missing = "step()" if self._backward_done else "backward(loss) and step()"
            raise UsageError(
                f"The loop continued without hands.{missing} for a slice.", fix=[f"hands.{missing} in the loop"]
            )


def _refuse_own_loop(worker: Any) -> None:
    """`SpecError` for settings that only the trainer supports, because it computes the slices itself."""
    if worker.resolved.spec.train.audit:
        raise SpecError(
            "audit computes a slice a second time, which only mh.Trainer can: with mh.join your code computes slices.",
            where="audit",
            fix=["audit = false", "mh.Trainer"],
        )
    if worker.grid.pipeline > 1:
        raise SpecError(
            "A pipeline runs several slices at a time through its stages, and a loop with mh.join computes one at a "
            "time.",
            where="mh.join",
            fix=["mh.Trainer", "mh.TensorParallel, mh.Sharded or mh.Mesh without pipeline="],
        )
    if worker.is_divided and worker.is_elastic:
        raise SpecError(
            "A worker that replaces another one in a divided model has to repeat its step, which only mh.Trainer can: "
            "with mh.join your code computes it.",
            where="elastic",
            fix=["mh.Trainer", "no elastic="],
        )
    if worker.strategy.takes_local_steps:
        raise SpecError(
            "Servers lease several batches at a time, and a worker takes local steps on them: a loop with mh.join "
            "takes steps slice by slice.",
            where="mh.join",
            fix=["mh.Trainer", "mh.LocalSGD(every=H), where workers average together"],
        )


def _params_by_turn(worker: Any, optimizers: Sequence[Any], scheduler: Any) -> list[list[nn.Parameter]]:
    """The trained parameters of each of several optimizers that take turns; `SpecError` if they cannot."""
    if worker.strategy.name not in ("single", "mirrored"):
        raise SpecError(
            f'strategy="{worker.strategy.name}" has one optimizer; several that take turns need whole replicas.',
            where="hands.setup",
            fix=['strategy="mirrored"'],
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
        raise SpecError("A parameter has two optimizers.", where="hands.setup", fix=["each parameter in one optimizer"])
    return [[param for param in params if param.requires_grad] for params in found]


def _no_loss(model: nn.Module, batch: Any) -> Any:
    raise AssertionError("a user loop computes its loss itself")
