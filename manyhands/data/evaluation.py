"""Every example exactly once, in order, divided among the workers: the data of evaluation and prediction.

Where the data is cut does not depend on the number of workers, so a slice has the same result on every worker;
`FetchedSlice.index` puts the results back in order. Start reading at `eval_pieces`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import torch

from manyhands.data.batches import FetchedSlice, accelerator, endless, floats_as, to_device
from manyhands.data.feeds import STEPS_AHEAD, start_fetcher
from manyhands.data.fetchers import Fetcher, SliceRequest, fetch_now
from manyhands.data.loader_processes import Loader, ProcessFetcher
from manyhands.data.randomness import randomness
from manyhands.data.row_exchange import RowExchange
from manyhands.data.sample_order import slice_key, slices_of
from manyhands.data.sources.as_source import Source
from manyhands.data.sources.per_slice_source import PerSliceSource
from manyhands.data.sources.row_source import RowSource
from manyhands.data.sources.stream_source import StreamSource
from manyhands.errors import DataFetchFailed, ManyhandsError

__all__ = ["EvalSlice", "eval_pieces", "eval_slices"]


class EvalSlice(msgspec.Struct, frozen=True):
    """Rows [start, stop) of the data, as slice `index` of all."""

    index: int
    start: int
    stop: int


def eval_slices(num_rows: int, batch_size: int, world_size: int, rank: int) -> list[EvalSlice]:
    """This worker's slices of at most `batch_size` rows: a contiguous range."""
    count = -(-num_rows // batch_size)
    mine = slices_of(rank, world_size, count)
    return [EvalSlice(i, i * batch_size, min(num_rows, (i + 1) * batch_size)) for i in mine]


def eval_pieces(
    source: Source,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    seed: int = 0,
    device: torch.device | str | None = None,
    floats: torch.dtype | None = None,
    exchange: RowExchange | None = None,
) -> Iterator[FetchedSlice]:
    """This worker's slices. Randomness is keyed by (seed, slice), so a repeated evaluation gives the same result.

    Close the iterator (or run it to its end) to end its thread or loader processes.
    """
    if source.endless:
        raise endless()
    target, batch_size = accelerator(device), source.own_batch_size or batch_size
    if isinstance(source, StreamSource):
        pieces = _of_stream(source, batch_size, seed, lambda index: index % world_size == rank)
    elif isinstance(source, PerSliceSource):
        pieces = _of_slices(source, batch_size, seed)
    elif source.shared:
        assert exchange is not None, "files that some workers lack need an exchange"
        pieces = _of_shared_files(source, batch_size, seed, rank, world_size, exchange)
    else:
        pieces = _of_rows(source, seed, eval_slices(source.num_rows, batch_size, world_size, rank))
    for piece in pieces:
        if target is not None:
            piece.batch = to_device(piece.batch, target)
        if floats is not None:
            piece.batch = floats_as(piece.batch, floats)
        yield piece


def _piece(each: EvalSlice, batch: Any, seed: int) -> FetchedSlice:
    return FetchedSlice(each.index, batch, each.stop - each.start, slice_key(seed, 0, each.index, "compute"), 0)


def _job(each: EvalSlice, seed: int) -> SliceRequest:
    return SliceRequest(0, each.index, np.arange(each.start, each.stop), slice_key(seed, 0, each.index, "evaluate"))


def _of_rows(source: RowSource, seed: int, mine: list[EvalSlice]) -> Iterator[FetchedSlice]:
    if not mine:
        return
    jobs = (_job(piece, seed) for piece in mine)
    if source.num_workers:
        # Starting a process takes seconds, and a run evaluates often: the processes live as long as the source.
        loader = source.kept_loader or Loader(source, STEPS_AHEAD)
        source.kept_loader = None  # in use
        fetcher: Fetcher = ProcessFetcher(loader, jobs)
    else:
        loader, fetcher = None, start_fetcher(source, jobs, STEPS_AHEAD)
    try:
        for each in mine:
            yield _piece(each, fetcher.get(0, each.index), seed)
    finally:
        fetcher.close()
        source.kept_loader = loader


def _of_shared_files(
    source: RowSource, batch_size: int, seed: int, rank: int, world_size: int, exchange: RowExchange
) -> Iterator[FetchedSlice]:
    """In rounds of one slice per worker; a worker without a slice left still calls the exchange."""
    shares = [eval_slices(source.num_rows, batch_size, world_size, other) for other in range(world_size)]
    for round_number in range(max(len(share) for share in shares)):
        in_round = [share[round_number : round_number + 1] for share in shares]
        wanted = [[np.arange(piece.start, piece.stop) for piece in pieces] for pieces in in_round]
        batches = source.take_together(wanted, exchange, f"data/evaluation {round_number}")
        for each, batch in zip(in_round[rank], batches, strict=True):
            yield _piece(each, fetch_now(functools.partial(_collated, batch), _job(each, seed)), seed)


def _collated(batch: Callable[[], Any], _job: SliceRequest) -> Any:
    return batch()


def _of_stream(source: StreamSource, batch_size: int, seed: int, mine: Callable[[int], bool]) -> Iterator[FetchedSlice]:
    """Every worker reads the whole stream; slices are assigned round-robin, as their number is not known."""
    stream, index, read = None, 0, 0
    while True:
        try:
            with randomness(slice_key(seed, 0, index, "evaluate")):
                stream = source.open(0) if stream is None else stream
                rows = list(islice(stream, source.items_of(batch_size)))
                if rows and not index:
                    source.check_first(rows[0])
        except ManyhandsError:
            raise
        except Exception as error:
            what = f"Reading the stream for evaluation failed after row {read}. {type(error).__name__}: {error}"
            raise DataFetchFailed(what) from error
        if not rows:
            return
        count = source.count(rows)
        if mine(index):
            each = EvalSlice(index, read, read + count)
            yield _piece(each, fetch_now(functools.partial(source.collate_job, rows), _job(each, seed)), seed)
        index, read = index + 1, read + count


def _of_slices(source: PerSliceSource, batch_size: int, seed: int) -> Iterator[FetchedSlice]:
    """Each worker reads the data of the slices assigned to it; piece i of slice v has the number i * V + v."""
    for v, part in source.parts.items():
        slice_seed = slice_key(seed, 0, v, "evaluate")
        if isinstance(part, StreamSource):
            pieces = _of_stream(part, batch_size, slice_seed, lambda _index: True)
        else:
            pieces = _of_rows(part, slice_seed, eval_slices(part.num_rows, batch_size, 1, 0))
        for piece in pieces:
            piece.index = piece.index * source.num_slices + v
            yield piece
