"""Whether a worker of an elastic run hangs, decided from what its agent has heard of it. Pure: no process, no clock.

Two signs, both needed. A heartbeat proves that a process lives and its interpreter runs; it says nothing of progress.
Reports of new steps prove progress; but a worker that merely waits for another one has none to report. So one that is
silent is stopped, or holds its interpreter; one that gets nowhere is asked for its stack, and killed only if it is not
the one that waits. Before its first step only one that is stopped is killed, which its agent looks up. Ages are of the
agent's own clock, and start anew after the agent itself stood still.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

__all__ = ["Limits", "Pulse", "Verdict", "judge", "main_stack", "pace_of", "place_in", "waits_for_others"]

# Fewer finished steps say nothing of how long one takes; the first may compile, or read all of the data.
STEPS_BEFORE_JUDGING = 3
SLOWEST_STEPS = 10.0

# What comes before the first step may hold the interpreter for minutes. A process that is stopped does nothing.
STOPPED_S = 30.0

Verdict = Literal["fine", "silent", "silent so far", "slow", "stuck"]


class Limits(msgspec.Struct, frozen=True):
    heartbeat_s: float = 3.0
    """A member without a sign of life for this long is killed."""
    hang_s: float = 10.0
    """No progress for this long and for ten of its slowest recent steps: its stack is taken. Twice that: killed."""


class Pulse(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one worker, by the agent's clock."""

    joined: bool
    """It has spoken, and not said goodbye."""
    judged: bool
    """It is a member, too, and has reported a step. What comes before and after may take its time."""
    training: bool
    heard_at: float
    moved_at: float
    """When it last told of another call, step or phase."""
    step_s: Sequence[float] = ()
    """How long its recent steps took."""


def judge(pulse: Pulse, limits: Limits, now: float, since: float = 0.0) -> Verdict:
    """`since`: when watching began; nothing that was missed before counts."""
    silent_s = now - max(pulse.heard_at, since)
    if not pulse.judged:
        return "silent so far" if pulse.joined and silent_s > max(STOPPED_S, limits.heartbeat_s) else "fine"
    if silent_s > limits.heartbeat_s:
        return "silent"
    pace_s = pace_of(pulse.step_s)
    if not pulse.training or pace_s is None:
        return "fine"
    limit_s = max(limits.hang_s, SLOWEST_STEPS * pace_s)
    still_s = now - max(pulse.moved_at, since)
    if still_s <= limit_s:
        return "fine"
    return "slow" if still_s <= 2 * limit_s else "stuck"


def pace_of(step_s: Sequence[float]) -> float | None:
    """The 99th percentile of what steps took; None while too few are known."""
    if len(step_s) < STEPS_BEFORE_JUDGING:
        return None
    return sorted(step_s)[int(0.99 * (len(step_s) - 1))]


# ---- the stack that a worker writes when asked --------------------------------------------------------------------

_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+ ")
_FRAME = re.compile(r'\s*File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
# Where a worker's thread is while it waits for others: in a collective, or for the word of its agent or of a server.
_WAITING = (
    "/manyhands/comm/",
    "/manyhands/control/session/session.py",
    "/manyhands/parameter_server/worker/server_connection.py",
    "/torch/distributed/",
)
_INNERMOST = 6


def main_stack(dump: str) -> list[str]:
    """The main thread's frames in what faulthandler wrote, the innermost first; it comes last."""
    frames: list[str] = []
    for line in dump.splitlines():
        if _THREAD.match(line):
            frames = []
        elif _FRAME.match(line):
            frames.append(line.strip())
    return frames


def waits_for_others(frames: Sequence[str]) -> bool:
    return any(place in frame for frame in frames[:_INNERMOST] for place in _WAITING)


def place_in(frames: Sequence[str]) -> str:
    """ "train.py line 12, in forward": the innermost frame; empty without any."""
    found = _FRAME.match(frames[0]) if frames else None
    return f"{found['file'].rpartition('/')[2]} line {found['line']}, in {found['name']}" if found else ""
