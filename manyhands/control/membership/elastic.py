"""An elastic attempt: workers die, join and leave while the other workers keep running. Pure, as its caller `react` is.

`worker_reports` takes in the agents' reports of their workers. `advance` decides, one transition at a time, and each
transition is on disk before any agent receives it:

    a member is gone          -> a generation of the live members, at once
    a slot is vacant          -> a new incarnation, which starts, and reports when it is ready to be admitted
    members have to leave,
    or newcomers are ready    -> a generation without the former and with the latter, once all are in the newest one
    no member is left         -> the attempt is over, and `attempt_end` decides what follows

docs/protocols/elastic.md is the whole protocol. Start reading at `advance`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from manyhands.control.membership.attempt_end import conclude, give_up_on_silent
from manyhands.control.membership.failure_policy import EndedWorker, attribute, cannot_be_retried
from manyhands.control.membership.server_hosts import have_servers, include_server_hosts, stop_without_server
from manyhands.control.membership.slots import (
    bounds,
    count_death,
    replicas_to_remove,
    surplus,
    update_slots,
    workers_per_host,
)
from manyhands.control.membership.state import AttemptState, Host, Member, Membership, Slot, begun, next_generation
from manyhands.control.membership.worker_reports import (
    alive,
    call_of,
    done,
    finished,
    has_run_state,
    lose_host,
    lost,
    missing,
    offering,
    quiet,
    reported_end,
    stranded,
    unreported_end,
    without_dismissed,
)
from manyhands.control.messages.failure import short

__all__ = ["advance", "could_begin", "enough", "form", "open_generations"]

JOIN_WINDOW_S = 1.0
"""How long a ready worker waits for workers that are being started, so that one generation admits them all."""
STRANDED_S = 0.5
"""A group in which a collective failed is formed again after this long, if no member was found to be gone."""
MAX_STRANDED = 10
DONE_GRACE_S = 5.0
"""The other members are usually done soon after the first. If not, they need a group without it."""


# ---- the first generation of an attempt ------------------------------------------------------------------------


def enough(state: Membership, ready: Sequence[Host]) -> bool:
    """Whether these hosts can begin: at first all hosts are needed; later, as many as the lower bound needs."""
    if len(ready) >= state.settings.hosts_wanted:
        return True
    workers = sum(host.slots for host in ready)
    return state.roster is not None and workers >= bounds(state)[0] and have_servers(state, ready)


def could_begin(state: Membership, ready: Sequence[Host]) -> bool:
    """Whether these hosts suffice for a first attempt that other hosts join later: every server, the fewest workers.

    The coordinator's own host has to be among them.
    """
    servers = {number for host in ready for number in host.servers}
    return (
        state.settings.begin_with_fewer_s is not None
        and any(host.local for host in ready)
        and sum(host.slots for host in ready) >= bounds(state)[0]
        and servers >= set(range(state.settings.job.servers))
    )


def form(state: Membership, hosts: list[Host], master: tuple[str, int], now: float) -> Membership:
    share = workers_per_host(state, hosts)
    agents = [host.agent for host in hosts for _ in range(share[host.agent])]
    members = tuple(
        Member(
            rank=rank,
            agent=agent,
            incarnation=state.next_incarnation + rank,
            slot=rank,
            leads_since="" if rank else next_generation(state),
        )
        for rank, agent in enumerate(agents)
    )
    slots = {member.slot: Slot(agent=member.agent) for member in members}
    # In a run with servers, hosts without workers run servers, or at least the coordinator.
    participating = tuple(host.agent for host in hosts if share[host.agent] or state.settings.job.servers)
    return begun(state, members, participating, master, now, slots)


# ---- deciding --------------------------------------------------------------------------------------------------


def advance(state: Membership, roster: AttemptState, now: float) -> Membership:
    """One transition, if one is due; the same state otherwise."""
    decisions: tuple[Callable[[Membership, AttemptState, float], Membership], ...]
    if state.phase == "stopping":
        decisions = (_stop,)
    else:
        decisions = (
            _refuse_retrying,
            stop_without_server,
            include_server_hosts,
            _record_ends,
            _forget_hosts,
            _finish,
            _drop_lost,
            _give_up,
            _update_slots,
            _planned_change,
        )
    for decide in decisions:
        after = decide(state, roster, now)
        if after is not state:
            return after
    return state


def _refuse_retrying(state: Membership, roster: AttemptState, now: float) -> Membership:
    """A member's usage error, or a numerical error, ends the run: the other members would run into it too."""
    if state.stop is not None:
        return state
    for member in roster.members:
        end = reported_end(member)
        if end is not None and member.status == "failed" and cannot_be_retried(end.end):
            return replace(state, phase="stopping", since=now, roster=replace(roster, ends=(end,), fatal=True))
    return state


