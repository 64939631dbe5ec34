"""What parameter servers mean to an elastic attempt: which hosts have them, and that it ends without one. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from manyhands.control.membership.failure_policy import Ended
from manyhands.control.membership.slots import open_to
from manyhands.control.membership.state import Host, Membership, Roster
from manyhands.control.messages.agent_messages import HostReport
from manyhands.control.messages.failure import WorkerEnd

__all__ = ["backups_for", "enlist", "failed_server", "have_servers", "lost_server", "miss_server"]


def have_servers(state: Membership, hosts: Sequence[Host]) -> bool:
    """Whether these hosts have all the servers that any host is known to have."""
    known = {number for host in state.hosts.values() for number in host.servers}
    return {number for host in hosts for number in host.servers} >= known


def backups_for(state: Membership, agent: str) -> list[str]:
    """Where other hosts keep logs, from the next host on in their order: so that not all hosts have the same."""
    if agent not in state.hosts:  # it has left, and may still ask
        return []
    own = state.hosts[agent].order
    others = [host for host in state.hosts.values() if host.agent != agent and host.backup and not host.silent]
    return [host.backup for host in sorted(others, key=lambda host: (host.order < own, host.order))]


def failed_server(roster: Roster, report: HostReport, now: float) -> Ended | None:
    """One of this attempt that its agent does not start again."""
    failed = report.failed_server
    if failed is None or failed.attempt != roster.attempt:
        return None
    return Ended(end=failed.end, at=now - failed.ended_s_ago)


def lost_server(state: Membership, agent: str) -> Ended | None:
    """One that is gone with its host, if no other host has come with it."""
    host = state.hosts[agent]
    elsewhere = {number for other in state.hosts.values() if other.agent != agent for number in other.servers}
    for number in sorted(set(host.servers) - elsewhere):
        end = WorkerEnd(rank=number, role="server", host=host.name, pid=0, kind="lost")
        return Ended(end=end, at=host.heard_at)
    return None


def miss_server(state: Membership, roster: Roster, now: float) -> Membership:
    """Workers get nowhere without a server that is not started again. In a stop, their time to end runs anyway."""
    if state.stop is not None or roster.failed_server is None:
        return state
    roster = replace(roster, ends=(roster.failed_server,), fatal=True)
    return replace(state, phase="stopping", since=now, roster=roster)


def enlist(state: Membership, roster: Roster, now: float) -> Membership:
    """A host that came with a server has no slot to be filled, and gets its orders all the same."""
    agents = [host.agent for host in state.hosts.values() if host.servers and open_to(state, host.agent)]
    new = sorted(set(agents) - set(roster.agents))
    return replace(state, roster=replace(roster, agents=(*roster.agents, *new))) if new else state
