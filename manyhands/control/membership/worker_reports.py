"""What is known of each worker of an elastic attempt, from what the agents report. Pure; nothing is decided here.

All of it can be lost: agents repeat their reports, so a coordinator that was restarted soon knows it again. Start
reading at `hear`; below it are the questions that `elastic` asks of a roster.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from manyhands.control.membership.failure_policy import Ended
from manyhands.control.membership.server_hosts import failed_server, lost_server
from manyhands.control.membership.slots import open_to
from manyhands.control.membership.state import Member, Membership, Roster, parse_generation
from manyhands.control.messages.agent_messages import HostReport, MemberReport
from manyhands.control.messages.failure import WorkerEnd

__all__ = [
    "alive",
    "call_of",
    "can_go_on",
    "done",
    "finished",
    "hear",
    "let_go",
    "living",
    "lose_host",
    "lost",
    "missing",
    "offering",
    "quiet",
    "resumed",
    "stranded",
]


def hear(state: Membership, roster: Roster, report: HostReport, now: float) -> Membership:
    """What this host says of workers that are planned there. Late reports do no harm: nothing is taken back."""
    said = {word.incarnation: word for word in report.members}
    known = {worker.incarnation for worker in _everyone(roster) if worker.agent == report.agent}
    # Whoever is not known was declared gone, or belongs to an older attempt. It is in no plan, so its agent kills it.
    strangers = [word for word in report.members if word.incarnation not in known and not word.ended]

    def updated(worker: Member) -> Member:
        if worker.agent != report.agent:
            return worker
        return _merged(worker, said[worker.incarnation], now) if worker.incarnation in said else _awake(worker)

    steps = [
        step
        for word in report.members
        if word.incarnation in known
        for step in (word.first_step, word.step)
        if step is not None
    ]
    cleared = set(roster.cleared) - {report.agent}
    if report.clear and report.generation == roster.generation:
        cleared.add(report.agent)
    roster = replace(
        roster,
        members=tuple(updated(worker) for worker in roster.members),
        joining=tuple(updated(worker) for worker in roster.joining),
        dismissed=tuple(updated(worker) for worker in roster.dismissed),
        cleared=tuple(sorted(cleared)),
        first_step=min([*steps, *_some(roster.first_step)], default=None),
        last_step=max([*steps, *_some(roster.last_step)], default=None),
        failed_server=roster.failed_server or failed_server(roster, report, now),
    )
    return replace(state, roster=roster, stale=state.stale + len(strangers))


def _some(value: int | None) -> list[int]:
    return [] if value is None else [value]


def _everyone(roster: Roster) -> tuple[Member, ...]:
    return (*roster.members, *roster.joining, *roster.dismissed)


def _merged(worker: Member, word: MemberReport, now: float) -> Member:
    if worker.ended or worker.status in ("dead", "done"):
        return worker
    end = worker.end
    if word.end is not None and end is None:
        end = Ended(end=word.end, at=now - word.ended_s_ago)
    return replace(
        worker,
        status=word.status,
        ended=word.ended,
        end=end,
        exit_code=word.exit_code,
        pid=word.pid,
        step=max([*_some(worker.step), *_some(word.step)], default=None),
        phase=word.phase,
        moved_at=now - word.age_s,
        generation=max(worker.generation, word.generation, key=_number),
        call=max(worker.call, word.call),
        offers=max(worker.offers, word.offers),
        offered_at=now if word.offers > worker.offers else worker.offered_at,
        done_at=now if word.status == "done" else 0.0,
        stranded_at=(worker.stranded_at or now) if word.stranded else 0.0,
    )


def _number(generation: str) -> tuple[int, int]:
    return parse_generation(generation) if generation else (0, 0)


def lose_host(state: Membership, roster: Roster, agent: str, *, gone: bool) -> Membership:
    """A host is silent, and its workers may live; or it is gone, and they are dead by its agent's word."""

    def marked(member: Member) -> Member:
        if member.agent != agent or member.status in ("dead", "done") or member.ended:
            return member
        return replace(member, status="dead" if gone else "suspect", ended=gone)

    theirs = [worker for worker in roster.dismissed if worker.agent == agent]
    roster = replace(roster, torn=roster.torn or any(tears(roster, worker) for worker in theirs))
    if gone:
        roster = replace(roster, failed_server=roster.failed_server or lost_server(state, agent))
        roster = replace(
            let_go(roster, theirs),
            joining=tuple(worker for worker in roster.joining if worker.agent != agent),
            ends=(*roster.ends, *(lost(state, m) for m in roster.members if marked(m) is not m)),
        )
    return replace(state, roster=replace(roster, members=tuple(marked(member) for member in roster.members)))


