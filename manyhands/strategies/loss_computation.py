"""Computations with the user's model and loss that all strategies share: weigh a slice, evaluate, report NaN or inf."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from manyhands.errors import BadLoss, NonFinite
from manyhands.parallel.model.training_modes import keeping_modes
from manyhands.parallel.tensor.whole_parameters import users_code
from manyhands.strategies.base import LossFn, MetricFn, SliceLike, SliceResult, StepLike
from manyhands.strategies.engine_parts import ModelSide
from manyhands.strategies.loss_check import LossCheck
from manyhands.strategies.losses import as_loss, first_non_finite, metric_sum

__all__ = ["LossComputation"]


class LossComputation:
    """Subclasses set `_model`."""

    def __init__(self, side: ModelSide) -> None:
        self._loss_fn, self._precision, self._foreign = side
        self._model: nn.Module
        self._loss_check: LossCheck | None = None

    @property
    def model(self) -> nn.Module:
        return self._model

    @property
    def _users_model(self) -> nn.Module:
        """The model whose parameter names appear in errors; `_model` may be a proxy for it."""
        return self._model

    def check_first_loss(self, look: LossCheck) -> None:
        """Check the loss before it is first computed; not where a forward pass also needs the other ranks."""
        self._loss_check = look

    def loss_of(self, step: StepLike, piece: SliceLike) -> Any:
        """What the user's loss function returns for a slice; call it in `slice_context`."""
        assert self._loss_fn is not None
        if self._loss_check is not None and self._loss_check.is_at(step, piece):
            self._loss_check.at(self._model, self._loss_fn, piece, self._foreign)
        return self._loss_fn(self._model, piece.batch)

    def eval_step(self, pieces: Iterable[SliceLike], metrics: Mapping[str, MetricFn]) -> list[SliceResult]:
        """Loss and per-example metrics of each slice, with the model in evaluation mode."""
        assert self._loss_fn is not None
        results = []
        with self.evaluating():
            for piece in pieces:
                value, times, weight = as_loss(self._loss_fn(self._model, piece.batch), piece.rows)
                sums = {
                    name: metric_sum(name, fn(self._model, piece.batch), piece.rows) for name, fn in metrics.items()
                }
                results.append(SliceResult(piece.index, piece.rows, value.item() * times, weight, sums))
        return results

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        was_training = self._model.training
        with keeping_modes(self._users_model):
            self._model.eval()
            try:
                with torch.no_grad(), self._calling():
                    yield
            finally:
                self._model.train(was_training)  # a model's `train` may do more than set its mode

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """The context in which the user's code calls the model."""
        with self._precision.autocast(), users_code():
            yield

    @contextmanager
    def using_loss(self, loss_fn: LossFn) -> Iterator[None]:
        """Evaluate with another loss function; in a user loop, the engine has none."""
        before, self._loss_fn = self._loss_fn, loss_fn
        try:
            yield
        finally:
            self._loss_fn = before

    def weigh(self, piece: SliceLike, result: Any, rows: int) -> tuple[float, float, Tensor]:
        """A slice's sum of losses, its weight, and the tensor to call backward on in a step of so many rows."""
        value, times, weight = as_loss(result, piece.rows)
        if not value.requires_grad:
            raise BadLoss(
                "The loss has no gradient: it does not depend on any trained parameter.",
                fix=["compute it from model(...) without .detach(), .item() or torch.no_grad()"],
            )
        # Slices are weighted by their rows before backward; the weights that the loss returned are divided out after.
        scale = self._precision.scale.value if self._precision.scale else 1.0
        factor = scale * (times / rows)
        return value.item() * times, weight, value if factor == 1.0 else value * factor

    def raise_non_finite(self, what: str) -> NoReturn:
        name = first_non_finite(self._users_model)
        raise NonFinite(
            f"{what}; {name or 'every parameter is still finite'}.",
            fix=[
                "a lower learning rate, or clip_norm=1.0",
                "the data of this step: NaN in the input makes NaN in the loss",
            ],
        )
