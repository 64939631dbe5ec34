"""The optimizers that have a fused version: the states that each keeps, and the numbers that native takes of a step.

All arithmetic on a group's settings, in double precision as torch does it. Who is updated when, and where the states
are, is `fused_update`'s business. Start reading at `KINDS`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from manyhands.native import library

__all__ = ["KINDS", "Group"]

Group = Mapping[str, Any]


class How(NamedTuple):
    """`struct mh_update` of core.h, field by field."""

    optimizer: int
    first: int = 0
    nesterov: int = 0
    maximize: int = 0
    extra: int = 0
    factor: float = 1.0
    clip: float = 1.0
    step_size: float = 0.0
    weight_decay: float = 0.0
    shrink: float = 1.0
    momentum: float = 0.0
    gradient_share: float = 1.0
    second_keep: float = 0.0
    second_share: float = 0.0
    root_divisor: float = 1.0
    eps: float = 0.0

    def pack(self, factor: float, clip: float) -> bytes:
        return struct.pack("5i11f", *self._replace(factor=factor, clip=clip))


class Kind(NamedTuple):
    """One optimizer: the states that a group's settings ask for, in native's order, and its numbers of a step."""

    states: Callable[[Group], Sequence[str | None]]
    counts_steps: bool
    how: Callable[[Group, int], How]
    """Of the group's settings and how many steps a parameter has taken, this one included; 0 where none are counted
    and there is no state yet."""
    starts_at: Callable[[Group], float] = lambda group: 0.0


def _sgd(group: Group, steps: int) -> How:
    return How(
        optimizer=library.SGD,
        first=steps == 0,
        nesterov=bool(group["nesterov"]),
        maximize=bool(group["maximize"]),
        step_size=-group["lr"],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        gradient_share=1 - group["dampening"],
    )


def _adam(group: Group, steps: int) -> How:
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    decoupled = group.get("decoupled_weight_decay", False)
    return How(
        optimizer=library.ADAM,
        maximize=bool(group["maximize"]),
        extra=bool(group["amsgrad"]),
        step_size=-(group["lr"] / (1 - beta1**steps)),
        weight_decay=0.0 if decoupled else decay,
        shrink=1 - group["lr"] * decay if decoupled else 1.0,
        gradient_share=1 - beta1,
        second_keep=beta2,
        second_share=1 - beta2,
        root_divisor=(1 - beta2**steps) ** 0.5,
        eps=group["eps"],
    )


def _adagrad(group: Group, steps: int) -> How:
    return How(
        optimizer=library.ADAGRAD,
        maximize=bool(group["maximize"]),
        step_size=-(group["lr"] / (1 + (steps - 1) * group["lr_decay"])),
        weight_decay=group["weight_decay"],
        eps=group["eps"],
    )


def _rmsprop(group: Group, steps: int) -> How:
    return How(
        optimizer=library.RMSPROP,
        maximize=bool(group["maximize"]),
        extra=bool(group["centered"]),
        step_size=-group["lr"],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        second_keep=group["alpha"],
        second_share=1 - group["alpha"],
        eps=group["eps"],
    )


_ADAM = Kind(
    states=lambda group: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq" if group["amsgrad"] else None),
    counts_steps=True,
    how=_adam,
)
KINDS: dict[type[Optimizer], Kind] = {
    SGD: Kind(lambda group: ("momentum_buffer",) if group["momentum"] else (), counts_steps=False, how=_sgd),
    Adam: _ADAM,
    AdamW: _ADAM,
    Adagrad: Kind(
        lambda group: ("sum",), counts_steps=True, how=_adagrad, starts_at=lambda g: g["initial_accumulator_value"]
    ),
    RMSprop: Kind(
        lambda group: (
            "square_avg",
            "momentum_buffer" if group["momentum"] > 0 else None,
            "grad_avg" if group["centered"] else None,
        ),
        counts_steps=True,
        how=_rmsprop,
    ),
}
