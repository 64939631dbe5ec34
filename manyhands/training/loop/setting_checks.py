"""Checks of settings against data, optimizer and progress, each with what to write instead; and the servers' mode."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from manyhands.data.sources.as_source import Source
from manyhands.data.sources.per_slice_source import PerSliceSource
from manyhands.data.sources.row_source import RowSource
from manyhands.data.sources.stream_source import StreamSource
from manyhands.embedding.row_layer import Sparse
from manyhands.errors import CheckpointMismatch, DataError, SpecError
from manyhands.parallel.gradients.custom_reduction import has_reduce_grad
from manyhands.spec.strategy_names import WITH_RESIDUALS
from manyhands.strategies.choices import ParameterServer
from manyhands.training.state.training_state import Progress
from manyhands.training.worker.strategy_lookup import StrategyChoice

__all__ = [
    "by_step",
    "check_balance",
    "check_counts",
    "check_elastic",
    "check_leasable",
    "check_length",
    "check_own_reduction",
    "mode_of",
    "same_order",
]

USUAL_ORDER = "each row once"


def by_step(make: Callable[[torch.optim.Optimizer], Any]) -> Callable[[torch.optim.Optimizer], Any]:
    """`make`, which refuses a scheduler that needs the loss of an epoch to be stepped."""

    def made(optimizer: torch.optim.Optimizer) -> Any:
        schedule = make(optimizer)
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise SpecError(
                "ReduceLROnPlateau looks at an epoch's loss, and cannot be stepped after every update.",
                where="scheduler",
                fix=['scheduler_every="epoch", of mh.Trainer', "with mh.join: call its step(...) yourself"],
            )
        return schedule

    return made


def check_balance(source: Source) -> None:
    if isinstance(source, PerSliceSource):
        raise DataError(
            "balance moves slices between workers, but this data is a function of the worker.",
            fix=["data that is the same on every worker; manyhands divides the rows", "balance=False"],
        )
    if isinstance(source, StreamSource) and source.num_workers:
        raise DataError(
            "balance moves slices between workers, but a loader process reads ahead the slices of one worker only.",
            fix=["num_workers=0", "data with a length", "balance=False"],
        )


def check_leasable(source: Source) -> None:
    """Under parameter servers any worker computes any slice, at any time."""
    if not isinstance(source, RowSource) or source.shared:
        raise DataError(
            "Parameter servers lease batches by number, but this data can only be read from its beginning, or some "
            "workers do not have all of it.",
            fix=["data with a length, such as tensors or a map-style Dataset", 'strategy="mirrored"'],
        )


def same_order(progress: Progress, source: Source, batch_size: int) -> str:
    """The order of rows; `CheckpointMismatch` if it changes within an epoch, which would skip or repeat rows."""
    order = _order_of(source, batch_size)
    if progress.row and order != progress.order:
        raise CheckpointMismatch(
            f"Epoch {progress.epoch} has begun: {progress.row} of its rows were taken in the order "
            f'"{progress.order or USUAL_ORDER}", and the others would be in the order "{order or USUAL_ORDER}".',
            fix=[
                "the same order=, weights or lengths, batched= and batch_size as before",
                "epochs= in place of steps=, so that the call before ends with its epoch",
                "a new run directory: --run-dir NEW",
            ],
        )
    return order


def _order_of(source: Source, batch_size: int) -> str:
    if isinstance(source, StreamSource):
        return source.identity or ("ready batches" if source.batched else "")
    return source.order.identity(batch_size) if isinstance(source, RowSource) and source.order is not None else ""


def check_counts(**asked: Any) -> None:
    """`SpecError` unless batch sizes, epochs, steps and loader processes are whole numbers; None is not given."""
    for name, value in asked.items():
        least = 1 if name.startswith("batch") else 0
        if value is not None and not (isinstance(value, numbers.Integral) and int(value) >= least):
            raise SpecError(
                f"{name} is {value!r}, but must be a whole number from {least} on.", fix=[f"{name}={max(1, least)}"]
            )


def check_length(progress: Progress, epochs: int | None, steps: int | None) -> None:
    """`CheckpointMismatch` if a resumed run has trained for longer than is asked for."""
    done = progress.epoch - progress.call_epoch, progress.step - progress.call_step
    begun = done[0] + (progress.row > 0 and done[1] > 0)  # an epoch that has begun counts
    if epochs is not None and begun > epochs:
        more = " and a part of the next" if begun > done[0] else ""
        what, asked, enough = f"{_many(done[0], 'epoch')}{more} ({_many(done[1], 'step')})", f"epochs={epochs}", begun
    elif steps is not None and done[1] > steps:
        what, asked, enough = _many(done[1], "step"), f"steps={steps}", done[1]
    else:
        return
    name = asked.partition("=")[0]
    raise CheckpointMismatch(
        f"The run has done {what} of this call already, but {asked} was asked for. The run is left unchanged.",
        fix=[
            f"{name}={enough}, to end it there",
            f"{name}={enough + 1} or more, to continue it",
            "a new run directory, to train from the start: --run-dir NEW",
        ],
    )


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def check_elastic(optimizer: torch.optim.Optimizer, reducer: str) -> None:
    """`SpecError` unless an interrupted step can be repeated, and no state is lost with a worker."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise SpecError(
            "LBFGS changes the weights several times within a step, so a step cannot be done again by other workers.",
            where="optimizer, in an elastic run",
            fix=["another optimizer", 'strategy="mirrored", without elastic='],
        )
    if reducer in WITH_RESIDUALS:
        raise SpecError(
            f'With reducer="{reducer}" every worker keeps a residual of its gradients, which is lost with the worker.',
            where="elastic",
            fix=['reducer="exact" or "bf16"', "a run without elastic="],
        )


