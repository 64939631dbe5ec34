"""How a worker trains on a stretch of batches by itself, and what it pushes then: one small object for each rule.

Weights that all workers agree on are on servers; `pull` gives them, with their version. A worker has a copy of its own,
which its model looks at during a stretch. What it pushes goes into a row, which servers take for a gradient. No rule
knows of leases, messages or other workers. Start reading at `LocalRule`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.parallel.averaging.rounds import Downpour
from manyhands.torch_private import foreach_copy_, foreach_zero_

__all__ = ["Accrue", "Drift", "Elastic", "LocalRule", "Pull", "Row"]

Pull = Callable[[], tuple[Sequence[Tensor], int]]
"""The newest weights, which are whole until the next call, and how many updates they have seen."""


class Row(NamedTuple):
    """What is said of a row that a rule has filled."""

    based_on: int
    """The version of the weights that it was computed with; of several, the oldest."""
    absent: list[int]
    """Parameters that it has nothing for."""


class LocalRule(ABC):
    """Per local step `before_step`, then `step` with its gradients; after a stretch, `fill`."""

    def __init__(self, params: Sequence[nn.Parameter], pull: Pull) -> None:
        self._params, self._pull = list(params), pull
        self._own = [torch.empty_like(param) for param in params]
        self._version = 0

    def enter(self, num_workers: int) -> None:  # noqa: B027  most have nothing to do
        """A course begins, with so many workers."""

    @abstractmethod
    def before_step(self) -> None:
        """Have the model look at the weights that the next step begins with."""

    @abstractmethod
    def step(self, grads: Sequence[Tensor | None]) -> None:
        """Move the worker's own weights."""

    @abstractmethod
    def fill(self, row: Sequence[Tensor]) -> Row:
        """Write what servers are to apply."""

    def own(self) -> list[Tensor]:
        """What a worker would lose with its weights; nothing where it begins each stretch with the agreed ones."""
        return []

    def take(self, own: Sequence[Tensor]) -> None:
        """Go on with these, which `own` told; with none, from the agreed weights."""
        assert not own, "this rule has nothing of its own"

    def _take_agreed(self) -> None:
        agreed, self._version = self._pull()
        with torch.no_grad():
            foreach_copy_(self._own, list(agreed))

    def _look(self) -> None:
        for param, own in zip(self._params, self._own, strict=True):
            param.data = own


class Accrue(LocalRule):
    """Downpour: gradients add up; meanwhile the copy takes steps of plain SGD, and is renewed every now and then."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        pull: Pull,
        optimizer: Optimizer,
        periods: Downpour,
        lr: float | None = None,
    ) -> None:
        """Without `lr` local steps have the learning rate that the `optimizer` has for each parameter."""
        super().__init__(params, pull)
        self._periods, self._lr = periods, lr
        by_param = {id(param): group for group in optimizer.param_groups for param in group["params"]}
        self._groups = [by_param.get(id(param), {"lr": 0.0}) for param in params]
        self._accrued = [torch.zeros_like(param) for param in params]
        self._present: set[int] = set()
        self._steps = 0
        self._based_on: int | None = None

    def enter(self, num_workers: int) -> None:
        self._steps = 0  # a course begins with fresh weights

    def before_step(self) -> None:
        if self._periods.pulls(self._steps):
            self._take_agreed()
        if self._based_on is None:
            self._based_on = self._version
        self._look()

    def step(self, grads: Sequence[Tensor | None]) -> None:
        self._steps += 1
        with torch.no_grad():
            for place, grad in enumerate(grads):
                if grad is not None:
                    self._present.add(place)
                    self._accrued[place].add_(grad)
                    self._own[place].add_(grad, alpha=self._rate(place))

    def _rate(self, place: int) -> float:
        group = self._groups[place]
        lr = float(group["lr"]) if self._lr is None else self._lr
        return lr if group.get("maximize") else -lr

    def fill(self, row: Sequence[Tensor]) -> Row:
        assert self._based_on is not None, "a stretch has a batch at least"
        with torch.no_grad():
            foreach_copy_(list(row), self._accrued)
            foreach_zero_(self._accrued)
        absent = [place for place in range(len(self._params)) if place not in self._present]
        told, self._based_on, self._present = Row(self._based_on, absent), None, set()
        return told


class _Inner(LocalRule):
    """Local steps are those of the user's optimizer."""

    def __init__(self, params: Sequence[nn.Parameter], pull: Pull, optimizer: Optimizer) -> None:
        super().__init__(params, pull)
        self._optimizer = optimizer

    def step(self, grads: Sequence[Tensor | None]) -> None:
        for param, grad in zip(self._params, grads, strict=True):
            param.grad = grad
        self._optimizer.step()
        for param in self._params:
            param.grad = None


class Drift(_Inner):
    """A stretch begins with the agreed weights, and pushes how far it has come from them."""

    _base: list[Tensor] | None = None

    def before_step(self) -> None:
        if self._base is None:
            self._take_agreed()
            self._base = [own.clone() for own in self._own]
        self._look()

    def fill(self, row: Sequence[Tensor]) -> Row:
        assert self._base is not None, "a stretch has a batch at least"
        with torch.no_grad():
            for into, base, own in zip(row, self._base, self._own, strict=True):
                torch.sub(base, own, out=into)
        self._base = None
        return Row(self._version, [])


class Elastic(_Inner):
    """EASGD: worker and center move towards each other, by the same; in between the worker keeps its own weights."""

    def __init__(self, params: Sequence[nn.Parameter], pull: Pull, optimizer: Optimizer, beta: float) -> None:
        """A worker goes beta / workers of the way."""
        super().__init__(params, pull, optimizer)
        self._beta = self._alpha = beta
        self._has_own = False

    def enter(self, num_workers: int) -> None:
        self._alpha = self._beta / num_workers

    def before_step(self) -> None:
        if not self._has_own:
            self._take_agreed()
            self._has_own = True
        self._look()

    def fill(self, row: Sequence[Tensor]) -> Row:
        center, version = self._pull()
        with torch.no_grad():
            for into, own, its in zip(row, self._own, center, strict=True):
                torch.sub(its, own, out=into).mul_(self._alpha)  # servers subtract it
                own.add_(into)
        return Row(version, [])

    def own(self) -> list[Tensor]:
        return self._own if self._has_own else []

    def take(self, own: Sequence[Tensor]) -> None:
        self._has_own = bool(own)
        with torch.no_grad():
            for mine, told in zip(self._own, own, strict=False):
                mine.copy_(told)
