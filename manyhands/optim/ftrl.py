"""FTRL-Proximal, which torch does not have: a `torch.optim.Optimizer` for any strategy and any loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.errors import SpecError

__all__ = ["FTRL"]

Convention = Literal["paper", "tensorflow"]
# Defaults of beta and of the initial n in each convention.
_DEFAULTS: dict[str, tuple[float, float]] = {"paper": (1.0, 0.0), "tensorflow": (0.0, 0.1)}


class FTRL(Optimizer):
    """FTRL-Proximal (McMahan et al., KDD 2013): a rate per weight, as in Adagrad, and L1 that gives exact zeros.

    Each weight has two state values: n, the sum of its squared gradients, and z, which determines the weight. With
    p = -lr_power, by default 1/2, a gradient g does

        z += g - (new n**p - n**p) / lr * w;    w = 0 where |z| <= l1, else (sign(z) l1 - z) / ((n**p + beta) / lr + L2)

    In the paper's convention L2 is `l2`, beta is 1, n starts at 0, and z starts at the value that gives the initial
    weight. In that of TensorFlow and Keras L2 is twice `l2` (their documentation says otherwise), beta is 0, n starts
    at 0.1, and z at 0. `l2_shrinkage` s adds 2 s w to the gradient in z, not to that in n. Sparse gradients update only
    their rows: for the other rows every change, shrinkage included, waits until they have a gradient.
    A rate of 0, with which some schedules start or end, changes nothing.

    Args:
        params: The parameters, or parameter groups as in torch.
        lr: The learning rate.
        l1: Strength of L1, which sets weights to exactly 0.
        l2: Strength of L2, which pulls weights towards 0.
        beta: See above. Default: the convention's.
        lr_power: How the rate falls with n: -0.5 as in Adagrad, 0 not at all.
        l2_shrinkage: See above; 0 switches it off.
        initial_accumulator: Initial n. Default: the convention's.
        convention: "paper" or "tensorflow".
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        l1: float = 0.0,
        l2: float = 0.0,
        beta: float | None = None,
        lr_power: float = -0.5,
        l2_shrinkage: float = 0.0,
        initial_accumulator: float | None = None,
        convention: Convention = "paper",
    ) -> None:
        if convention not in _DEFAULTS:
            raise SpecError(
                f"convention is {convention!r}; there are {' and '.join(_DEFAULTS)}.",
                where="convention",
                fix=['convention="paper"'],
            )
        default_beta, default_start = _DEFAULTS[convention]
        beta = default_beta if beta is None else beta
        start = default_start if initial_accumulator is None else initial_accumulator
        if not lr > 0:
            raise SpecError(f"lr is {lr:g}, but must be above 0.", where="lr")
        for name, value in {
            "l1": l1, "l2": l2, "beta": beta, "l2_shrinkage": l2_shrinkage, "initial_accumulator": start,
            "-lr_power": -lr_power,
        }.items():  # fmt: skip
            if not value >= 0:
                raise SpecError(f"{name} is {value:g}, but must not be below 0.", where=name)
        defaults = {
            "lr": lr, "l1": l1, "l2": l2, "beta": beta, "lr_power": lr_power, "l2_shrinkage": l2_shrinkage,
            "initial_accumulator": start, "convention": convention,
        }  # fmt: skip
        super().__init__(params, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and group["lr"]:
                    self._update(param, param.grad, group)
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if torch.is_complex(param):
            raise SpecError("FTRL needs real weights; L1 has no meaning for complex ones.")
        state = self.state[param]
        if not state:
            state["n"] = torch.full_like(param, group["initial_accumulator"])
            state["z"] = _first_z(param, state["n"], group)
        if not grad.is_sparse:
            _update(param, state["z"], state["n"], grad, group)
            return
        grad = grad.coalesce()
        rows = grad.indices()[0]
        if grad.sparse_dim() != 1:
            raise SpecError("FTRL accepts only gradients that are sparse by rows, as those of nn.Embedding are.")
        weights, z, n = (tensor.index_select(0, rows) for tensor in (param, state["z"], state["n"]))
        _update(weights, z, n, grad.values(), group)
        for tensor, values in ((param, weights), (state["z"], z), (state["n"], n)):
            tensor.index_copy_(0, rows, values)


def _weight_of_l2(group: dict[str, Any]) -> float:
    return float(2.0 * group["l2"] if group["convention"] == "tensorflow" else group["l2"])


def _denominator(n: Tensor, group: dict[str, Any]) -> Tensor:
    result: Tensor = (n.pow(-group["lr_power"]) + group["beta"]).div_(group["lr"]).add_(_weight_of_l2(group))
    return result


def _first_z(param: Tensor, n: Tensor, group: dict[str, Any]) -> Tensor:
    if group["convention"] == "tensorflow":
        return torch.zeros_like(param)
    return _denominator(n, group).mul_(param).add_(param.sign(), alpha=group["l1"]).neg_()


def _update(param: Tensor, z: Tensor, n: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
    power = -group["lr_power"]
    before = n.pow(power)
    n.addcmul_(grad, grad)
    rate = n.pow(power).sub_(before).div_(group["lr"])
    z.add_(grad).addcmul_(rate, param, value=-1.0)
    if group["l2_shrinkage"]:
        z.add_(param, alpha=2.0 * group["l2_shrinkage"])
    clipped = z.clamp(-group["l1"], group["l1"])
    # Where |z| <= l1 the numerator is 0, and the denominator may be 0 as well: a weight without gradients, l2 or beta.
    torch.where(clipped == z, torch.zeros_like(z), (clipped - z) / _denominator(n, group), out=param)
