"""What each worker of a trial writes for `mh profile`: facts about itself, then the times of every step, as JSON lines.

A trial is killed once enough steps are there, so every line is written when its step is done. Start reading at
`read_records`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

__all__ = [
    "TRACE_NAME",
    "WARM_UP_STEPS",
    "StepTimes",
    "WorkerFacts",
    "WorkerRecord",
    "mean_phases",
    "read_records",
    "record_path",
    "waiting_by_peer",
]

WARM_UP_STEPS = 3
"""Steps that are not measured: they allocate memory, and start loader processes."""
TRACE_NAME = "profile-trace-{rank}.json"


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    workers: int
    wanted_workers: int | None = None
    """How many the script's strategy asks for."""
    strategy: str
    slices: int
    threads: int
    precision: str
    reducer: str = "exact"
    plane: str = "auto"
    sockets_because: str = ""
    """Why workers send gradients over sockets; empty if they share memory."""
    divided: bool = False
    """Each worker has only a part of the model."""
    leases: bool = False
    """Parameter servers lease slices or batches."""
    exact: bool = False
    fetched_by: str = "caller"
    """"memory", "thread", "caller", "stream" or "function": how the data is read without loader processes."""
    loaders: int = 0
    """Loader processes of this worker."""

    @property
    def most_loaders(self) -> int | None:
        """How many loader processes its data can have; None: any number."""
        if self.fetched_by in ("memory", "thread", "function"):
            return 0
        return 1 if self.fetched_by == "stream" else None


class StepTimes(msgspec.Struct, frozen=True):
    step: int
    took_s: float
    phases: dict[str, float]
    times: list[list[float]] = []
    """Of the step before, by rank: busy seconds in each phase, then seconds of waiting for others."""
    slices: int = 0
    """How many this worker computed; 0: servers lease them."""


class WorkerRecord(msgspec.Struct, frozen=True):
    facts: WorkerFacts
    steps: list[StepTimes]

    @property
    def measured(self) -> list[StepTimes]:
        return self.steps[WARM_UP_STEPS:]


def record_path(run_dir: Path, rank: int) -> Path:
    return run_dir / f"profile-{rank}.jsonl"


def read_records(run_dir: Path) -> list[WorkerRecord]:
    """By rank; the last line of a worker that was killed may be torn, and is skipped."""
    found = []
    for path in run_dir.glob("profile-*.jsonl"):
        first, *lines = path.read_bytes().split(b"\n")[:-1] or [b""]
        if first:
            steps = [msgspec.json.decode(line, type=StepTimes) for line in lines]
            found.append(WorkerRecord(msgspec.json.decode(first, type=WorkerFacts), steps))
    return sorted(found, key=lambda one: one.facts.rank)


def mean_phases(steps: Sequence[StepTimes]) -> dict[str, float]:
    """Mean seconds of a step in each phase; in "other" what is in none, such as hooks and garbage between steps."""
    if not steps:
        return {}
    names = list(dict.fromkeys(phase for step in steps for phase in step.phases))
    means = {name: sum(step.phases.get(name, 0.0) for step in steps) / len(steps) for name in names}
    means["other"] = max(0.0, sum(step.took_s for step in steps) / len(steps) - sum(means.values()))
    return means


def waiting_by_peer(steps: Sequence[StepTimes]) -> Mapping[tuple[int, int], float]:
    """(waiting rank, rank waited for) -> mean seconds of a step.

    Ranks meet once per step, so all wait for the one that was busy longest in it.
    """
    sums: dict[tuple[int, int], float] = {}
    counted = [step.times for step in steps if step.times and all(map(any, step.times))]
    for times in counted:
        busy = [sum(seconds[:-1]) for seconds in times]
        last = busy.index(max(busy))
        for rank, seconds in enumerate(times):
            if rank != last:
                sums[rank, last] = sums.get((rank, last), 0.0) + seconds[-1]
    return {pair: total / len(counted) for pair, total in sums.items()}
