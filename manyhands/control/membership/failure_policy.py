"""Who failed first, and whether the run goes on: pure judgements over the ends of one attempt.

`attribute` tells the cause from its consequences; `judge` applies the failure policy, which
docs/protocols/control-plane.md states in words.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from manyhands.control.messages.failure import WorkerEnd, describe

__all__ = ["Ended", "Signature", "Verdict", "attribute", "cannot_be_retried", "judge", "signature"]

SAME_FAILURE_LIMIT = 3
PASSED_THROUGH = (2, 3)
# Errors of the maths: the same step computes the same again.
REPEATABLE = {"BadLoss", "NonFinite"}
# Nobody but a person can tell which copy of the weights to go on with.
UNDECIDED = {"Diverged"}

_PEER_ERRORS = frozenset(
    [
        "PartLost",
        "PeerLost",
        "ConnectionError",
        "BrokenPipeError",
        "DistNetworkError",
        "DistBackendError",
        "DistStoreError",
    ]
)
# What Gloo's RuntimeErrors say when the other side is gone.
_PEER_WORDS = ("closed by peer", "reset by peer", "Broken pipe", "Timed out waiting", "Connection refused")

Signature = tuple[str, str, int | None]


class Ended(msgspec.Struct, frozen=True):
    """An end, and when it happened by the coordinator's clock."""

    end: WorkerEnd
    at: float


class Verdict(msgspec.Struct, frozen=True):
    restart: bool
    exit_code: int
    reason: str


def _follows(end: WorkerEnd) -> bool:
    """Could be a mere consequence of another worker's end."""
    if end.kind == "stopped":
        return True
    if end.kind != "exception":
        return False
    return bool(_PEER_ERRORS.intersection([end.error, *end.bases])) or any(w in end.message for w in _PEER_WORDS)


def attribute(ends: Sequence[Ended]) -> tuple[WorkerEnd, list[WorkerEnd], bool]:
    """The first failure, the others, and whether the clock alone says so.

    A worker that dies takes the connections of its peers with it, and their errors may be seen before its own end is.
    So an end that cannot be a consequence goes before those that can; among equals the earliest is the first.
    """
    in_time = sorted(ends, key=lambda ended: (ended.end.kind == "stopped", ended.at))
    first = min(in_time, key=lambda ended: (_follows(ended.end), ended.end.kind == "stopped", ended.at))
    others = [ended.end for ended in in_time if ended is not first]
    return first.end, others, first is in_time[0]


def signature(end: WorkerEnd) -> Signature:
    return end.error or describe(end), end.message, end.step


def cannot_be_retried(end: WorkerEnd) -> bool:
    """A usage or environment error, or one of the maths: whoever tries again meets it again."""
    raised = end.kind in ("exception", "exit")
    return raised and (end.exit_code in PASSED_THROUGH or bool((REPEATABLE | UNDECIDED) & set(end.bases)))


def judge(
    first: WorkerEnd,
    history: Sequence[Signature],
    *,
    restarts: int,
    max_restarts: int,
    progressed: bool,
    always_restart: bool = False,
) -> Verdict:
    """Restart or not, and the exit code if not. `history` holds the first failures so far, this one included."""
    raised = first.kind in ("exception", "exit")
    if raised and first.exit_code in PASSED_THROUGH:
        return Verdict(
            False, first.exit_code, f"it ended with exit code {first.exit_code}, which a restart cannot change"
        )
    code = (70 if first.exit_code == 70 else 1) if raised else 4
    if raised and UNDECIDED & set(first.bases):
        return Verdict(False, code, "the workers' copies of the weights differ, and nothing tells which is right")
    if raised and REPEATABLE & set(first.bases):
        return Verdict(False, code, "a run is repeatable, so this step would fail again")
    if raised and not always_restart:
        if not progressed and not _follows(first):
            return Verdict(False, code, "it failed before this attempt finished a step, so a restart would too")
        if sum(entry == signature(first) for entry in history) >= SAME_FAILURE_LIMIT:
            return Verdict(False, code, f"the same failure at the same step, {SAME_FAILURE_LIMIT} times")
    if restarts >= max_restarts:
        spent = f"the restart budget of {max_restarts} is spent" if max_restarts else "no restarts were allowed"
        return Verdict(False, code, spent)
    return Verdict(True, code, "")
