"""Converts what a Keras model was compiled with: its loss and metrics to functions. Its optimizer: `keras_optimizer`.

Used unchanged where the result does not depend on how a batch is cut into slices; refused with the reason where it
does. Start reading at `compiled_parts`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from manyhands.errors import BadLoss, DataError, SpecError
from manyhands.strategies.base import LossFn, MetricFn

__all__ = ["Compiled", "compiled_parts"]

MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def compiled_parts(
    model: Any, loss: LossFn | None, optimizer: Any, metrics: Mapping[str, MetricFn] | None
) -> tuple[LossFn | None, Any, Mapping[str, MetricFn] | None]:
    """The user's loss, optimizer and metrics; for each that was not given, the one the model was compiled with."""
    if not model.compiled:
        return loss, optimizer, metrics
    compiled = Compiled(model)
    if loss is None:
        _check_loss(model)
        loss = compiled.loss
        metrics = compiled.metrics(model) if metrics is None else metrics
    return loss, model.optimizer if optimizer is None else optimizer, metrics


class Compiled:
    """The loss and metrics given to `model.compile`, as functions of (model, batch).

    A batch is (inputs, targets) or (inputs, targets, sample weights). The forward pass of an evaluation is shared by
    the loss and all metrics.
    """

    def __init__(self, model: Any) -> None:
        self._seen: tuple[Any, Any] | None = None
        self._wants_mode = "training" in inspect.signature(model.compute_loss).parameters

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y, weights = _unpack(batch)
        _refuse_weighted_mean(model, weights)
        outputs = self._outputs(model, batch, x)
        mode = {"training": model.training} if self._wants_mode else {}
        return model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weights, **mode)  # type: ignore[no-any-return]

    def metrics(self, model: Any) -> dict[str, MetricFn]:
        return {name: self._metric(position) for position, name in enumerate(_metric_names(model))}

    def _metric(self, position: int) -> MetricFn:
        def values(model: Any, batch: Any) -> Tensor:
            x, y, _ = _unpack(batch)
            outputs = self._outputs(model, batch, x)
            compiled = model._compile_metrics
            if not compiled.built:
                compiled.build(y, outputs)  # which accuracy "accuracy" means depends on the shapes
            metric = compiled.metrics[position]
            found: Tensor = metric._fn(y, outputs, **metric._fn_kwargs)
            return found.flatten(1).float().mean(1) if found.ndim > 1 else found

        return values

    def _outputs(self, model: Any, batch: Any, x: Any) -> Any:
        if model.training:
            self._seen = None
        elif self._seen is not None and self._seen[0] is batch:
            return self._seen[1]
        outputs = model(x)
        _refuse_mask(outputs)
        if not model.training:
            self._seen = (batch, outputs)
        return outputs


def _unpack(batch: Any) -> tuple[Any, Any, Any]:
    if not isinstance(batch, tuple | list) or not 1 <= len(batch) <= 3:
        raise DataError(
            f"A compiled loss takes batches (inputs, targets) or (inputs, targets, weights), not {_shape(batch)}.",
            fix=["data that gives such tuples, or collate=", "loss=lambda model, batch: ..., your own"],
        )
    x, y, weights = (*batch, None, None)[:3]
    return x, y, weights


def _shape(batch: Any) -> str:
    return f"{len(batch)} parts" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"


def _refuse_mask(outputs: Any) -> None:
    keras = sys.modules["keras"]
    if any(getattr(output, "_keras_mask", None) is not None for output in keras.tree.flatten(outputs)):
        raise BadLoss(
            "The model's outputs carry a Keras mask, so the compiled loss is a mean over unmasked entries: the losses "
            "of slices with different numbers of them cannot be averaged.",
            fix=["loss=lambda model, batch: (sum over the unmasked entries, their number)", "mask_zero=False"],
        )


def _check_loss(model: Any) -> None:
    """Refuse, before anything runs, a loss that is not a mean over the batch: it could not be computed by slices."""
    keras = sys.modules["keras"]
    if type(model).train_step is not keras.Model.train_step:
        raise SpecError(
            f"{type(model).__name__} overrides train_step, which only Keras's fit would call.",
            fix=["loss=lambda model, batch: ..., which computes the same loss"],
        )
    for part in keras.tree.flatten(model.loss):
        if isinstance(part, keras.losses.Loss) and part.reduction not in MEANS:
            raise SpecError(
                f"{type(part).__name__}(reduction={part.reduction!r}) is not a mean over the batch.",
                fix=[
                    f'{type(part).__name__}(reduction="sum_over_batch_size")',
                    "for a sum: that, and the learning rate multiplied by the rows of a batch",
                ],
            )


def _refuse_weighted_mean(model: Any, weights: Any) -> None:
    keras = sys.modules["keras"]
    parts = keras.tree.flatten(model.loss)
    if weights is not None and any(getattr(part, "reduction", "") == "mean_with_sample_weight" for part in parts):
        raise BadLoss(
            'reduction="mean_with_sample_weight" divides by the sum of all weights of a batch, which no slice has.',
            fix=['reduction="sum_over_batch_size"', "loss=lambda model, batch: (weighted sum, sum of the weights)"],
        )


def _metric_names(model: Any) -> list[str]:
    compiled = model._compile_metrics
    if compiled is None:
        return []
    asked = compiled._user_metrics or []
    if compiled._user_weighted_metrics:
        raise SpecError("weighted_metrics are not means of one value per example.", fix=["metrics=[...] in compile"])
    if isinstance(asked, dict) or any(isinstance(metric, list | tuple | dict) for metric in asked):
        raise SpecError(
            "The compiled metrics belong to single outputs; only a flat list of metrics is supported.",
            fix=['metrics={"name": lambda model, batch: one value per example} of the trainer'],
        )
    return [_metric_name(metric) for metric in asked]


def _metric_name(asked: Any) -> str:
    keras = sys.modules["keras"]
    if str(asked).lower() in ("accuracy", "acc"):
        return str(asked)
    found = keras.metrics.get(asked)
    name = asked if isinstance(asked, str) else getattr(found, "name", None) or getattr(found, "__name__", "metric")
    if isinstance(found, keras.metrics.Metric) and not isinstance(found, keras.metrics.MeanMetricWrapper):
        raise SpecError(
            f"The compiled metric {name!r} ({type(found).__name__}) is not a mean of one value per example, so it "
            "cannot be computed from the workers' results.",
            fix=[
                "leave it out of compile(metrics=...), and compute it from trainer.predict(data)",
                'or metrics={"name": lambda model, batch: one value per example} of the trainer',
            ],
        )
    return str(name)
