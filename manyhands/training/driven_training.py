"""A training whose loop belongs to another library, which asks for one step, evaluation or record after the other.

`Trainer` and `Hands` own their loop. Here another library's loop runs on every worker and calls `next_step` and
`compute` where it would have computed a batch itself; checkpoints, resuming, lost workers and joining ones are handled
between those calls. Where servers lease slices, a step is what this worker computes until the update with its number is
made, by any worker. Strategies in which workers' weights differ, or a worker computes only a part of the model, are
refused: such a loop knows of neither. Start reading at `DrivenTraining.steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from manyhands.data.batches import Step
from manyhands.data.evaluation import eval_pieces
from manyhands.data.sources.as_source import Source, as_source
from manyhands.data.sources.row_source import RowSource
from manyhands.errors import SpecError, UsageError
from manyhands.parallel.sharding.gather_per_step import GatherPerStep
from manyhands.parameter_server.engine.leased_engine import LeasedEngine
from manyhands.parameter_server.loop.leased_driven_loop import LeasedDrivenLoop
from manyhands.parameter_server.loop.server_main import serve
from manyhands.strategies.base import Engine, SliceLike
from manyhands.training.loop.lockstep_own_loop import LockstepOwnLoop
from manyhands.training.loop.run import Run
from manyhands.training.own_loop import Hands
from manyhands.training.setup.user_model import Parts
from manyhands.training.state.foreign_optimizer import show_states
from manyhands.training.step import evaluation
from manyhands.training.step.hooks import Hooks

__all__ = ["DrivenTraining", "whole_batches"]

T = TypeVar("T")
USABLE = ("single", "mirrored", "central_storage", "sharded", "parameter_server")
ONE_COPY = ("central_storage", "sharded")
"""Strategies whose workers share weights, if they share memory."""
BUFFER = "manyhands_sum_"


class DrivenTraining:
    """The training that `hands` joined, of one model.

    `sums` are tensors outside of the model that forward passes add to; after a step each has what all slices added,
    and they are part of checkpoints. `hook` has `state()` and `restore(state)`, and gets what a checkpoint has before
    the first step.
    """

    def __init__(
        self,
        hands: Hands,
        model: nn.Module,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        *,
        hook: Any,
        sums: Sequence[Tensor] = (),
    ) -> None:
        self._worker, self._checkpoint = hands._worker, hands._checkpoint
        _refuse(self._worker)
        parts = Parts(model, _no_loss, {}, make_optimizer, lambda m, batch: m(batch), tuple(sums))
        if self.leases:
            _serve_sums(model, sums)
        if self._worker.is_server:
            serve(self._worker, parts, None)
        self._run = Run(self._worker, parts, Hooks((hook,), self, is_chief=lambda: self.is_chief), None)
        self._loop: LockstepOwnLoop | LeasedDrivenLoop = LockstepOwnLoop(self._worker)
        self.is_in_steps = self._is_users_turn = False
        """Inside `steps`: no other public call is counted."""

    @property
    def leases(self) -> bool:
        """Whether servers lease slices: workers act together only at the ends of epochs."""
        return bool(self._worker.strategy.leases)

    @property
    def is_chief(self) -> bool:
        return bool(self._worker.is_chief)

    @property
    def rank(self) -> int:
        return int(self._worker.rank)

    @property
    def num_workers(self) -> int:
        return int(self._worker.world_size)

    @property
    def steps_taken(self) -> int:
        """Committed steps of the running call."""
        progress = self._run.ready().progress
        return progress.step - progress.call_step

    @property
    def position(self) -> tuple[int, int]:
        """The epoch of the run, and the row of its data, with which the next step begins."""
        progress = self._run.ready().progress
        return progress.epoch, progress.row

    @property
    def num_slices(self) -> int:
        return self._run.ready().slices

    def warn(self, text: str) -> None:
        self._worker.events.warn(text)

    # ---- public calls, which are numbered as the trainer's are ----

    def begin(self, name: str) -> bool:
        """Count a public call. True: the run has finished it; its result is `recorded`."""
        self._run.begin_call(name)
        if not self._worker.is_server:
            self._show_whole()
        return self._run.calls.already_done

    @property
    def is_over(self) -> bool:
        """For a call without steps: whether its result is recorded. A worker that joins late waits for that."""
        return self._run.is_call_over()

    @property
    def recorded(self) -> Any:
        return self._run.calls.recorded()

    @property
    def recorded_tensors(self) -> Any:
        """The result of a call that ended with `record_tensors`."""
        return evaluation.from_file(self._run.calls.tensors_path(), self.recorded)

    def record(self, result: Any) -> None:
        """End the call with this result, which the chief writes."""
        self._run.record_result(lambda: self._run.calls.finish(result))

    def record_tensors(self, result: Any) -> None:
        """The same for a result of tensors, in a file."""
        calls = self._run.calls
        write = partial(evaluation.to_file, calls.tensors_path(), result)
        self._run.record_result(lambda: calls.finish_with(write) if self.is_chief else None)

    # ---- steps ----

    def source(self, data: Any, *, shuffle: bool, batched: bool | None = None) -> Source:
        return self._run.source(data, shuffle=shuffle, batched=batched)

    @contextmanager
    def steps(
        self,
        source: Source,
        batch_size: int | None,
        *,
        epochs: int | None,
        steps: int | None,
        saves: bool = True,
        together_every: int | None = None,
    ) -> Iterator[bool]:
        """Inside, `next_step` and `compute` take the steps of a call, from the state that a checkpoint or the other
        workers have. Yields False if the run finished the call without this worker, whose result is then recorded.

        After the last step of a pass over the data, and after `together_every` steps of an epoch of the other library,
        all workers are at that step. Where servers lease slices, they are not in between.

        The first checkpoint is committed before it, the last one after it, if it `saves`; then `record` the result.
        """
        run, worker = self._run, self._worker
        self._leave_users_weights()
        joined = worker.is_waiting
        if joined and not run.regrouping.wait_for_admission():
            yield False
            return
        if not saves:
            self._start_uncounted()
        elif not joined and not run.calls.is_resumed:
            self._start_new_pass()
        size = run.batch_size(source, batch_size)
        lifecycle = run.lifecycle(lambda: run.batches(source, size, epochs, steps), self._checkpoint)
        if not joined:
            run.announce("fit", lifecycle.total_steps, source)
        run.ready().restore_hooks()
        self.is_in_steps = True
        try:
            with run.regrouping.listening(lifecycle.regrouped):
                if saves and not joined and not run.calls.is_resumed:
                    lifecycle.save("first checkpoint", required=True)
                if self.leases:
                    self._loop = LeasedDrivenLoop(lifecycle, together_every)
                    self._loop.begin()
                else:
                    assert isinstance(self._loop, LockstepOwnLoop)
                    self._loop.begin(lifecycle)
                yield True
                worker.end_trial()
                lifecycle.compare_last()
                if saves:
                    lifecycle.save("end of fit", required=True)
        finally:
            self.is_in_steps = False
            lifecycle.end()
            lifecycle.close()
            if isinstance(self._loop, LeasedDrivenLoop):
                self._loop.close()
        self._show_whole()

    def begin_epoch(self, taken: int) -> None:
        """An epoch of the other library begins after so many steps of the call; `together_every` counts from here."""
        if isinstance(self._loop, LeasedDrivenLoop):
            self._loop.begin_epoch(taken)

    @property
    def is_ended(self) -> bool:
        """Whether the workers have agreed to take no further step of this call."""
        return bool(self._run.ready().progress.ended)

    def request_end(self) -> None:
        """Have no worker take a further step, once all have been asked. For loops whose workers are not in step."""
        assert isinstance(self._loop, LeasedDrivenLoop)
        self._loop.request_end()

    @property
    def is_end_requested(self) -> bool:
        return isinstance(self._loop, LeasedDrivenLoop) and self._loop.is_end_requested

    # ---- the user's code between steps, which reads and writes weights ----

    @contextmanager
    def users_code(self) -> Iterator[None]:
        """Inside, weights and optimizer state are whole, and may be written: the chief's changes count. Collective."""
        engine, before = self._run.use().engine, self._is_users_turn
        with ExitStack() as stack:
            if isinstance(engine, LeasedEngine):
                engine.leave_memory()
                engine.gather_state()
            elif self._has_common(engine) or isinstance(engine.held, GatherPerStep):
                stack.enter_context(engine.editing())
                stack.enter_context(torch.enable_grad())
            show_states(self._run.ready())
            self._is_users_turn = True
            stack.callback(setattr, self, "_is_users_turn", before)
            yield
        if isinstance(engine, LeasedEngine):
            self.agreed(engine.synchronise)

    @property
    def shares_weights(self) -> bool:
        """Whether workers have one copy of the weights: only the chief may write, in `users_code`."""
        engine = self._run.ready().engine
        return not isinstance(engine, LeasedEngine) and not self._is_users_turn and self._has_common(engine)

    def _has_common(self, engine: Engine) -> bool:
        return self._worker.strategy.name in ONE_COPY and engine.held.common is not None

    @property
    def has_whole_weights(self) -> bool:
        """Whether the user's code may read and write weights here, on every worker alike."""
        partial = self.leases or isinstance(getattr(self._run.ready().engine, "held", None), GatherPerStep)
        return not (self.is_in_steps and partial) or self._is_users_turn

    def _show_whole(self) -> None:
        """The user's code follows, until the next steps."""
        if self._worker.is_waiting:
            return
        engine = self._run.use().engine
        if isinstance(engine, LeasedEngine):
            engine.leave_memory()
            engine.gather_state()
        elif isinstance(engine.held, GatherPerStep):
            engine.held.make_whole()
        show_states(self._run.ready())

    def _leave_users_weights(self) -> None:
        """Steps follow: the chief's weights count."""
        engine = self._run.use().engine
        if not isinstance(engine, LeasedEngine) and isinstance(engine.held, GatherPerStep):
            engine.held.shard_again()
            engine.synchronise()

    def refuse_without_checkpoints(self, name: str, instead: str) -> None:
        """`UsageError` where calls of single steps, which are neither counted nor saved, would be made twice."""
        run = self._run
        run.use()
        if self._worker.is_elastic or run.calls.resume_at:
            raise UsageError(
                f"{name} takes single steps that are not in checkpoints, so "
                + ("no worker can join or be replaced" if self._worker.is_elastic else "the run cannot be resumed")
                + " between them.",
                fix=[f"{instead}, whose steps are", "mh.join, for a loop of your own"],
            )

    def _start_new_pass(self) -> None:
        """A call begins with the first row of its data, also if the call before has ended inside a pass."""
        progress = self._run.ready().progress
        if progress.row:
            progress.epoch, progress.row = progress.epoch + 1, 0
            progress.call_epoch = progress.epoch

    def _start_uncounted(self) -> None:
        """The same for steps of no public call: they are counted from here."""
        self._start_new_pass()
        progress = self._run.ready().progress
        progress.call_step, progress.call_epoch, progress.ended = progress.step, progress.epoch, False

    def next_step(self) -> Step | None:
        """The next step, on every worker; None after the last. Workers that wait to join are admitted here."""
        return self._loop.next_step()

    def compute(self, step: Step, loss_of: Callable[[SliceLike], Tensor]) -> None:
        """Compute and commit a step. `loss_of(slice)` runs the forward pass and returns the mean loss of the slice.

        It is called for this worker's slices, and for those of workers that are lost in the step. Where servers lease
        slices, it is called for the slices of any step, until this one is committed.
        """
        if isinstance(self._loop, LeasedDrivenLoop):
            self._loop.compute(step, loss_of)
            return
        current: Step | None = step
        while current is not None:
            with closing(self._loop.slices_of(current)) as pieces:
                for piece in pieces:
                    self._loop.backward(loss_of(piece))
                    self._loop.step()
            current = self._loop.next_step() if self._loop.starts_over else None

    # ---- between steps, and outside of them ----

    def agreed(self, work: Callable[[], T]) -> T:
        """Run a collective `work`, again if a worker is lost in it, until every worker has its result."""
        return self._run.regrouping.agreed(work)

    def gather(self, what: str, data: bytes) -> list[bytes]:
        """Every worker's bytes, in rank order. Call it inside `agreed`, or where no worker can be lost."""
        return list(self._worker.axis.all_gather_bytes(what, data))

    def wait_for_chief(self, what: str) -> None:
        self.agreed(lambda: self._worker.wait_for_chief(what))

    def evaluating(self) -> AbstractContextManager[None]:
        """Around forward passes that train nothing."""
        return self._run.use().engine.evaluating()


