"""Turns the membership state into the orders for each host. Pure; start reading at `orders_for`."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from manyhands.control.membership.server_hosts import backups_for
from manyhands.control.membership.slots import bounds
from manyhands.control.membership.state import AttemptState, Host, Member, Membership
from manyhands.control.membership.worker_reports import call_of, finished, living
from manyhands.control.messages.agent_messages import GroupMember, HostPlan, LentHost, Orders, PlannedWorker
from manyhands.control.messages.launch_request import HostSeat
from manyhands.control.messages.worker_messages import WorkerPosition

__all__ = ["orders_for"]


def orders_for(state: Membership, agent: str, now: float, *, with_job: bool = False) -> Orders:
    """The state that this host should be in."""
    roster, outcome = state.roster, state.outcome
    orders = Orders(
        term=state.term,
        revision=state.revision,
        run=state.settings.run,
        do="wait",
        stop=state.stop,
        stop_signal=state.stop_signal,
        run_dir=state.run_dir,
        log_base=state.log_base,
        job=state.settings.job if with_job else None,
        generation=roster.generation if roster else None,
        hosts=_lent(state, now) if agent in state.hosts and state.hosts[agent].local else [],
    )
    if outcome is not None:
        return replace(orders, do="end", exit_code=outcome.exit_code, failure=outcome.failure, note=outcome.reason)
    if state.phase == "gathering":
        return replace(orders, waiting_for=_missing(state))
    if roster is None or agent not in roster.agents:
        return orders
    elastic = state.settings.elastic is not None
    if state.phase == "stopping":
        return replace(orders, do="stop", well=elastic and finished(roster) and not roster.fatal)
    return replace(
        orders,
        do="run",
        plan=_elastic_plan(state, roster, agent) if elastic else _plan(roster, agent),
        positions=_elsewhere(roster, agent, now),
        run_call=call_of(roster) if elastic else 0,
    )


def _lent(state: Membership, now: float) -> list[LentHost]:
    return [
        LentHost(
            agent=host.agent,
            name=host.name,
            slots=host.slots,
            local=host.local,
            silent=host.silent,
            leaving=host.leaving,
            seat=_aged(host.seat, now - host.heard_at),
        )
        for host in sorted(state.hosts.values(), key=lambda host: host.order)
    ]


def _aged(seat: HostSeat | None, seconds: float) -> HostSeat | None:
    if seat is None or seat.seconds_left is None:
        return seat
    return replace(seat, seconds_left=max(0.0, seat.seconds_left - seconds))


def _missing(state: Membership) -> str:
    wanted = state.settings.hosts_wanted
    ready = [host for host in state.hosts.values() if not host.silent and not host.undecided]
    if len(ready) >= wanted:
        return ""
    ranks = {host.host_rank for host in ready}
    missing = sorted(set(range(wanted)) - ranks) if None not in ranks else []
    names = f"; missing: {', '.join(f'host {rank}' for rank in missing)}" if ready and missing else ""
    joined = f"{len(ready)} of {wanted} hosts {'has' if len(ready) == 1 else 'have'} joined{names}"
    if state.could_begin_at is not None:
        return f"{joined}; training begins soon without them, and they may join later"
    if state.settings.begin_with_fewer_s is not None and (needed := _needed(state, ready)):
        return f"{joined}; needed to begin: {' and '.join(needed)}"
    return joined


def _needed(state: Membership, ready: Sequence[Host]) -> list[str]:
    """What an elastic run still needs to begin without all of its hosts."""
    there = {number for host in ready for number in host.servers}
    servers = sorted(set(range(state.settings.job.servers)) - there)
    workers = bounds(state)[0] - sum(host.slots for host in ready)
    return [
        *(f"server {number}" for number in servers),
        *([f"{workers} more worker{'' if workers == 1 else 's'}"] if workers > 0 else []),
    ]


def _plan(roster: AttemptState, agent: str) -> HostPlan:
    mine = [member for member in roster.members if member.agent == agent]
    return HostPlan(
        generation=roster.generation,
        attempt=roster.attempt,
        world_size=len(roster.members),
        num_hosts=len(roster.agents),
        host=roster.agents.index(agent),
        first_rank=mine[0].rank,
        incarnations=[member.incarnation for member in mine],
        master=roster.master,
        why=roster.why,
    )


def _elastic_plan(state: Membership, roster: AttemptState, agent: str) -> HostPlan:
    """Like `_plan`, with the processes that should exist. A host may have no member of the group."""
    mine = [member for member in roster.members if member.agent == agent]
    number = {name: index for index, name in enumerate(roster.agents)}
    return HostPlan(
        generation=roster.generation,
        attempt=roster.attempt,
        world_size=len(roster.members),
        num_hosts=len({member.agent for member in roster.members}),
        host=number[agent],
        first_rank=mine[0].rank if mine else -1,
        incarnations=[member.incarnation for member in mine],
        master=roster.master,
        why=roster.why,
        workers=[
            *(_planned(member, joining=False) for member in mine if member.status != "dead"),
            *(_planned(worker, joining=True) for worker in roster.joining if worker.agent == agent),
        ],
        dismissed=[worker.incarnation for worker in roster.dismissed if worker.agent == agent],
        group=[GroupMember(incarnation=m.incarnation, slot=m.slot, host=number[m.agent]) for m in roster.members],
        lost=roster.lost,
        call=roster.call,
        servers=state.settings.job.servers if state.servers_wanted is None else state.servers_wanted,
        servers_at={number: at for host in state.hosts.values() for number, at in host.servers.items()},
        backups=backups_for(state, agent),
        living=living(roster),
    )


def _planned(worker: Member, *, joining: bool) -> PlannedWorker:
    return PlannedWorker(slot=worker.slot, incarnation=worker.incarnation, joining=joining)


def _elsewhere(roster: AttemptState, agent: str, now: float) -> dict[int, WorkerPosition]:
    return {
        member.rank: WorkerPosition(
            step=member.report.step, phase=member.report.phase, age_s=member.report.age_s + now - member.reported_at
        )
        for member in roster.members
        if member.agent != agent and member.report.step is not None
    }
