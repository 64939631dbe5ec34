"""What is known of each worker of an attempt, from the agents' reports. Pure; nothing is decided here.

This is soft state: agents repeat their reports, so a restarted coordinator soon has it again. Start reading at
`apply_report`; below it are the queries that `elastic` makes on a roster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from manyhands.control.membership.failure_policy import EndedWorker
from manyhands.control.membership.server_hosts import failed_server, lost_server
from manyhands.control.membership.slots import accepts_workers
from manyhands.control.membership.state import AttemptState, Member, Membership, parse_generation
from manyhands.control.messages.agent_messages import HostReport, MemberReport
from manyhands.control.messages.failure import WorkerEnd

__all__ = [
    "alive",
    "apply_report",
    "call_of",
    "done",
    "finished",
    "has_run_state",
    "living",
    "lose_host",
    "lost",
    "missing",
    "offering",
    "quiet",
    "reported_end",
    "resumed",
    "stranded",
    "unreported_end",
    "with_steps",
    "without_dismissed",
]


def apply_report(state: Membership, roster: AttemptState, report: HostReport, now: float) -> Membership:
    """Merge this host's report of the workers that are planned there. Late reports are harmless: they undo nothing."""
    here = {worker.incarnation for worker in _all_workers(roster) if worker.agent == report.agent}
    known = [reported for incarnation, reported in report.members.items() if incarnation in here]
    # An unknown worker was declared gone, or belongs to an older attempt. It is in no plan, so its agent kills it.
    strangers = [number for number, reported in report.members.items() if number not in here and not reported.ended]

    def updated(worker: Member) -> Member:
        if worker.agent != report.agent:
            return worker
        reported = report.members.get(worker.incarnation)
        return _merged(worker, reported, now) if reported is not None else _revived(worker)

    cleared = set(roster.cleared) - {report.agent}
    if report.clear and report.generation == roster.generation:
        cleared.add(report.agent)
    roster = replace(
        with_steps(roster, [step for reported in known for step in (reported.first_step, reported.step)]),
        members=tuple(updated(worker) for worker in roster.members),
        joining=tuple(updated(worker) for worker in roster.joining),
        dismissed=tuple(updated(worker) for worker in roster.dismissed),
        cleared=tuple(sorted(cleared)),
        failed_server=roster.failed_server or failed_server(roster, report, now),
    )
    return replace(state, roster=roster, stale=state.stale + len(strangers))


def with_steps(roster: AttemptState, reported: Sequence[int | None]) -> AttemptState:
    """With these steps in the range from the attempt's first to its last."""
    return replace(
        roster,
        first_step=min(_known(roster.first_step, *reported), default=None),
        last_step=max(_known(roster.last_step, *reported), default=None),
    )


def _known(*steps: int | None) -> list[int]:
    return [step for step in steps if step is not None]


def _all_workers(roster: AttemptState) -> tuple[Member, ...]:
    return (*roster.members, *roster.joining, *roster.dismissed)


def _merged(worker: Member, reported: MemberReport, now: float) -> Member:
    before = worker.report
    if before.ended or worker.status in ("dead", "done"):
        return worker
    return replace(
        worker,
        status=reported.status,
        report=replace(  # a late report takes nothing back
            reported,
            end=before.end or reported.end,
            step=max(_known(before.step, reported.step), default=None),
            generation=max(before.generation, reported.generation, key=_number),
            call=max(before.call, reported.call),
            offers=max(before.offers, reported.offers),
        ),
        reported_at=now,
        failed_at=worker.failed_at if before.end is not None else now - reported.ended_s_ago,
        offered_at=now if reported.offers > before.offers else worker.offered_at,
        stranded_at=(worker.stranded_at or now) if reported.stranded else 0.0,
    )


def _number(generation: str) -> tuple[int, int]:
    return parse_generation(generation) if generation else (0, 0)


def lose_host(state: Membership, roster: AttemptState, agent: str, *, gone: bool) -> Membership:
    """A host is silent, and its workers may be alive; or (`gone`) it has left, and its agent confirmed their death."""

    def marked(member: Member) -> Member:
        if member.agent != agent or member.status in ("dead", "done") or member.report.ended:
            return member
        return replace(member, status="dead" if gone else "suspect")

    dismissed_there = [worker for worker in roster.dismissed if worker.agent == agent]
    roster = replace(roster, torn=roster.torn or any(blocks_step_end(roster, worker) for worker in dismissed_there))
    if gone:
        roster = replace(roster, failed_server=roster.failed_server or lost_server(state, agent))
        roster = replace(
            without_dismissed(roster, dismissed_there),
            joining=tuple(worker for worker in roster.joining if worker.agent != agent),
            ends=(*roster.ends, *(lost(state, m) for m in roster.members if marked(m) is not m)),
        )
    return replace(state, roster=replace(roster, members=tuple(marked(member) for member in roster.members)))


