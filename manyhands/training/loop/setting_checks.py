"""What a run's settings rule out, of data and of optimizers, and what the mode of its servers comes to."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import torch

from manyhands.data.sources.as_source import Source
from manyhands.data.sources.per_slice_source import ApartSource
from manyhands.data.sources.row_source import RowSource
from manyhands.data.sources.stream_source import StreamSource
from manyhands.errors import CheckpointMismatch, DataError, SpecError
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
    "mode_of",
    "same_order",
]

USUAL_ORDER = "each row once"


def by_step(make: Callable[[torch.optim.Optimizer], Any]) -> Callable[[torch.optim.Optimizer], Any]:
    """`make`, of a schedule that needs no result of an epoch to take a step."""

    def made(optimizer: torch.optim.Optimizer) -> Any:
        schedule = make(optimizer)
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise SpecError(
                "ReduceLROnPlateau looks at an epoch's loss, and cannot be stepped after every update.",
                where="scheduler",
                fix=['scheduler_every="epoch", of mh.Trainer', "in a loop of your own: call its step(...) yourself"],
            )
        return schedule

    return made


def check_balance(source: Source) -> None:
    if isinstance(source, ApartSource):
        raise DataError(
            "balance moves slices between workers, but this data is a function of the worker.",
            fix=["data that is the same on every worker; manyhands shares out the rows", "balance=False"],
        )
    if isinstance(source, StreamSource) and source.num_workers:
        raise DataError(
            "balance moves slices between workers, but the process that reads a stream ahead knows one worker's only.",
            fix=["num_workers=0", "data with a length", "balance=False"],
        )


def check_leasable(source: Source) -> None:
    """Under parameter servers any worker computes any slice, at any time."""
    if not isinstance(source, RowSource) or source.shared:
        raise DataError(
            "Parameter servers hand out batches by number, but this data can only be read from its beginning, or "
            "some workers lack some of it.",
            fix=["data with a length, such as tensors or a map-style Dataset", 'strategy="mirrored"'],
        )


def same_order(progress: Progress, source: Source, batch_size: int) -> str:
    """The order that rows are taken in. One that changes within an epoch would lose rows and take others twice."""
    order = _order_of(source, batch_size)
    if progress.row and order != progress.order:
        raise CheckpointMismatch(
            f"Epoch {progress.epoch} is under way: {progress.row} of its rows were taken in the order "
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
        return "ready batches" if source.batched else ""
    return source.order.identity(batch_size) if isinstance(source, RowSource) and source.order is not None else ""


def check_counts(**asked: Any) -> None:
    """Rows of a batch, epochs, steps, loader processes: whole numbers; None is what was not asked for."""
    for name, value in asked.items():
        least = 1 if name.startswith("batch") else 0
        if value is not None and not (isinstance(value, numbers.Integral) and int(value) >= least):
            raise SpecError(
                f"{name} is {value!r}, but must be a whole number from {least} on.", fix=[f"{name}={max(1, least)}"]
            )


def check_length(progress: Progress, epochs: int | None, steps: int | None) -> None:
    """A resumed run has not gone beyond what is asked for: no training could give that result any more."""
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
        f"The run has done {what} of this call already, but {asked} was asked for. It is left as it is.",
        fix=[
            f"{name}={enough}, to end it there",
            f"{name}={enough + 1} or more, to go on",
            "a new run directory, to train anew: --run-dir NEW",
        ],
    )


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def check_elastic(optimizer: torch.optim.Optimizer, reducer: str) -> None:
    """A step that is lost half-way must leave everything as it was, and nobody may have what the others lack."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise SpecError(
            "LBFGS changes the weights several times within a step, so a step cannot be done again by other workers.",
            where="optimizer, in a run that goes on when workers die",
            fix=["another optimizer", 'strategy="mirrored", without elastic='],
        )
    if reducer == "int8":
        raise SpecError(
            'With reducer="int8" every worker keeps what it left out so far, which is lost with it.',
            where="elastic",
            fix=['reducer="exact" or "bf16"', "a run without elastic="],
        )


def mode_of(strategy: StrategyChoice) -> str:
    """What the mode of parameter servers comes to."""
    if not isinstance(strategy, ParameterServer):
        return "async" if strategy.leases else ""
    return "sync" if strategy.mode == "ssp" and strategy.staleness == 0 else strategy.mode
