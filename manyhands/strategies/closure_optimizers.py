"""Optimizers that evaluate the loss several times per step (LBFGS), and the features they cannot be combined with."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from manyhands.errors import SpecError

__all__ = ["refuse_closures", "wants_closure"]

_REFUSED = {
    "rows": (
        "evaluates the loss several times per step; embedding rows are updated once.",
        ("another optimizer", "torch.nn.Embedding"),
    ),
    "divided": (
        "needs all of the model's gradients at once, and each worker has only some of them.",
        ("another optimizer", 'strategy="mirrored"'),
    ),
    "residuals": (
        "compares gradients within a step, but what int8 leaves out of one arrives with the next.",
        ('reducer="exact" or "bf16"', "another optimizer"),
    ),
    "audit": (
        "evaluates the loss several times per step; audit compares one evaluation.",
        ("audit=False", "another optimizer"),
    ),
}


def wants_closure(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.LBFGS)


def refuse_closures(optimizer: Optimizer, beside: str) -> None:
    """Raise `SpecError` if `optimizer` needs a closure; `beside` is the feature it cannot be combined with."""
    if wants_closure(optimizer):
        what, fix = _REFUSED[beside]
        raise SpecError(f"{type(optimizer).__name__} {what}", fix=fix)