def let_go(roster: Roster, workers: Sequence[Member]) -> Roster:
    """Without these, who were dismissed and are gone. A chief among them may have been done instead of leaving."""
    led = [worker.generation for worker in workers if worker.leads_since and _by_itself(worker)]
    return replace(
        roster,
        dismissed=tuple(worker for worker in roster.dismissed if worker not in workers),
        torn=roster.torn or any(tears(roster, worker) for worker in workers),
        chief_done_in=max([roster.chief_done_in, *led], key=_number),
    )


def lost(state: Membership, member: Member) -> Ended:
    host = state.hosts[member.agent]
    end = WorkerEnd(rank=member.rank, host=host.name, pid=member.pid, kind="lost", step=member.step)
    return Ended(end=end, at=host.heard_at)


def resumed(roster: Roster) -> Roster:
    """As a restarted coordinator takes it up: it has heard of nobody yet, so nobody has been silent for long."""
    return replace(roster, members=tuple(_awake(member) for member in roster.members))


def _awake(member: Member) -> Member:
    return replace(member, status="live") if member.status == "suspect" else member


# ---- questions ---------------------------------------------------------------------------------------------------


def alive(roster: Roster) -> list[Member]:
    return [m for m in roster.members if m.status not in ("dead", "done", "suspect") and not m.ended]


def living(roster: Roster) -> dict[int, int]:
    """The slots, by incarnation, of workers that are not known to be dead, in the group or not."""
    return {worker.incarnation: worker.slot for worker in _everyone(roster) if not _is_gone(worker)}


def _is_gone(worker: Member) -> bool:
    return worker.ended or worker.status == "dead"


def missing(roster: Roster) -> list[Member]:
    return [member for member in roster.members if member.status in ("dead", "suspect")]


def done(roster: Roster) -> list[Member]:
    return [member for member in roster.members if member.status == "done"]


def finished(roster: Roster) -> bool:
    """The chief was done. One that was done before it knew that it had become the chief does not count as one."""
    chief = roster.members[0]
    veterans = [member for member in roster.members if can_go_on(member)]
    over = roster.chief_done_in and all(member.status in ("done", "suspect") for member in veterans)
    if over and all(_number(member.generation) <= _number(roster.chief_done_in) for member in veterans):
        return True
    return chief.status == "done" and _number(chief.generation) >= _number(chief.leads_since)


def can_go_on(member: Member) -> bool:
    """It has the run's state: it was there from the start, or has caught up since it was admitted."""
    return member.catch_up is None or (member.step is not None and member.step >= member.catch_up)


def tears(roster: Roster, worker: Member) -> bool:
    """Without this dismissed worker, who has not left yet, members cannot finish the step after which they go over."""
    waiting = any(member.generation != roster.generation for member in alive(roster))
    return waiting and worker.generation == roster.before and not _by_itself(worker)


def _by_itself(worker: Member) -> bool:
    return worker.status == "done" or (worker.status == "left" and not worker.exit_code)


def quiet(roster: Roster) -> bool:
    return all(
        member.status == "live" and not member.ended and member.generation == roster.generation
        for member in roster.members
    )


def stranded(roster: Roster, now: float, for_s: float) -> list[Member]:
    """Members that cannot go on in the newest generation, for so long that somebody's death should be known by now."""
    return [
        member
        for member in alive(roster)
        if member.stranded_at and member.generation == roster.generation and now - member.stranded_at >= for_s
    ]


def call_of(roster: Roster) -> int:
    """The public call that the run is in."""
    return max((member.call for member in roster.members), default=0)


def offering(state: Membership, roster: Roster) -> list[Member]:
    call = call_of(roster)
    return [
        worker
        for worker in roster.joining
        if worker.offers and worker.offers == call and worker.status == "live" and open_to(state, worker.agent)
    ]
