"""Decides what follows once all processes of an attempt are dead: the run is done, stopped, failed, or restarts.

Pure, as its caller `react` is. Start reading at `conclude`.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection

from msgspec.structs import replace

from manyhands.control.membership.failure_policy import attribute, judge, signature
from manyhands.control.membership.state import AttemptState, Membership, RunOutcome
from manyhands.control.membership.worker_reports import finished
from manyhands.control.messages.failure import Failure, WorkerEnd, short

__all__ = ["conclude", "end_run", "give_up_on_silent", "stopped_code"]


def conclude(state: Membership, roster: AttemptState, now: float) -> Membership:
    """The agents have confirmed that every process of the generation is dead: done, stopped, restart, or failed?"""
    done = [member.report.exit_code or 0 for member in roster.members if member.status == "done"]
    codes = [*roster.exit_codes, *done]
    elastic = state.settings.elastic is not None
    # An elastic run is finished if its chief was done, even if other workers died.
    all_well = finished(roster) and not roster.fatal if elastic else len(done) == len(roster.members)
    if all_well:
        code = 75 if 75 in codes else 0
        return end_run(state, now, code, "preempted, with a committed checkpoint" if code else "finished")
    if state.stop is not None:
        chief = roster.members[0]
        by_chief = chief.status == "done" and chief.report.exit_code == 75 and not elastic
        code = 75 if by_chief else stopped_code(state)
        return end_run(state, now, code, "stopped on request")
    return _after_failure(state, roster, now)


def _after_failure(state: Membership, roster: AttemptState, now: float) -> Membership:
    if not roster.ends:
        return end_run(state, now, 70, "workers ended, and no agent saw a reason")
    first, _, _ = attribute(roster.ends)
    history = (*state.history, signature(first))
    settings = state.settings
    progressed = (roster.last_step or 0) > (roster.first_step or 0)
    decision = judge(
        first,
        history,
        restarts=state.restarts + state.deaths,
        max_restarts=settings.job.max_restarts,
        progressed=progressed,
        always_restart=settings.always_restart,
    )
    state = replace(state, history=history)
    if not decision.restart:
        return end_run(state, now, decision.exit_code, decision.reason, failed=True)
    where = f"from step {state.committed.step}" if state.committed else "from the start"
    attempts = f"attempt {state.restarts + 2} of {settings.job.max_restarts + 1}"
    return replace(
        state,
        phase="gathering",
        since=now,
        restarts=state.restarts + 1,
        why=f"{short(first)}; restarting {where}, {attempts}",
    )


def give_up_on_silent(state: Membership, roster: AttemptState, agents: Collection[str], now: float) -> Membership:
    lost = [state.hosts[agent].name if agent in state.hosts else agent for agent in sorted(agents)]
    state = replace(state, roster=roster)
    if state.stop is not None:
        return end_run(state, now, stopped_code(state), f"stopped; no report from {', '.join(lost)}")
    return end_run(state, now, 4, f"{', '.join(lost)} did not return to confirm that its workers are dead", failed=True)


def stopped_code(state: Membership) -> int:
    """SIGINT ends with 130; SIGTERM, SIGUSR1 and `mh stop` with 143."""
    return 130 if state.stop_signal == 2 else 143


def end_run(state: Membership, now: float, code: int, reason: str, *, failed: bool = False) -> Membership:
    failure = _failure(state, state.roster, code, reason) if failed and state.roster and state.roster.ends else None
    return replace(state, phase="ended", since=now, outcome=RunOutcome(exit_code=code, reason=reason, failure=failure))


def _failure(state: Membership, roster: AttemptState, code: int, reason: str) -> Failure:
    first, others, certain = attribute(roster.ends)
    commit = state.committed
    return Failure(
        run=state.settings.run,
        exit_code=code,
        reason=reason,
        attempt=roster.attempt,
        max_attempts=state.settings.job.max_restarts + 1,
        step=roster.last_step,
        first=first,
        certain=certain,
        followers=[_brief(end) for end in others],
        committed_step=commit.step if commit else None,
        committed_path=commit.path if commit else "",
        resume=state.settings.resume.replace("{run_dir}", shlex.quote(state.run_dir or "")),
    )


def _brief(end: WorkerEnd) -> WorkerEnd:
    return replace(end, traceback="", stderr=[], message=end.message[:200])
