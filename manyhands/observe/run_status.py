"""What a run directory tells about its run, live or long over, read from the outside.

Looks at files only, takes no lock and changes nothing, so it may look as often as it likes; where a live run answers
questions, `control.session.run_client` is asked. How it is shown is the command line's business. Start reading at
`look_at`.
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

from manyhands.control.messages.status_messages import MemberStatus, ServerStatus
from manyhands.control.run_directory import RunRecord, read_run
from manyhands.errors import ManyhandsError, UsageError
from manyhands.events import (
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

__all__ = ["Overview", "Saved", "all_runs", "attempts_of", "find_run", "look_at"]

MAX_SCAN_BYTES = 32 * 2**20
CHUNK_BYTES = 2**18


class Saved(msgspec.Struct, frozen=True):
    step: int
    path: str
    age_s: float


class Overview(msgspec.Struct, kw_only=True):
    run: str
    path: str
    state: str
    """running, finished, failed, stopped; died: running, but its process is gone; unknown: its record is unreadable."""
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
    """Which of the script's trainings the step is of."""
    step: int | None = None
    total_steps: int | None = None
    epoch: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    eta_s: float | None = None
    last_step_age_s: float | None = None
    results: dict[str, float] = {}
    """Of the last evaluation."""
    checkpoint: Saved | None = None
    events_dropped: int = 0
    last_warning: str | None = None
    last_lost: str | None = None
    used: list[ResourcesUsed] = []
    """What each worker used in its last call of `fit`, by its last word; by rank."""
    slow: list[Straggler] = []
    """Workers that are slower than the others; of a run that has ended, that were."""
    ranks: list[MemberStatus] = []
    """Where each worker is right now; empty when the run does not answer."""
    servers: list[ServerStatus] = []
    """This host's parameter servers right now; empty when the run has none, or does not answer."""
    spare: ServerStatus | None = None
    """The one that waits for the number of one that dies."""
    elastic: tuple[int, int] | None = None
    """Of a live elastic run: the least and the most workers, the number last asked for, and the generation."""
    workers_wanted: int | None = None
    generation: str | None = None


def find_run(named: str | None, root: Path = Path("runs")) -> Path:
    """A run directory by its path or its name under `root`; without a name, the run started last.

    `PermissionError` for one that this user may not read, also where its directory is open to all.
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


def look_at(path: Path, *, ask: bool = True) -> Overview:
    """Everything known about the run in `path`. With `ask`, a live run is asked where its workers are."""
    record = _record(path)
    overview = Overview(
        run=record.run,
        path=readable(str(path)),
        state=record.status if record.created else "unknown",
        exit_code=record.exit_code,
        command=record.command,
        pid=record.pid or None,
        host=record.host or None,
        started_s=_seconds(record.created) or None,
        restarts=max(attempts_of(path), default=1) - 1,
    )
    if overview.state == "running" and not _is_alive(record):
        overview.state = "died"
    for file in sorted((path / "events").glob("*.jsonl")):
        _take_in(overview, _last_events(file))
    overview.used.sort(key=lambda one: one.rank)
    if ask and overview.state == "running":
        _ask_agent(overview, path)
    overview.slow = _still_slow(overview.slow, overview.generation)
    return overview


def _still_slow(told: list[Straggler], generation: str | None) -> list[Straggler]:
    """Of this generation, or the last one that was heard of: before it ranks were others'."""
    if generation is None and told:
        generation = max(told, key=lambda one: (one.time_s, one.step)).generation
    return sorted((one for one in told if one.generation == generation and not one.is_over), key=lambda one: one.rank)


def _take_in(overview: Overview, seen: dict[Hashable, Event]) -> None:
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
                overview.checkpoint = Saved(event.step, event.path, now_s - event.time_s)
            case Evaluated():
                overview.results = event.results
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


_WANTED = (RunStarted, StepDone, CheckpointSaved, Evaluated, ResourcesUsed, RunEnded, Straggler, Warned, WorkerLost)
_BY_PREFIX = {f'{{"event":"{kind.__name__}"'.encode(): kind for kind in _WANTED}


def _last_events(file: Path) -> dict[Hashable, Event]:
    """The last event of each kind we show, looking back through at most 32 MB; the first lines are always seen.

    Of what was used, the last of each worker: all tell it in turns, so one that speaks again has been heard. Of who is
    slow, the last of each worker, too; such events are few.
    """
    found: dict[Hashable, Event] = {}
    all_told = False
    for line in _lines_backwards(file):
        kind = _BY_PREFIX.get(line[: line.find(b'"', 10) + 1])  # {"event":"Kind": decoding every line would be slow
        if kind is None or kind in found or (kind is WorkerLost and b'"collateral":true' in line):
            continue
        if kind is ResourcesUsed and all_told:
            continue
        event = parse_line(line)
        if isinstance(event, ResourcesUsed):
            all_told = ("used", event.rank) in found
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


def _ask_agent(overview: Overview, path: Path) -> None:
    try:
        from manyhands.control.session.run_client import query

        status = query(path)
    except (ImportError, OSError, ManyhandsError):
        return  # nobody answers, or it ended while we asked: the files say all that is left to say
    overview.ranks, overview.servers, overview.generation = status.members, status.servers, status.generation
    overview.elastic, overview.workers_wanted = status.elastic, status.workers_wanted
    overview.spare = status.spare


def attempts_of(path: Path) -> list[int]:
    """The starts of a run that left logs: 1, 2, …"""
    numbers = (folder.name.removeprefix("attempt-") for folder in (path / "logs").glob("attempt-*"))
    return sorted(int(number) for number in numbers if number.isdigit())


def _is_alive(record: RunRecord) -> bool:
    """Whether the process that owns the run is there. One on another host is believed: we cannot see it."""
    import psutil

    if record.host != socket.gethostname():
        return True
    try:
        process = psutil.Process(record.pid)
        later = process.create_time() > _seconds(record.created) + 1  # another one, with the same number
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
