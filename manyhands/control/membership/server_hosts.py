"""Parameter servers in an elastic attempt: which hosts have them, and ending the attempt if one is lost. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from manyhands.control.membership.failure_policy import EndedWorker
from manyhands.control.membership.slots import accepts_workers
from manyhands.control.membership.state import AttemptState, Host, Membership
from manyhands.control.messages.agent_messages import HostReport
from manyhands.control.messages.failure import WorkerEnd

__all__ = ["backups_for", "failed_server", "have_servers", "include_server_hosts", "lost_server", "stop_without_server"]


def have_servers(state: Membership, hosts: Sequence[Host]) -> bool:
    """Whether these hosts have all the servers that any host is known to have."""
    known = {number for host in state.hosts.values() for number in host.servers}
    return {number for host in hosts for number in host.servers} >= known


def backups_for(state: Membership, agent: str) -> list[str]:
    """Endpoints where other hosts keep logs, starting with the next host, so that hosts choose different ones."""
    if agent not in state.hosts:  # it has left, and may still send a report
        return []
    own = state.hosts[agent].order
    others = [host for host in state.hosts.values() if host.agent != agent and host.backup and not host.silent]
    return [host.backup for host in sorted(others, key=lambda host: (host.order < own, host.order))]


def failed_server(roster: AttemptState, report: HostReport, now: float) -> EndedWorker | None:
    """A server of this attempt that its agent will not restart."""
    failed = report.failed_server
    if failed is None or failed.attempt != roster.attempt:
        return None
    return EndedWorker(end=failed.end, at=now - failed.ended_s_ago)


def lost_server(state: Membership, agent: str) -> EndedWorker | None:
    """A server that was lost with its host, if no other host has it."""
    host = state.hosts[agent]
    elsewhere = {number for other in state.hosts.values() if other.agent != agent for number in other.servers}
    for number in sorted(set(host.servers) - elsewhere):
        end = WorkerEnd(rank=number, role="server", host=host.name, pid=0, kind="lost")
        return EndedWorker(end=end, at=host.heard_at)
    return None


def stop_without_server(state: Membership, roster: AttemptState, now: float) -> Membership:
    """End the attempt: workers cannot continue without that server. During a stop, the grace period applies anyway."""
    if state.stop is not None or roster.failed_server is None:
        return state
    roster = replace(roster, ends=(roster.failed_server,), fatal=True)
    return replace(state, phase="stopping", since=now, roster=roster)


def include_server_hosts(state: Membership, roster: AttemptState, now: float) -> Membership:
    """A host that joined with only a server has no slot to be filled, but has to receive orders."""
    agents = [host.agent for host in state.hosts.values() if host.servers and accepts_workers(state, host.agent)]
    new = sorted(set(agents) - set(roster.agents))
    return replace(state, roster=replace(roster, agents=(*roster.agents, *new))) if new else state
