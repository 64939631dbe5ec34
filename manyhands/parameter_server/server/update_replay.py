"""What a course of one server writes to its log, and how an update is made again from it.

An update is made from a copy of the gradients' sum: what is in the log is then what was applied, whoever writes to the
rows meanwhile. Start reading at `Keeper.take`.
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
from manyhands.parameter_server.log.log_format import Begin, Terms, Update
from manyhands.parameter_server.log.write_ahead_log import Past, ServedLog
from manyhands.parameter_server.memory.versioned_memory import ServedMemory
from manyhands.parameter_server.protocol.chunk_placement import Chunk
from manyhands.parameter_server.protocol.leases import Minutes, Standing
from manyhands.parameter_server.protocol.messages import Open, RowGradients
from manyhands.parameter_server.protocol.shard import Contribution, Shard
from manyhands.parameter_server.server.shard_optimizer import Gradient
from manyhands.parameter_server.tables.server_tables import to_bytes

__all__ = ["Keeper", "first_minutes", "statistics_from"]


class Keeper:
    def __init__(
        self, log: ServedLog, number: int, opened: Open, served: ServedMemory, chunks: Sequence[Chunk], *, clips: bool
    ) -> None:
        """`chunks` are the server's. One that clips needs the norm of the whole gradient, and keeps all of it."""
        self._log, self._opened, self._served = log, opened, served
        whole = [Chunk(place, 0, param.numel()) for place, param in enumerate(served.params)]
        self._chunks = whole if clips else list(chunks)
        # Servers that do not clip write to their own chunks of one row.
        self._row = -2 - number if clips else -1
        served.row(self._row)  # where there is no room for it, nothing has begun yet
        self._terms = Terms(
            servers=opened.servers,
            part=hashlib.blake2s(f"{opened.layout} {self._chunks}".encode(), digest_size=8).hexdigest(),
            batch_size=opened.course.batch_size,
            slices=opened.course.slices,
        )

    # ---- as updates are made ----

    def take(self, gradient: Gradient) -> Gradient:
        """The same from a row of this server's own, which nobody else writes to: the sum of those that it names."""
        rows = [self._served.row(number).views for number in gradient.rows]
        for place, start, stop in self._of(gradient.present):
            parts = {(0, v): in_memory_order(row[place])[start:stop] for v, row in enumerate(rows)}
            self._own(place)[start:stop] = finish(parts, len(rows), torch.add)
        return gradient._replace(rows=(self._row,))

    def write(
        self,
        shard: Shard,
        due: Sequence[Contribution],
        present: Collection[int],
        groups: list[dict[str, Any]],
        statistics: Sequence[Tensor],
        pieces: list[RowGradients],
    ) -> None:
        """What was taken goes to the log, with what else the update is made of; on disk it is once that is settled."""
        told = Update(
            contributions=list(due), groups=groups, statistics=[to_bytes(one) for one in statistics], pieces=pieces
        )
        payload = [_bytes(self._own(place)[start:stop]) for place, start, stop in self._of(present)]
        self._log.write(due[0].step, told, payload, lambda: self.begin(shard))

    def begin(self, shard: Shard) -> Begin:
        """What a segment begins with that continues from here."""
        return Begin(terms=self._terms, low=shard.low, seen=sorted(shard.seen))

    @property
    def wants_checkpoint(self) -> bool:
        return self._log.wants_checkpoint

    # ---- and again ----

    def past(self, shard: Shard) -> Iterator[Past]:
        """Updates of this course that were made before, and are not applied; `put` prepares for each.

        In sync and ssp those that all servers have: the others are computed again, with rows as they were before them.
        """
        opened, last = self._opened, self._opened.course.last
        if opened.fresh:  # workers have what is in the log, if anything is; other servers may not have removed theirs
            return
        self._log.before_reading()
        if opened.ahead is not None:
            reaches = [self._log.reader_of(server).reach(opened.version) for server in range(opened.servers)]
            # Later, other servers go on while this one reads.
            if shard.num_applied == opened.version and not self._log.may_end_early:
                check_together(reaches, opened.ahead)
            last = min(last, *reaches)
        for one in self._log.reader.past(opened.version, shard.is_applied):
            if one.step <= last:
                self._check(one.begin.terms)
                yield one

    def put(self, past: Past, gradient: Gradient) -> Gradient:
        """The gradient as it was taken then."""
        payload, at = past.payload, 0
        for place, start, stop in self._of(gradient.present):
            target = _bytes(self._own(place)[start:stop])
            target[:] = payload[at : at + len(target)]
            at += len(target)
        return gradient._replace(rows=(self._row,))

    def _check(self, before: Terms) -> None:
        for name in ("servers", "batch_size", "slices"):
            was, now = getattr(before, name), getattr(self._terms, name)
            if was != now:
                raise SpecError(
                    f"The log has updates that were made with {name}={was}, but now {name}={now}.",
                    fix=[
                        f"--servers {was}" if name == "servers" else f"{name}={was}",
                        'durability="upstream", which goes on from the checkpoint without them',
                    ],
                )
        if before.part != self._terms.part:
            raise SpecError(
                "The log has updates of other parameters than this server has now.",
                fix=["the model, the optimizer and place= as they were when the run ended"],
            )

    def _of(self, present: Collection[int]) -> list[Chunk]:
        there = set(present)
        return [chunk for chunk in self._chunks if chunk.place in there]

    def _own(self, place: int) -> Tensor:
        return in_memory_order(self._served.row(self._row).views[place])


def first_minutes(opened: Open, standings: Sequence[Standing]) -> Minutes:
    """Of a course that servers may have made some updates of in an earlier life of the run, by their logs."""
    before = Minutes.before(opened.course.first)
    return replace(before, reach=max(before.reach, *(max({one.low} | one.seen) for one in standings)))


def check_together(reaches: Sequence[int], ahead: int) -> None:
    """Logs of servers that were never further apart than they may be reach about as far."""
    if max(reaches) > min(reaches) + 1 + ahead:
        raise EnvironmentProblem(
            f"The log of server {reaches.index(min(reaches))} has updates to step {min(reaches)}, others to step "
            f"{max(reaches)}: a part of it is gone.",
            fix=["the whole of updates/ in the run directory, as it was", "no updates/, to go on from the checkpoint"],
        )


def statistics_from(told: Sequence[bytes]) -> list[Tensor]:
    """As they are in an `Update`."""
    return [torch.frombuffer(bytearray(one), dtype=torch.float64) for one in told]


def _bytes(tensor: Tensor) -> memoryview:
    """Its memory, which is not copied."""
    return tensor.view(torch.uint8).numpy().data
