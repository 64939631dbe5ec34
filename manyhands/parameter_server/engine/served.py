"""Weights on parameter servers: workers lease slices, push their gradients and read the weights that servers make.

`sync` and `ssp` sum a step's slices along the same tree as every other strategy, and update once; `async` applies each
step as it comes. Steps are not taken in turns here: between `open` and the next meeting a worker asks for work,
computes it and pushes it, for as long as there is any. Whoever dies, worker or server, is no concern of the others'.
What is leased to whom is decided by `parameter_server/protocol/leases.py`, what is applied by
`parameter_server/server/server.py`, what a course begins with by `parameter_server/engine/leased_engine.py`. Start
reading at `Served.compute`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec
from torch import Tensor

from manyhands.comm.transport import MAX_MESSAGE_BYTES
from manyhands.embedding.row_layer import Contribution, merge
from manyhands.errors import PeerTimeout, TrainingFailed
from manyhands.parameter_server.engine.leased_engine import InCourses
from manyhands.parameter_server.protocol.leases import Held
from manyhands.parameter_server.protocol.messages import Ask, Filled, Reply
from manyhands.parameter_server.worker.server_connection import Pushed
from manyhands.strategies.base import PieceLike, StepLike
from manyhands.strategies.choices import ParameterServer

__all__ = ["Served", "has_backups"]

# A port drops what is longer than a message may be, and the push would be said again for ever.
MOST_CHANGES_BYTES = MAX_MESSAGE_BYTES // 2
# So long a worker that has left its loop waits for servers to hear of it; one of them may be about to be replaced.
LEAVE_S = 10.0


_Result = tuple[float, float, Tensor, list[Contribution]]
"""Of a slice: its loss and weight, batch statistics, and gradients of rows of embeddings."""


class Served(InCourses):
    """One worker among several whose weights are on servers.

    Promises: every slice of every step counts exactly once, whoever dies. With `mode="sync"` the result is that of
    `Replicated`, to the bit; with "ssp" a gradient lacks at most the last `staleness` steps; with "async" any number.
    Costs: a gradient is written once and read once by servers. In async a worker that servers overtake, so that they
    write where it reads, computes once more with a copy of the weights; after that, it makes copies until they do not.
    """

    def ask(self, wish: Callable[[], int]) -> Reply:
        """Work, news, or that all meet now."""
        self.phases.mark("update")
        reply = self._link.ask(lambda ticket: self._question(ticket, wish()), self._held.values)
        if self.is_async:
            self._await_applied()
        else:
            self._held = {key: one for key, one in self._held.items() if one.filled.held.step > reply.version}
            self._link.forget(reply.version)
        self.phases.mark("reduce")
        self._told = max([self._told, *(done.update for done in reply.done)])
        self._book, self.others = reply.book, reply.values
        if reply.meet is not None:
            self._met = reply.meet
            self._look(reply.meet)
        return reply

    def leave(self) -> None:
        """Take no further part in this course: what is leased to this worker goes to others.

        Servers that do not hear it give others what it had when this process ends.
        """
        self._held = {}
        with contextlib.suppress(PeerTimeout):
            self._link.ask(
                lambda ticket: msgspec.structs.replace(self._question(ticket, 0), leaves=True), patience_s=LEAVE_S
            )

    def take_times(self) -> dict[str, float]:
        """Seconds by phase since this was last asked for."""
        self.phases.mark("update")
        seconds = self.phases.seconds
        self.phases.begin([self._link.waiting])
        return seconds

    def _question(self, ticket: int, wish: int) -> Ask:
        return Ask(
            number=self._course_now.number,
            worker=self._worker,
            book=self._book,
            ticket=ticket,
            met=self._met,
            told=self._told,
            wish=wish,
            holding=[one.filled.held for one in self._held.values()],
            values=self.values,
            soon=self.soon,
        )

    def compute(self, step: StepLike, work: Held, version: int) -> None:
        """Compute what was leased, and push it; unless somebody else has done so, and the weights are gone."""
        assert self._loss_fn is not None
        slices = self.computing(step, work, version, may_repeat=True)
        for piece in slices:
            if piece is not None:
                slices.send(self.loss_of(step, piece))

    def computing(
        self, step: StepLike, work: Held, version: int, *, may_repeat: bool = False
    ) -> Generator[PieceLike | None, Any, None]:
        """The same where somebody else has the loss. For each slice: a pause; the slice; its loss is sent; a pause.

        Randomness and precision are the slice's from when it comes until its loss is sent. The push follows the last
        pause; in any of them whoever computes may do as it likes. With `may_repeat` all slices may come once more.
        """
        served, _ = self._memory_now()
        based_on = self._pull(in_place=may_repeat) if self.is_async else self._look(version)
        row = self._reach.row(work)
        if based_on is None:
            return
        served.begin_filling(row, work.filling)
        pieces = [step.slice(v) for v in (range(step.num_slices) if self._course_now.course.whole else [work.place])]
        results, absent = yield from self._fill(step, pieces, work, based_on)
        if self.is_async and not self._reach.stayed(based_on) and self._reads_in_place:
            based_on = self._pull(in_place=False)
            results, absent = yield from self._fill(step, pieces, work, based_on)
        served.write_statistics(row, [statistics for _, _, statistics, _ in results])
        filled = Filled(
            number=self._course_now.number,
            worker=self._worker,
            held=work,
            based_on=based_on if self._rows.oldest is None else min(based_on, self._rows.oldest),
            total=sum(total for total, _, _, _ in results),
            weight=sum(weight for _, weight, _, _ in results),
            absent=absent,
            changes=self._changes() if work.place == 0 else b"",
        )
        rows = merge(one for _, _, _, contributions in results for one in contributions)
        self.phases.mark("backward")
        yield None
        handed = self._rows.hand_over(row, rows)
        sent = self._rows.messages(work.filling, rows) if rows and not handed else ()
        tables = [one.table for one in rows]
        self._push(Pushed(msgspec.structs.replace(filled, handed=handed, tables=tables), sent))
        self.phases.mark("reduce")

    def _fill(
        self, step: StepLike, pieces: Sequence[PieceLike], work: Held, based_on: int
    ) -> Generator[PieceLike | None, Any, tuple[list[_Result], list[int]]]:
        """Compute slices into a row: what each has told, and which parameters have no gradient."""
        served, filler = self._memory_now()
        filler.begin(served.row(self._reach.row(work)).views, len(pieces), straight=self.is_async)
        self._buffers.begin(len(pieces), 2)
        results: list[_Result] = []
        newest, is_sync = self._newest(work, based_on), self.ahead == 0
        lacks = 0 if is_sync else self._choice.staleness
        # Of a step that is computed once more because somebody died in telling servers of it, some have it already.
        with self._rows.lacking_at_most(lacks, newest, at_most=newest if is_sync else None):
            for piece in pieces:
                if results:
                    yield None
                yield None
                self.phases.mark("load")
                results.append((yield from self._slice(piece, step)))
        return results, filler.finish()

    def _newest(self, work: Held, based_on: int) -> int:
        """All updates to this one are what a slice would see if it waited for them."""
        return based_on if self.is_async else work.step - 1

    def _changes(self) -> bytes:
        """What the first slice made of buffers other than batch statistics; it travels in a message."""
        changes = self._buffers.first_changes()
        if len(changes) > MOST_CHANGES_BYTES:
            raise TrainingFailed(
                f"A forward pass changed {len(changes) / 1e6:.1f} MB of buffers, but servers are told of "
                f"{MOST_CHANGES_BYTES / 1e6:.1f} MB at most with each slice.",
                fix=["keep large state out of buffers that forward changes", 'strategy="mirrored"'],
            )
        return changes

    def _push(self, push: Pushed) -> None:
        self._reach.send(push.filled.held)
        self._link.tell(push)
        self._held[push.filled.held.filling] = push
        if self._course_now.quorum is not None:  # whoever had more work would be waited for, and would wait
            self._await_applied()

    def _await_applied(self) -> None:
        """Have all that was pushed in what is computed with next."""
        for push in self._held.values():
            self._link.await_applied(push)
        self._held = {}

    def _slice(self, piece: PieceLike, step: StepLike) -> Generator[PieceLike, Any, _Result]:
        assert self._filler is not None
        place = piece.index
        self._buffers.enter(place)
        with (
            piece.randomness(),
            self._precision.autocast(),
            self._foreign.in_slice(),
            self._filler.in_forward(),
        ):
            result = yield piece
        self.phases.mark("forward")
        total, weight, scaled = self.weigh(piece, result, step.rows)
        if not math.isfinite(total):
            self.raise_non_finite(f"The loss of slice {place} of step {step.number} is {total}")
        statistics = self._buffers.leave(place)
        if self.ahead != 0:  # others may be applied before it
            statistics = self._buffers.apart(statistics)
        try:
            self._filler.backward(scaled, place)
        finally:
            self._buffers.put_back()
        self.phases.mark("backward")
        return total, weight, statistics, self._rows.sparse.take()


def has_backups(strategy: object) -> bool:
    """Whether hosts keep logs of other hosts' servers."""
    return isinstance(strategy, ParameterServer) and strategy.durability == "replica"
