"""Training operations: `optimizer.minimize(loss, ...)` returns one, and a session runs it, a step at a time.

In TensorFlow 1 an operation is a node of a graph that knows its model and its input. Here it is an object that is given
them: a loss function, a model, data and the global batch size. Start reading at `TrainOp`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import manyhands as mh
from manyhands.distribute.train.hooks import SessionRunHook
from manyhands.distribute.train.notices import refuse_unknown
from manyhands.distribute.train.placement import is_placing
from manyhands.errors import NotHere, SpecError
from manyhands.spec.keyword_check import checked_class, checked_keywords

__all__ = [
    "AdagradOptimizer",
    "FtrlOptimizer",
    "GlobalStep",
    "GradientDescentOptimizer",
    "MomentumOptimizer",
    "OperationLoss",
    "SyncReplicasOptimizer",
    "TowerOptimizer",
    "TrainOp",
    "get_or_create_global_step",
    "minimize",
]


class GlobalStep:
    """The number of steps of the session's run; fetch it with `sess.run(global_step)`."""

    def __str__(self) -> str:
        return "global_step"


_GLOBAL_STEP = GlobalStep()


@checked_keywords
def get_or_create_global_step() -> GlobalStep:
    """The step counter: the run has one, and every session counts with it."""
    return _GLOBAL_STEP


class OperationLoss:
    """The mean loss over the whole batch of an operation's last step; fetch it with `sess.run(train_op.loss)`."""

    def __init__(self, op: TrainOp) -> None:
        self.op = op

    def __str__(self) -> str:
        return "loss"


class TrainOp:
    """One step of a training: what `sess.run(train_op)` takes. Made by `minimize`."""

    def __init__(
        self,
        loss: Callable[[nn.Module, Any], Any],
        model: nn.Module | Callable[[], nn.Module],
        optimizer: Optimizer | Callable[[Any], Optimizer],
        data: Any,
        *,
        batch_size: int | None,
        epochs: int,
        strategy: Any = None,
        maker: Any = None,
    ) -> None:
        if isinstance(optimizer, Optimizer) and not isinstance(model, nn.Module):
            raise SpecError(
                "The model is made here, by a function, so a ready optimizer cannot have its parameters.",
                where="minimize",
                fix=["optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"],
            )
        if is_placing() and not isinstance(model, nn.Module):
            raise SpecError(
                "The model is made later, by a function, so that device() cannot place its parameters.",
                where="minimize",
                fix=["model = make_model(), inside of device(), and model=model"],
            )
        self.loss_fn, self.given_model, self._optimizer, self.data = loss, model, optimizer, data
        self.batch_size, self.epochs, self.strategy, self.maker = batch_size, epochs, strategy, maker
        self.loss = OperationLoss(self)
        """Fetch it for the loss of the last step."""

    def build(self) -> tuple[nn.Module, Optimizer]:
        """Model and optimizer, for this worker."""
        model = self.given_model if isinstance(self.given_model, nn.Module) else self.given_model()
        made = self._optimizer
        return model, made if isinstance(made, Optimizer) else made(model.parameters())

    def __call__(self) -> None:
        raise SpecError("A training operation is run by a session.", where="train_op()", fix=["sess.run(train_op)"])


@checked_keywords
def minimize(
    loss: Callable[[nn.Module, Any], Any],
    *,
    model: nn.Module | Callable[[], nn.Module],
    optimizer: Optimizer | Callable[[Any], Optimizer],
    data: Any,
    batch_size: int | None = None,
    epochs: int = 1,
    strategy: Any = None,
) -> TrainOp:
    """The operation of a training, with any optimizer of torch.

    Args:
        loss: `loss(model, batch)`, the mean over the batch.
        model: The model, or a function that makes it. A function's initial weights are the same in every run.
        optimizer: A torch optimizer of its parameters, or a function of them that makes one.
        data: As for `mh.Trainer.fit`.
        batch_size: Rows of the global batch, over all workers.
        epochs: Passes over the data. `StopAtStepHook` decides instead, where there is one.
        strategy: Ours. Default: parameter servers if the model was placed on some, or the session's cluster has some;
            otherwise replicas.
    """
    return TrainOp(loss, model, optimizer, data, batch_size=batch_size, epochs=epochs, strategy=strategy)


