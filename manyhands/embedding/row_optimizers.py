"""Settings of an embedding table: initial weights, row optimizer, which rows are kept. Imports no torch.

Optimizers here are settings; native/row_rules.c computes the updates, a row at a time. Each stores its state beside
the row: a row without gradients costs nothing and does not change.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Literal

import msgspec

from manyhands.errors import SpecError
from manyhands.native import library

__all__ = ["FTRL", "OPTIMIZERS", "SGD", "Adagrad", "Adam", "Init", "RowOptimizer", "RowwiseAdagrad", "TableSpec"]

Init = Literal["uniform", "normal", "zeros"]
_STARTS = {"zeros": 0, "uniform": 1, "normal": 2}
# The layout of struct mh_rows_rule.
_RULE = struct.Struct("<iiQ11fiII")
_NUMBERS = ("lr", "eps", "accumulator", "beta1", "beta2", "l1", "l2", "beta", "power", "shrinkage")
_FTRL_DEFAULTS: dict[str, tuple[float, float]] = {"paper": (1.0, 0.0), "tensorflow": (0.0, 0.1)}
MOST = 2**31 - 2


class RowOptimizer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the row optimizers. Learning rate schedules of the dense optimizer do not change its `lr`."""

    lr: float

    number = -1

    def __post_init__(self) -> None:
        if not isinstance(self.lr, int | float) or not self.lr > 0:
            raise SpecError(f"lr is {self.lr!r}, but must be a number above 0.", where=type(self).__name__)
        self.check()

    def check(self) -> None:
        pass

    def numbers(self) -> dict[str, float]:
        """By name in C; numbers that are not listed are 0."""
        return {"lr": self.lr}

    def num_states(self, dim: int) -> int:
        return int(library.row_states(self.number, dim))

    def _not_below_0(self, **values: float) -> None:
        for name, value in values.items():
            if not value >= 0:
                raise SpecError(f"{name} is {value:g}, but must not be below 0.", where=type(self).__name__)


class SGD(RowOptimizer, frozen=True):
    """w -= lr * g.

    Args:
        lr: The learning rate.
    """

    lr: float = 0.01

    number = 0


class Adagrad(RowOptimizer, frozen=True):
    """n += g * g; w -= lr * g / (sqrt(n) + eps): a learning rate for every weight, as in torch.

    Args:
        lr: The learning rate.
        initial_accumulator: Initial value of n.
        eps: Keeps the divisor above 0.
    """

    lr: float = 0.05
    initial_accumulator: float = 0.0
    eps: float = 1e-10

    number = 1

    def check(self) -> None:
        self._not_below_0(initial_accumulator=self.initial_accumulator, eps=self.eps)

    def numbers(self) -> dict[str, float]:
        return {"lr": self.lr, "accumulator": self.initial_accumulator, "eps": self.eps}


class RowwiseAdagrad(Adagrad, frozen=True):
    """Adagrad with one n for the whole row, to which the mean of g * g is added: little more memory than SGD.

    Args:
        lr: The learning rate.
        initial_accumulator: Initial value of n.
        eps: Keeps the divisor above 0.
    """

    number = 2