def _record_ends(state: Membership, roster: AttemptState, now: float) -> Membership:
    """Record, once, each worker that has ended: in its slot, and in the attempt's list of ends."""
    if gone := [worker for worker in roster.dismissed if worker.report.ended]:
        return replace(state, roster=without_dismissed(roster, gone))
    for worker in roster.joining:
        if worker.report.ended or worker.status == "done":
            return _record_newcomer_end(state, roster, worker, now)
    for member in roster.members:
        if member.report.ended and member.status not in ("dead", "done"):
            end = _end_of(state, member, now)
            members = tuple(replace(m, status="dead") if m is member else m for m in roster.members)
            roster = replace(roster, members=members, ends=(*roster.ends, end))
            return count_death(state, roster, member, end.end, now)
    return _record_never_started(state, roster, now)


def _record_never_started(state: Membership, roster: AttemptState, now: float) -> Membership:
    """Agents that were asked to stop start no worker: a member that was not started by then never will be."""
    never_started = [member for member in alive(roster) if state.stop is not None and member.agent in roster.cleared]
    if not never_started:
        return state
    ends = [
        EndedWorker(end=replace(_end_of(state, member, now).end, kind="stopped"), at=now) for member in never_started
    ]
    members = tuple(replace(member, status="dead") if member in never_started else member for member in roster.members)
    return replace(state, roster=replace(roster, members=members, ends=(*roster.ends, *ends)))


def _record_newcomer_end(state: Membership, roster: AttemptState, worker: Member, now: float) -> Membership:
    roster = replace(roster, joining=tuple(other for other in roster.joining if other is not worker))
    end = _end_of(state, worker, now)
    if worker.status == "done" or cannot_be_retried(end.end):
        # It found nothing left to do, or cannot run here. That is no reason to end a run that works without it.
        slot = roster.slots.get(worker.slot)
        slots = {**roster.slots, worker.slot: replace(slot, retired=True)} if slot else roster.slots
        roster = replace(roster, slots=slots)
    if worker.status == "done":
        return replace(state, roster=roster)
    if missing(roster):
        roster = replace(roster, ends=(*roster.ends, end))
    return count_death(state, roster, worker, end.end, now)


def _end_of(state: Membership, worker: Member, now: float) -> EndedWorker:
    return reported_end(worker) or EndedWorker(end=unreported_end(state, worker, "exit"), at=now)


def _forget_hosts(state: Membership, roster: AttemptState, now: float) -> Membership:
    """Drop a host that stays silent, with its members and slots, if a live member elsewhere has the run's state."""
    needed = {member.agent for member in roster.members if member.status == "suspect"}
    if any(has_run_state(member) for member in alive(roster)):
        needed = set()
    for host in state.hosts.values():
        if host.silent and host.agent not in needed and now - host.heard_at > state.settings.rejoin_wait_s:
            state = lose_host(state, roster, host.agent, gone=True)
            return replace(state, hosts={name: other for name, other in state.hosts.items() if name != host.agent})
    return state


def _finish(state: Membership, roster: AttemptState, now: float) -> Membership:
    """The attempt is over when no live member has the run's state. Waits for suspects, unless the chief was done."""
    if any(has_run_state(member) for member in alive(roster)):
        return state
    suspects = {member.agent for member in roster.members if member.status == "suspect" and has_run_state(member)}
    if suspects and not finished(roster):
        waited_out = all(
            agent not in state.hosts or now - state.hosts[agent].heard_at > state.settings.rejoin_wait_s
            for agent in suspects
        )
        return give_up_on_silent(state, _with_suspects(state, roster), suspects, now) if waited_out else state
    # If no member failed, the last workers were done too early: the failure is that of the chief that they lost.
    return replace(state, phase="stopping", since=now, roster=replace(roster, ends=roster.ends or roster.last_loss))


def _with_suspects(state: Membership, roster: AttemptState) -> AttemptState:
    """With the suspects added to the attempt's ends."""
    suspects = [member for member in roster.members if member.status == "suspect" and member.agent in state.hosts]
    return replace(roster, ends=(*roster.ends, *(lost(state, member) for member in suspects)))


