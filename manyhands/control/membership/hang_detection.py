"""Decides whether a worker of an elastic run hangs, from the messages that its agent received. Pure, without a clock.

Two signals, both needed. A heartbeat proves that a process is alive and its interpreter runs, but not that it makes
progress. Reports of new steps prove progress, but a worker that only waits for another one has none to report. So a
worker without heartbeats is stopped, or holds the interpreter lock; a worker without progress is asked for its stack,
and killed only if it is not waiting for others. Before its first step a worker is killed only if the process is
stopped, which its agent looks up. Ages use the agent's own clock, and restart after the agent itself was suspended.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from manyhands.comm.peer_waits import MARK

__all__ = ["HangLimits", "Verdict", "WorkerActivity", "judge", "main_stack", "pace_of", "place_in", "waits_for_others"]

# Fewer steps do not show how long one takes; the first may compile, or read all of the data.
STEPS_BEFORE_JUDGING = 3
SLOWEST_STEPS = 10.0

# What precedes the first step may hold the interpreter lock for minutes; only a stopped process is a hang then.
STOPPED_S = 30.0

Verdict = Literal["fine", "silent", "silent so far", "slow", "stuck"]


class HangLimits(msgspec.Struct, frozen=True):
    heartbeat_s: float = 3.0
    """A member that sends nothing for this long is killed."""
    hang_s: float = 10.0
    """No progress for this long and for ten of its slowest recent steps: its stack is taken. Twice that: killed."""


class WorkerActivity(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent knows of one worker. Times are on the agent's clock."""

    joined: bool
    """It has sent a message, and no Goodbye."""
    judged: bool
    """It is also a member, and has reported a step. What comes before and after has no time limit."""
    training: bool
    heard_at: float
    moved_at: float
    """When it last reported another call, step or phase."""
    step_s: Sequence[float] = ()
    """How long its recent steps took."""


def judge(activity: WorkerActivity, limits: HangLimits, now: float, since: float = 0.0) -> Verdict:
    """`since`: when watching began; silence before that does not count."""
    silent_s = now - max(activity.heard_at, since)
    if not activity.judged:
        return "silent so far" if activity.joined and silent_s > max(STOPPED_S, limits.heartbeat_s) else "fine"
    if silent_s > limits.heartbeat_s:
        return "silent"
    pace_s = pace_of(activity.step_s)
    if not activity.training or pace_s is None:
        return "fine"
    limit_s = max(limits.hang_s, SLOWEST_STEPS * pace_s)
    still_s = now - max(activity.moved_at, since)
    if still_s <= limit_s:
        return "fine"
    return "slow" if still_s <= 2 * limit_s else "stuck"


def pace_of(step_s: Sequence[float]) -> float | None:
    """The 99th percentile of step durations; None while too few are known."""
    if len(step_s) < STEPS_BEFORE_JUDGING:
        return None
    return sorted(step_s)[int(0.99 * (len(step_s) - 1))]


# ---- the stack that a worker writes on request --------------------------------------------------------------------

_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+ ")
_FRAME = re.compile(r'\s*File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
# A script may call torch's collectives directly, whose functions are not marked; they are near the innermost frame.
_COLLECTIVES = "/torch/distributed/"
_INNERMOST = 6


def main_stack(dump: str) -> list[str]:
    """The main thread's frames in faulthandler's output, which lists it last; the innermost frame first."""
    frames: list[str] = []
    for line in dump.splitlines():
        if _THREAD.match(line):
            frames = []
        elif _FRAME.match(line):
            frames.append(line.strip())
    return frames


def waits_for_others(frames: Sequence[str]) -> bool:
    """Whether this stack has a function marked by `waits_for_peers`, or a collective of torch."""
    is_marked = any(found["name"] == MARK for frame in frames if (found := _FRAME.match(frame)))
    return is_marked or any(_COLLECTIVES in frame for frame in frames[:_INNERMOST])


def place_in(frames: Sequence[str]) -> str:
    """ "train.py line 12, in forward": the innermost frame; empty without any."""
    found = _FRAME.match(frames[0]) if frames else None
    return f"{found['file'].rpartition('/')[2]} line {found['line']}, in {found['name']}" if found else ""