class Adam(RowOptimizer, frozen=True):
    """Adam on the rows that have a gradient, each with its own step count ("lazy"); other rows do not change.

    Args:
        lr: The learning rate.
        betas: Decay rates of the means of gradients and of their squares.
        eps: Keeps the divisor above 0.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    number = 3

    def check(self) -> None:
        self._not_below_0(eps=self.eps)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise SpecError(f"betas are {self.betas}, but must be at least 0 and below 1.", where="Adam")

    def numbers(self) -> dict[str, float]:
        return {"lr": self.lr, "beta1": self.betas[0], "beta2": self.betas[1], "eps": self.eps}


class FTRL(RowOptimizer, frozen=True):
    """FTRL-Proximal, like `mh.optim.FTRL` for dense weights: the same settings, conventions and formulas.

    Args:
        lr: The learning rate.
        l1: Strength of the L1 penalty, which makes weights exactly 0.
        l2: Strength of the L2 penalty.
        beta: See `mh.optim.FTRL`. Default: the convention's.
        lr_power: How the learning rate falls with n: -0.5 is as in Adagrad, 0 not at all.
        l2_shrinkage: See `mh.optim.FTRL`; 0 disables it.
        initial_accumulator: Initial value of n. Default: the convention's.
        convention: "paper" or "tensorflow".
    """

    lr: float = 1e-3
    l1: float = 0.0
    l2: float = 0.0
    beta: float | None = None
    lr_power: float = -0.5
    l2_shrinkage: float = 0.0
    initial_accumulator: float | None = None
    convention: Literal["paper", "tensorflow"] = "paper"

    number = 4

    def check(self) -> None:
        if self.convention not in _FTRL_DEFAULTS:
            raise SpecError(
                f"convention is {self.convention!r}; there are {' and '.join(_FTRL_DEFAULTS)}.",
                where="FTRL",
                fix=['convention="paper"'],
            )
        numbers = self.numbers()
        self._not_below_0(**{name: numbers[name] for name in ("l1", "l2", "beta", "accumulator", "power", "shrinkage")})

    def numbers(self) -> dict[str, float]:
        beta, start = _FTRL_DEFAULTS[self.convention]
        return {
            "lr": self.lr,
            "l1": self.l1,
            "l2": self.l2 if self.convention == "paper" else 2 * self.l2,
            "beta": beta if self.beta is None else self.beta,
            "accumulator": start if self.initial_accumulator is None else self.initial_accumulator,
            "power": -self.lr_power,
            "shrinkage": self.l2_shrinkage,
        }


OPTIMIZERS = (SGD, Adagrad, RowwiseAdagrad, Adam, FTRL)


class TableSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table, the same for every process that uses its name."""

    name: str
    dim: int
    optimizer: RowOptimizer = Adagrad()
    init: Init = "uniform"
    """Initial weights of rows: a function of `seed`, `name` and the id, the same in every process at any time."""
    scale: float = 0.05
    """Uniform from -scale to scale, or normal with this deviation (the sum of 12 uniform numbers; none beyond 6)."""
    admit_after: int = 1
    """A row is created at the n-th update that has its id; gradients before that are dropped."""
    keep_steps: int | None = None
    """Rows that no update has touched for this many steps are dropped, at the next eighth of as many."""
    max_bytes: int | None = None
    """Limit for rows and index. When it is reached, the least recently updated rows are dropped."""
    cache: int | None = None
    """Rows that a worker on another host than the servers caches, as far as the mode's staleness allows."""
    seed: int = 0

    def __post_init__(self) -> None:
        where = f"table {self.name!r}"
        if not self.name or not isinstance(self.name, str):
            raise SpecError(f"A table's name is {self.name!r}.", fix=['name="items"'])
        if not isinstance(self.optimizer, RowOptimizer):
            kind = type(self.optimizer).__name__
            raise SpecError(
                f"optimizer is a {kind}, which cannot run on rows.", where=where, fix=["mh.optim.rows.Adagrad()"]
            )
        if self.init not in _STARTS:
            raise SpecError(f"init is {self.init!r}.", where=where, fix=[f'init="{name}"' for name in _STARTS])
        if not self.scale >= 0:
            raise SpecError(f"scale is {self.scale:g}, but must not be below 0.", where=where)
        for name in ("dim", "admit_after", "keep_steps", "cache"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and 1 <= value <= MOST):
                raise SpecError(f"{name} is {value!r}, but must be a whole number from 1 to {MOST}.", where=where)
        if self.max_bytes is not None and not isinstance(self.max_bytes, int):
            raise SpecError(f"max_bytes is {self.max_bytes!r}, but must be a number of bytes.", where=where)

    @property
    def num_states(self) -> int:
        """Number of optimizer state values per row."""
        return self.optimizer.num_states(self.dim)

    def rule(self) -> bytes:
        """All settings, as a C struct."""
        key = hashlib.blake2b(f"{self.seed} {self.name}".encode(), digest_size=8).digest()
        numbers = self.optimizer.numbers()
        paper = getattr(self.optimizer, "convention", "") == "paper"
        return _RULE.pack(
            self.optimizer.number,
            _STARTS[self.init],
            int.from_bytes(key, "little"),
            self.scale,
            *(numbers.get(name, 0.0) for name in _NUMBERS),
            int(paper),
            self.admit_after,
            self.keep_steps or 0,
        )
