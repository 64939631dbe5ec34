"""What membership has decided, as the orders that each host is sent. Pure; start reading at `orders_for`."""

from __future__ import annotations

from msgspec.structs import replace

from manyhands.control.messages import Orders, Plan, WorkerPosition
from manyhands.control.roster import Membership, Roster

__all__ = ["orders_for"]


def orders_for(state: Membership, agent: str, now: float, *, with_job: bool = False) -> Orders:
    """How this host should stand."""
    roster, outcome = state.roster, state.outcome
    orders = Orders(
        term=state.term,
        run=state.settings.run,
        do="wait",
        stop=state.stop,
        stop_signal=state.stop_signal,
        run_dir=state.run_dir,
        log_base=state.log_base,
        job=state.settings.job if with_job else None,
        generation=roster.generation if roster else None,
    )
    if outcome is not None:
        return replace(orders, do="end", exit_code=outcome.exit_code, failure=outcome.failure, note=outcome.reason)
    if state.phase == "gathering":
        return replace(orders, waiting_for=_missing(state))
    if roster is None or agent not in roster.agents:
        return orders
    if state.phase == "stopping":
        return replace(orders, do="stop")
    return replace(orders, do="run", plan=_plan(roster, agent), positions=_elsewhere(roster, agent, now))


def _missing(state: Membership) -> str:
    wanted = state.settings.hosts_wanted
    ready = [host for host in state.hosts.values() if not host.silent]
    if len(ready) >= wanted:
        return ""
    ranks = {host.host_rank for host in ready}
    missing = sorted(set(range(wanted)) - ranks) if None not in ranks else []
    names = f"; missing: {', '.join(f'host {rank}' for rank in missing)}" if ready and missing else ""
    return f"{len(ready)} of {wanted} hosts {'has' if len(ready) == 1 else 'have'} joined{names}"


def _plan(roster: Roster, agent: str) -> Plan:
    mine = [member for member in roster.members if member.agent == agent]
    return Plan(
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


def _elsewhere(roster: Roster, agent: str, now: float) -> dict[int, WorkerPosition]:
    return {
        member.rank: WorkerPosition(step=member.step, phase=member.phase, age_s=now - member.moved_at)
        for member in roster.members
        if member.agent != agent and member.step is not None
    }
