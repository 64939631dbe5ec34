"""What a table of rows is told once: how rows start, which optimizer changes them, which of them stay. No torch.

Optimizers here are settings; what they compute is in native/row_rules.c, a row at a time. Each keeps what it needs
beside the row: a row without gradients costs nothing and changes nothing.
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
# As struct mh_rows_rule has them.
_RULE = struct.Struct("<iiQ11fiII")
_NUMBERS = ("lr", "eps", "accumulator", "beta1", "beta2", "l1", "l2", "beta", "power", "shrinkage")
_FTRL_DEFAULTS: dict[str, tuple[float, float]] = {"paper": (1.0, 0.0), "tensorflow": (0.0, 0.1)}
MOST = 2**31 - 2


class RowOptimizer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a gradient changes a row: what those below are. Schedules of the dense optimizer do not change its rate."""

    lr: float

    number = -1

    def __post_init__(self) -> None:
        if not isinstance(self.lr, int | float) or not self.lr > 0:
            raise SpecError(f"lr is {self.lr!r}, but must be a number above 0.", where=type(self).__name__)
        self.check()

    def check(self) -> None:
        pass

    def numbers(self) -> dict[str, float]:
        """By their names in C; what is not named is 0."""
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
    """n += g * g; w -= lr * g / (sqrt(n) + eps): a rate for every weight, as in torch.

    Args:
        lr: The learning rate.
        initial_accumulator: What n starts with.
        eps: Keeps the divisor from 0.
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
        initial_accumulator: What n starts with.
        eps: Keeps the divisor from 0.
    """

    number = 2


class Adam(RowOptimizer, frozen=True):
    """Adam on the rows that have a gradient, each with its own count of steps ("lazy"): others are left alone.

    Args:
        lr: The learning rate.
        betas: How slowly the means of gradients and of their squares change.
        eps: Keeps the divisor from 0.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    number = 3

    def check(self) -> None:
        self._not_below_0(eps=self.eps)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise SpecError(f"betas are {self.betas}, but must be from 0 up to 1, without it.", where="Adam")

    def numbers(self) -> dict[str, float]:
        return {"lr": self.lr, "beta1": self.betas[0], "beta2": self.betas[1], "eps": self.eps}


class FTRL(RowOptimizer, frozen=True):
    """FTRL-Proximal, as `mh.optim.FTRL` has it for dense weights: the same settings, conventions and formulas.

    Args:
        lr: The learning rate.
        l1: How strongly weights are held at exactly 0.
        l2: How strongly they are drawn towards 0.
        beta: See `mh.optim.FTRL`. Default: the convention's.
        lr_power: How the rate falls with n: -0.5 is as in Adagrad, 0 not at all.
        l2_shrinkage: See `mh.optim.FTRL`; 0 switches it off.
        initial_accumulator: What n starts with. Default: the convention's.
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
    """One table, by its name the same for everybody."""

    name: str
    dim: int
    optimizer: RowOptimizer = Adagrad()
    init: Init = "uniform"
    """What rows start with: a function of `seed`, `name` and the id, whoever computes it and when."""
    scale: float = 0.05
    """Uniform from -scale up to scale, or normal with this deviation (the sum of 12 even numbers; none beyond 6)."""
    admit_after: int = 1
    """A row is made at the n-th update that has its id; gradients before that are dropped."""
    keep_steps: int | None = None
    """Rows that no update has touched for so many steps go, at the next eighth of as many."""
    max_bytes: int | None = None
    """Of rows and index. When they are full, rows go that no update has touched for longest."""
    cache: int | None = None
    """Rows that a worker on another host than the servers keeps, as far as the mode's staleness allows."""
    seed: int = 0

    def __post_init__(self) -> None:
        where = f"table {self.name!r}"
        if not self.name or not isinstance(self.name, str):
            raise SpecError(f"A table's name is {self.name!r}.", fix=['name="items"'])
        if not isinstance(self.optimizer, RowOptimizer):
            kind = type(self.optimizer).__name__
            raise SpecError(f"optimizer is a {kind}, which cannot run on rows.", where=where, fix=["mh.rows.Adagrad()"])
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
        """Numbers of the optimizer in a row."""
        return self.optimizer.num_states(self.dim)

    def rule(self) -> bytes:
        """All of it, for C."""
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
