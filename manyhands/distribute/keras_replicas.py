"""What happens to optimizers and variables inside `strategy.run`: gradients are summed, variables are merged.

While a replica runs, `apply_gradients` and `apply` of Keras's optimizers, and `step` of torch's, first sum the
gradients over the replicas. Other variables that it assigns are merged when it ends, by the `aggregation` that Keras
notes for each: metrics by the sum of their changes, batch statistics by their mean. Start reading at `merging`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from manyhands.distribute.replica_exchange import ReplicaExchange
from manyhands.errors import NotHere

__all__ = ["merging"]


@contextmanager
def merging(exchange: ReplicaExchange) -> Iterator[None]:
    """Inside, one replica's function runs; on leaving, what it has assigned is the same on all replicas."""
    assigned = _Assigned(exchange)
    with ExitStack() as stack:
        hook = register_optimizer_step_pre_hook(functools.partial(_sum_torch_gradients, exchange))
        stack.callback(hook.remove)
        keras = sys.modules.get("keras")
        if keras is not None:
            for kind in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
                stack.enter_context(_replaced(kind, "apply", assigned.around_apply))
            stack.enter_context(_replaced(keras.Variable, "assign", assigned.around_assign))
        yield
    assigned.merge()


@contextmanager
def _replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    own = vars(owner).get(name)
    setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _sum_torch_gradients(exchange: ReplicaExchange, optimizer: Any, args: Any, kwargs: Any) -> None:
    if kwargs.get("closure") is not None or len(args) > 1:
        raise NotHere(
            f"{type(optimizer).__name__}.step gets a closure, which computes gradients after they were to be summed.",
            where="strategy.run",
            fix=["step() without a closure", "mh.Trainer, which takes LBFGS"],
        )
    _refuse_own_reduction(optimizer)
    params = [one for group in optimizer.param_groups for one in group["params"]]
    exchange.check_alike(params)
    for param, total in zip(params, exchange.sum_gradients([one.grad for one in params], params), strict=True):
        param.grad = total


def _refuse_own_reduction(optimizer: Any) -> None:
    for name in ("reduce_grad", "get_gradients"):
        if hasattr(optimizer, name):
            raise NotHere(
                f"{type(optimizer).__name__} has {name}, and in strategy.run gradients are summed over the replicas.",
                where="strategy.run",
                fix=["get_replica_context().all_reduce, before the optimizer", "mh.Trainer, which calls reduce_grad"],
            )


class _Assigned:
    """The variables that a replica assigns outside of its optimizer, with the values that they had before."""

    def __init__(self, exchange: ReplicaExchange) -> None:
        self._exchange = exchange
        self._before: dict[int, tuple[Any, Tensor]] = {}
        self._updating = False

    def around_apply(self, inherited: Callable[..., Any]) -> Callable[..., Any]:
        """An optimizer's `apply`, of gradients that are summed; an optimizer inside of another gets those."""

        def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
            if self._updating:
                return inherited(optimizer, grads, trainable_variables)
            _refuse_own_reduction(optimizer)
            variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
            if not optimizer.built:
                optimizer.build(variables)
            state = [one.value for one in (*variables, *optimizer.variables)]
            self._exchange.check_alike([one for one in state if one.is_floating_point()])
            given = [None if grad is None else torch.as_tensor(grad) for grad in grads]
            sums = self._exchange.sum_gradients(given, [one.value for one in variables])
            self._updating = True
            try:
                return inherited(optimizer, sums, trainable_variables)
            finally:
                self._updating = False

        return apply

    def around_assign(self, inherited: Callable[..., Any]) -> Callable[..., Any]:
        def assign(variable: Any, value: Any) -> Any:
            if not self._updating and id(variable) not in self._before:
                self._before[id(variable)] = variable, variable.value.detach().clone()
            if not self._updating and _adds(variable) and not torch.as_tensor(value).any():
                # A metric that a replica resets: what it adds from here on begins at zero, not at the sum so far.
                self._before[id(variable)] = variable, torch.zeros_like(variable.value)
            return inherited(variable, value)

        return assign

    def merge(self) -> None:
        changed = [(variable, before, variable.value.detach()) for variable, before in self._before.values()]
        self._exchange.check_same([variable.path for variable, _, _ in changed])
        sums = self._exchange.sum(
            [after - before if _adds(variable) else after.double() for variable, before, after in changed]
        )
        for (variable, before, after), total in zip(changed, sums, strict=True):
            if _adds(variable):
                variable.assign(before + total)
            elif after.is_floating_point():
                variable.assign((total / self._exchange.size).to(after.dtype))
            # Whole numbers, such as the state of a random seed, count the same calls on every replica.


def _adds(variable: Any) -> bool:
    return bool(variable.aggregation == "sum")
