"""One call of `fit`: what Keras's loop gets as data, as a step and as logs, and where a resumed loop continues.

Keras's loop always runs from its first epoch. Its moments (an epoch or a batch begins or ends) are counted; a process
that continues the call passes by those that the run is past, and steps that were taken, without doing anything, and
then goes live: callbacks and metrics get their state. Start reading at `FitCall.train_function`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import torch
from torch import Tensor

from manyhands.compat.keras import metric_sums
from manyhands.compat.keras.callback_list import LockstepCallbacks
from manyhands.compat.keras.fit_data import FitData
from manyhands.compat.keras.forward_state import ForwardState
from manyhands.compat.keras.model_checks import check_replaced
from manyhands.compat.keras.same_batches import agree_on_batch
from manyhands.errors import BadLoss, SpecError, TrainingFailed
from manyhands.training.driven_training import DrivenTraining

__all__ = ["FitCall", "FitState", "give_parameter"]

PARAMETER = "manyhands_nothing"


class FitState:
    """The hook of a model's training: the state of its call of `fit`, in checkpoints and for workers that join."""

    def __init__(self) -> None:
        self.call: FitCall | None = None
        self.found: dict[str, Any] | None = None
        """What the checkpoint has, or the other workers."""
        self.halves, self.halves_of_tests = metric_sums.HalvesCheck(), metric_sums.HalvesCheck()
        self._forward_state: ForwardState | None = None

    def state(self) -> dict[str, Any] | None:
        return self.call.state() if self.call is not None else None

    def restore(self, state: dict[str, Any]) -> None:
        self.found = state

    def forward_state(self, model: Any) -> ForwardState:
        if self._forward_state is None:
            self._forward_state = ForwardState(model)
        return self._forward_state


