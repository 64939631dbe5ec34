"""The status of a run, live or ended, read from its run directory.

Only reads files: it takes no lock and changes nothing, so it can be called at any rate. A live run is queried through
`control.session.run_client`. The command line does the formatting. Start reading at `look_at`.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import socket
import time
from collections.abc import Hashable, Iterator
from datetime import datetime
from pathlib import Path

import msgspec

from manyhands.control.messages.agent_messages import LentHost
from manyhands.control.messages.status_messages import MemberStatus, ServerStatus
from manyhands.control.run_directory import RunRecord, read_run
from manyhands.errors import ManyhandsError, UsageError
from manyhands.events import (
    CheckpointEvaluated,
    CheckpointSaved,
    Evaluated,
    Event,
    ResourcesUsed,
    RunEnded,
    RunStarted,
    StepDone,
    Straggler,
    Warned,
    WorkerLost,
)
from manyhands.observe.recorder import parse_line
from manyhands.spec.undecodable_names import readable

__all__ = ["RunStatus", "SavedCheckpoint", "all_runs", "attempts_of", "find_run", "look_at", "state_of"]

MAX_SCAN_BYTES = 32 * 2**20
CHUNK_BYTES = 2**18


class SavedCheckpoint(msgspec.Struct, frozen=True):
    step: int
    path: str
    age_s: float


class RunStatus(msgspec.Struct, kw_only=True):
    run: str
    path: str
    state: str
    """running, finished, failed, stopped; died: running, but the process is gone; unknown: the record is unreadable."""
    exit_code: int | None = None
    command: list[str] = []
    pid: int | None = None
    host: str | None = None
    started_s: float | None = None
    strategy: str | None = None
    workers: int | None = None
    slices: int | None = None
    precision: str | None = None
    restarts: int = 0
    training: int = 1
    """Which training of the script the step belongs to."""
    step: int | None = None
    total_steps: int | None = None
    epoch: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    eta_s: float | None = None
    last_step_age_s: float | None = None
    results: dict[str, float] = {}
    """Results of the last evaluation."""
    evaluator: CheckpointEvaluated | None = None
    """The last checkpoint that an evaluator beside the training has evaluated."""
    checkpoint: SavedCheckpoint | None = None
    events_dropped: int = 0
    last_warning: str | None = None
    last_lost: str | None = None
    used: list[ResourcesUsed] = []
    """Resources that each worker used in its last call of `fit`, as last reported; by rank."""
    slow: list[Straggler] = []
    """Workers that are slower than the others; for a run that has ended, that were."""
    ranks: list[MemberStatus] = []
    """Where each worker is now; empty when the run does not answer."""
    servers: list[ServerStatus] = []
    """This host's parameter servers now; empty when the run has none, or does not answer."""
    spare: ServerStatus | None = None
    """The spare server, which replaces a server that dies."""
    lent: list[LentHost] = []
    """The hosts of a live run, with what placed them; empty when the run does not answer."""
    elastic: tuple[int, int] | None = None
    """Of a live elastic run: the smallest and the largest number of workers. Below: the number last requested, and the
    generation."""
    workers_wanted: int | None = None
    generation: str | None = None


def find_run(named: str | None, root: Path = Path("runs")) -> Path:
    """A run directory by its path or its name under `root`; without a name, the run started last.

    `PermissionError` if this user may not read the run, even if its directory is readable.
    """
    if named is None:
        runs = all_runs(root)
        if not runs:
            raise UsageError(f"There is no run in {root}/.", fix=["mh run script.py", "name a run directory"])
        return runs[0]
    for path in (Path(named), root / named):
        if (record := path / "run.json").is_file():
            record.open("rb").close()
            return path
    known = [path.name for path in all_runs(root)]
    near = difflib.get_close_matches(named, known, n=3, cutoff=0.4) or known[:1]
    raise UsageError(f"{named} is not a run directory: it has no run.json.", fix=[str(root / name) for name in near])


def all_runs(root: Path = Path("runs")) -> list[Path]:
    """The run directories in `root`, the one started last first."""
    found = [path.parent for path in root.glob("*/run.json")]
    return sorted(found, key=lambda path: (_seconds(_record(path).created), path.name), reverse=True)


def look_at(path: Path, *, ask: bool = True) -> RunStatus:
    """Everything known about the run in `path`. With `ask`, query a live run for the state of its workers."""
    record = _record(path)
    overview = RunStatus(
        run=record.run,
        path=readable(str(path)),
        state=state_of(record),
        exit_code=record.exit_code,
        command=record.command,
        pid=record.pid or None,
        host=record.host or None,
        started_s=_seconds(record.created) or None,
        restarts=max(attempts_of(path), default=1) - 1,
    )
    for file in sorted((path / "events").glob("*.jsonl")):
        _add_events(overview, _last_events(file))
    overview.used.sort(key=lambda one: one.rank)
    if ask and overview.state == "running":
        _ask_agent(overview, path)
    overview.slow = _still_slow(overview.slow, overview.generation)
    return overview


def state_of(record: RunRecord) -> str:
    """As `RunStatus.state`."""
    if not record.created:
        return "unknown"
    return "died" if record.status == "running" and not _is_alive(record) else record.status


