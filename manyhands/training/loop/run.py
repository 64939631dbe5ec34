"""What the trainer and user loops have in common: setup, cutting data into steps, evaluation, start-of-run events.

`Run.ready` joins the run, reads the newest checkpoint and builds the live state, once; everything before it is cheap
and touches neither the disk nor the other workers.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from manyhands.checkpoint.reader import newest_valid, open_checkpoint
from manyhands.control.session.session import RunFacts
from manyhands.data.batches import Batches, FetchedSlice
from manyhands.data.custom_orders import Order
from manyhands.data.evaluation import eval_pieces
from manyhands.data.feeds import BatchSchedule
from manyhands.data.optimizer_turns import Turns
from manyhands.data.ready_batches import cut_rows
from manyhands.data.sample_order import slices_of
from manyhands.data.sources.as_source import InputContext, Source, as_source, describe
from manyhands.data.sources.per_slice_source import PerSliceSource
from manyhands.data.sources.stream_source import StreamSource
from manyhands.errors import CheckpointMismatch, DataError, PeerLost
from manyhands.events import Evaluated, RunStarted, Warned
from manyhands.launcher.worker_process import process_settings
from manyhands.observe.notebook import in_notebook, notebook_name
from manyhands.parallel.model.layer_dtypes import set_dtypes_
from manyhands.parallel.model.precision import fp16_slowdown
from manyhands.parallel.model.training_modes import begin_training_
from manyhands.parameter_server.engine.leased_engine import has_backups
from manyhands.planner.measure.memory_limit import check_memory
from manyhands.planner.measure.memory_plan import WorkerPlan
from manyhands.private_files import make_directory
from manyhands.profiling.profiled_trial import ProfiledTrial
from manyhands.spec.load import environment
from manyhands.strategies.choices import ParameterServer, Sharded
from manyhands.strategies.loss_check import LossCheck
from manyhands.strategies.model_parallel import Mesh, microbatches
from manyhands.strategies.replicated import Replicated
from manyhands.training.elastic.regroup import Regroup
from manyhands.training.loop.checkpoint_follower import CheckpointFollower
from manyhands.training.loop.fit_history import FitSettings
from manyhands.training.loop.recorded_calls import RecordedCalls
from manyhands.training.loop.setting_checks import (
    check_balance,
    check_elastic,
    check_leasable,
    check_length,
    check_own_reduction,
    mode_of,
    same_order,
)
from manyhands.training.loop.step_lifecycle import StepLifecycle
from manyhands.training.loop.step_watch import StepWatch
from manyhands.training.setup.divide_model import Sample
from manyhands.training.setup.engine_factory import make_engine
from manyhands.training.setup.user_model import Parts, floats_of, randomness_in
from manyhands.training.state.checkpoint_broadcast import CheckpointBroadcast
from manyhands.training.state.checkpointing import Checkpoints, Saver, load_newest
from manyhands.training.state.gathered_state import WholeState
from manyhands.training.state.training_state import TrainingState
from manyhands.training.step import evaluation
from manyhands.training.step.hooks import Hooks
from manyhands.training.step.placement_log import log_placement
from manyhands.training.step.stragglers import StragglerTracker
from manyhands.training.worker.worker import Worker, machine_of

if TYPE_CHECKING:
    from manyhands.dataflow.graph_request import GraphOfFirstCall

__all__ = ["Run"]

EVAL_BATCH = 256
WITH_FIRST_CHECKPOINT = ("fit", "batches")
"""Calls that commit a checkpoint before their first step."""
USUAL_BATCH = 32
"""Rows of the sample where no batch size is given because the data comes in batches."""


class Run:
    """One training on this worker. `calls` and the state exist once `ready` has been called."""

    def __init__(self, worker: Worker, parts: Parts, hooks: Hooks, scheduler: Callable[..., Any] | None) -> None:
        self.worker, self.parts, self.spec = worker, parts, worker.resolved.spec
        self._hooks, self._scheduler = hooks, scheduler
        self._training: TrainingState | None = None
        self._watch: StepWatch
        self._sample: Callable[[], Sample | None] = lambda: None
        self._planned: list[WorkerPlan] = []
        self._has_checked_loss = False
        self._trial = ProfiledTrial(worker)
        self.graph: GraphOfFirstCall | None = None
        """Under `mh graph`: what waits for the first call of the model."""
        if worker.planned is not None and worker.planned.graph is not None:
            from manyhands.dataflow.graph_request import GraphOfFirstCall  # not in every worker: it takes a while

            self.graph = GraphOfFirstCall(worker.planned, parts)
        self.regrouping = Regroup(worker, self._regrouped)
        self.calls: RecordedCalls
        self._shown_checkpoint: Path | None = None
        self._follower: CheckpointFollower | None = None
        worker.script.watch(self)
        self._warnings: list[str] = []

    def warn_when_ready(self, text: str) -> None:
        """Keep a warning for `ready`: before it, nothing is written or printed."""
        self._warnings.append(text)

    def begin_call(self, name: str, *, resume: bool = True) -> TrainingState:
        """Count a public call. Afterwards `calls.already_done` says whether its result is recorded."""
        training, worker = self.use(resume=resume), self.worker
        worker.script.call += 1
        self.calls.begin(name, is_past=worker.is_server or (worker.is_waiting and self._is_behind))
        progress = training.progress
        if self.worker.is_elastic and not self.worker.is_waiting:
            self.worker.report(progress.step, name)
        if self.calls.number > progress.call:
            progress.call, progress.call_step, progress.call_epoch = self.calls.number, progress.step, progress.epoch
            progress.history, progress.ended, progress.best = [], False, None
            progress.row_loss, progress.row_rows = 0.0, 0
            if self.calls.number == 1 and worker.number > 1 and name not in WITH_FIRST_CHECKPOINT:
                self._save_first()
        return training

    def _save_first(self) -> None:
        """Commit the initial state of a second or later training of the script. It may be a copy of an earlier
        training's weights, and in a resumed run those weights are newer than they were here.
        """
        if self.worker.is_waiting or self.worker.is_server or self.worker.is_evaluator:
            return
        saver = Saver(self.worker, self.ready(), self.spec.checkpoint)

        def work() -> None:
            saver.save_now(required=True)
            self.worker.wait_for_chief("first checkpoint")

        try:
            self.regrouping.agreed(work)
        finally:
            saver.close()

    @property
    def _is_behind(self) -> bool:
        """Whether the other workers are past this call, in a worker that joined late."""
        return self.worker.call < self.regrouping.run_call

    def offer(
        self, data: Any, collate: Any, rows: int | None, *, batched: bool | None = None, with_loss: bool = True
    ) -> None:
        """Data from which a strategy may take a sample before it divides the model; nothing is read unless it does."""
        worker = self.worker
        if self._training is not None or not (
            worker.is_divided or worker.planned or worker.strategy.memory_limit is not None
        ):
            return

        def sample() -> Sample:
            source = as_source(data, collate=collate, num_workers=0, shuffle=False, batched=batched)
            num_rows = max(1, (rows or USUAL_BATCH) // (self.spec.train.slices or self._default_slices()))
            floats = floats_of(self.spec.train.precision)
            pieces = eval_pieces(
                source, batch_size=num_rows, rank=0, world_size=1, device=self.worker.device, floats=floats
            )
            with contextlib.closing(pieces):  # type: ignore[type-var]  # a generator
                piece = next(pieces)
            batch = cut_rows(piece.batch, 0, num_rows) if batched and piece.rows > num_rows else piece.batch
            return Sample(batch, self.parts.loss if with_loss else self.parts.call)

        self._sample = functools.cache(sample)

    def sample(self) -> Sample:
        """One slice of the data given to `offer`."""
        found = self._sample()
        assert found is not None, "call offer first"
        return found

    def check_memory(self) -> None:
        """`SpecError` if the layout needs more memory than the strategy allows; called before the model is divided."""
        worker, limit = self.worker, self.worker.strategy.memory_limit
        if limit is not None and self._training is None:
            slices = self.spec.train.slices
            plan = check_memory(limit, self.parts, worker.strategy, worker.world_size, slices, self.sample())
            self._planned = plan.memory

    def is_call_over(self) -> bool:
        """Whether the result of this call, which has no steps, is recorded. A worker that joins late waits for that."""
        if self.worker.is_waiting and not self.calls.already_done:
            self.regrouping.wait_for_end_of_call()
            return True
        return self.calls.already_done

    def record_result(self, write: Callable[[], None]) -> None:
        """Record the result of this call, which `write` writes on the chief. No worker begins the next call before it
        is written, because a worker that joins the run meanwhile reads it."""

        def work() -> None:
            write()
            if self.worker.is_elastic:
                self.worker.wait_for_chief("record")

        self.regrouping.agreed(work)

    def use(self, *, resume: bool = True) -> TrainingState:
        """As `ready`, and make this the training in use: call it before any collective of this training."""
        training = self.ready(resume=resume)
        if not self.worker.script.use(self):
            return training
        if self.worker.is_waiting:  # it receives the state when it is admitted
            training.engine.adopt_rows()
            return training
        if not self.regrouping.take_up():
            self._training = None
            while self._training is None:
                self._set_up(resume=True)
        self.worker.script.give_back()
        return self.ready()

    def load_newest_weights(self) -> None:
        """In a worker that joined late and is not yet admitted: load the newest checkpoint's weights into the model."""
        if not self.worker.is_waiting or self._training is None:
            return
        newest = newest_valid(self.worker.home / "checkpoints")
        if newest is not None and newest.path != self._shown_checkpoint:
            self._training.show(open_checkpoint(newest.path, verify=False))
            self._shown_checkpoint = newest.path

    def put_down(self) -> Callable[[], None]:
        """Called when another training becomes the one in use. Returns what releases this one's memory."""
        return self._training.engine.put_down() if self._training is not None else lambda: None

    @property
    def is_ready(self) -> bool:
        return self._training is not None

    def ready(self, *, resume: bool = True) -> TrainingState:
        """Join the run and build the state, from the newest checkpoint with `resume`; at once if that was done."""
        if self._training is not None:
            return self._training
        spec, worker = self.spec, self.worker
        worker.script.use(self)
        worker.join_run(
            RunFacts(
                run_dir=spec.run.run_dir,
                overwrite=spec.run.overwrite,
                strategy=worker.strategy.name,
                slices=spec.train.slices or self._default_slices(),
                precision=spec.train.precision,
                script=notebook_name(environment()) if in_notebook() else sys.argv[0],
                backup=has_backups(worker.strategy),
                replica=worker.one_replica.size if isinstance(worker.strategy, Mesh) else 1,
            )
        )
        self.regrouping.end_if_replica_incomplete()
        if worker.is_chief and not worker.is_evaluator:
            make_directory(worker.home)
        self.calls = RecordedCalls(
            worker.home / "calls",
            writes=lambda: worker.is_chief and not worker.is_evaluator,
            warn=worker.events.warn,
        )
        if worker.is_waiting:
            self._set_up_for_joining()
        while self._training is None:
            self._set_up(resume and not worker.is_evaluator)
        for text in self._warnings:
            self.worker.events.warn(text)
        return self._training

    def _set_up(self, resume: bool) -> None:
        """Load the newest checkpoint, or start afresh, on all workers. If a worker is lost, the others do it again."""
        try:
            self._synchronise_start()
            loaded = load_newest(self.worker) if resume else None
            training = self._build(self._choose_slices(loaded.manifest.slices if loaded else None))
        except PeerLost:
            if not self.worker.is_elastic or self.worker.is_divided:  # the model may be only partly divided
                raise
            self._set_up_for_joining()
            if not self.regrouping.switch_generation().received:
                self._training = self.regrouping.training = None
            self.calls.resume_at = self.regrouping.resumed
            return
        self._training = self.regrouping.training = training
        if loaded is not None:
            self._restore(loaded)
            del loaded
            process_settings.give_freed_memory_back()
        self.regrouping.settled()

    def _synchronise_start(self) -> None:
        """Check that all workers begin the same training, and release the memory of the one before."""
        worker = self.worker
        try:
            worker.script.check_same(worker.number, worker.axis)
        except PeerLost:
            ended = worker.script.ended_without(worker.number)
            if ended is None:
                raise
            raise ended from None
        worker.script.give_back()
        worker.script.collect()

    def _set_up_for_joining(self) -> None:
        """Set up everything but the state, which this worker receives from another one."""
        self._training = self.regrouping.training = self._build(self._choose_slices(None), joining=True)

    def _regrouped(self) -> None:
        if self._training is not None:
            self._watch.regrouped()
        if self.worker.is_chief:
            self.calls.record_missing()

    def resume(self) -> bool:
        """Load the newest checkpoint, for user loops, which call this explicitly. False if there is none."""
        training = self.use(resume=False)
        loaded = self.regrouping.agreed(lambda: load_newest(self.worker))
        if loaded is None:
            return False
        training.slices = self._choose_slices(loaded.manifest.slices)
        self._restore(loaded)
        del loaded
        process_settings.give_freed_memory_back()
        return True

    def _restore(self, loaded: CheckpointBroadcast) -> None:
        training = self.ready()
        training.restore(loaded)
        self.calls.resume_at = self.regrouping.resumed = training.progress.call

    def _build(self, slices: int, *, joining: bool = False) -> TrainingState:
        spec, worker, parts = self.spec, self.worker, self.parts
        worker.script.check_whole(worker.number, parts.model)
        model = parts.model.to(worker.device)
        if spec.launch.memory_format == "channels_last":
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if worker.strategy.dtypes:
            set_dtypes_(model, worker.strategy.dtypes)
        optimizer = parts.make_optimizer(model)
        check_own_reduction(optimizer, worker.strategy, spec.train.precision, model)
        if worker.is_elastic:
            check_elastic(optimizer, spec.comm.reducer)
        if spec.train.precision == "fp16" and worker.device.type == "cpu":
            operation, factor = fp16_slowdown()
            worker.events.warn(
                f"fp16 on this CPU takes {factor:.0f} times as long as fp32 in a {operation}; "
                'precision="bf16" needs no loss scaling and is usually faster here.'
            )
        if spec.train.audit and worker.most_workers == 1:
            worker.events.warn("audit compares the gradients of two workers, and this run has one.")
        # Made before the model is divided, because only `setup` finds out whether it is.
        whole = WholeState(model, optimizer) if worker.is_divided or isinstance(worker.strategy, Sharded) else None
        pacing = StragglerTracker(spec.train, worker.num_replicas)
        engine = make_engine(worker, parts, model, pacing, joining=joining, sample=self._sample)
        self._begin_training(model)
        try:
            engine.setup(model, optimizer, joining=joining)
        except PeerLost:
            engine.abandon()
            raise
        awaits_part = worker.is_divided and joining  # other workers send which part this one gets
        divided = engine.divided if isinstance(engine, Replicated) and not awaits_part else None
        if divided is not None:
            worker.script.divided.update(model.modules())
        if whole is not None and divided is not None:
            whole.divided(divided.shares, divided.present)
            log_placement(worker, whole.placement())
        if not awaits_part and (engine.held.common is not None or divided is not None):
            process_settings.give_freed_memory_back()
        scheduler = self._scheduler(optimizer) if self._scheduler is not None else None
        training = TrainingState(
            worker,
            model,
            optimizer,
            scheduler,
            engine,
            self._hooks,
            slices,
            whole if divided or awaits_part else None,
            parts.sums,
        )
        self._watch = StepWatch(training, pacing, self._predicted(joining))
        return training

    def _predicted(self, joining: bool) -> WorkerPlan | None:
        """The memory that this worker will need: that of its part of the model, which the chief's measurements decide,
        and what this process holds beside the model.
        """
        if not self._planned:
            return None
        worker, rank = self.worker, int(self.worker.rank)
        mine = self._planned[rank]
        if not worker.is_divided or joining:
            return mine
        gathered = worker.axis.all_gather_bytes("predicted memory", msgspec.msgpack.encode(self._planned))
        agreed = msgspec.msgpack.decode(gathered[0], type=list[WorkerPlan])[rank]
        return msgspec.structs.replace(agreed, base=mine.base, total=agreed.total - agreed.base + mine.base)

    def _begin_training(self, model: torch.nn.Module) -> None:
        evaluated = begin_training_(model)
        if evaluated:
            self.worker.events.warn(
                f"{evaluated[0] or 'A part of the model'} is in evaluation mode and stays there, though it has "
                "parameters to train: no dropout, batch statistics as they are. Call model.train() before this to "
                "train it, or requires_grad_(False) to freeze its parameters, too."
            )

    def _choose_slices(self, before: int | None) -> int:
        train = self.spec.train
        if before is not None and train.slices not in (None, before):
            raise CheckpointMismatch(
                f"The run began with {before} slices, but now slices={train.slices}.",
                fix=[f"slices={before}", "a new run directory: --run-dir NEW"],
            )
        if before is not None or train.slices is not None:
            return before or train.slices or 1
        slices = self._default_slices()
        found = randomness_in(self.parts.model)
        if found and slices > 1:
            self.worker.events.warn(
                f"The model has {found}, whose result depends on the number of slices, and V={slices} follows from the "
                f"number of workers. Set slices={slices} to get the same result with any other number."
            )
        return slices

    def _default_slices(self) -> int:
        """`accumulate` for each worker that shares a batch, times microbatches, since each of those is a slice."""
        worker = self.worker
        choice = worker.strategy if isinstance(worker.strategy, ParameterServer) else None
        if choice is not None and choice.aggregate is not None:
            return choice.aggregate
        if mode_of(worker.strategy) == "async":
            return self.spec.train.accumulate
        return self.spec.train.accumulate * worker.most_replicas * microbatches(worker.strategy, worker.grid)

    def announce(self, call: str, total_steps: int | None, source: Source) -> None:
        worker, slices = self.worker, self.ready().slices
        if self.spec.train.balance and worker.num_replicas > 1 and slices <= worker.num_replicas:
            worker.events.warn(
                f"balance has nothing to move: no worker has more than one slice. Try slices={4 * slices}."
            )
        worker.events.emit(
            RunStarted(
                time_s=time.time(),
                run=str(worker.run_dir),
                strategy=worker.strategy.name,
                workers=worker.world_size,
                slices=slices,
                precision=self.spec.train.precision,
                threads=worker.threads,
                attempt=worker.session.identity.attempt,
                total_steps=total_steps,
                call=call,
                machine=machine_of(worker),
                exact=self.spec.train.exact,
                mode=mode_of(worker.strategy),
                depends_on_slices=randomness_in(self.parts.model),
                data=describe(source),
                origins={key: origin for key, origin in worker.resolved.origins.items() if origin != "default"},
            )
        )

    def check_first_loss(self) -> None:
        """Have the worker that computes the first step check its loss; once per training, over all calls."""
        if self._has_checked_loss or not self.spec.train.check_loss:
            return
        self._has_checked_loss = True
        training, emit = self.ready(), self.worker.events.emit_own
        look = LossCheck(
            training.progress.step + 1,
            self.parts.metrics,
            lambda text: emit(Warned(text=text)),
            may_couple=self.spec.train.slices is not None,
        )
        training.engine.check_first_loss(look)

    def source(
        self,
        data: Any,
        *,
        collate: Any = None,
        num_workers: int | None = None,
        shuffle: bool = True,
        batched: bool | None = None,
        order: Order | None = None,
    ) -> Source:
        worker, slices = self.worker, self.ready().slices
        replica, num_replicas = self._trial.replica
        context = InputContext(
            worker=replica,
            num_workers=num_replicas,
            slices=() if worker.is_waiting else tuple(slices_of(replica, num_replicas, slices)),
            num_slices=slices,
            host=worker.session.identity.host,
        )

        def work() -> Source:
            # Workers that train already have exchanged which data each of them has.
            exchange = worker if worker.num_replicas > 1 and not worker.is_waiting else None
            return as_source(
                data,
                collate=collate,
                num_workers=self._trial.loaders(num_workers),
                context=context,
                shuffle=shuffle,
                exchange=exchange,
                batched=batched,
                order=order,
                seed=self.spec.run.seed,
            )

        source = work() if worker.is_waiting else self.regrouping.agreed(work)
        if source.loader_timeout_s is None:
            source.loader_timeout_s = self.spec.train.loader_timeout_s
        if worker.is_elastic and isinstance(source, PerSliceSource):
            raise DataError(
                "Data that is a function of the worker cannot be divided again when workers join or leave.",
                fix=["data that is the same on every worker; manyhands divides the rows", "no elastic="],
            )
        return source

    def batch_size(self, source: Source, batch_size: int | None, per_worker: int | None = None) -> int:
        if isinstance(source, StreamSource) and source.batched:
            return _size_of_ready_batches(batch_size or per_worker)
        if batch_size is not None and per_worker is not None:
            raise DataError("batch_size and batch_per_worker were both given.", fix=["batch_size, the global batch"])
        own = source.own_batch_size
        if own is not None and (per_worker is not None or batch_size not in (None, own)):
            raise DataError(
                f"batch_size is {batch_size or per_worker}, but the Dataset makes batches of {own} itself.",
                fix=["no batch_size=", f"batch({batch_size or per_worker}) in the Dataset"],
            )
        if per_worker is not None:
            return per_worker * self._trial.most_replicas
        chosen = batch_size or getattr(source, "loader_batch_size", None)
        if chosen is None:
            fix = ["batch_size=256: the global batch, over all workers"]
            if isinstance(source, StreamSource):
                fix.append("batched=True, if each item is a whole batch already")
            raise DataError("No batch_size was given.", fix=fix)
        return int(chosen)

    def piece_size(self, source: Source, asked: int | None) -> int:
        """Rows per forward pass of an evaluation."""
        if isinstance(source, StreamSource) and source.batched:
            return _size_of_ready_batches(asked)
        return asked or EVAL_BATCH

    def batches(
        self, source: Source, batch_size: int, epochs: int | None, steps: int | None, turns: int = 1
    ) -> Batches:
        """With `turns`, each batch is yielded that many times, and `steps` counts batches."""
        if (epochs is None) == (steps is None):
            given = "Neither epochs nor steps was given." if epochs is None else "epochs and steps were both given."
            raise DataError(given, fix=["epochs=3", "steps=1000"])
        training, progress = self.ready(), self.ready().progress
        check_length(progress, epochs, None if steps is None else steps * turns)
        progress.order = same_order(progress, source, batch_size)
        if self.spec.train.balance:
            check_balance(source)
        if self.worker.strategy.leases:
            check_leasable(source)
        schedule = BatchSchedule(
            batch_size,
            training.slices,
            training.position(),
            first_step=progress.step // turns + 1,
            epochs=progress.call_epoch + epochs if epochs is not None else None,
            steps=progress.call_step // turns + steps if steps is not None else None,
        )
        worker = self.worker
        batches = Batches(
            source,
            schedule,
            self._trial.replica[0],
            self._trial.division(self._watch.division),
            device=worker.device,
            floats=floats_of(self.spec.train.precision),
            exchange=worker if worker.num_replicas > 1 else None,
        )
        batches = self._trial.batches(batches, source)
        return batches if turns == 1 else Turns(batches, turns, progress.step)  # type: ignore[return-value]

    def lifecycle(
        self,
        make_batches: Callable[[], Batches],
        checkpoint: Checkpoints | None,
        settings: FitSettings | None = None,
    ) -> StepLifecycle:
        """The lifecycle for the steps of one call. With `settings` they have a history."""
        saver = Saver(self.worker, self.ready(), checkpoint or self.spec.checkpoint)
        lifecycle = StepLifecycle(self.ready(), self._watch, make_batches, saver, self.regrouping, settings)
        lifecycle.observers += self._trial.observers(self.ready())
        return lifecycle

    def evaluate(self, source: Source, batch_size: int) -> dict[str, float]:
        results, rows = self.regrouping.agreed(lambda: self._evaluate(source, batch_size))
        step = self.ready().progress.step
        self.worker.events.emit(Evaluated(time_s=time.time(), step=step, results=results, rows=rows))
        return results

    def validate(self, sources: Mapping[str, Source], batch_size: int) -> dict[str, float]:
        """Inside `fit`, several evaluations as one: the results of each, named by its prefix and the result's name."""

        def work() -> tuple[dict[str, float], int]:
            found = {prefix: self._evaluate(source, batch_size) for prefix, source in sources.items()}
            named = {f"{prefix}{name}": value for prefix, (one, _) in found.items() for name, value in one.items()}
            return named, sum(rows for _, rows in found.values())

        return self.regrouping.evaluated(work)[0]

    def follow(self, source: Source, batch_size: int, *, ends_with_call: bool) -> list[dict[str, float]]:
        """On an evaluator, in place of a call of `fit`: evaluate what the run commits, until the call has ended there.

        Without `ends_with_call` its record may be of an earlier launch, and the end of the run counts.
        """
        if self._follower is None:
            self._follower = CheckpointFollower(self.worker, self.ready())
        calls = self.calls
        return self._follower.follow(
            calls.number,
            lambda: self._evaluate(source, batch_size),
            lambda: ends_with_call and calls.is_recorded,
        )

    def _evaluate(self, source: Source, batch_size: int) -> tuple[dict[str, float], int]:
        pieces = self.pieces(source, batch_size)
        return evaluation.evaluate(self.ready().engine, self.worker.replicas, pieces, self.parts.metrics)

    def predict(self, source: Source, batch_size: int) -> Any:
        engine = self.ready().engine
        return self.regrouping.agreed(
            lambda: evaluation.predict(engine, self.worker.replicas, self.parts.call, self.pieces(source, batch_size))
        )

    def pieces(self, source: Source, batch_size: int) -> Iterator[FetchedSlice]:
        """This worker's share of an evaluation: every row of `source` is in one worker's pieces."""
        worker = self.worker
        return eval_pieces(
            source,
            batch_size=batch_size,
            rank=worker.replica,
            world_size=worker.num_replicas,
            seed=self.spec.run.seed,
            device=worker.device,
            floats=floats_of(self.spec.train.precision),
            exchange=worker if worker.num_replicas > 1 else None,
        )


def _size_of_ready_batches(asked: int | None) -> int:
    """The rows per pass of validation data that does not come in batches; ready batches have sizes themselves."""
    if asked is not None:
        raise DataError(
            f"batch_size is {asked}, but with batched=True each item of the data is one global batch.",
            fix=["no batch_size=", "no batched=True, if each item is one example"],
        )
    return EVAL_BATCH
