"""Keras's list of callbacks, called on every worker at the same moments with the same logs.

What writes files or prints is called on the chief only, and so is a callback with `chief_only = True`. A process that
resumed, or joined late, runs through the moments that the run is past without calling anything; then callbacks get the
state that they had there. Start reading at `LockstepCallbacks`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import keras
from keras.src.callbacks.progbar_logger import ProgbarLogger

from manyhands.compat.keras import callback_state
from manyhands.compat.keras.summaries import Summaries

__all__ = ["CallProgress", "ChiefOnly", "LockstepCallbacks", "QuietCallbacks"]

MOMENTS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]
CHIEFS = (keras.callbacks.CSVLogger, keras.callbacks.RemoteMonitor, ProgbarLogger)
NEVER_STOP = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.History,
    keras.callbacks.ModelCheckpoint,
    ProgbarLogger,
    Summaries,
)


class CallProgress(Protocol):
    """What a list of callbacks asks about its call of `fit`."""

    @property
    def is_resumed(self) -> bool: ...
    @property
    def is_chief(self) -> bool: ...
    @property
    def batches_taken(self) -> int: ...

    def pass_moment(self) -> bool:
        """Count a moment. False: the run was past it before this process continued it."""

    def agree_to_stop(self, mine: bool, *, in_epoch: bool = False) -> bool:
        """Whether any worker's callbacks have requested to stop. Collective, but for workers that are not in step."""

    def begin_epoch(self) -> None:
        """An epoch begins, also one that the run is past."""

    def users_code(self) -> AbstractContextManager[None]:
        """Around calls that may read and write weights, at moments that all workers have together. Collective."""

    def check_step(self) -> None:
        """`SpecError` if a callback has replaced the step."""

    def warn(self, text: str) -> None: ...


