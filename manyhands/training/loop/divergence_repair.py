"""What is done when replicas differ: the wrong copy is replaced, or the run stops and keeps checkpoints that are right.

Workers send each other hashes of their copies in the exchange of a step (`Replicated.hashes`), so that all find a
difference in the same step, before it has changed anything. Which copy is wrong is decided by
`parallel/replicas/divergence.py`. All methods but `distrust_last` are collective; the caller repeats them if a worker
is lost in one. Start reading at `DivergenceRepair.settle`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from manyhands.errors import Diverged, ManyhandsError, PeerLost, TrainingFailed
from manyhands.events import CopiesDiverged, WrongGradientFound
from manyhands.parallel.model.tensor_shard import TensorShard
from manyhands.parallel.replicas.divergence import CopiesDiffer, DivergenceVerdict, Hashes, WrongGradient, odd_parts
from manyhands.training.elastic.state_transfer import broadcast_state
from manyhands.training.state.checkpointing import Saver
from manyhands.training.state.training_state import TrainingState

__all__ = ["DivergenceRepair"]

_GRADIENT_FIXES = [
    "a test of that machine's processor and memory",
    "a loss that depends on the model and the batch only: audit=True needs that",
]


class DivergenceRepair:
    def __init__(self, training: TrainingState, saver: Saver) -> None:
        self._training, self._saver, self._worker = training, saver, training.worker
        self._has_drifted = False

    def settle(self, differ: CopiesDiffer) -> None:
        """Copy the state of a right worker to the wrong ones; `Diverged` if it is undecided which ones are right."""
        verdict, progress = differ.verdict, self._training.progress
        agreed, is_chief_odd = progress.agreed, 0 in verdict.odd
        newest = self._set_aside(agreed) if verdict.source is None or is_chief_odd else ""
        names = self._names()
        odd = [names[rank] for rank in verdict.odd]
        self._report_diverged(odd, verdict.odd, healed=verdict.source is not None)
        if verdict.source is None:
            raise _undecided(odd, progress.step, agreed, newest)
        self._worker.events.warn(
            f"After step {progress.step} the weights or optimizer states of {' and '.join(odd)} differed from those "
            f"of the other workers; after step {agreed} all were equal. They were replaced by those of "
            f"{names[verdict.source]}. If this happens again, test that machine's memory."
        )
        self._heal(verdict)

    @property
    def is_due(self) -> bool:
        """Whether `compare_parts` follows this step: every `check_every` steps, where the model is divided."""
        every = self._worker.resolved.spec.train.check_every
        return self._training.whole is not None and every > 0 and self._training.progress.step % every == 0

    def compare_parts(self) -> None:
        """Compare what several workers hold of a divided model: `Diverged` if replicas differ.

        Differences between workers of one replica are only warned about: other processors may round otherwise.
        """
        progress, formation, whole = self._training.progress, self._worker.formation, self._training.whole
        assert whole is not None and formation is not None
        found = whole.hashes(self._worker.network)
        replicas = [
            {(name, shard, position._replace(data=0)): number for (name, shard), number in one.items()}
            for position, one in zip(formation.places, found, strict=True)
        ]
        unlike = odd_parts(replicas)
        if not unlike:
            progress.agreed = progress.step
            self._warn_of_drift(odd_parts(found))
            return
        (name, _, _), ranks = next(iter(unlike.items()))
        newest, names = self._set_aside(progress.agreed), self._names()
        odd = [names[rank] for rank in ranks]
        self._report_diverged(odd, ranks, healed=False)
        raise _undecided(odd, progress.step, progress.agreed, newest, name)

    def _warn_of_drift(self, unlike: Mapping[tuple[str, TensorShard], Sequence[int]]) -> None:
        if unlike and not self._has_drifted:
            self._has_drifted = True
            (name, _), ranks = next(iter(unlike.items()))
            self._worker.events.warn(
                f"After step {self._training.progress.step} {name} is not the same on ranks "
                f"{' and '.join(map(str, ranks))} of one replica. Either they round differently, as other processors "
                "or numbers of threads do, or a part of the model draws random numbers from a separate generator."
            )

    def last_comparisons(self) -> Iterator[Callable[[], None]]:
        """The comparisons that are left after the last step, since no later step makes them."""
        progress, spec = self._training.progress, self._worker.resolved.spec
        if self._worker.in_trial or progress.agreed == progress.step:
            return
        if self._training.whole is not None and spec.train.check_every:
            yield self.compare_parts
        if self._training.engine.compares_copies and progress.agreed != progress.step:
            yield self._compare_copies

    def _compare_copies(self) -> None:
        engine = self._training.in_step
        found = self._worker.axis.all_gather_bytes("copies", msgspec.msgpack.encode(engine.hashes()))
        try:
            engine.compare([Hashes(*msgspec.msgpack.decode(data)) for data in found])
        except CopiesDiffer as differ:
            self.settle(differ)
        self._training.progress.agreed = self._training.progress.step

    def expose(self, wrong: WrongGradient) -> ManyhandsError:
        """Report which worker's gradients are wrong, and return the error that this worker raises.

        In an elastic run the wrong worker ends; the others treat it as lost and compute its slices of the step, whose
        update has not begun. In a static run, and if it is undecided which is wrong, the run stops.
        """
        asked, names, elastic = wrong.asked, self._names(), self._worker.is_elastic
        ranks = [asked.owner, asked.auditor] if wrong.rank is None else [wrong.rank]
        who = [names[rank] for rank in ranks]
        replaced = elastic and wrong.rank is not None
        self._worker.events.emit(
            WrongGradientFound(
                time_s=time.time(), step=asked.step, slice=asked.place, workers=who, ranks=ranks, replaced=replaced
            )
        )
        what = f"Slice {asked.place} of step {asked.step} has other gradients on {names[asked.owner]} than on "
        what += f"{names[asked.auditor]}"
        if wrong.rank is None:
            return Diverged(f"{what}, and it cannot be decided which is right.", fix=_GRADIENT_FIXES)
        judges = f"{names[asked.third]} finds" if asked.third is not None else "Computed once more, it seems"
        what += f". {judges} that {who[0]} is wrong."
        if not elastic:
            return Diverged(what, fix=[f"a run without {who[0]}", *_GRADIENT_FIXES])
        self._worker.events.warn(f"{what} The other workers continue without it.")
        return TrainingFailed(what, fix=_GRADIENT_FIXES) if self._worker.rank == wrong.rank else PeerLost(what)

    def _report_diverged(self, workers: list[str], ranks: Sequence[int], *, healed: bool) -> None:
        step, agreed = self._training.progress.step, self._training.progress.agreed
        self._worker.events.emit(
            CopiesDiverged(
                time_s=time.time(), step=step, workers=workers, ranks=list(ranks), healed=healed, agreed_step=agreed
            )
        )

    def distrust_last(self) -> None:
        """Set aside the checkpoint of the last step: the weights may have changed since its update. Not collective."""
        if self._worker.is_chief:
            self._saver.set_aside(self._training.progress.step - 1)

    def _heal(self, verdict: DivergenceVerdict) -> None:
        assert verdict.source is not None
        one_host = self._worker.group.num_hosts == 1
        take = broadcast_state(self._worker.axis, self._training, verdict.source, from_shared_memory=one_host)
        if self._worker.rank in verdict.odd:
            take()

    def _set_aside(self, agreed: int) -> str:
        """Set aside checkpoints after step `agreed`, which may hold a wrong copy. Returns the newest that is left."""
        newest = self._saver.set_aside(agreed) if self._worker.is_chief else ""
        self._worker.wait_for_chief(f"checkpoints set aside after step {self._training.progress.step}")
        return self._worker.axis.all_gather_bytes("newest checkpoint", newest.encode())[0].decode()

    def _names(self) -> list[str]:
        mine = f"rank {self._worker.rank} on {socket.gethostname()} (pid {os.getpid()})"
        return [name.decode() for name in self._worker.axis.all_gather_bytes("names", mine.encode())]


def _undecided(workers: list[str], step: int, agreed: int, newest: str, part: str = "") -> Diverged:
    """The error for whole copies that differ, or for copies of one `part` of a divided model."""
    what = f"copies of {part}" if part else "the workers' weights or optimizer states"
    copies = "one of these two" if len(workers) == 2 else f"some of these {len(workers)}"
    since = (
        f"checkpoints of later steps were set aside, and {newest} is the newest now"
        if newest
        else "no checkpoint is left"
    )
    return Diverged(
        f"After step {step} {what} are not the same, and it cannot be decided which are right: "
        f"{copies} changed since step {agreed}, when all were equal: {', '.join(workers)}; {since}.",
        fix=[
            "the same command once more, which resumes there",
            *(
                []
                if part
                else ["three or more workers without shared memory, or hosts: then a wrong copy is found and replaced"]
            ),
            "a test of these machines' memory",
        ],
    )