def whole_batches(data: Any, batch_size: int, *, limit: int | None = None) -> Iterator[Any]:
    """All of `data` in order, in whole batches, on this worker alone: for evaluation.

    Data that repeats without an end needs a `limit`: how many batches are read at most.
    """
    source = as_source(data, num_workers=0, shuffle=False)
    if source.endless and limit is not None:
        source = _beginning(source, limit * (source.own_batch_size or batch_size))
    with closing(eval_pieces(source, batch_size=batch_size, rank=0, world_size=1)) as pieces:  # type: ignore[type-var]
        for piece in pieces:
            yield piece.batch


def _beginning(source: Source, rows: int) -> Source:
    """Of endless data. A stream is read no further than it is asked for."""
    source.endless = False
    if isinstance(source, RowSource):
        source.num_rows = min(rows, source.num_rows)
    return source


def _serve_sums(model: nn.Module, sums: Sequence[Tensor]) -> None:
    """Servers keep a model's buffers with every version of the weights: make the sums such buffers, not to be saved."""
    for name in [name for name in model._buffers if name.startswith(BUFFER)]:
        nn.Module.__delattr__(model, name)
    for number, one in enumerate(sums):
        model.register_buffer(f"{BUFFER}{number}", one, persistent=False)


def _refuse(worker: Any) -> None:
    choice, grid = worker.strategy, worker.grid
    why = ""
    if choice.takes_local_steps or choice.name == "local_sgd":
        why, fix = "averages weights of workers that differ in between, so no logs are those of one model", []
        if choice.name == "parameter_server":
            fix = ['mh.ParameterServer(mode="async"), without push_every= and pull_every=']
    elif grid.tensor > 1:
        why, fix = "splits torch's layers, and another library's would be computed whole by every worker", []
    elif grid.pipeline > 1:
        why, fix = "runs a model stage by stage, and another library's loop calls all of it", []
    elif choice.name not in (*USABLE, "mesh"):
        why, fix = "is none in which each worker computes slices with the whole model", []
    if why:
        raise SpecError(
            f"mh.{type(choice).__name__} {why}.",
            where=f'strategy="{choice.name}"',
            fix=[*fix, "mh.Mirrored(workers=2)", "mh.Sharded(workers=2), for memory"],
        )
    if worker.resolved.spec.train.audit:
        raise SpecError(
            "audit computes a slice a second time, which only mh.Trainer can.", where="audit", fix=["audit = false"]
        )


def _no_loss(model: nn.Module, batch: Any) -> Any:
    raise AssertionError("the other library computes the loss")
