"""Decides which worker failed first, and whether the run restarts. Pure functions over the ends of one attempt.

`attribute` separates the cause from its consequences; `judge` applies the failure policy, which
docs/protocols/control-plane.md describes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from manyhands.control.messages.failure import WorkerEnd, describe

__all__ = ["EndedWorker", "RetryDecision", "Signature", "attribute", "cannot_be_retried", "judge", "signature"]

SAME_FAILURE_LIMIT = 3
PASSED_THROUGH = (2, 3)
# Numerical errors: the same step computes the same values again.
REPEATABLE = {"BadLoss", "NonFinite"}
# Only the user can decide which copy of the weights to continue with.
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
# Texts of Gloo's RuntimeErrors when the peer is gone.
_PEER_WORDS = ("closed by peer", "reset by peer", "Broken pipe", "Timed out waiting", "Connection refused")

Signature = tuple[str, str, int | None]


class EndedWorker(msgspec.Struct, frozen=True):
    """A worker's end, and its time on the coordinator's clock."""

    end: WorkerEnd
    at: float


class RetryDecision(msgspec.Struct, frozen=True):
    restart: bool
    exit_code: int
    reason: str


def _follows(end: WorkerEnd) -> bool:
    """Whether this may be only a consequence of another worker's end."""
    if end.kind == "stopped":
        return True
    if end.kind != "exception":
        return False
    return bool(_PEER_ERRORS.intersection([end.error, *end.bases])) or any(w in end.message for w in _PEER_WORDS)


def attribute(ends: Sequence[EndedWorker]) -> tuple[WorkerEnd, list[WorkerEnd], bool]:
    """The first failure, the other ones, and whether the clock alone gives this order.

    A worker that dies breaks the connections of its peers, and their errors may be detected before its own end is.
    So an end that cannot be a consequence precedes those that can; among equals the earliest is the first.
    """
    in_time = sorted(ends, key=lambda ended: (ended.end.kind == "stopped", ended.at))
    first = min(in_time, key=lambda ended: (_follows(ended.end), ended.end.kind == "stopped", ended.at))
    others = [ended.end for ended in in_time if ended is not first]
    return first.end, others, first is in_time[0]


def signature(end: WorkerEnd) -> Signature:
    return end.error or describe(end), end.message, end.step


def cannot_be_retried(end: WorkerEnd) -> bool:
    """Whether it is a usage, environment or numerical error, which every retry would run into again."""
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
) -> RetryDecision:
    """Restart or not, and the exit code if not. `history` holds the first failures so far, this one included."""
    raised = first.kind in ("exception", "exit")
    if raised and first.exit_code in PASSED_THROUGH:
        return RetryDecision(
            False, first.exit_code, f"it ended with exit code {first.exit_code}, which a restart cannot change"
        )
    code = (70 if first.exit_code == 70 else 1) if raised else 4
    if raised and UNDECIDED & set(first.bases):
        return RetryDecision(
            False, code, "the workers' copies of the weights differ, and which one is right is unknown"
        )
    if raised and REPEATABLE & set(first.bases):
        return RetryDecision(False, code, "a run is repeatable, so this step would fail again")
    if raised and not always_restart:
        if not progressed and not _follows(first):
            return RetryDecision(False, code, "it failed before this attempt finished a step, so a restart would too")
        if sum(entry == signature(first) for entry in history) >= SAME_FAILURE_LIMIT:
            return RetryDecision(False, code, f"the same failure at the same step, {SAME_FAILURE_LIMIT} times")
    if restarts >= max_restarts:
        spent = f"the restart budget of {max_restarts} is spent" if max_restarts else "no restarts were allowed"
        return RetryDecision(False, code, spent)
    return RetryDecision(True, code, "")