def without_dismissed(roster: AttemptState, workers: Sequence[Member]) -> AttemptState:
    """Remove these dismissed workers, which have ended. A chief among them may have been done instead of leaving."""
    led = [worker.report.generation for worker in workers if worker.leads_since and _exited_normally(worker)]
    return replace(
        roster,
        dismissed=tuple(worker for worker in roster.dismissed if worker not in workers),
        torn=roster.torn or any(blocks_step_end(roster, worker) for worker in workers),
        chief_done_in=max([roster.chief_done_in, *led], key=_number),
    )


def reported_end(worker: Member) -> EndedWorker | None:
    return EndedWorker(end=worker.report.end, at=worker.failed_at) if worker.report.end is not None else None


def lost(state: Membership, member: Member) -> EndedWorker:
    """The end of a member that was lost with its host."""
    return EndedWorker(end=unreported_end(state, member, "lost"), at=state.hosts[member.agent].heard_at)


def unreported_end(state: Membership, worker: Member, kind: Literal["lost", "exit"]) -> WorkerEnd:
    """The end of a worker, as far as it is known without a description by its agent."""
    host = state.hosts[worker.agent].name if worker.agent in state.hosts else worker.agent
    report = worker.report
    return WorkerEnd(
        rank=worker.rank, host=host, pid=report.pid, kind=kind, exit_code=report.exit_code or 0, step=report.step
    )


def resumed(roster: AttemptState) -> AttemptState:
    """For a restarted coordinator: it has had no time to receive reports yet, so no host counts as silent."""
    return replace(roster, members=tuple(_revived(member) for member in roster.members))


def _revived(member: Member) -> Member:
    return replace(member, status="live") if member.status == "suspect" else member


# ---- queries -----------------------------------------------------------------------------------------------------


def alive(roster: AttemptState) -> list[Member]:
    return [m for m in roster.members if m.status not in ("dead", "done", "suspect") and not m.report.ended]


def living(roster: AttemptState) -> dict[int, int]:
    """Slot, by incarnation, of each worker that is not known to be dead, in the group or not."""
    return {worker.incarnation: worker.slot for worker in _all_workers(roster) if not _is_gone(worker)}


def _is_gone(worker: Member) -> bool:
    return worker.report.ended or worker.status == "dead"


def missing(roster: AttemptState) -> list[Member]:
    return [member for member in roster.members if member.status in ("dead", "suspect")]


def done(roster: AttemptState) -> list[Member]:
    return [member for member in roster.members if member.status == "done"]


def finished(roster: AttemptState) -> bool:
    """Whether the chief was done. One that was done before it knew that it had become the chief does not count."""
    chief = roster.members[0]
    veterans = [member for member in roster.members if has_run_state(member)]
    over = roster.chief_done_in and all(member.status in ("done", "suspect") for member in veterans)
    if over and all(_number(member.report.generation) <= _number(roster.chief_done_in) for member in veterans):
        return True
    return chief.status == "done" and _number(chief.report.generation) >= _number(chief.leads_since)


def has_run_state(member: Member) -> bool:
    """Whether it has the run's state: it is a member from the start, or has caught up since it was admitted."""
    return member.catch_up is None or (member.report.step is not None and member.report.step >= member.catch_up)


def blocks_step_end(roster: AttemptState, worker: Member) -> bool:
    """Whether members need this dismissed worker to complete the step after which they switch generations."""
    waiting = any(member.report.generation != roster.generation for member in alive(roster))
    return waiting and worker.report.generation == roster.before and not _exited_normally(worker)


def _exited_normally(worker: Member) -> bool:
    return worker.status == "done" or (worker.status == "left" and not worker.report.exit_code)


def quiet(roster: AttemptState) -> bool:
    return all(
        member.status == "live" and not member.report.ended and member.report.generation == roster.generation
        for member in roster.members
    )


def stranded(roster: AttemptState, now: float, for_s: float) -> list[Member]:
    """Members that could not continue in the newest generation for `for_s`, after which a death would be known."""
    return [
        member
        for member in alive(roster)
        if member.stranded_at and member.report.generation == roster.generation and now - member.stranded_at >= for_s
    ]


def call_of(roster: AttemptState) -> int:
    """The public call that the run is in."""
    return max((member.report.call for member in roster.members), default=0)


def offering(state: Membership, roster: AttemptState) -> list[Member]:
    call = call_of(roster)
    return [
        worker
        for worker in roster.joining
        if call and worker.report.offers == call and worker.status == "live" and accepts_workers(state, worker.agent)
    ]
