"""A scalar reference implementation of FTRL, for tests of `mh.optim.FTRL` and embedding rows."""

from __future__ import annotations

import math


def by_paper(w: float, gradients: list[float], lr: float, l1=0.0, l2=0.0, beta=1.0, power=0.5, n=0.0, s=0.0) -> float:
    """Algorithm 1 of the paper, with the weight as a function of z and n."""
    z = -(w * ((beta + n**power) / lr + l2) + math.copysign(l1, w) * (w != 0))
    for g in gradients:
        w = 0.0 if abs(z) <= l1 else -(z - math.copysign(l1, z)) / ((beta + n**power) / lr + l2)
        sigma = ((n + g * g) ** power - n**power) / lr
        z += g + 2 * s * w - sigma * w
        n += g * g
    return 0.0 if abs(z) <= l1 else -(z - math.copysign(l1, z)) / ((beta + n**power) / lr + l2)


def by_keras(w: float, gradients: list[float], lr: float, l1=0.0, l2=0.0, beta=0.0, power=0.5, n=0.1, s=0.0) -> float:
    """What Keras computes, in its own order and with its own adjusted l2."""
    linear, adjusted = 0.0, l2 + beta / (2 * lr)
    for g in gradients:
        with_shrinkage = g + 2 * s * w
        new_n = n + g * g
        linear += with_shrinkage - (new_n**power - n**power) / lr * w
        quadratic = new_n**power / lr + 2 * adjusted
        w = (min(max(linear, -l1), l1) - linear) / quadratic
        n = new_n
    return w


FORMULAS = {"paper": by_paper, "tensorflow": by_keras}
_NAMES = {"lr_power": "power", "initial_accumulator": "n", "l2_shrinkage": "s"}


def weight_after(convention: str, w: float, gradients: list[float], lr: float, settings: dict[str, float]) -> float:
    """The weight after these gradients; `settings` have the optimizer's names."""
    known = {_NAMES.get(name, name): -value if name == "lr_power" else value for name, value in settings.items()}
    return FORMULAS[convention](w, gradients, lr, **known)
