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
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from manyhands.distribute.replica_exchange import ReplicaExchange
from manyhands.errors import NotHere
from manyhands.parallel.gradients.custom_reduction import Reduction, has_reduce_grad, own_reduction

__all__ = ["merging"]

Reducer = Callable[[list[Tensor]], Tensor]


@contextmanager
def merging(exchange: ReplicaExchange, reducer: Reducer | None = None) -> Iterator[None]:
    """Inside, one replica's function runs; on leaving, what it has assigned is the same on all replicas.

    `reducer` is the user's function that combines the gradients of the replicas, in place of their sum.
    """
    assigned = _Assigned(exchange, reducer)
    with ExitStack() as stack:
        before = functools.partial(_combine_torch_gradients, exchange, reducer)
        stack.callback(register_optimizer_step_pre_hook(before).remove)
        stack.callback(register_optimizer_step_post_hook(functools.partial(_torch_updated, exchange)).remove)
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


def _combine_torch_gradients(
    exchange: ReplicaExchange, reducer: Reducer | None, optimizer: Any, args: Any, kwargs: Any
) -> None:
    if kwargs.get("closure") is not None or len(args) > 1:
        raise NotHere(
            f"{type(optimizer).__name__}.step gets a closure, which computes gradients after they were to be summed.",
            where="strategy.run",
            fix=["step() without a closure", "mh.Trainer, which takes LBFGS"],
        )
    reduction, params = _reduction_of(optimizer, reducer), _params(optimizer)
    exchange.check_alike(params)
    if exchange.central is not None:
        exchange.central.adopt(params)
    found = exchange.combine_gradients([one.grad for one in params], params, reduction)
    updates_here = exchange.central is None or exchange.central.updates_here
    for param, grad in zip(params, found, strict=True):
        param.grad = grad if updates_here else None  # torch's optimizers leave out what has no gradient


def _torch_updated(exchange: ReplicaExchange, optimizer: Any, args: Any, kwargs: Any) -> None:
    if exchange.central is not None:
        exchange.central.updated(_params(optimizer))


def _params(optimizer: Any) -> list[Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _reduction_of(optimizer: Any, reducer: Reducer | None) -> Reduction | None:
    """The user's reduction, from the strategy or from the optimizer; None for a sum."""
    name = type(optimizer).__name__
    if hasattr(optimizer, "get_gradients"):
        raise NotHere(
            f"{name} has get_gradients, which computes the gradients of a loss; in strategy.run the replicas compute "
            "them, and only their combination can be the optimizer's.",
            where="strategy.run",
            fix=["reduce_grad(self, gradients), which gets every variable's list of gradients", "reducer="],
        )
    if reducer is not None and has_reduce_grad(optimizer):
        raise NotHere(
            f"{name} has reduce_grad, and the strategy a reducer: only one of them could be called.",
            where="strategy.run",
            fix=["no reducer="],
        )
    reduction = own_reduction(reducer, optimizer)
    if reduction is not None and hasattr(optimizer, "inner_optimizer"):
        raise NotHere(
            f"{name} scales the loss, and with it the gradients that a reduction of yours would get.",
            where="strategy.run",
            fix=['the policy "mixed_bfloat16", which needs no scaling', "no reducer="],
        )
    return reduction


class _Assigned:
    """The variables that a replica assigns outside of its optimizer, with the values that they had before."""

    def __init__(self, exchange: ReplicaExchange, reducer: Reducer | None) -> None:
        self._exchange, self._reducer = exchange, reducer
        self._before: dict[int, tuple[Any, Tensor]] = {}
        self._updating = False

    def around_apply(self, inherited: Callable[..., Any]) -> Callable[..., Any]:
        """An optimizer's `apply`, of gradients that are summed; an optimizer inside of another gets those."""

        def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
            if self._updating:
                return inherited(optimizer, grads, trainable_variables)
            reduction = _reduction_of(optimizer, self._reducer)
            variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
            if not optimizer.built:
                optimizer.build(variables)
            values, central = [one.value for one in variables], self._exchange.central
            state = values if central is not None else [*values, *(one.value for one in optimizer.variables)]
            self._exchange.check_alike([one for one in state if one.is_floating_point()])
            if central is not None:
                _check_central(optimizer)
                central.adopt(values)
            given = [None if grad is None else torch.as_tensor(grad) for grad in grads]
            found = self._exchange.combine_gradients(given, values, reduction)
            self._updating = True
            try:
                if central is not None and not central.updates_here:
                    optimizer.iterations.assign_add(1)  # schedules of the learning rate count with it
                    return None
                return inherited(optimizer, found, trainable_variables)
            finally:
                self._updating = False
                if central is not None:
                    central.updated(values)

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


def _check_central(optimizer: Any) -> None:
    """The chief alone updates, so that what an optimizer tells the replicas, such as a scale, would be the chief's."""
    for name in ("inner_optimizer", "use_ema", "gradient_accumulation_steps"):
        if getattr(optimizer, name, None):
            raise NotHere(
                f"{type(optimizer).__name__} has {name}, and where the weights are in central storage one worker "
                "updates them: the others would not have what it keeps beside them.",
                where="CentralStorageStrategy.run",
                fix=["MirroredStrategy()", "model.fit"],
            )


def _adds(variable: Any) -> bool:
    return bool(variable.aggregation == "sum")
