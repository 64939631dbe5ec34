"""Optimizers that evaluate the loss several times within a step, as LBFGS does, and what they do not go with."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from manyhands.errors import SpecError

__all__ = ["refuse_closures", "wants_closure"]

_REFUSED = {
    "rows": (
        "evaluates the loss several times per step; rows of embeddings change once.",
        ("another optimizer", "torch.nn.Embedding"),
    ),
    "divided": (
        "looks at all of the model's gradients at once, and each worker has some.",
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
    """`SpecError` if it is such an optimizer; `beside` says what it does not go with."""
    if wants_closure(optimizer):
        what, fix = _REFUSED[beside]
        raise SpecError(f"{type(optimizer).__name__} {what}", fix=fix)
