"""How a strategy's words become this worker's part of a model: which layers are split, and what of them is here."""

from __future__ import annotations

from torch import nn

from manyhands.parallel.shares import Share
from manyhands.parallel.spread import Divided, Spread
from manyhands.runtime.worker import Worker

__all__ = ["spread_of"]


def spread_of(worker: Worker) -> Spread:
    return Spread(worker.axis, worker.line("pipeline", "tensor"), lambda model: _divide(worker, model))


def _divide(worker: Worker, model: nn.Module) -> Divided:
    place = worker.grid.place(worker.rank)
    shares: dict[str, Share] = {}
    counted = frozenset(id(param) for name, param in model.named_parameters() if name in shares or place.tensor == 0)
    return Divided(local=model, stand_in=model, shares=shares, counted=counted)