def _drop_lost(state: Membership, roster: AttemptState, now: float) -> Membership:
    """Form a generation without members that are gone, or were done long before the other members."""
    living, ready = alive(roster), done(roster)
    early = [member for member in ready if now - member.reported_at > DONE_GRACE_S]
    apart = stranded(roster, now, STRANDED_S)
    gone = missing(roster) or early or roster.torn
    if not (gone or apart) or not any(has_run_state(member) for member in living):
        return state
    if not gone:
        again = roster.apart + 1 if roster.apart_at_step == roster.last_step else 1
        roster = replace(roster, apart=again, apart_at_step=roster.last_step)
        if again > MAX_STRANDED:
            return replace(
                state, phase="stopping", since=now, roster=replace(roster, ends=(_group_failure(state, apart[0], now),))
            )
    stranded_why = "a worker that was to leave is gone" if roster.torn else "an exchange between workers failed"
    why = f"{len(early)} done" if early else stranded_why
    roster = _with_suspects(state, roster)
    if roster.ends:
        first, others, _ = attribute(roster.ends)
        why = short(first) + (f", and {len(others)} more" if others else "")
    roster = replace(
        roster,
        exit_codes=(*roster.exit_codes, *(member.report.exit_code or 0 for member in ready)),
        chief_done_in=roster.members[0].report.generation if finished(roster) else roster.chief_done_in,
    )
    for member in ready:
        if member.slot in roster.slots:
            retired = replace(roster.slots[member.slot], retired=True)
            roster = replace(roster, slots={**roster.slots, member.slot: retired})
    return _regroup(state, roster, living, (), lost=True, why=why)


def _group_failure(state: Membership, member: Member, now: float) -> EndedWorker:
    end = replace(
        _end_of(state, member, now).end,
        kind="exception",
        error="PeerLost",
        message=f"the workers lost each other {MAX_STRANDED} times in a row at step {member.report.step}, "
        "and all are alive",
    )
    return EndedWorker(end=end, at=now)


def _give_up(state: Membership, roster: AttemptState, now: float) -> Membership:
    """End the attempt if too few members are left and none can join: at once if the budget is spent, else after a wait.

    Until then the remaining members complete their step, and wait there.
    """
    few = len(alive(roster)) + len(done(roster)) < bounds(state)[0]
    if not (missing(roster) or few) or state.stop is not None:
        return state
    if roster.short_since is None:
        return replace(state, roster=replace(roster, short_since=now))
    waited = now - roster.short_since
    held = {member.slot for member in roster.members if member.status != "dead"}
    may_come_back = any(member.status == "suspect" and member.agent in state.hosts for member in roster.members)
    joining = any(worker.agent in state.hosts for worker in roster.joining)
    hopeful = joining or any(
        number not in held and not slot.retired and slot.agent in state.hosts for number, slot in roster.slots.items()
    )
    spent = any(slot.retired for slot in roster.slots.values())
    if hopeful or not ((spent and not may_come_back) or waited > state.settings.rejoin_wait_s):
        return state
    return replace(state, phase="stopping", since=now, roster=replace(roster, ends=roster.ends or roster.last_loss))


def _update_slots(state: Membership, roster: AttemptState, now: float) -> Membership:
    if state.stop is not None or done(roster):
        return state
    return update_slots(state, roster, now)


def _planned_change(state: Membership, roster: AttemptState, now: float) -> Membership:
    """A planned change: members switch at the end of a step. One change at a time, so all must be in the newest one.

    While a member cannot reach the end of a step, `_drop_lost` has to act first: the other members leave at once.
    """
    if state.stop is not None:
        return state
    if _newcomers_too_late(roster):
        return _withdraw_newcomers(state, roster)
    if not quiet(roster) or stranded(roster, now, 0.0):
        return state
    leaving = _to_dismiss(state, roster)
    newcomers = _ready(state, roster, now)
    staying = [member for member in roster.members if member not in leaving]
    if not leaving and not newcomers:
        return state
    if len(staying) + len(newcomers) < bounds(state)[0] or not any(has_run_state(member) for member in staying):
        return state
    changes = [f"{len(newcomers)} joined"] * bool(newcomers) + [f"{len(leaving)} left"] * bool(leaving)
    gone = {member.slot for member in leaving}
    roster = replace(
        roster,
        slots={number: slot for number, slot in roster.slots.items() if number not in gone},
        dismissed=(*roster.dismissed, *(replace(member, rank=-1) for member in leaving)),
    )
    return _regroup(state, roster, staying, newcomers, lost=False, why=", ".join(changes))


