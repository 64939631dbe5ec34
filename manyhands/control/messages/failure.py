"""A failure, as data and as the block of text that the user reads.

`WorkerEnd` describes how one worker ended, as its agent saw it; `Failure` how the run did: which worker failed first,
which failed as a consequence, and how to resume. `failure_policy` decides which was first; this module only renders.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Collection
from typing import Literal

import msgspec

from manyhands.errors import UsageError

__all__ = ["Failure", "WorkerEnd", "describe", "escape", "render", "short"]


class WorkerEnd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a worker or server ended, unless it ended normally.

    stopped: the agent killed it because another one had ended. lost: its host went silent. hung: it made no progress,
    so its agent killed it; `message` says how the agent detected that, and where in the code the process was.
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
    """Names of the exception's classes up to Exception, to distinguish causes from consequences."""
    traceback: str = ""
    stderr: list[str] = []
    step: int | None = None
    phase: str = ""
    greeted: bool = False
    clock: str = ""
    """Wall clock of its host, for display."""
    role: Literal["worker", "server"] = "worker"
    """For a server, `rank` is its number."""
    memory: str = ""
    """Why it may have run out of memory, if there is an indication."""
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
    """False: which worker failed first was decided by the kinds of end, not by the clock alone."""
    followers: list[WorkerEnd] = []
    committed_step: int | None = None
    committed_path: str = ""
    resume: str = ""


def escape(text: str) -> str:
    """Replace control characters: text from a peer must not move the terminal's cursor."""
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
    """The failure block. Plain text, no colour. Standard error is left out if all its lines are in `seen`."""
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
    is_usage_error = failure.exit_code == UsageError.exit_code and failure.committed_step is None
    if failure.resume and not is_usage_error:  # the same command would fail in the same way
        lines.append(_row("resume", failure.resume))
    return escape("\n".join(lines))


def _first(end: WorkerEnd, *, certain: bool) -> str:
    what = "" if end.traceback else f"  {describe(end)}"  # the last line of a traceback says the same
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
