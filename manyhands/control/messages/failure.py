"""What went wrong, as data, and as the one block a person reads.

`WorkerEnd` is one worker's end as its agent saw it; `Failure` is the run's: who failed first, who only followed, and
how to go on. Which of the ends was first is decided in `failure_policy`; this module only states and renders.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Collection
from typing import Literal

import msgspec

from manyhands.errors import UsageError

__all__ = ["Failure", "WorkerEnd", "describe", "escape", "render", "short"]


class WorkerEnd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a worker, or a server, ended other than well.

    stopped: the agent killed it because of another's end. lost: its host went silent. hung: it got nowhere, so its
    agent killed it; `message` tells how that was seen, and where it stood.
    """

    rank: int
    host: str
    pid: int
    kind: Literal["signal", "exception", "exit", "stopped", "lost", "hung"]
    signal: int = 0
    exit_code: int = 0
    error: str = ""
    """Class name of the exception, as the traceback prints it."""
    message: str = ""
    bases: list[str] = []
    """Names of the exception's classes up to Exception: what it *is*, for telling causes from consequences."""
    traceback: str = ""
    stderr: list[str] = []
    step: int | None = None
    phase: str = ""
    greeted: bool = False
    clock: str = ""
    """Wall clock of its host, for people."""
    role: Literal["worker", "server"] = "worker"
    """Of a server, `rank` is its number."""
    memory: str = ""
    """Why it may have run out of memory, where there is a sign of that."""
    log: str = ""


class Failure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run: str
    exit_code: int
    reason: str
    """Why the run ended instead of restarting."""
    attempt: int
    max_attempts: int
    step: int | None
    first: WorkerEnd
    certain: bool
    """False: the order of two ends was judged by their kind, not by a clock alone."""
    followers: list[WorkerEnd] = []
    committed_step: int | None = None
    committed_path: str = ""
    resume: str = ""


def escape(text: str) -> str:
    """Without control characters: what a peer sends must not move the reader's cursor."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


def describe(end: WorkerEnd) -> str:
    match end.kind:
        case "signal":
            return f"signal {end.signal} ({_signal(end.signal)})"
        case "exception":
            first_line = end.message.strip().splitlines()[0] if end.message.strip() else ""
            return f"{end.error}: {first_line}" if first_line else end.error
        case "exit":
            return f"exit code {end.exit_code}"
        case "lost":
            return "its host went silent"
        case "hung":
            return f"hung: {end.message}"
        case _:
            return "stopped by its agent"


def who(end: WorkerEnd) -> str:
    return f"{'server' if end.role == 'server' else 'rank'} {end.rank}"


def _signal(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return "unknown"


def short(end: WorkerEnd) -> str:
    """One line, for a restart: "rank 1 on host-0 (pid 4121) died: SIGKILL"."""
    what = _signal(end.signal) if end.kind == "signal" else describe(end)
    return escape(f"{who(end)} on {end.host} (pid {end.pid}) died: {what.rstrip('.')}")


def render(failure: Failure, *, seen: Collection[str] = ()) -> str:
    """The failure block. Plain text, no colour. Lines of standard error that were `seen` already are left out."""
    first = failure.first
    steps = f" at step {failure.step}" if failure.step is not None else ""
    lines = [
        f"run {failure.run} failed{steps} (attempt {failure.attempt} of {failure.max_attempts}): {failure.reason}",
        _row("first failure", _first(first, certain=failure.certain)),
    ]
    if first.step is not None:
        lines.append(_row("where", f"step {first.step}" + (f", {first.phase}" if first.phase else "")))
    if first.memory:
        lines.append(_row("likely cause", f"{first.memory} (heuristic)"))
    lines += _block("traceback", first.traceback.rstrip().splitlines())
    if not first.traceback and not set(first.stderr) <= set(seen):
        lines += _block("last stderr", first.stderr)
    if failure.followers:
        lines.append(_row("followed by", _followers(failure.followers, describe(first))))
    if failure.committed_step is not None:
        lines.append(_row("last commit", f"step {failure.committed_step}  {failure.committed_path}".rstrip()))
    else:
        lines.append(_row("last commit", "none"))
    if first.log:
        lines.append(_row("log", first.log))
    is_asked_wrongly = failure.exit_code == UsageError.exit_code and failure.committed_step is None
    if failure.resume and not is_asked_wrongly:  # the same command would end in the same way
        lines.append(_row("resume", failure.resume))
    return escape("\n".join(lines))


def _first(end: WorkerEnd, *, certain: bool) -> str:
    what = "" if end.traceback else f"  {describe(end)}"  # a traceback ends with it
    doubt = "" if certain else "  [judged by the kind of end, not by a clock alone]"
    return f"{who(end)} on {end.host} (pid {end.pid}){what}  at {end.clock}{doubt}"


def _row(name: str, text: str) -> str:
    return f"  {name:<15} {text}"


def _block(name: str, lines: list[str]) -> list[str]:
    return [_row(name if number == 0 else "", line) for number, line in enumerate(lines)]


def _followers(ends: list[WorkerEnd], first: str) -> str:
    by_cause: dict[str, list[str]] = {}
    for end in ends:
        what = describe(end)
        by_cause.setdefault("the same" if what == first else what, []).append(str(end.rank))
    parts = [f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} ({what})" for what, ranks in by_cause.items()]
    return "; ".join(parts)