@checked_class(name="optimizer")
class _TrainOptimizer:
    """An optimizer by TensorFlow's name: settings, and `minimize`."""

    def __init__(self, make: Callable[[Any], Optimizer], strategy: Any = None) -> None:
        self.make, self.strategy = make, strategy

    def __call__(self, params: Any) -> Optimizer:
        return self.make(params)

    def minimize(
        self,
        loss: Callable[[nn.Module, Any], Any],
        global_step: GlobalStep | None = None,
        *,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        data: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
    ) -> TrainOp:
        """The operation that takes a step of this training; the arguments are those of `minimize`.

        Args:
            loss: `loss(model, batch)`.
            global_step: The run counts its steps in any case.
            model: The model, or a function that makes it.
            data: As for `mh.Trainer.fit`.
            batch_size: Rows of the global batch.
            epochs: Passes over the data.
        """
        if model is None or data is None or not callable(loss):
            raise SpecError(
                "There is no graph in which the model and the data of a loss could be found.",
                where="minimize",
                fix=["minimize(loss, model=model, data=(x, y), batch_size=32), with loss(model, batch)"],
            )
        return TrainOp(
            loss,
            model,
            self.make,
            data,
            batch_size=batch_size,
            epochs=epochs,
            strategy=self.strategy,
            maker=self,
        )

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a step computes gradients and applies their sum over all workers."""
        raise NotHere(
            "Gradients are computed and applied in one step, between which the workers sum them.",
            where=f"{type(self).__name__}.compute_gradients",
            fix=["minimize(loss, model=model, data=data)", "clip_norm= of mh.Trainer, to clip them"],
        )

    apply_gradients = compute_gradients


@checked_class()
class GradientDescentOptimizer(_TrainOptimizer):
    """`torch.optim.SGD`: the same arithmetic.

    Args:
        learning_rate: The learning rate.
    """

    def __init__(self, learning_rate: float) -> None:
        super().__init__(lambda params: torch.optim.SGD(params, lr=learning_rate))


@checked_class()
class MomentumOptimizer(_TrainOptimizer):
    """`torch.optim.SGD` with momentum: the same arithmetic.

    Args:
        learning_rate: The learning rate.
        momentum: The momentum.
        use_nesterov: Nesterov's variant.
    """

    def __init__(self, learning_rate: float, momentum: float, use_nesterov: bool = False) -> None:
        super().__init__(
            lambda params: torch.optim.SGD(params, lr=learning_rate, momentum=momentum, nesterov=use_nesterov)
        )


@checked_class()
class AdagradOptimizer(_TrainOptimizer):
    """`torch.optim.Adagrad` with TensorFlow's defaults: sums begin at 0.1, and no epsilon is added.

    Args:
        learning_rate: The learning rate.
        initial_accumulator_value: What the sums of squares begin at.
    """

    def __init__(self, learning_rate: float, initial_accumulator_value: float = 0.1) -> None:
        super().__init__(
            lambda params: torch.optim.Adagrad(
                params, lr=learning_rate, initial_accumulator_value=initial_accumulator_value, eps=0.0
            )
        )


@checked_class()
class FtrlOptimizer(_TrainOptimizer):
    """`mh.optim.FTRL` with TensorFlow's convention, in which l2 counts twice.

    Args:
        learning_rate: The learning rate.
        learning_rate_power: How it falls with the sum of squares.
        initial_accumulator_value: What that begins at.
        l1_regularization_strength: Towards zeros.
        l2_regularization_strength: Towards small weights.
    """

    def __init__(
        self,
        learning_rate: float,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
    ) -> None:
        super().__init__(
            lambda params: mh.optim.FTRL(
                params,
                lr=learning_rate,
                l1=l1_regularization_strength,
                l2=l2_regularization_strength,
                lr_power=learning_rate_power,
                initial_accumulator=initial_accumulator_value,
                convention="tensorflow",
            )
        )


def _maker_of(opt: Callable[[Any], Optimizer], where: str) -> Callable[[Any], Optimizer]:
    if isinstance(opt, Optimizer) or not callable(opt):
        raise SpecError(
            f"{where} needs an optimizer that it can make, not {type(opt).__name__}.",
            where=where,
            fix=["GradientDescentOptimizer(0.1)", "lambda params: torch.optim.Adam(params, lr=1e-3)"],
        )
    return opt


@checked_class()
class SyncReplicasOptimizer(_TrainOptimizer):
    """Synchronous parameter servers: `mh.ParameterServer(mode="sync", aggregate=...)`.

    A global batch is cut into `replicas_to_aggregate` slices, whose gradients make one update. Fewer of them than
    workers: the others are backup workers, and compute slices of slow ones again. More: a worker computes several.

    Args:
        opt: An optimizer by one of our names, or a function of the parameters that makes a torch optimizer.
        replicas_to_aggregate: How many gradients make one update.
        total_num_replicas: How many workers there are. Default: as many.
    """

    def __init__(self, opt: Any, replicas_to_aggregate: int, total_num_replicas: int | None = None) -> None:
        total = replicas_to_aggregate if total_num_replicas is None else total_num_replicas
        self.replicas_to_aggregate, self.total_num_replicas = replicas_to_aggregate, total
        super().__init__(
            _maker_of(opt, "SyncReplicasOptimizer"),
            mh.ParameterServer(
                mode="sync",
                aggregate=replicas_to_aggregate,
                workers=total,
                backup_workers=max(0, total - replicas_to_aggregate),
            ),
        )

    def make_session_run_hook(self, is_chief: bool, num_tokens: int = -1) -> SessionRunHook:
        """A hook that checks, when the session begins, that it runs this optimizer. Servers need no tokens.

        Args:
            is_chief: The run knows its chief.
            num_tokens: Only -1.
        """
        refuse_unknown("make_session_run_hook", {} if num_tokens == -1 else {"num_tokens": num_tokens}, ["is_chief"])
        return _RunsThis(self)


class _RunsThis(SessionRunHook):
    """Refuses a session that runs another optimizer than the one that the hook was made for."""

    def __init__(self, maker: SyncReplicasOptimizer) -> None:
        self._maker = maker

    def after_create_session(self, session: Any, coord: Any) -> None:
        if session.train_op.maker is not self._maker:
            raise SpecError(
                "The session has the hook of a SyncReplicasOptimizer, and runs another optimizer.",
                where="make_session_run_hook",
                fix=["train_op = sync_optimizer.minimize(...)"],
            )


@checked_class()
class TowerOptimizer(_TrainOptimizer):
    """Towers, one per device of a host, whose gradients are averaged: replicas, `mh.Mirrored`.

    Args:
        opt: An optimizer by one of our names, or a function of the parameters that makes a torch optimizer.
        num_towers: How many workers. Default: as many as the launcher starts.
    """

    def __init__(self, opt: Any, num_towers: int | None = None) -> None:
        super().__init__(_maker_of(opt, "TowerOptimizer"), mh.Mirrored(workers=num_towers))
