"""`MonitoredTrainingSession`: TensorFlow 1's session loop over `mh.join`.

A session is a worker's `Hands` and one loop over its slices. `sess.run(train_op)` takes one step: forward and backward
for each of this worker's slices of the next batch, then the update that all workers make together. The training begins
with the first `run`: the process joins the run there, and becomes the launcher if several workers are asked for. What
restarts a lost worker, saves checkpoints and resumes is the run, not the session. Start reading at
`MonitoredTrainingSession.run`.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import torch

import manyhands as mh
from manyhands.distribute.train.cluster import Target
from manyhands.distribute.train.coordinator import ThreadCoordinator
from manyhands.distribute.train.hooks import (
    CheckpointSaverHook,
    NanTensorHook,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
)
from manyhands.distribute.train.notices import say_once
from manyhands.distribute.train.optimizers import GlobalStep, OperationLoss, TrainOp
from manyhands.distribute.train.placement import ConfigProto, places_of
from manyhands.errors import EnvironmentProblem, NonFinite, NotHere, SpecError, UsageError
from manyhands.spec.keyword_check import checked_class

__all__ = ["EndOfSession", "MonitoredTrainingSession"]

LOG = "placement.log"
USUAL_S = 600
_END = object()


class EndOfSession(Exception):
    """TensorFlow's OutOfRangeError: the training has ended, with its data or on request. A session catches it."""