def _still_slow(reports: list[Straggler], generation: str | None) -> list[Straggler]:
    """Stragglers of this generation, or of the last one reported: earlier ranks were other workers."""
    if generation is None and reports:
        generation = max(reports, key=lambda one: (one.time_s, one.step)).generation
    return sorted(
        (one for one in reports if one.generation == generation and not one.is_over), key=lambda one: one.rank
    )


def _add_events(overview: RunStatus, seen: dict[Hashable, Event]) -> None:
    now_s = time.time()
    for event in seen.values():
        match event:
            case RunStarted():
                overview.strategy, overview.precision = event.strategy, event.precision
                overview.workers, overview.slices = event.workers, event.slices
                overview.total_steps = overview.total_steps or event.total_steps
                overview.restarts = max(overview.restarts, event.attempt - 1)
            case StepDone():
                overview.step, overview.epoch, overview.loss = event.step, event.epoch, event.loss
                overview.training = event.training
                overview.samples_per_s, overview.eta_s = event.samples_per_s, event.eta_s
                overview.total_steps = event.total_steps or overview.total_steps
                overview.last_step_age_s = now_s - event.time_s
            case CheckpointSaved():
                overview.checkpoint = SavedCheckpoint(event.step, event.path, now_s - event.time_s)
            case Evaluated():
                overview.results = event.results
            case CheckpointEvaluated():
                overview.evaluator = event
            case RunEnded():
                overview.events_dropped = max(overview.events_dropped, event.dropped)
            case ResourcesUsed():
                overview.used.append(event)
            case Straggler():
                overview.slow.append(event)
            case Warned():
                overview.last_warning = event.text
            case WorkerLost():
                overview.last_lost = f"rank {event.rank} on {event.host} (pid {event.pid}): {event.reason}"


_WANTED = (
    *(RunStarted, StepDone, CheckpointSaved, Evaluated, CheckpointEvaluated, ResourcesUsed, RunEnded, Straggler),
    *(Warned, WorkerLost),
)
_BY_PREFIX = {f'{{"event":"{kind.__name__}"'.encode(): kind for kind in _WANTED}


def _last_events(file: Path) -> dict[Hashable, Event]:
    """The last event of each displayed kind, reading back through at most 32 MB; the first lines are always read.

    `ResourcesUsed`: the last one of each worker; workers report in turn, so the scan ends when a rank appears again.
    `Straggler`: the last one of each worker, too; such events are few.
    """
    found: dict[Hashable, Event] = {}
    all_used_found = False
    for line in _lines_backwards(file):
        kind = _BY_PREFIX.get(line[: line.find(b'"', 10) + 1])  # {"event":"Kind": decoding every line would be slow
        if kind is None or kind in found or (kind is WorkerLost and b'"collateral":true' in line):
            continue
        if kind is ResourcesUsed and all_used_found:
            continue
        event = parse_line(line)
        if isinstance(event, ResourcesUsed):
            all_used_found = ("used", event.rank) in found
            found.setdefault(("used", event.rank), event)
        elif isinstance(event, Straggler):
            found.setdefault(("slow", event.generation, event.rank), event)
        elif event is not None:
            found[kind] = event
    return found


def _lines_backwards(file: Path) -> Iterator[bytes]:
    with contextlib.suppress(OSError), file.open("rb") as stream:
        end = stream.seek(0, os.SEEK_END)
        oldest, rest = max(0, end - MAX_SCAN_BYTES), b""
        while end > oldest:
            start = max(oldest, end - CHUNK_BYTES)
            stream.seek(start)
            first, *lines = (stream.read(end - start) + rest).split(b"\n")
            yield from reversed(lines)
            end, rest = start, first
        if oldest:
            stream.seek(0)
            yield from reversed(stream.read(min(oldest, CHUNK_BYTES)).split(b"\n"))
        else:
            yield rest


def _ask_agent(overview: RunStatus, path: Path) -> None:
    try:
        from manyhands.control.session.run_client import query

        status = query(path)
    except (ImportError, OSError, ManyhandsError):
        return  # no agent answers, or the run ended meanwhile: the files contain the rest
    overview.ranks, overview.servers, overview.generation = status.members, status.servers, status.generation
    overview.elastic, overview.workers_wanted = status.elastic, status.workers_wanted
    overview.spare, overview.lent = status.spare, status.lent


def attempts_of(path: Path) -> list[int]:
    """The attempts of a run that have logs: 1, 2, …"""
    numbers = (folder.name.removeprefix("attempt-") for folder in (path / "logs").glob("attempt-*"))
    return sorted(int(number) for number in numbers if number.isdigit())


def _is_alive(record: RunRecord) -> bool:
    """Whether the process that owns the run exists. On another host it is assumed to: it cannot be seen from here."""
    import psutil

    if record.host != socket.gethostname():
        return True
    try:
        process = psutil.Process(record.pid)
        later = process.create_time() > _seconds(record.created) + 1  # another process with the same pid
        return not later and process.status() != str(psutil.STATUS_ZOMBIE)
    except (psutil.NoSuchProcess, ValueError):
        return False


def _record(path: Path) -> RunRecord:
    try:
        return read_run(path)
    except UsageError:  # one unreadable record must not hide the other runs, nor the events beside it
        return RunRecord(run=path.name)


def _seconds(moment: str) -> float:
    try:
        return datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return 0.0
