"""What every strategy does with the user's model and loss: weigh a slice, evaluate, and say what is not finite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from manyhands.errors import BadLoss, NonFinite
from manyhands.parallel.model.precision import Precision
from manyhands.parallel.model.step_buffers import ForeignState
from manyhands.parallel.model.training_modes import keeping_modes
from manyhands.parallel.tensor.whole_parameters import users_code
from manyhands.strategies.base import LossFn, MetricFn, PieceLike, PieceResult, StepLike
from manyhands.strategies.loss_check import FirstLook
from manyhands.strategies.losses import as_loss, first_non_finite, metric_sum

__all__ = ["Computing"]


class Computing:
    """Who derives from it sets `_model`."""

    def __init__(self, loss_fn: LossFn | None, precision: Precision) -> None:
        self._loss_fn, self._precision, self._foreign = loss_fn, precision, ForeignState()
        self._model: nn.Module
        self._first_look: FirstLook | None = None

    @property
    def model(self) -> nn.Module:
        return self._model

    @property
    def _users_model(self) -> nn.Module:
        """Whose names errors tell; `_model` may stand for it."""
        return self._model

    def look_first(self, look: FirstLook) -> None:
        """Look at the loss before it is first computed; not where a forward pass needs the other ranks, too."""
        self._first_look = look

    def loss_of(self, step: StepLike, piece: PieceLike) -> Any:
        """What the user's loss function returns for a slice; in the slice's own context."""
        assert self._loss_fn is not None
        if self._first_look is not None and self._first_look.is_at(step, piece):
            self._first_look.at(self._model, self._loss_fn, piece, self._foreign)
        return self._loss_fn(self._model, piece.batch)

    def eval_step(self, pieces: Iterable[PieceLike], metrics: Mapping[str, MetricFn]) -> list[PieceResult]:
        """Loss and per-example metrics of each piece, with the model in evaluation mode."""
        assert self._loss_fn is not None
        results = []
        with self.evaluating():
            for piece in pieces:
                value, times, weight = as_loss(self._loss_fn(self._model, piece.batch), piece.rows)
                sums = {
                    name: metric_sum(name, fn(self._model, piece.batch), piece.rows) for name, fn in metrics.items()
                }
                results.append(PieceResult(piece.index, piece.rows, value.item() * times, weight, sums))
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
                self._model.train(was_training)  # a model may do more in it than set its mode

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Around what the user's code does with the model."""
        with self._precision.autocast(), users_code():
            yield

    @contextmanager
    def using_loss(self, loss_fn: LossFn) -> Iterator[None]:
        """Evaluate with another loss function; a loop of the user's own has none that we know."""
        before, self._loss_fn = self._loss_fn, loss_fn
        try:
            yield
        finally:
            self._loss_fn = before

    def weigh(self, piece: PieceLike, result: Any, rows: int) -> tuple[float, float, Tensor]:
        """A slice's sum of losses, its weight, and what backward begins with in a step of so many rows."""
        value, times, weight = as_loss(result, piece.rows)
        if not value.requires_grad:
            raise BadLoss(
                "The loss has no gradient: it does not depend on any trained parameter.",
                fix=["compute it from model(...) without .detach(), .item() or torch.no_grad()"],
            )
        # Slices are weighted before backward, with what is known before it; what `weight` adds is divided out after.
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
