"""What a server writes to its log during an interval, and how an update is repeated from it.

An update is computed from a copy of the gradients' sum: so the log has exactly what was applied, even if a worker
writes to the gradient buffers meanwhile. Start reading at `UpdateReplay.take`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from manyhands.errors import EnvironmentProblem, SpecError
from manyhands.parallel.gradients.slice_tree import finish
from manyhands.parallel.model.flat_layout import in_memory_order
from manyhands.parameter_server.log.log_format import Begin, Terms, UpdateRecord
from manyhands.parameter_server.log.write_ahead_log import LoggedUpdate, WriteAheadLog
from manyhands.parameter_server.memory.versioned_memory import VersionedMemory
from manyhands.parameter_server.protocol.chunk_placement import Chunk
from manyhands.parameter_server.protocol.leases import LeaseTableState, ServerProgress
from manyhands.parameter_server.protocol.messages import Open, RowGradients
from manyhands.parameter_server.protocol.shard import Shard, SliceGradient
from manyhands.parameter_server.server.shard_optimizer import Gradient
from manyhands.parameter_server.tables.server_tables import to_bytes

__all__ = ["UpdateReplay", "first_table_state", "statistics_from"]


class UpdateReplay:
    def __init__(
        self,
        log: WriteAheadLog,
        number: int,
        opened: Open,
        served: VersionedMemory,
        chunks: Sequence[Chunk],
        *,
        clips: bool,
    ) -> None:
        """`chunks` are the server's. One that clips needs the norm of the whole gradient, and logs all of it."""
        self._log, self._opened, self._served = log, opened, served
        whole = [Chunk(place, 0, param.numel()) for place, param in enumerate(served.params)]
        self._chunks = whole if clips else list(chunks)
        # Servers that do not clip write to their chunks of one common buffer.
        self._buffer_number = -2 - number if clips else -1
        served.row(self._buffer_number)  # if there is no room for it, nothing has begun yet
        self._terms = Terms(
            servers=opened.servers,
            part=hashlib.blake2s(f"{opened.layout} {self._chunks}".encode(), digest_size=8).hexdigest(),
            batch_size=opened.interval.batch_size,
            slices=opened.interval.slices,
        )

    # ---- logging updates ----

    def take(self, gradient: Gradient) -> Gradient:
        """The same gradient, summed into a buffer that only this server writes to."""
        rows = [self._served.row(number).views for number in gradient.rows]
        for place, start, stop in self._chunks_of(gradient.present):
            parts = {(0, v): in_memory_order(row[place])[start:stop] for v, row in enumerate(rows)}
            self._buffer(place)[start:stop] = finish(parts, len(rows), torch.add)
        return gradient._replace(rows=(self._buffer_number,))

    def write(
        self,
        shard: Shard,
        due: Sequence[SliceGradient],
        present: Collection[int],
        groups: list[dict[str, Any]],
        statistics: Sequence[Tensor],
        pieces: list[RowGradients],
    ) -> None:
        """Log what was taken, with everything else the update depends on; it is on disk once the log has settled."""
        record = UpdateRecord(
            contributions=list(due), groups=groups, statistics=[to_bytes(one) for one in statistics], pieces=pieces
        )
        payload = [_bytes(self._buffer(place)[start:stop]) for place, start, stop in self._chunks_of(present)]
        self._log.write(due[0].step, record, payload, lambda: self.begin(shard))

    def begin(self, shard: Shard) -> Begin:
        """The first record of a segment that continues from here."""
        return Begin(terms=self._terms, low=shard.low, seen=sorted(shard.seen))

    @property
    def wants_checkpoint(self) -> bool:
        return self._log.wants_checkpoint

    # ---- repeating updates ----

    def past(self, shard: Shard) -> Iterator[LoggedUpdate]:
        """Updates of this interval that are in the log and not applied; `put` prepares for each.

        In sync and ssp those that all servers have: the rest is computed again, with embedding rows as of before them.
        """
        opened, last = self._opened, self._opened.interval.last
        if opened.fresh:  # workers still have what is logged and not applied; others may not have removed old logs
            return
        self._log.before_reading()
        if opened.ahead is not None:
            reaches = [self._log.reader_of(server).reach(opened.version) for server in range(opened.servers)]
            # Later, other servers make updates while this one reads.
            if shard.num_applied == opened.version and not self._log.may_end_early:
                check_together(reaches, opened.ahead)
            last = min(last, *reaches)
        for one in self._log.reader.past(opened.version, shard.is_applied):
            if one.step <= last:
                self._check(one.begin.terms)
                yield one

    def put(self, past: LoggedUpdate, gradient: Gradient) -> Gradient:
        """The gradient as it was logged."""
        payload, at = past.payload, 0
        for place, start, stop in self._chunks_of(gradient.present):
            target = _bytes(self._buffer(place)[start:stop])
            target[:] = payload[at : at + len(target)]
            at += len(target)
        return gradient._replace(rows=(self._buffer_number,))

    def _check(self, before: Terms) -> None:
        for name in ("servers", "batch_size", "slices"):
            was, now = getattr(before, name), getattr(self._terms, name)
            if was != now:
                raise SpecError(
                    f"The log has updates that were made with {name}={was}, but now {name}={now}.",
                    fix=[
                        f"--servers {was}" if name == "servers" else f"{name}={was}",
                        'durability="upstream", which continues from the checkpoint without them',
                    ],
                )
        if before.part != self._terms.part:
            raise SpecError(
                "The log has updates of other parameters than this server has now.",
                fix=["the model, the optimizer and place= as they were when the run ended"],
            )

    def _chunks_of(self, present: Collection[int]) -> list[Chunk]:
        there = set(present)
        return [chunk for chunk in self._chunks if chunk.place in there]

    def _buffer(self, place: int) -> Tensor:
        return in_memory_order(self._served.row(self._buffer_number).views[place])


def first_table_state(opened: Open, progress: Sequence[ServerProgress]) -> LeaseTableState:
    """For an interval of which servers have already made updates before a restart of the run, by their logs."""
    before = LeaseTableState.before(opened.interval.first)
    return replace(before, reach=max(before.reach, *(max({one.low} | one.seen) for one in progress)))


def check_together(reaches: Sequence[int], ahead: int) -> None:
    """Logs end at about the same step, as servers were never further ahead of each other than the mode allows."""
    if max(reaches) > min(reaches) + 1 + ahead:
        raise EnvironmentProblem(
            f"The log of server {reaches.index(min(reaches))} has updates to step {min(reaches)}, others to step "
            f"{max(reaches)}: a part of it is missing.",
            fix=["all of updates/ in the run directory, as it was", "no updates/, to continue from the checkpoint"],
        )


def statistics_from(encoded: Sequence[bytes]) -> list[Tensor]:
    """The batch statistics of an `UpdateRecord`."""
    return [torch.frombuffer(bytearray(one), dtype=torch.float64) for one in encoded]


def _bytes(tensor: Tensor) -> memoryview:
    """Its memory, without a copy."""
    return tensor.view(torch.uint8).numpy().data
