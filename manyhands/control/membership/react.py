"""Decides which workers are in the run: `react(state, event, now) -> (state, outputs)`; no socket, clock or process.

Agents report the state of their hosts, `orders` computes the state they should be in; between the two, a state machine:

    gathering --all hosts joined-> running --a member failed--> stopping --every host clear--> gathering or ended
                                   running --every host clear-----------------------------------------> ended

A generation is (term, counter): terms increase with every start of a coordinator, counters with every generation, so
none repeats. A new one requires that every agent has confirmed ("clear") that its members of the previous one are
dead. The caller performs outputs in order: `Persist` is on disk before any `SendOrders` of the same reaction is sent.
Start reading at `react`.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from manyhands.control.membership import elastic, worker_reports
from manyhands.control.membership.attempt_end import conclude, end_run, give_up_on_silent, stopped_code
from manyhands.control.membership.slots import rescaled
from manyhands.control.membership.state import (
    AttemptState,
    Event,
    Host,
    Member,
    Membership,
    MembershipSettings,
    Output,
    Persist,
    Refuse,
    ReportReceived,
    SendOrders,
    Ticked,
    begun,
    parse_generation,
)
from manyhands.control.messages.agent_messages import CheckpointCommit, HostReport

__all__ = ["begin", "parse_generation", "react", "restored"]


def begin(settings: MembershipSettings, term: int, now: float) -> Membership:
    return Membership(settings=settings, term=term, since=now)


def restored(state: Membership, term: int, now: float) -> Membership:
    """The state from which a restarted coordinator continues: a higher term, and no host counts as silent yet."""
    assert term > state.term
    hosts = {name: replace(host, heard_at=now, silent=False) for name, host in state.hosts.items()}
    roster = worker_reports.resumed(state.roster) if state.roster and state.settings.elastic else state.roster
    return replace(state, term=term, hosts=hosts, roster=roster, since=now, could_begin_at=None)


def react(state: Membership, event: Event, now: float) -> tuple[Membership, list[Output]]:
    outputs: list[Output] = []
    match event:
        case ReportReceived(report=report):
            refusal = _objection(state, report)
            if refusal is not None:
                return state, [refusal]
            known = state
            state = _apply_report(state, report, now)
            news = _of_interest_to_all(state) != _of_interest_to_all(known)
            if state.servers_wanted != known.servers_wanted:
                # On disk before any agent starts or ends a server: a restarted coordinator that lacks it would undo it.
                state = replace(state, revision=state.revision + 1)
                outputs.append(Persist(state=state))
            outputs += [SendOrders(agent=agent) for agent in (state.hosts if news else [report.agent])]
        case Ticked():
            state = _note_silence(state, now)
    before = state
    while (after := _advance(state, now)) is not state:
        state = after
    if state is not before:
        # The new state is durable before any agent acts on it; then all agents get it, the reporting one included.
        state = replace(state, revision=state.revision + 1)
        outputs = [Persist(state=state), *(SendOrders(agent=agent) for agent in state.hosts)]
    return state, outputs


def _of_interest_to_all(state: Membership) -> tuple[object, ...]:
    if state.roster is None or state.settings.elastic is None:
        return state.stop, state.run_dir
    return (
        state.stop,
        state.run_dir,
        state.servers_wanted,
        worker_reports.call_of(state.roster),
        worker_reports.living(state.roster),
    )


# ---- reports ---------------------------------------------------------------------------------------------------


def _objection(state: Membership, report: HostReport) -> Refuse | None:
    settings = state.settings
    if report.run not in ("", settings.run):
        return Refuse(agent=report.agent, what=f"This is run {settings.run}, not {report.run}.")
    if report.agent in state.hosts:
        return None
    for name, ours in settings.versions.items():
        theirs = report.versions.get(name, "none")
        if theirs != ours:
            what = f"{report.host} has {name} {theirs}, the run has {name} {ours}; all hosts need the same."
            return Refuse(agent=report.agent, what=what, fix=[f"install {name} {ours} on {report.host}"])
    if report.program and settings.job.program not in ("", report.program):
        shas = f"sha {report.program[:12]} against {settings.job.program[:12]} on {settings.job.host}"
        what = f"{report.host} runs another {settings.job.command.target.rpartition('/')[2]} ({shas})."
        return Refuse(agent=report.agent, what=what, fix=["the same files on every host"])
    most_hosts = max(settings.hosts_wanted, settings.elastic[1] if settings.elastic else 0)
    # In an elastic run, another host may join in place of a silent one; if that one returns, both may stay.
    present = [host for host in state.hosts.values() if not (settings.elastic and host.silent)]
    if len(present) >= most_hosts:
        return Refuse(agent=report.agent, what=f"Run {settings.run} has all {most_hosts} of its hosts.")
    if report.host_rank is not None and report.host_rank in [host.host_rank for host in present]:
        return Refuse(agent=report.agent, what=f"There already is a host with rank {report.host_rank}.")
    return None


def _apply_report(state: Membership, report: HostReport, now: float) -> Membership:
    known = state.hosts.get(report.agent)
    host = Host(
        agent=report.agent,
        name=report.host,
        slots=report.slots,
        local=report.local,
        data_address=report.data_address,
        order=known.order if known else state.next_order,
        host_rank=report.host_rank,
        master=report.master,
        heard_at=now,
        leaving=report.leaving or (known is not None and known.leaving),
        servers=report.servers,
        backup=report.backup,
        seat=report.seat,
        undecided=report.undecided,
    )
    state = replace(
        state,
        hosts={**state.hosts, report.agent: host},
        next_order=state.next_order + (known is None),
        committed=_newest(state.committed, report.committed),
        run_dir=report.run_dir if report.local and report.run_dir else state.run_dir,
        log_base=report.log_base if report.local else state.log_base,
        stop=state.stop or report.stop,
        stop_signal=state.stop_signal or report.stop_signal,
        servers_wanted=(report.servers_wanted if report.local else None) or state.servers_wanted,
        replica=max(report.replica, state.replica),
    )
    if state.settings.elastic is not None:
        state = rescaled(state, report.workers_wanted) if report.local else state
        state = worker_reports.apply_report(state, state.roster, report, now) if state.roster is not None else state
    elif report.generation is not None and state.roster is not None:
        if report.generation == state.roster.generation:
            state = _with_reported_ends(worker_reports.apply_report(state, state.roster, report, now))
        elif report.members:
            state = replace(state, stale=state.stale + 1)
    if report.leaving and report.clear:
        return _leave(state, report.agent)
    return state


def _newest(one: CheckpointCommit | None, other: CheckpointCommit | None) -> CheckpointCommit | None:
    if one is None or other is None:
        return one or other
    return other if other.step >= one.step else one


def _with_reported_ends(state: Membership) -> Membership:
    """A static attempt fails with its first worker, so each end counts as soon as it is reported."""
    roster = state.roster
    assert roster is not None
    known = {ended.end.rank for ended in roster.ends}
    reported = [worker_reports.reported_end(member) for member in roster.members if member.rank not in known]
    new = [ended for ended in reported if ended is not None]
    roster = worker_reports.with_steps(roster, [ended.end.step for ended in new])
    return replace(state, roster=replace(roster, ends=(*roster.ends, *new)))


def _leave(state: Membership, agent: str) -> Membership:
    """An agent leaves, after it has confirmed that its workers are dead. Its members are lost to this generation."""
    if state.settings.elastic is not None and state.roster is not None:
        state = worker_reports.lose_host(state, state.roster, agent, gone=True)
    elif state.roster is not None and state.phase == "running" and agent in state.roster.agents:
        state = _lose(state, state.roster, agent)
    return replace(state, hosts={name: host for name, host in state.hosts.items() if name != agent})


def _note_silence(state: Membership, now: float) -> Membership:
    limit = state.settings.silent_after_s
    for host in list(state.hosts.values()):
        if host.local or host.silent or now - host.heard_at <= limit:
            continue
        state = replace(state, hosts={**state.hosts, host.agent: replace(host, silent=True)})
        if state.settings.elastic is not None and state.roster is not None and state.phase in ("running", "stopping"):
            state = worker_reports.lose_host(state, state.roster, host.agent, gone=False)
        elif state.roster is not None and state.phase == "running" and host.agent in state.roster.agents:
            state = _lose(state, state.roster, host.agent)
        elif state.phase == "gathering" and (state.roster is None or host.agent not in state.roster.agents):
            state = replace(state, hosts={name: h for name, h in state.hosts.items() if name != host.agent})
    return state


def _lose(state: Membership, roster: AttemptState, agent: str) -> Membership:
    known = {ended.end.rank for ended in roster.ends}
    there = [member for member in roster.members if member.agent == agent and member.status == "live"]
    ends = [worker_reports.lost(state, member) for member in there if member.rank not in known]
    members = tuple(replace(member, status="suspect") if member in there else member for member in roster.members)
    return replace(state, roster=replace(roster, members=members, ends=(*roster.ends, *ends)))


# ---- deciding --------------------------------------------------------------------------------------------------


def _advance(state: Membership, now: float) -> Membership:
    """One transition, if one is due; the same state otherwise."""
    match state.phase:
        case "gathering":
            return _gather(state, now)
        case "running" | "stopping":
            assert state.roster is not None
            watch = elastic.advance if state.settings.elastic is not None else _watch
            return watch(state, state.roster, now)
        case _:
            return state


def _gather(state: Membership, now: float) -> Membership:
    if state.stop is not None:
        return end_run(state, now, stopped_code(state), "stopped before its workers were started")
    ready = [host for host in state.hosts.values() if not (host.silent or host.leaving or host.undecided)]
    chief = _in_order(ready)[0] if ready else None
    if _enough(state, ready) and chief is not None and chief.master is not None:
        form = elastic.form if state.settings.elastic is not None else _form
        return form(state, _in_order(ready), chief.master, now)
    again = state.roster is not None
    if state.settings.elastic is not None and not again and elastic.could_begin(state, ready):
        return _begin_with_fewer(state, _in_order(ready), now)
    if state.could_begin_at is not None:
        return replace(state, could_begin_at=None)  # a host that was needed has left again
    if now - state.since > (state.settings.rejoin_wait_s if again else state.settings.gather_wait_s):
        reason = f"{len(ready)} of {state.settings.hosts_wanted} hosts {'came back' if again else 'joined'}"
        return end_run(state, now, 4 if again else 3, reason)
    return state


def _begin_with_fewer(state: Membership, ready: list[Host], now: float) -> Membership:
    """Begin after a wait, because each host that joins during training costs the others a regroup."""
    if state.could_begin_at is None:
        return replace(state, could_begin_at=now)
    patience_s, master = state.settings.begin_with_fewer_s, ready[0].master
    if patience_s is None or master is None or now - state.could_begin_at < patience_s:
        return state
    why = f"{len(ready)} of {state.settings.hosts_wanted} hosts are there, others may join"
    return elastic.form(replace(state, why=why), ready, master, now)


def _enough(state: Membership, ready: Sequence[Host]) -> bool:
    if state.settings.elastic is not None:
        return elastic.enough(state, ready)
    return len(ready) == state.settings.hosts_wanted


def _in_order(hosts: Sequence[Host]) -> list[Host]:
    """The coordinator's own host first, then by requested rank, then in order of joining."""
    return sorted(hosts, key=lambda h: (not h.local, h.host_rank if h.host_rank is not None else 2**31, h.order))


def _form(state: Membership, hosts: list[Host], master: tuple[str, int], now: float) -> Membership:
    agents = [host.agent for host in hosts for _ in range(host.slots)]
    members = tuple(
        Member(rank=rank, agent=agent, incarnation=state.next_incarnation + rank) for rank, agent in enumerate(agents)
    )
    return begun(state, members, tuple(host.agent for host in hosts), master, now)


def _watch(state: Membership, roster: AttemptState, now: float) -> Membership:
    if set(roster.cleared) >= set(roster.agents):
        return conclude(state, roster, now)
    missing = [state.hosts.get(agent) for agent in roster.agents if agent not in roster.cleared]
    if any(host is None or (host.silent and now - host.heard_at > state.settings.rejoin_wait_s) for host in missing):
        return give_up_on_silent(state, roster, set(roster.agents) - set(roster.cleared), now)
    # During a stop the agents' grace period applies; a worker that fails then must not cut it short.
    if state.phase == "running" and roster.ends and state.stop is None:
        return replace(state, phase="stopping", since=now)
    return state
