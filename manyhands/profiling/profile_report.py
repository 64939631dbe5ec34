"""The report of `mh profile`: a value, and its text. Start reading at `ProfileReport.text`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from manyhands.observe.event_text import duration
from manyhands.profiling.layer_times import LayerTime
from manyhands.profiling.recorded_run import slice_line
from manyhands.profiling.step_records import WorkerFacts
from manyhands.profiling.verdict import Finding, Verdict

__all__ = ["ProfileReport", "WorkerTimes", "table"]

LAYERS_SHOWN = 12
ELSE = {
    "data": "read less per example, or prepare it once: mh.Dataset.cache(), a smaller format, files in memory",
    "exchange": "mh tune, which tries fewer workers with more threads; accumulate=2, fewer and larger exchanges",
    "computation": "the layers below; mh tune, for workers, threads and memory format; --allow-maths tries bf16, too",
}


class WorkerTimes(msgspec.Struct, frozen=True):
    rank: int
    step_s: float
    phases: dict[str, float]
    """Mean seconds of a step in each phase; in "other" what is in none."""
    slices_per_step: float = 0.0
    """Slices that it computed; 0: servers lease them."""


class ProfileReport(msgspec.Struct, frozen=True, kw_only=True):
    facts: WorkerFacts
    steps: int
    rounds: int
    verdict: Verdict
    workers: list[WorkerTimes]
    waiting: list[tuple[int, int, float]]
    """(rank, rank waited for, mean seconds of a step)."""
    layers: list[LayerTime]
    """Seconds of one step; of each layer those of the slowest worker."""
    seconds: float

    def text(self) -> str:
        parts = [[self._head(), *self._verdict()], self._phases(), self._waiting(), self._layers()]
        return "\n\n".join("\n".join(lines) for lines in parts if lines)

    def _head(self) -> str:
        facts, verdict = self.facts, self.verdict
        split = f"{_many(facts.workers, 'worker')} x {_many(facts.threads, 'thread')}, {facts.strategy}"
        return (
            f"{split}, V={facts.slices}: {_ms(verdict.step_s)} per step as it is ({self.steps} steps a trial, "
            f"{_many(self.rounds, 'round')}; two trials as it is differ by {_percent(verdict.noise.controls)})"
        )

    def _verdict(self) -> Iterator[str]:
        verdict = self.verdict
        if verdict.holds_back is None:
            yield "too noisy to say what holds it back: stop other programs on this machine, or take more --steps"
        else:
            shares = ", ".join(f"{name} {_percent(share)}" for name, share in verdict.shares.items())
            yield f"held back by {verdict.holds_back}; of a step: {shares}"
        for finding in verdict.findings:
            yield f"  {self._line(finding)}"
        for name, why in verdict.untried.items():
            yield f"  {name}: not tried: {why}"
        for line in self._advice():
            yield f"try: {line}"

    def _line(self, finding: Finding) -> str:
        way, noise = finding.way, f"noise {_percent(finding.noise)}"
        with_it = f"with {way.name}" if way.name == "data for free" else "without the exchange between workers"
        name = with_it if way.removes else f"with {way.name}"
        if not finding.is_clear:
            return f"{name}: no difference beyond the noise ({_signed(-finding.saves)}, {noise})"
        text = f"{name} a step takes {_percent(abs(finding.saves))} {'less' if finding.saves > 0 else 'more'} ({noise})"
        removed = self.verdict.removed(way.cause) if way.cause is not None and not way.removes else None
        if removed is not None and removed.is_clear and finding.saves > 0:
            text += f": {100 * finding.saves:.0f} of the {100 * removed.saves:.0f}"
        return text

    def _advice(self) -> Iterator[str]:
        verdict = self.verdict
        for cause in ("data", "exchange", "computation"):
            remedy = verdict.best_remedy(cause)
            if remedy is not None:
                changes = f" ({remedy.way.changes})" if remedy.way.changes else ""
                yield f"{remedy.way.advice}: {_percent(remedy.saves)} less{changes}"
            if verdict.holds_back is not None and cause in verdict.holds_back.split(" or "):
                yield ELSE[cause]

    def _phases(self) -> list[str]:
        if not self.workers:
            return []
        names = list(dict.fromkeys(name for worker in self.workers for name in worker.phases))
        rows = [
            [str(worker.rank), *(_ms(worker.phases.get(name, 0.0)) for name in names), _ms(worker.step_s)]
            for worker in self.workers
        ]
        per_slice = (slice_line(one.rank, one.slices_per_step, one.phases) for one in self.workers)
        return [*table(["worker", *names, "step"], rows), *filter(None, per_slice)]

    def _waiting(self) -> list[str]:
        shown = [one for one in sorted(self.waiting, key=lambda one: -one[2]) if one[2] > 0.005 * self.verdict.step_s]
        return [f"worker {rank} waits for worker {peer}: {_ms(seconds)} per step" for rank, peer, seconds in shown]

    def _layers(self) -> list[str]:
        total = sum(layer.seconds for layer in self.layers)
        rows = [
            [
                layer.name,
                layer.kind,
                f"{layer.calls:g}",
                _ms(layer.forward_s),
                _ms(layer.backward_s),
                _percent(layer.seconds / total),
            ]
            for layer in self.layers[:LAYERS_SHOWN]
        ]
        lines = table(["layer", "class", "calls", "forward", "backward", "share"], rows) if rows else []
        left = self.layers[LAYERS_SHOWN:]
        if left:
            share = _percent(sum(layer.seconds for layer in left) / total)
            lines.append(f"and {len(left)} more layers, {share} together")
        return [*lines, f"measured in {duration(self.seconds)}"]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows])
    return [line.rstrip() for line in lines]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %" if fraction >= 0.095 or fraction == 0 else f"{100 * fraction:.1f} %"


def _signed(fraction: float) -> str:
    return f"{100 * fraction:+.1f} %"


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
