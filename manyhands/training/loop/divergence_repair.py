"""What is done about copies that differ: the odd one is healed, or the run stops where all still agreed.

Workers tell each other hashes of their copies in the exchange of a step (`Replicated.hashes`), so that all see a
difference at the same place, before the step has changed anything. Who is odd is decided by
`parallel/replicas/divergence.py`. Start reading at `Checking.settle`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence

import msgspec

from manyhands.errors import Diverged, ManyhandsError, PeerLost, TrainingFailed
from manyhands.events import CopiesDiverged, WrongGradientFound
from manyhands.parallel.model.tensor_shard import Share
from manyhands.parallel.replicas.divergence import CopiesDiffer, Hashes, Verdict, WrongGradient, odd_parts
from manyhands.training.elastic.regroup import Regrouping
from manyhands.training.elastic.state_transfer import take_shared
from manyhands.training.state.checkpointing import Saver
from manyhands.training.state.training_state import Training

__all__ = ["Checking"]

_ABOUT_GRADIENTS = [
    "a test of that machine's processor and memory",
    "a loss that is a function of the model and the batch alone, if it is not: audit=True needs that",
]


class Checking:
    def __init__(self, training: Training, saver: Saver, regrouping: Regrouping) -> None:
        self._training, self._saver, self._regrouping = training, saver, regrouping
        self._worker = training.worker
        self._has_drifted = False

    def settle(self, differ: CopiesDiffer) -> None:
        """Give those that are odd a right one's state; `Diverged` where nobody can tell who is. By all workers."""
        verdict, progress = differ.verdict, self._training.progress
        agreed, is_chief_odd = progress.agreed, 0 in verdict.odd
        newest = self._set_aside(agreed) if verdict.source is None or is_chief_odd else ""
        names = self._names()
        odd = [names[rank] for rank in verdict.odd]
        self._tell_diverged(odd, verdict.odd, healed=verdict.source is not None)
        if verdict.source is None:
            raise _undecided(odd, progress.step, agreed, newest)
        self._worker.warn(
            f"After step {progress.step} the weights or states of {' and '.join(odd)} were not those of the others, "
            f"as they were after step {agreed}. They have those of {names[verdict.source]} now. Does it happen again, "
            "test that machine's memory."
        )
        self._heal(verdict)

    def after_step(self) -> None:
        """Every so many steps, of a divided model: what replicas, or workers of one, have alike. By all workers."""
        every = self._worker.resolved.spec.train.check_every
        if self._training.whole is not None and every and self._training.progress.step % every == 0:
            self._regrouping.agreed(self._compare_parts)

    def _compare_parts(self) -> None:
        """`Diverged` where replicas have unlike parts. Workers of one replica may compute unlike; then that is told."""
        progress, formation, whole = self._training.progress, self._worker.formation, self._training.whole
        assert whole is not None and formation is not None
        told = whole.hashes(self._worker.network)
        replicas = [
            {(name, share, place._replace(data=0)): number for (name, share), number in one.items()}
            for place, one in zip(formation.places, told, strict=True)
        ]
        unlike = odd_parts(replicas)
        if not unlike:
            progress.agreed = progress.step
            self._tell_drift(odd_parts(told))
            return
        (name, _, _), ranks = next(iter(unlike.items()))
        newest, names = self._set_aside(progress.agreed), self._names()
        odd = [names[rank] for rank in ranks]
        self._tell_diverged(odd, ranks, healed=False)
        raise _undecided(odd, progress.step, progress.agreed, newest, name)

    def _tell_drift(self, unlike: Mapping[tuple[str, Share], Sequence[int]]) -> None:
        if unlike and not self._has_drifted:
            self._has_drifted = True
            (name, _), ranks = next(iter(unlike.items()))
            self._worker.warn(
                f"After step {self._training.progress.step} {name} is not the same on ranks "
                f"{' and '.join(map(str, ranks))}, which are parts of one replica: they compute unlike, as other "
                "processors or numbers of threads do, or a part of the model draws random numbers of its own."
            )

    def at_end(self) -> None:
        """The last steps, which no later one looks at. By all workers."""
        progress, whole = self._training.progress, self._training.whole
        every = self._worker.resolved.spec.train.check_every
        if whole is not None and every and not self._worker.in_trial and progress.agreed != progress.step:
            self._regrouping.agreed(self._compare_parts)
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

    def _tell_diverged(self, workers: list[str], ranks: Sequence[int], *, healed: bool) -> None:
        step, agreed = self._training.progress.step, self._training.progress.agreed
        self._worker.emit(
            CopiesDiverged(
                time_s=time.time(), step=step, workers=workers, ranks=list(ranks), healed=healed, agreed_step=agreed
            )
        )

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


def _undecided(workers: list[str], step: int, agreed: int, newest: str, part: str = "") -> Diverged:
    """Of whole copies, or of those that there are of a part of a divided model."""
    what = f"copies of {part}" if part else "the workers' weights or states"
    copies = "one of these two" if len(workers) == 2 else f"some of these {len(workers)}"
    since = (
        f"checkpoints of later steps were set aside, and {newest} is the newest now"
        if newest
        else "no checkpoint is left"
    )
    return Diverged(
        f"After step {step} {what} are not the same, and nobody can tell whose are right: "
        f"{copies} changed since step {agreed}, when all agreed: {', '.join(workers)}; {since}.",
        fix=[
            "the same command once more, which resumes there",
            *(
                []
                if part
                else ["three or more workers without shared memory, or hosts: the odd one is known, and healed"]
            ),
            "a test of these machines' memory",
        ],
    )