@checked_class()
class MonitoredTrainingSession:
    """This worker's part of a training, run step by step: `while not sess.should_stop(): sess.run(train_op)`.

    Args:
        master: `server.target` of a `Server`; "" without a cluster of tasks.
        is_chief: The run knows its chief; what scripts usually pass agrees with it.
        checkpoint_dir: The run's directory: checkpoints are in `checkpoints` there, and a run that is not finished
            continues from them.
        hooks: Hooks of every worker.
        chief_only_hooks: Hooks that only the chief calls.
        save_checkpoint_secs: Seconds between two checkpoints; None: by steps alone.
        save_checkpoint_steps: Save at multiples of so many steps.
        save_summaries_steps: With `checkpoint_dir`: steps between two points of TensorBoard summaries; None: none.
        log_step_count_steps: Steps between two lines with steps per second; None: none.
        config: A `ConfigProto`.
    """

    def __init__(
        self,
        master: str = "",
        is_chief: bool = True,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        *,
        hooks: Sequence[SessionRunHook] = (),
        chief_only_hooks: Sequence[SessionRunHook] = (),
        save_checkpoint_secs: float | None = USUAL_S,
        save_checkpoint_steps: int | None = None,
        save_summaries_steps: int | None = 100,
        log_step_count_steps: int | None = 100,
        config: ConfigProto | None = None,
    ) -> None:
        if master not in ("", "local") and not isinstance(master, Target):
            raise SpecError(
                f"master is {master!r}, from which it is not known which task this process is.",
                where="MonitoredTrainingSession",
                fix=["master=server.target"],
            )
        self._server = master.server if isinstance(master, Target) else None
        self._dir = Path(checkpoint_dir) if checkpoint_dir is not None else None
        self._hooks, self._chief_only = list(hooks), list(chief_only_hooks)
        if log_step_count_steps:
            self._chief_only.append(StepCounterHook(log_step_count_steps))
        if self._dir is not None and save_summaries_steps:
            self._add_summaries(save_summaries_steps)
        self._checkpoints = self._when_to_save(save_checkpoint_secs, save_checkpoint_steps)
        self._config = config or ConfigProto()
        self._op: TrainOp | None = None
        self._hands: mh.Hands | None = None
        self._batches: Generator[Any, None, None] | None = None
        self._model: torch.nn.Module
        self.strategy: Any = None
        """Ours, from the first training operation on."""
        self._last_step: int | None = None
        self._over = False
        self.coord = ThreadCoordinator()
        """For threads beside the training; they are asked to stop when it ends."""

    # ---- what a user asks ------------------------------------------------------------------------------------

    @property
    def hands(self) -> mh.Hands:
        """This worker, from the first training operation on."""
        if self._hands is None:
            raise UsageError(
                "The session knows its training from the first training operation on.", fix=["sess.run(train_op)"]
            )
        return self._hands

    @property
    def train_op(self) -> TrainOp:
        """The operation that this session runs."""
        assert self._op is not None, "the first run sets it"
        return self._op

    @property
    def has_begun(self) -> bool:
        return self._hands is not None

    @property
    def global_step(self) -> int:
        """The run's step."""
        return self.hands.steps_done

    def should_stop(self) -> bool:
        """Whether the training has ended: a request to stop, `coord`'s too, ends it on all workers after a step."""
        return self._over

    def run(self, fetches: Any, feed_dict: Any = None) -> Any:
        """Take a step for a training operation, and return the other values, in the structure of `fetches`.

        Raises `EndOfSession` if there is no further step; `with` the session catches it.

        Args:
            fetches: A `TrainOp` (its value is None), `train_op.loss`, a `GlobalStep`, a function without arguments,
                and lists, tuples and dicts of these.
            feed_dict: Refused: there are no placeholders.
        """
        if feed_dict:
            raise NotHere(
                "feed_dict fills placeholders of a graph, and there are none.",
                where="sess.run",
                fix=["minimize(..., data=(x, y), batch_size=32)"],
            )
        if self._over:
            raise EndOfSession
        ops = list(_ops(fetches))
        if ops:
            self._begin(ops[0])
        context = SessionRunContext(SessionRunArgs(fetches), self)
        asked = [hook.before_run(context) for hook in self._hooks] if self._hands is not None else []
        every = [fetches, *(one.fetches if one is not None else None for one in asked)]
        for op in dict.fromkeys(_ops(every)):
            self._step(op)
        values = [self._value(one) for one in every]
        for hook, found in zip(self._hooks if asked else (), values[1:], strict=True):
            hook.after_run(context, SessionRunValues(found))
        if self._hands is not None and not self._over and (context.stop_requested or self.coord.should_stop()):
            self._stop_all()
        return values[0]

    # ---- beginning -------------------------------------------------------------------------------------------

    def _begin(self, op: TrainOp) -> None:
        if self._op is not None:
            if op is not self._op:
                raise UsageError(
                    "A session runs one training operation, and this is another one.",
                    where="sess.run",
                    fix=["hands.setup([model, other], [optimizer, other]), for optimizers that take turns"],
                )
            return
        self._config.apply()
        for hook in self._hooks:
            hook.begin()
        places = places_of(op.given_model) if isinstance(op.given_model, torch.nn.Module) else {}
        self.strategy = strategy = self._strategy_of(op, places)
        hands = mh.join(strategy, run_dir=self._dir, checkpoint=self._checkpoints)
        model, optimizer = op.build()
        self._op, self._model = op, model
        hands.setup(model, optimizer)
        hands.resume()
        self._hands = hands
        if hands.is_chief:
            for hook in self._chief_only:
                hook.begin()
            self._hooks += self._chief_only
            if self._config.log_device_placement:
                self._log_placement(model)
        for hook in self._hooks:
            hook.after_create_session(self, self.coord)
        steps = [hook.last_step for hook in self._every_hook() if isinstance(hook, StopAtStepHook)]
        self._last_step = min(steps, default=None)
        much: dict[str, Any] = {"epochs": op.epochs} if self._last_step is None else {"steps": self._last_step}
        self._batches = hands.batches(op.data, batch_size=op.batch_size, **much)  # type: ignore[assignment]

    def _every_hook(self) -> list[SessionRunHook]:
        """Those of the chief, too: what ends a training ends it on all workers."""
        return [*self._hooks, *(one for one in self._chief_only if one not in self._hooks)]

    def _strategy_of(self, op: TrainOp, places: Any) -> Any:
        on_workers = {place.task or 0 for place in places.values() if place.job not in (None, "ps")}
        if len(on_workers) > 1:
            raise SpecError(
                f"Parameters were placed on the workers {sorted(on_workers)}, and each worker here has a whole model.",
                where="device",
                fix=["strategy=mh.PipelineParallel(stages=2), of minimize", 'device("/job:ps/task:0")'],
            )
        on_servers = {name: place.task or 0 for name, place in places.items() if place.job == "ps"}
        cluster = self._server.cluster_spec if self._server is not None else None
        listed = cluster.num_tasks("ps") if cluster is not None and "ps" in cluster.jobs else 0
        strategy, given = op.strategy, {}
        if strategy is None:
            strategy = mh.ParameterServer() if on_servers or listed else mh.Mirrored()
        if on_servers:
            if not isinstance(strategy, mh.ParameterServer):
                raise SpecError(
                    f'{len(on_servers)} parameters were placed on "/job:ps", but the strategy has no servers.',
                    where=f"mh.{type(strategy).__name__}",
                    fix=["mh.ParameterServer(...)", "no device() around the model"],
                )
            given = {"place": on_servers, "servers": strategy.servers or listed or max(on_servers.values()) + 1}
        if cluster is not None and sum(map(cluster.num_tasks, cluster.jobs)) > 1:
            assert self._server is not None
            given["cluster"] = self._server.ours
        if self._config.intra_op_parallelism_threads:
            given["threads"] = self._config.intra_op_parallelism_threads
        return msgspec.structs.replace(strategy, **given)

    def _when_to_save(self, secs: float | None, steps: int | None) -> mh.Checkpoints:
        asked = [one for one in (*self._hooks, *self._chief_only) if isinstance(one, CheckpointSaverHook)]
        for hook in asked:
            if self._dir is None or hook.checkpoint_dir.resolve() != self._dir.resolve():
                raise SpecError(
                    f"A run has one directory for checkpoints, {self._dir}, and the hook has {hook.checkpoint_dir}.",
                    where="CheckpointSaverHook",
                    fix=[f'MonitoredTrainingSession(checkpoint_dir="{hook.checkpoint_dir}")', "Saver(model).save(...)"],
                )
        asked_steps = [steps, *(hook.checkpoints.every_steps for hook in asked)]
        every_steps = sorted({one for one in asked_steps if one is not None})
        own_s = None if asked and secs == USUAL_S else secs  # a hook decides instead of the default
        every_s = [one for one in (own_s, *(hook.checkpoints.every_s for hook in asked)) if one is not None]
        if len(every_steps) > 1:
            raise SpecError(
                f"Checkpoints would be saved every {' and every '.join(map(str, every_steps))} steps, "
                "and a run has one number.",
                where="CheckpointSaverHook",
                fix=["one CheckpointSaverHook with save_steps", "save_secs, beside it"],
            )
        return mh.Checkpoints(
            every_s=min(every_s, default=None),
            every_steps=max(every_steps, default=None),
            keep_last=max((hook.checkpoints.keep_last for hook in asked), default=3),
        )

    def _add_summaries(self, steps: int) -> None:
        try:
            self._chief_only.append(SummarySaverHook(steps))
        except EnvironmentProblem as missing:  # asked for by a default only
            say_once(f"No summaries are written: {missing.what}")

    def _log_placement(self, model: torch.nn.Module) -> None:
        places = places_of(model)
        lines = [
            f"{name}: {places.get(name, f'/device:{str(param.device).upper()}')}"
            for name, param in model.named_parameters()
        ]
        print("\n".join(lines), flush=True)
        (self.hands.run_dir / LOG).write_text("\n".join(lines) + "\n")

    # ---- steps -----------------------------------------------------------------------------------------------

    def _step(self, op: TrainOp) -> None:
        """The next step in which this worker has slices."""
        if op is not self._op:
            self._begin(op)
        try:
            if not self._advance(op):
                raise EndOfSession
            if self._last_step is not None and self.hands.steps_done >= self._last_step:
                self._drain(op)
        except NonFinite as error:
            if any(isinstance(hook, NanTensorHook) and not hook.fails for hook in self._every_hook()):
                print(f"{error.what}; the training ends.", flush=True)
                self._end()
                raise EndOfSession from error
            raise

    def _advance(self, op: TrainOp) -> bool:
        """Take slices until a step is made; False after the last one."""
        assert self._batches is not None
        hands = self.hands
        while (batch := next(self._batches, _END)) is not _END:
            hands.backward(op.loss_fn(self._model, batch))
            hands.step()
            if hands.stepped:
                return True
        self._end()
        return False

    def _drain(self, op: TrainOp) -> None:
        """Take the steps that are left, so that the run's last checkpoint is committed."""
        while self._advance(op):
            pass

    def _stop_all(self) -> None:
        self.hands.request_stop()
        self._drain(self.train_op)

    def _end(self) -> None:
        self._over = True
        self.coord.request_stop()

    def _value(self, fetch: Any) -> Any:
        if isinstance(fetch, dict):
            return {name: self._value(one) for name, one in fetch.items()}
        if isinstance(fetch, list | tuple):
            found = [self._value(one) for one in fetch]
            return type(fetch)(*found) if hasattr(fetch, "_fields") else type(fetch)(found)
        if fetch is None or isinstance(fetch, TrainOp):
            return None
        if isinstance(fetch, OperationLoss):
            return self.hands.loss
        if isinstance(fetch, GlobalStep):
            return self.global_step
        if self._op is not None and fetch is self._op.loss_fn:
            raise SpecError(
                "The loss function was fetched, which needs a model and a batch.",
                where="sess.run",
                fix=["sess.run([train_op, train_op.loss])"],
            )
        if callable(fetch):
            return fetch()
        raise SpecError(
            f"{fetch!r} cannot be fetched: a session returns a training's values.",
            where="sess.run",
            fix=["sess.run(train_op)", "sess.run(train_op.loss)", "sess.run(lambda: model(x))"],
        )

    # ---- ending ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the session. A training that has not ended is left by this worker, as with `break` in a loop."""
        if self._batches is not None:
            self._batches.close()
        if not self._over:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        ended = error is None or isinstance(error, EndOfSession)
        if ended and self._hands is not None:
            for hook in self._hooks:
                hook.end(self)
        self.close()
        return isinstance(error, EndOfSession)


def _ops(fetches: Any) -> Any:
    """The training operations in a structure."""
    if isinstance(fetches, TrainOp):
        yield fetches
    elif isinstance(fetches, dict):
        for one in fetches.values():
            yield from _ops(one)
    elif isinstance(fetches, list | tuple):
        for one in fetches:
            yield from _ops(one)