class ChiefOnly(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Calls a callback on the chief. A worker that becomes the chief later begins it then."""

    def __init__(self, callback: Any, progress: CallProgress) -> None:
        super().__init__()
        self.callback, self._progress, self._has_begun = callback, progress, False

    def set_model(self, model: Any) -> None:
        self._model = model
        self.callback.set_model(model)

    def set_params(self, params: Any) -> None:
        self.params = params
        self.callback.set_params(params)

    def call(self, moment: str, *args: Any, **kwargs: Any) -> None:
        if not self._progress.is_chief:
            return
        if moment == "on_train_begin":
            self._begin(continues=self._progress.is_resumed)
            return
        if not self._has_begun and ("train" in moment or "epoch" in moment):
            self._begin(continues=True)
        getattr(self.callback, moment)(*args, **kwargs)

    def _begin(self, *, continues: bool) -> None:
        self._has_begun = True
        if continues and isinstance(self.callback, keras.callbacks.CSVLogger):
            self.callback.append = True
        self.callback.on_train_begin()

    def state(self) -> dict[str, Any]:
        if isinstance(self.callback, keras.callbacks.CSVLogger):
            name = self.callback.filename
            return {"bytes": os.path.getsize(name) if os.path.exists(name) else 0, "keys": self.callback.keys}
        return callback_state.state_of(self.callback)

    def restore(self, state: Mapping[str, Any]) -> None:
        if not self._progress.is_chief:
            return
        if isinstance(self.callback, keras.callbacks.CSVLogger):
            self._cut_file(int(state["bytes"]))
        else:
            callback_state.restore(self.callback, state)

    def _cut_file(self, size: int) -> None:
        """Drop the lines that an earlier attempt wrote for epochs that are trained again."""
        name = self.callback.filename
        if os.path.exists(name) and os.path.getsize(name) > size:
            os.truncate(name, size)
        self.callback.append_header = size == 0


def _forward(moment: str) -> Callable[..., None]:
    def call(self: ChiefOnly, *args: Any, **kwargs: Any) -> None:
        self.call(moment, *args, **kwargs)

    return call


for _moment in MOMENTS:
    setattr(ChiefOnly, _moment, _forward(_moment))


class QuietCallbacks(keras.callbacks.CallbackList):  # type: ignore[misc]
    """For `evaluate` and `predict`, and the base of the list for `fit`: the progress bar is the chief's."""

    def __init__(
        self,
        callbacks: Any,
        progress: CallProgress,
        *,
        model: Any,
        verbose: Any,
        epochs: int,
        steps: int | None,
        add_history: bool = False,
    ) -> None:
        given = [_adapted(one, progress) for one in (keras.tree.flatten(callbacks) if callbacks else [])]
        listed = [one for one in given if one is not None]
        params = {"verbose": verbose, "epochs": epochs, "steps": steps}
        super().__init__(listed, add_history=add_history, model=model, **params)
        is_there = any(isinstance(getattr(one, "callback", None), ProgbarLogger) for one in self.callbacks)
        if verbose != 0 and not is_there:
            bar = ChiefOnly(ProgbarLogger(), progress)
            bar.set_model(model)
            bar.set_params(self.params)
            self.callbacks.append(bar)


class LockstepCallbacks(QuietCallbacks):
    """The callbacks of one call of `fit`."""

    def __init__(self, callbacks: Any, progress: CallProgress, **params: Any) -> None:
        super().__init__(callbacks, progress, add_history=True, **params)
        self._progress = progress
        self._may_stop_in_epoch = any(map(_may_stop_in_epoch, self.callbacks))

    @property
    def history(self) -> Any:
        return self._history

    def on_train_begin(self, logs: Any = None) -> None:
        with self._progress.users_code():
            super().on_train_begin(logs)
        self._progress.check_step()
        for one in filter(_is_of_attributes, self.callbacks):
            if left := callback_state.unsaved(getattr(one, "callback", one) if isinstance(one, ChiefOnly) else one):
                self._progress.warn(
                    f"{_name(one)}: {', '.join(left)} cannot be saved: after a resume, it is what the script makes."
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._progress.begin_epoch()
        if self._progress.pass_moment():
            with self._progress.users_code():
                super().on_epoch_begin(epoch, logs)
            self._progress.check_step()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._progress.pass_moment():
            super().on_train_batch_begin(batch, logs)
            self._progress.check_step()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._progress.pass_moment():
            super().on_train_batch_end(batch, logs)
            if self._may_stop_in_epoch:
                self._agree_to_stop(in_epoch=True)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._progress.pass_moment():
            with self._progress.users_code():
                super().on_epoch_end(epoch, logs)
            self._agree_to_stop()

    def on_train_end(self, logs: Any = None) -> None:
        with self._progress.users_code():
            super().on_train_end(logs)

    def _agree_to_stop(self, *, in_epoch: bool = False) -> None:
        mine = bool(self.model.stop_training)
        self.model.stop_training = self._progress.agree_to_stop(mine, in_epoch=in_epoch)

    def states(self) -> list[Any]:
        """Of every callback, in order, with its class; None for those that have none, such as a progress bar."""
        return [[_name(one), self._state_of(one)] for one in self.callbacks]

    def _state_of(self, callback: Any) -> Any:
        if isinstance(callback, ChiefOnly):
            skipped = isinstance(callback.callback, ProgbarLogger | Summaries) or not self._progress.is_chief
            return None if skipped else callback.state()
        return callback_state.state_of(callback)

    def restore(self, states: list[Any]) -> None:
        if [name for name, _ in states] != list(map(_name, self.callbacks)):
            self._progress.warn("The callbacks are others than those of the checkpoint, and begin without a state.")
            return
        for callback, (_, state) in zip(self.callbacks, states, strict=True):
            if state is not None and isinstance(callback, ChiefOnly):
                callback.restore(state)
            elif state is not None:
                callback_state.restore(callback, state)


def _adapted(callback: Any, progress: CallProgress) -> Any:
    """The callback as this run calls it; None if a checkpoint of ours takes its place."""
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        progress.warn(
            f"BackupAndRestore({callback.backup_dir!r}): the run's own checkpoints take its place. The same run_dir= "
            "resumes them."
        )
        return None
    if isinstance(callback, keras.callbacks.TensorBoard):
        return ChiefOnly(Summaries(callback, lambda: progress.batches_taken), progress)
    if isinstance(callback, CHIEFS) or getattr(callback, "chief_only", False):
        return ChiefOnly(callback, progress)
    return callback


def _is_of_attributes(callback: Any) -> bool:
    """Whether its state is what its attributes hold; not that of one that writes files of ours, or a progress bar."""
    return not (isinstance(callback, ChiefOnly) and isinstance(callback.callback, (*CHIEFS, Summaries)))


def _name(callback: Any) -> str:
    return type(getattr(callback, "callback", callback)).__name__


def _may_stop_in_epoch(callback: Any) -> bool:
    """Whether it is called after batches, and may set `stop_training` there."""
    callback = getattr(callback, "callback", callback)
    if type(callback) in NEVER_STOP:
        return False
    return any(not keras.src.utils.is_default(getattr(callback, one)) for one in ("on_batch_end", "on_train_batch_end"))
