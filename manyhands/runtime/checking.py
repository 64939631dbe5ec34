"""What is done about copies that differ: the odd one is healed, or the run stops where all still agreed.

Workers tell each other hashes of their copies in the exchange of a step (`Replicated.hashes`), so that all see a
difference at the same place, before the step has changed anything. Who is odd is decided by `parallel/divergence.py`.
Start reading at `Checking.settle`.
"""

from __future__ import annotations

import os
import socket
import time

import msgspec

from manyhands.errors import Diverged, ManyhandsError, PeerLost, TrainingFailed
from manyhands.events import CopiesDiverged, WrongGradientFound
from manyhands.parallel.divergence import CopiesDiffer, Hashes, Verdict, WrongGradient
from manyhands.runtime.given_state import take_shared
from manyhands.runtime.regroup import Regrouping
from manyhands.runtime.saving import Saver
from manyhands.runtime.training import Training

__all__ = ["Checking"]

_ABOUT_GRADIENTS = [
    "a test of that machine's processor and memory",
    "a loss that is a function of the model and the batch alone, if it is not: audit=True needs that",
]


class Checking:
    def __init__(self, training: Training, saver: Saver, regrouping: Regrouping) -> None:
        self._training, self._saver, self._regrouping = training, saver, regrouping
        self._worker = training.worker

    def settle(self, differ: CopiesDiffer) -> None:
        """Give those that are odd a right one's state; `Diverged` where nobody can tell who is. By all workers."""
        verdict, progress = differ.verdict, self._training.progress
        agreed, is_chief_odd = progress.agreed, 0 in verdict.odd
        newest = self._set_aside(agreed) if verdict.source is None or is_chief_odd else ""
        names = self._names()
        odd = [names[rank] for rank in verdict.odd]
        self._worker.emit(
            CopiesDiverged(
                time_s=time.time(),
                step=progress.step,
                workers=odd,
                ranks=list(verdict.odd),
                healed=verdict.source is not None,
                agreed_step=agreed,
            )
        )
        if verdict.source is None:
            raise _undecided(odd, progress.step, agreed, newest)
        self._worker.warn(
            f"After step {progress.step} the weights or states of {' and '.join(odd)} were not those of the others, "
            f"as they were after step {agreed}. They have those of {names[verdict.source]} now. Does it happen again, "
            "test that machine's memory."
        )
        self._heal(verdict)

    def at_end(self) -> None:
        """The last steps, which no later one looks at. By all workers."""
        progress = self._training.progress
        if not self._training.engine.compares_copies or self._worker.in_trial or progress.agreed == progress.step:
            return
        engine = self._training.in_step

        def work() -> None:
            told = self._worker.axis.all_gather_bytes("copies", msgspec.msgpack.encode(engine.hashes()))
            try:
                engine.compare([Hashes(*msgspec.msgpack.decode(data)) for data in told])
            except CopiesDiffer as differ:
                self.settle(differ)

        self._regrouping.agreed(work)
        self._training.progress.agreed = self._training.progress.step

    def expose(self, wrong: WrongGradient) -> ManyhandsError:
        """Tell whose gradients are wrong, and return what this worker raises. By all workers.

        In an elastic run the one that is wrong ends, and is lost to the others, who do its part of the step; the
        update has not begun. Otherwise, and where nobody can tell, the run stops.
        """
        asked, names, elastic = wrong.asked, self._names(), self._worker.is_elastic
        ranks = [asked.owner, asked.auditor] if wrong.rank is None else [wrong.rank]
        who = [names[rank] for rank in ranks]
        replaced = elastic and wrong.rank is not None
        self._worker.emit(
            WrongGradientFound(
                time_s=time.time(), step=asked.step, slice=asked.place, workers=who, ranks=ranks, replaced=replaced
            )
        )
        what = f"Slice {asked.place} of step {asked.step} has other gradients on {names[asked.owner]} than on "
        what += f"{names[asked.auditor]}"
        if wrong.rank is None:
            return Diverged(f"{what}, and nobody can tell who is right.", fix=_ABOUT_GRADIENTS)
        judges = f"{names[asked.third]} finds" if asked.third is not None else "Computed once more, it seems"
        what += f". {judges} that {who[0]} is wrong."
        if not elastic:
            return Diverged(what, fix=[f"a run without {who[0]}", *_ABOUT_GRADIENTS])
        self._worker.warn(f"{what} The others go on without it.")
        return TrainingFailed(what, fix=_ABOUT_GRADIENTS) if self._worker.rank == wrong.rank else PeerLost(what)

    def distrust_last(self) -> None:
        """The weights after the last step may not be what that step made of them. On this worker alone."""
        if self._worker.is_chief:
            self._saver.set_aside(self._training.progress.step - 1)

    def _heal(self, verdict: Verdict) -> None:
        assert verdict.source is not None
        one_host = self._worker.group.num_hosts == 1
        take = take_shared(self._worker.axis, self._training, verdict.source, from_shared_memory=one_host)
        if self._worker.rank in verdict.odd:
            take()

    def _set_aside(self, agreed: int) -> str:
        """Checkpoints since then hold a copy that may be wrong. The newest that is left, as the chief sees it."""
        newest = self._saver.set_aside(agreed) if self._worker.is_chief else ""
        self._worker.wait_for_chief(f"checkpoints set aside after step {self._training.progress.step}")
        return self._worker.axis.all_gather_bytes("newest checkpoint", newest.encode())[0].decode()

    def _names(self) -> list[str]:
        mine = f"rank {self._worker.rank} on {socket.gethostname()} (pid {os.getpid()})"
        return [name.decode() for name in self._worker.axis.all_gather_bytes("names", mine.encode())]


def _undecided(workers: list[str], step: int, agreed: int, newest: str) -> Diverged:
    copies = "one of these two" if len(workers) == 2 else f"some of these {len(workers)}"
    since = (
        f"checkpoints of later steps were set aside, and {newest} is the newest now"
        if newest
        else "no checkpoint is left"
    )
    return Diverged(
        f"After step {step} the workers' weights or states are not the same, and nobody can tell whose are right: "
        f"{copies} changed since step {agreed}, when all agreed: {', '.join(workers)}; {since}.",
        fix=[
            "the same command once more, which resumes there",
            "three or more workers without shared memory, or hosts: then the odd one is known, and healed",
            "a test of these machines' memory",
        ],
    )
