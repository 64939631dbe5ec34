"""The check that all workers read the same batches of a stream, as every worker takes its slices of what it has read.

Streams may end at different batches, and a generator that draws random numbers without a seed yields other rows in each
process: some values of every batch are compared, as `data_agreement` does once for data with row numbers. Start
reading at `agree_on_batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from torch import Tensor

from manyhands.data.data_agreement import RowSample, difference, sample_of_batch
from manyhands.data.row_exchange import decode, encode
from manyhands.errors import DataError
from manyhands.training.driven_training import DrivenTraining

__all__ = ["agree_on_batch", "agreed_batches"]

T = TypeVar("T")


def agree_on_batch(
    training: DrivenTraining, where: str, batch: Sequence[Tensor] | None, number: int, *, is_last: bool
) -> None:
    """`DataError` if a batch is not that of the other workers, or the data ends only here. Collective.

    `number` batches have been read until that end.
    """
    sample = RowSample() if batch is None or training.num_workers == 1 else sample_of_batch(batch)
    mine = encode([is_last, list(sample.values)])
    answers = [decode(one) for one in training.agreed(lambda: training.gather("the batch", mine))]
    _check_ends([bool(last) for last, _ in answers], where, number)
    first, *others = (RowSample("", values) for _, values in answers)
    for rank, other in enumerate(others, 1):
        if text := difference(first, other):
            raise DataError(
                f"The workers read different data after {number} batches: {text.format(rank=rank)}. Every worker reads "
                "all batches, and takes its slices of each.",
                where=where,
                fix=[
                    "numpy.random.default_rng(0): random numbers of the generator's own need a seed",
                    "the same batches on every worker, in the same order",
                    "arrays, or a keras.utils.PyDataset",
                ],
            )


def _check_ends(ends: list[bool], where: str, number: int) -> None:
    if len(set(ends)) > 1:
        ended = [str(rank) for rank, one in enumerate(ends) if one]
        raise DataError(
            f"The data of rank {', '.join(ended)} ended after {number} batches, that of the others did "
            "not: every worker makes a generator, and takes its slices of every batch.",
            where=where,
            fix=["a generator that yields the same batches on every worker", "arrays, or a keras.utils.PyDataset"],
        )


def agreed_batches(
    training: DrivenTraining, where: str, batches: Iterator[T], columns_of: Callable[[T], Sequence[Tensor] | None]
) -> Iterator[T]:
    """The batches of an evaluation, each compared with those of the other workers; their end, too."""
    number = 0
    for number, batch in enumerate(batches, 1):
        agree_on_batch(training, where, columns_of(batch), number - 1, is_last=False)
        yield batch
    agree_on_batch(training, where, None, number, is_last=True)
