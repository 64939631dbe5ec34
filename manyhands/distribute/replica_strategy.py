"""`run`, `reduce`, `gather` and the data calls of TensorFlow's strategies: a custom loop, one replica per worker.

The loop is the user's: `run` calls a function once in every worker, with gradients summed over the replicas where an
optimizer applies them, as in TensorFlow. Losses are therefore divided by the global batch size
(`compute_average_loss`). Results agree with one process to float rounding. It is neither elastic nor resumed:
`model.fit` and `mh.join` are. Start reading at `ReplicaStrategy.run`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import manyhands as mh
from manyhands.distribute.keras_replicas import merging
from manyhands.distribute.replica_data import DataRandomness, GlobalBatches, OwnBatches
from manyhands.distribute.replica_exchange import ReplicaExchange
from manyhands.distribute.replicas import (
    PipelineContext,
    ReduceOp,
    ReplicaContext,
    as_reduce_op,
    current_context,
    enter_strategy,
    leave_strategy,
)
from manyhands.distribute.train.notices import refuse_unknown
from manyhands.errors import NotHere, SpecError, UsageError
from manyhands.spec.keyword_check import checked_class

__all__ = ["ReplicaStrategy"]

LOOP_SETTINGS = ("seed", "run_dir")
"""Settings of `mh.join` that a custom loop can keep; the others are about steps that we take."""


@checked_class(name="strategy")
class ReplicaStrategy:
    """What all strategies have beside their scope. `choice` is our strategy, `joined` the settings of `mh.join`."""

    choice: Any
    joined: Mapping[str, Any]
    _exchange: ReplicaExchange | None = None
    _randomness: DataRandomness | None = None

    def _replicas(self) -> ReplicaExchange:
        """The exchange with the other replicas, from the first use of the loop's calls on."""
        if self._exchange is None:
            self._check_loop()
            self._exchange = ReplicaExchange(lambda: mh.join(self.choice, **self.joined))
            if isinstance(self.choice, mh.CentralStorage):
                self._exchange.share_weights()
            self._randomness = DataRandomness(torch.initial_seed())  # that of the run
        return self._exchange

    def _data_randomness(self) -> DataRandomness:
        self._replicas()
        assert self._randomness is not None
        return self._randomness

    def _check_loop(self) -> None:
        if isinstance(self.choice, mh.ParameterServer):
            raise NotHere(
                f"{type(self).__name__} has no replicas to run, reduce or gather over: servers have the weights, which "
                "change with every worker's push, and a function of yours says neither when to fetch nor when to push.",
                where="strategy.run",
                fix=[
                    "model.fit, which TensorFlow's guide uses under parameter servers, too",
                    "coordinator.ClusterCoordinator(strategy).schedule(step), with ctx.variables and ctx.add in step",
                    'MirroredStrategy(), or mode="sync" with mh.join, for steps that all workers take together',
                ],
            )
        if not isinstance(self.choice, mh.Mirrored | mh.Single | mh.CentralStorage):
            raise NotHere(
                f"{type(self).__name__}.run would compute on replicas, and mh.{type(self.choice).__name__} keeps the "
                "weights elsewhere: only its own steps know where.",
                where="strategy.run",
                fix=["MirroredStrategy()", "model.fit, mh.Trainer or mh.join"],
            )
        for name, value in self.joined.items():
            if name not in LOOP_SETTINGS:
                raise SpecError(
                    f"{name}={value!r} is about steps that we take, and in a loop with strategy.run you take them.",
                    where=type(self).__name__,
                    fix=[f"no {name}=", "model.fit, mh.Trainer or mh.join"],
                )
        if getattr(self.choice, "elastic", None) is not None:
            raise SpecError(
                "elastic= is not for a loop with strategy.run: its replicas are fixed, and a lost one takes with it "
                "what only your loop could compute again.",
                where=type(self).__name__,
                fix=["no elastic=", "model.fit, mh.Trainer or mh.join"],
            )
        reducer = getattr(self.choice, "reducer", None)
        if isinstance(reducer, str) and reducer != "exact":
            raise SpecError(
                f"reducer={reducer!r} is how our steps send gradients, and in a loop with strategy.run you take the "
                "steps: they are sent exactly.",
                where=type(self).__name__,
                fix=["no reducer=", "a function of one parameter's gradients", "model.fit, mh.Trainer or mh.join"],
            )

    # ---- computing -------------------------------------------------------------------------------------------

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Call `fn` in every worker, each with its arguments, and return this replica's result.

        Args:
            fn: What a replica does in a step.
            args: Its arguments.
            kwargs: Its keyword arguments.
            options: Only None.
        """
        _refuse_options("run", options)
        exchange = self._replicas()
        if current_context() is not None:
            raise UsageError("run was called inside of a run.", where="strategy.run", fix=["call the function itself"])
        context = ReplicaContext(self, exchange)
        enter_strategy(self, context)
        try:
            reducer = getattr(self.choice, "reducer", None)
            with merging(exchange, reducer if callable(reducer) else None):
                return fn(*args, **(kwargs or {}))
        finally:
            leave_strategy(context)

    experimental_run_v2 = run

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None = None) -> Any:
        """The sum or mean over all replicas, on every worker; outside of `run`.

        Args:
            reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`.
            value: This replica's value, as `run` returned it; a list with several of them; or a dict of these.
            axis: None: values of replicas are combined. A dimension: that one, too; its mean has the true number of
                rows, however they are divided.
        """
        op, exchange = as_reduce_op(reduce_op), self._replicas()
        if current_context() is not None:
            raise UsageError(
                "reduce was called inside of run.", where="strategy.reduce", fix=["get_replica_context().all_reduce"]
            )
        if isinstance(value, dict):
            return {name: self.reduce(op, one, axis) for name, one in value.items()}
        mine = [torch.as_tensor(one) for one in (value if isinstance(value, list | tuple) else [value])]
        for one in mine if axis is not None else ():
            _check_axis(one, axis, "strategy.reduce")
        count = float(len(mine)) if axis is None else float(sum(one.shape[axis] for one in mine))
        mine = mine if axis is None else [one.sum(axis) for one in mine]
        total, whole = exchange.sum([torch.stack(mine).sum(0), torch.tensor(count, dtype=torch.float64)])
        return total / whole.item() if op is ReduceOp.MEAN else total

    def gather(self, value: Any, axis: int) -> Tensor:
        """The values of all replicas, concatenated in their order; the other dimensions must agree.

        Args:
            value: This replica's tensor.
            axis: The dimension along which they are concatenated.
        """
        mine, exchange = torch.as_tensor(value), self._replicas()
        _check_axis(mine, axis, "strategy.gather")
        return torch.cat(exchange.gather(mine), axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The results of this worker's replicas: of one."""
        return (value,)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        """What a function makes for this replica.

        Args:
            value_fn: A function of a context with `replica_id_in_sync_group` and `num_replicas_in_sync`.
        """
        return value_fn(ReplicaContext(self, self._replicas()))

    # ---- data ------------------------------------------------------------------------------------------------

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> GlobalBatches:
        """A dataset of global batches, of which each replica gets its rows.

        Args:
            dataset: Anything that yields batches with the same rows, in the same order, on every worker: a
                DataLoader, a list, a dataset that is batched.
            options: Only None.
        """
        refuse_unknown(
            "experimental_distribute_dataset", {} if options is None else {"options": options}, ["dataset", "options"]
        )
        return GlobalBatches(dataset, self._replicas, self._data_randomness)

    def distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any = None) -> Any:
        """What `dataset_fn` makes in each worker: batches of this replica, neither cut nor shuffled.

        Args:
            dataset_fn: A function of an `InputContext`, or without arguments. It returns a dataset, or several, such as
                (train, test).
            options: Only None.
        """
        refuse_unknown(
            "distribute_datasets_from_function",
            {} if options is None else {"options": options},
            ["dataset_fn", "options"],
        )
        replicas = self._replicas()
        context = PipelineContext(num_input_pipelines=replicas.size, input_pipeline_id=replicas.rank)
        made = dataset_fn(context) if inspect.signature(dataset_fn).parameters else dataset_fn()
        if isinstance(made, tuple):
            return tuple(OwnBatches(one, self._replicas) for one in made)
        return OwnBatches(made, self._replicas)

    experimental_distribute_datasets_from_function = distribute_datasets_from_function


def _refuse_options(call: str, options: Any) -> None:
    refuse_unknown(f"strategy.{call}", {} if options is None else {"options": options}, ["options"])


def _check_axis(value: Tensor, axis: int | None, where: str) -> None:
    if axis is not None and not -value.ndim <= axis < value.ndim:
        raise SpecError(
            f"axis is {axis}, and this replica's value has {value.ndim} dimensions.",
            where=where,
            fix=["axis=None, for one value per replica" if where == "strategy.reduce" else "value[None], and axis=0"],
        )


@contextmanager
def entered(strategy: Any, scope: Any) -> Iterator[Any]:
    """A scope in which `get_strategy` returns the strategy."""
    with scope:
        enter_strategy(strategy)
        try:
            yield strategy
        finally:
            leave_strategy()