def check_own_reduction(optimizer: object, strategy: StrategyChoice, precision: str, model: nn.Module) -> None:
    """`SpecError` for a reduction of the user's own that would not be called, or not with all gradients."""
    given, optimizer = callable(getattr(strategy, "reducer", None)), getattr(optimizer, "keras", optimizer)
    name = type(optimizer).__name__
    if callable(getattr(optimizer, "get_gradients", None)):
        raise SpecError(
            f"{name} has get_gradients, which computes the gradients of a loss; here every worker computes those of "
            "its slices, and only their combination can be the optimizer's.",
            where="optimizer",
            fix=["reduce_grad(self, gradients), which gets every parameter's list of slice gradients", "reducer="],
        )
    if not (given or has_reduce_grad(optimizer)):
        return
    reason: tuple[str, str] | None = None
    if Sparse(model):
        reason = "rows of mh.nn.Embedding and mh.nn.EmbeddingBag are summed without it", "nn.Embedding"
    elif given and has_reduce_grad(optimizer):
        reason = "the strategy has a reducer, and only one of them could be called", "no reducer="
    elif not given and hasattr(optimizer, "learning_rate"):
        reason = "Keras's optimizers get gradients that are summed", "mh.Mirrored(reducer=...)"
    elif not given and strategy.name not in ("single", "mirrored"):
        reason = (
            f'with strategy="{strategy.name}" no worker has the gradients of all slices',
            'strategy="mirrored"',
        )
    elif precision == "fp16":
        reason = "fp16 scales the loss, and with it the gradients", 'precision="bf16"'
    if reason is not None:
        what = "reducer is a function" if given else f"{name} has reduce_grad"
        raise SpecError(f"{what}, but {reason[0]}.", where="reducer" if given else "optimizer", fix=[reason[1]])


def mode_of(strategy: StrategyChoice) -> str:
    """The effective mode of parameter servers: ssp without staleness is sync. Empty where nothing is leased."""
    if not isinstance(strategy, ParameterServer):
        return "async" if strategy.leases else ""
    return "sync" if strategy.mode == "ssp" and strategy.staleness == 0 else strategy.mode