def _newcomers_too_late(roster: AttemptState) -> bool:
    """Whether the call that newcomers wait in ended before the members completed another step of it."""
    newcomers = {member.incarnation for member in roster.members if member.report.generation != roster.before}
    return bool(roster.before and roster.call) and any(
        member.report.call > roster.call and member.report.generation == roster.before
        for member in alive(roster)
        if member.incarnation not in newcomers
    )


def _withdraw_newcomers(state: Membership, roster: AttemptState) -> Membership:
    """Members continue without the newcomers that they should have admitted; new ones are started in their slots."""
    newcomers = [member for member in roster.members if not has_run_state(member)]
    staying = [member for member in roster.members if has_run_state(member)]
    roster = replace(roster, dismissed=(*roster.dismissed, *(replace(member, rank=-1) for member in newcomers)))
    # As if a worker was lost: members that have switched to the generation with the newcomers leave it at once.
    return _regroup(state, roster, staying, (), lost=True, why="their call ended before newcomers were admitted")


def _to_dismiss(state: Membership, roster: AttemptState) -> list[Member]:
    going = [member for member in roster.members if not _stays(state, member)]
    rest = [member for member in roster.members if _stays(state, member)]
    if state.replica > 1:
        replicas = replicas_to_remove(state, roster)
        return going + [member for member in rest if member.slot // state.replica in replicas]
    extra = max(0, surplus(state, roster))
    return going + rest[len(rest) - extra :]


def _stays(state: Membership, member: Member) -> bool:
    host = state.hosts.get(member.agent)
    return host is not None and not host.leaving


def _ready(state: Membership, roster: AttemptState, now: float) -> list[Member]:
    """The newcomers to admit; none yet, while workers that are being started may soon be ready too.

    None of a replica that is still incomplete: all members would have to wait for its missing workers.
    """
    ready = offering(state, roster)
    there = Counter(worker.slot // state.replica for worker in (*alive(roster), *ready))
    ready = [worker for worker in ready if there[worker.slot // state.replica] == state.replica]
    if not ready or len(ready) == len(roster.joining):
        return ready
    return ready if now - min(worker.offered_at for worker in ready) >= JOIN_WINDOW_S else []


def _regroup(
    state: Membership,
    roster: AttemptState,
    staying: Sequence[Member],
    newcomers: Sequence[Member],
    *,
    lost: bool,
    why: str,
) -> Membership:
    staying = [replace(member, stranded_at=0.0) for member in staying]
    admitted = [replace(worker, catch_up=roster.last_step or 0) for worker in newcomers]
    members = tuple(replace(member, rank=rank) for rank, member in enumerate([*staying, *admitted]))
    generation = next_generation(state)
    members = (replace(members[0], leads_since=members[0].leads_since or generation), *members[1:])
    names = {worker.incarnation for worker in newcomers}
    roster = replace(
        roster,
        generation=generation,
        members=members,
        joining=tuple(worker for worker in roster.joining if worker.incarnation not in names),
        lost=lost,
        call=call_of(roster) if newcomers else 0,
        before="" if lost else roster.generation,
        why=why,
        ends=(),
        last_loss=roster.ends or roster.last_loss,
        cleared=(),
        short_since=None,
        torn=False,
    )
    return replace(state, counter=state.counter + 1, roster=roster)


def _stop(state: Membership, roster: AttemptState, now: float) -> Membership:
    """Wait until the agents confirm that every process has ended; not for silent hosts if the chief was done."""
    well = finished(roster) and not roster.fatal
    awaited = {agent for agent in roster.agents if agent in state.hosts and not state.hosts[agent].silent}
    suspects = {member.agent for member in roster.members if member.status == "suspect"}
    if not well:
        awaited |= suspects
    if awaited <= set(roster.cleared):
        return conclude(state, roster, now)
    silent = awaited & suspects
    hosts = [state.hosts.get(agent) for agent in silent]
    if any(host is None or now - host.heard_at > state.settings.rejoin_wait_s for host in hosts):
        return give_up_on_silent(state, _with_suspects(state, roster), silent, now)
    return state


def open_generations(roster: AttemptState) -> list[str]:
    """Those that members' messages may be for: after a planned change also the previous one, until they switch."""
    return [roster.before, roster.generation] if roster.before else [roster.generation]
