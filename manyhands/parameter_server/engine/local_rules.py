"""How a worker trains locally on a range of batches, and what it pushes afterwards: one small class for each rule.

The agreed weights are on servers; `pull` returns them, with their version. A worker has its own copy, which its model
uses during a range. The rule writes what is pushed into a gradient buffer, which servers apply like a gradient. No rule
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

__all__ = ["Accrue", "Drift", "Elastic", "FilledBuffer", "LocalRule", "Pull"]

Pull = Callable[[], tuple[Sequence[Tensor], int]]
"""The newest weights, which stay unchanged until the next call, and how many updates they contain."""


class FilledBuffer(NamedTuple):
    """Describes a gradient buffer that a rule has filled."""

    based_on: int
    """The version of the weights that it was computed with; of several, the oldest."""
    absent: list[int]
    """Indices of the parameters without a value."""


class LocalRule(ABC):
    """Per local step `before_step`, then `step` with its gradients; after a range of batches, `fill`."""

    def __init__(self, params: Sequence[nn.Parameter], pull: Pull) -> None:
        self._params, self._pull = list(params), pull
        self._own = [torch.empty_like(param) for param in params]
        self._version = 0

    def enter(self, num_workers: int) -> None:  # noqa: B027  most have nothing to do
        """An interval begins, with so many workers."""

    @abstractmethod
    def before_step(self) -> None:
        """Give the model the weights that the next step begins with."""

    @abstractmethod
    def step(self, grads: Sequence[Tensor | None]) -> None:
        """Update the worker's own weights."""

    @abstractmethod
    def fill(self, buffer: Sequence[Tensor]) -> FilledBuffer:
        """Write what servers are to apply."""

    def own(self) -> list[Tensor]:
        """The worker's own weights, to be saved; empty where each range begins with the agreed weights."""
        return []

    def take(self, own: Sequence[Tensor]) -> None:
        """Continue with weights that `own` returned; if empty, from the agreed weights."""
        assert not own, "with this rule workers keep no weights between ranges"

    def _take_agreed(self) -> None:
        agreed, self._version = self._pull()
        with torch.no_grad():
            foreach_copy_(self._own, list(agreed))

    def _use_own_weights(self) -> None:
        for param, own in zip(self._params, self._own, strict=True):
            param.data = own


class Accrue(LocalRule):
    """Downpour: accumulates gradients; meanwhile plain SGD updates the local copy, which is refreshed periodically."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        pull: Pull,
        optimizer: Optimizer,
        periods: Downpour,
        lr: float | None = None,
    ) -> None:
        """Without `lr`, local steps use the `optimizer`'s learning rate of each parameter."""
        super().__init__(params, pull)
        self._periods, self._lr = periods, lr
        by_param = {id(param): group for group in optimizer.param_groups for param in group["params"]}
        self._groups = [by_param.get(id(param), {"lr": 0.0}) for param in params]
        self._accrued = [torch.zeros_like(param) for param in params]
        self._present: set[int] = set()
        self._steps = 0
        self._based_on: int | None = None

    def enter(self, num_workers: int) -> None:
        self._steps = 0  # an interval begins with fresh weights

    def before_step(self) -> None:
        if self._periods.pulls(self._steps):
            self._take_agreed()
        if self._based_on is None:
            self._based_on = self._version
        self._use_own_weights()

    def step(self, grads: Sequence[Tensor | None]) -> None:
        self._steps += 1
        with torch.no_grad():
            for index, grad in enumerate(grads):
                if grad is not None:
                    self._present.add(index)
                    self._accrued[index].add_(grad)
                    self._own[index].add_(grad, alpha=self._rate(index))

    def _rate(self, index: int) -> float:
        group = self._groups[index]
        lr = float(group["lr"]) if self._lr is None else self._lr
        return lr if group.get("maximize") else -lr

    def fill(self, buffer: Sequence[Tensor]) -> FilledBuffer:
        assert self._based_on is not None, "a range has at least one batch"
        with torch.no_grad():
            foreach_copy_(list(buffer), self._accrued)
            foreach_zero_(self._accrued)
        absent = [index for index in range(len(self._params)) if index not in self._present]
        result, self._based_on, self._present = FilledBuffer(self._based_on, absent), None, set()
        return result


class _Inner(LocalRule):
    """Runs local steps with the user's optimizer."""

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
    """Each range begins with the agreed weights; the worker pushes their difference to its own weights."""

    _base: list[Tensor] | None = None

    def before_step(self) -> None:
        if self._base is None:
            self._take_agreed()
            self._base = [own.clone() for own in self._own]
        self._use_own_weights()

    def fill(self, buffer: Sequence[Tensor]) -> FilledBuffer:
        assert self._base is not None, "a range has at least one batch"
        with torch.no_grad():
            for into, base, own in zip(buffer, self._base, self._own, strict=True):
                torch.sub(base, own, out=into)
        self._base = None
        return FilledBuffer(self._version, [])


class Elastic(_Inner):
    """EASGD: worker and center move towards each other by the same amount; in between, the worker keeps its weights."""

    def __init__(self, params: Sequence[nn.Parameter], pull: Pull, optimizer: Optimizer, beta: float) -> None:
        """Each worker moves beta / workers of the distance."""
        super().__init__(params, pull, optimizer)
        self._beta = self._alpha = beta
        self._has_own = False

    def enter(self, num_workers: int) -> None:
        self._alpha = self._beta / num_workers

    def before_step(self) -> None:
        if not self._has_own:
            self._take_agreed()
            self._has_own = True
        self._use_own_weights()

    def fill(self, buffer: Sequence[Tensor]) -> FilledBuffer:
        center, version = self._pull()
        with torch.no_grad():
            for into, own, theirs in zip(buffer, self._own, center, strict=True):
                torch.sub(theirs, own, out=into).mul_(self._alpha)  # servers subtract it
                own.add_(into)
        return FilledBuffer(version, [])

    def own(self) -> list[Tensor]:
        return self._own if self._has_own else []

    def take(self, own: Sequence[Tensor]) -> None:
        self._has_own = bool(own)
        with torch.no_grad():
            for mine, given in zip(self._own, own, strict=False):
                mine.copy_(given)