class FitCall:
    """`callbacks` are known once it has begun."""

    def __init__(self, model: Any, training: DrivenTraining, data: FitData, checks: FitState) -> None:
        self._model, self._training, self._data, self._checks = model, training, data, checks
        self._sums = metric_sums.sums_of(model)
        self.callbacks: LockstepCallbacks
        self.finished: dict[str, Any] | None = None
        """The history of a call that has ended."""
        self._moments = self._position = 0
        self._pass_ends: list[int] = []
        self._versions: list[int] = []
        self._resume({})

    def resume(self) -> None:
        """Continue from the state that was found, if any; the model's metrics have the values of that state."""
        self._resume(self._checks.found or {})
        self._checks.found = None

    def _resume(self, found: dict[str, Any]) -> None:
        self._past, self._taken_before = int(found.get("moments", 0)), int(found.get("taken", 0))
        self._pass_ends = [int(one) for one in found.get("pass ends", ())]
        self._states: list[Any] = found.get("callbacks", [])
        self.finished = found.get("finished")
        self._values = metric_sums.values_of(self._sums)

    def state(self) -> dict[str, Any]:
        return {
            "moments": self._moments,
            "taken": self._training.steps_taken,
            "pass ends": list(self._pass_ends),
            "callbacks": self.callbacks.states() if self._moments else [],
            "finished": self.finished,
        }

    # ---- what the callbacks ask ----

    @property
    def is_resumed(self) -> bool:
        """Whether callbacks have been called before, in an earlier attempt or on the other workers."""
        return self._past > 0

    @property
    def is_chief(self) -> bool:
        return self._training.is_chief

    @property
    def batches_taken(self) -> int:
        return self._position

    @property
    def is_live(self) -> bool:
        return self._moments >= self._past

    def pass_moment(self) -> bool:
        self._moments += 1
        if self._moments == self._past:
            self.callbacks.restore(self._states)
            metric_sums.add_up(self._sums, self._values)
        return self._moments > self._past

    def agree_to_stop(self, mine: bool, *, in_epoch: bool = False) -> bool:
        training = self._training
        if in_epoch and training.leases:  # workers are not at the same step: this one goes on until all can stop
            if mine and not training.is_ended:
                training.request_end()
            return training.is_ended
        mine = mine or training.is_end_requested
        return any(map(any, training.agreed(lambda: training.gather("stop", bytes([mine])))))

    def check_step(self) -> None:
        check_replaced(self._model, self.train_function)

    def warn(self, text: str) -> None:
        self._training.warn(text)

    def begin_epoch(self) -> None:
        self._training.begin_epoch(self._position)

    @contextmanager
    def users_code(self) -> Iterator[None]:
        with self._training.users_code():
            yield
        self._versions = []  # what was changed in it is not lost

    # ---- what Keras's loop calls ----

    def start_pass(self) -> Iterator[Any]:
        """An item per step: the step, or None for one that was taken before."""
        while True:
            if self._position < self._taken_before:
                self._position += 1
                yield None
                if self._position in self._pass_ends:
                    return
                continue
            step = self._training.next_step()
            if step is None:
                return
            self._position += 1
            if self._data.is_stream:
                batch = self._data.batch_at(step.start)
                agree_on_batch(self._training, "fit(x=...)", batch, self._position, is_last=step.last_of_epoch)
            if step.last_of_epoch:
                self._pass_ends.append(self._position)
            yield step
            if step.last_of_epoch:
                return

    def train_function(self, items: list[Any]) -> dict[str, Any]:
        """Keras's step: the logs of all batches of the epoch so far."""
        if items[0] is not None:
            self._check_weights()
            self._training.compute(items[0], self._loss_of)
            self._versions = self._read_versions()
            if self._training.is_ended:
                self._model.stop_training = True
        elif not self.is_live:
            return {}
        return dict(self._model.get_metrics_result())

    def _read_versions(self) -> list[int]:
        return [one.value._version for one in self._model.variables] if self._training.leases else []

    def _check_weights(self) -> None:
        """Servers write the weights that this worker reads, so a callback's change after a batch would be lost."""
        if self._versions and not self._training.has_whole_weights and self._versions != self._read_versions():
            raise TrainingFailed(
                "A callback changed weights after a batch, while parameter servers have them.",
                where="on_train_batch_begin or on_train_batch_end",
                fix=["on_epoch_end, where the chief's changes count", "mh.Mirrored"],
            )

    def warn_if_frozen(self) -> None:
        if PARAMETER in self._model._parameters:
            self.warn(f"The model {self._model.name!r} does not have any trainable weights.")

    def _loss_of(self, piece: Any) -> Tensor:
        """Forward pass, loss and metrics of one slice, as in Keras's train_step up to its backward pass."""
        model = self._model
        x, y, weights = keras.utils.unpack_x_y_sample_weight(self._data.restored(piece.batch))
        with self._checks.forward_state(model).watching(self._training.num_slices, self.warn):
            outputs = model(x, training=True) if model._call_has_training_arg else model(x)
        _refuse_masks(outputs)
        loss: Tensor = model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weights, training=True)
        with torch.no_grad():
            model._loss_tracker.update_state(loss, sample_weight=piece.rows)
            if type(model).compute_metrics is not keras.Model.compute_metrics:
                _check_logs(model, model.compute_metrics(x, y, outputs, sample_weight=weights))
            elif model._compile_metrics is not None:  # Keras's own would also compute the results so far
                model._compile_metrics.update_state(y, outputs, sample_weight=weights)
        if self._training.num_slices > 1:
            self._checks.halves.see(model, (x, y, outputs, weights))
        if PARAMETER in model._parameters:
            with_parameter: Tensor = loss + model._parameters[PARAMETER]
            return with_parameter
        return _scaled(model.optimizer, loss)


def give_parameter(model: Any) -> None:
    """Have a model of which nothing is trained, as Keras allows, get a parameter that is: a number, which is 0."""
    model._parameters.pop(PARAMETER, None)
    if not model.trainable_variables:
        model.register_parameter(PARAMETER, torch.nn.Parameter(torch.zeros(())))


class _ScaledGradient(torch.autograd.Function):
    """The same value; its gradient is multiplied, as LossScaleOptimizer expects it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def _scaled(optimizer: Any, loss: Tensor) -> Tensor:
    """The loss as it is reported, with the gradient of what `optimizer.scale_loss` makes of it."""
    factor = float(optimizer.scale_loss(torch.ones(())))
    return loss if factor == 1.0 else _ScaledGradient.apply(loss, factor)  # type: ignore[no-untyped-call]


def _refuse_masks(outputs: Any) -> None:
    if any(getattr(one, "_keras_mask", None) is not None for one in keras.tree.flatten(outputs)):
        raise BadLoss(
            "The model's outputs carry a Keras mask, so its loss is a mean over unmasked entries: the losses of slices "
            "with different numbers of them cannot be averaged.",
            fix=["mask_zero=False, and sample_weight= of 0 for what should not count"],
        )


def _check_logs(model: Any, logs: Any) -> None:
    if isinstance(logs, dict) and (own := set(logs) - set(model.get_metrics_result())):
        raise SpecError(
            f"compute_metrics of {type(model).__name__} returns {', '.join(sorted(own))} beside its metrics: a value "
            "of one slice, which cannot be merged with those of the others.",
            fix=["a keras.metrics.Metric, made in __init__ and updated in compute_metrics"],
        )
