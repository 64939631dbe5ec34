"""Where code runs: inside a replica, or across them; and what is reduced over them.

`get_strategy` and `get_replica_context` may always be called: outside of any strategy there is one replica, whose
reductions return what they are given. Start reading at `ReplicaContext`.
"""

from __future__ import annotations

import enum
import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from manyhands.errors import NotHere, SpecError
from manyhands.spec.keyword_check import checked_class, checked_keywords
from manyhands.torch_private import pytree

if TYPE_CHECKING:
    from manyhands.distribute.replica_exchange import ReplicaExchange
    from manyhands.distribute.replica_strategy import ReplicaStrategy

__all__ = [
    "PipelineContext",
    "ReduceOp",
    "ReplicaContext",
    "as_reduce_op",
    "current_context",
    "enter_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "leave_strategy",
]


class ReduceOp(enum.Enum):
    """How values of replicas become one: their SUM, or their MEAN."""

    SUM = "SUM"
    MEAN = "MEAN"


def as_reduce_op(op: ReduceOp | str) -> ReduceOp:
    try:
        return op if isinstance(op, ReduceOp) else ReduceOp(str(op).upper())
    except ValueError:
        raise SpecError(f"{op!r} is no reduction.", where="reduce", fix=["ReduceOp.SUM", "ReduceOp.MEAN"]) from None


@checked_class(name="InputContext")
class PipelineContext:
    """`mh.InputContext` with TensorFlow's names: an input pipeline is a worker, and so is a replica.

    Args:
        num_input_pipelines: How many workers there are.
        input_pipeline_id: The number of this worker, from 0.
        num_replicas_in_sync: How many replicas share a batch: as many.
    """

    def __init__(
        self, num_input_pipelines: int = 1, input_pipeline_id: int = 0, num_replicas_in_sync: int | None = None
    ) -> None:
        self.num_input_pipelines, self.input_pipeline_id = num_input_pipelines, input_pipeline_id
        self.num_replicas_in_sync = num_input_pipelines if num_replicas_in_sync is None else num_replicas_in_sync

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The rows of each replica; `SpecError` where they cannot be equal, as in TensorFlow.

        Args:
            global_batch_size: Rows of a batch over all replicas.
        """
        if global_batch_size % self.num_replicas_in_sync:
            parts = self.num_replicas_in_sync
            raise SpecError(
                f"A global batch of {global_batch_size} rows does not divide into {parts} equal parts.",
                where="get_per_replica_batch_size",
                fix=[f"{global_batch_size // parts * parts or parts}"],
            )
        return global_batch_size // self.num_replicas_in_sync


@checked_class()
class ReplicaContext:
    """The replica that runs: inside `strategy.run`."""

    def __init__(self, strategy: ReplicaStrategy | None, exchange: ReplicaExchange | None) -> None:
        self._strategy, self._exchange = strategy, exchange

    @property
    def replica_id_in_sync_group(self) -> int:
        """The number of this replica, from 0: the worker's rank."""
        return self._exchange.rank if self._exchange is not None else 0

    @property
    def num_replicas_in_sync(self) -> int:
        return self._exchange.size if self._exchange is not None else 1

    @property
    def strategy(self) -> Any:
        return self._strategy or get_strategy()

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any) -> Any:
        """The sum or mean of `value` over all replicas, each of which must call this.

        Args:
            reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`.
            value: A tensor or number, or a structure of them.
        """
        op = as_reduce_op(reduce_op)
        leaves, structure = pytree.tree_flatten(value)
        tensors = [torch.as_tensor(one) for one in leaves]
        if self._exchange is None:
            return value
        summed = self._exchange.sum(tensors)
        return pytree.tree_unflatten([_mean(one, self._exchange.size, op) for one in summed], structure)

    def all_gather(self, value: Any, axis: int) -> Tensor:
        """The values of all replicas, each of which must call this, concatenated in their order.

        Args:
            value: A tensor.
            axis: The dimension along which they are concatenated.
        """
        mine = torch.as_tensor(value)
        return mine if self._exchange is None else torch.cat(self._exchange.gather(mine), axis)

    def merge_call(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: no process sees the arguments of all replicas."""
        raise NotHere(
            "merge_call has no meaning here: each replica is a process, and none sees the values of the others.",
            where="merge_call",
            fix=["get_replica_context().all_reduce", "strategy.reduce, outside of run"],
        )


def _mean(total: Tensor, count: int, op: ReduceOp) -> Tensor:
    return total / count if op is ReduceOp.MEAN else total


@checked_class(name="strategy")
class _NoStrategy:
    """Outside of any scope: one replica."""

    num_replicas_in_sync = 1
    cluster_resolver = None

    def scope(self) -> AbstractContextManager[Any]:
        return nullcontext(self)

    def experimental_distribute_dataset(self, dataset: Any, options: None = None) -> Any:
        return dataset

    def distribute_datasets_from_function(self, dataset_fn: Any, options: None = None) -> Any:
        return dataset_fn(PipelineContext()) if inspect.signature(dataset_fn).parameters else dataset_fn()

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def gather(self, value: Any, axis: int) -> Any:
        return torch.as_tensor(value)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        return (value,)

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: None = None) -> Any:
        return fn(*args, **(kwargs or {}))

    experimental_run_v2 = run

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None = None) -> Any:
        if axis is None:
            return value
        op, tensor = as_reduce_op(reduce_op), torch.as_tensor(value)
        return tensor.sum(axis) if op is ReduceOp.SUM else tensor.mean(axis)


_nobody = _NoStrategy()
_entered: list[Any] = []
_contexts: list[ReplicaContext] = []
_alone = ReplicaContext(None, None)


@checked_keywords
def get_strategy() -> Any:
    """The strategy whose scope, or `run`, this code is in; outside of any: one replica, as in TensorFlow."""
    return _entered[-1] if _entered else _nobody


@checked_keywords
def has_strategy() -> bool:
    """Whether this code is in the scope, or a `run`, of a strategy."""
    return bool(_entered)


@checked_keywords
def get_replica_context() -> ReplicaContext | None:
    """The replica that runs; None in a scope outside of `run`, where code is for all replicas."""
    return current_context() or (None if _entered else _alone)


@checked_keywords
def in_cross_replica_context() -> bool:
    """Whether this code is in a scope, and outside of `run`."""
    return get_replica_context() is None


def current_context() -> ReplicaContext | None:
    return _contexts[-1] if _contexts else None


def enter_strategy(strategy: Any, context: ReplicaContext | None = None) -> None:
    """Begin a scope, or with `context` a run."""
    _entered.append(strategy)
    if context is not None:
        _contexts.append(context)


def leave_strategy(context: ReplicaContext | None = None) -> None:
    _entered.pop()
    if context is not None:
        _contexts.pop()
