"""Requests of `mh status`, `mh stop` and `mh scale` to an agent, sent by `run_client`, and its reply: the status."""

from __future__ import annotations

from typing import Literal

from manyhands.comm.transport import Message
from manyhands.control.messages.agent_messages import CheckpointCommit, LentHost
from manyhands.control.messages.worker_messages import MessagePart

__all__ = ["MemberStatus", "ServerStatus", "Status", "StatusRequest"]


class StatusRequest(Message, frozen=True, kw_only=True):
    what: Literal["status", "stop", "scale"]
    workers: int | None = None
    servers: int | None = None
    """scale: how many there should be; None: unchanged."""


class MemberStatus(MessagePart, frozen=True, kw_only=True):
    rank: int
    """-1: it is not in the newest generation: not yet, or no longer."""
    pid: int
    status: str
    """live, done, failed, left; in an elastic run also starting, joining, leaving."""
    step: int | None
    phase: str
    age_s: float
    slot: int | None = None
    """In elastic runs only."""
    generation: str = ""
    """The generation that its messages are for."""
    call: int = 0


class ServerStatus(MessagePart, frozen=True, kw_only=True):
    server: int
    pid: int
    status: str
    """starting, live, ending; once it has ended: failed, left."""
    phase: str
    age_s: float
    """Since its last message."""
    step: int | None = None
    """Number of updates that a parameter server has applied. None: it has not reported one yet."""
    deaths: int = 0
    role: str = "server"


class Status(Message, frozen=True, kw_only=True):
    run: str
    run_dir: str | None
    generation: str | None
    attempt: int
    hosts: int
    host: str
    stop: str | None
    coordinator_pid: int
    template_pid: int = 0
    """The process that workers of this host are forked from; 0: there is none."""
    members: list[MemberStatus]
    servers: list[ServerStatus] = []
    spare: ServerStatus | None = None
    """The spare server, which takes the number of one that dies: starting, or ready."""
    lent: list[LentHost] = []
    """The run's hosts, if this agent is the first one's."""
    committed: CheckpointCommit | None = None
    elastic: tuple[int, int] | None = None
    workers_wanted: int | None = None
    servers_wanted: int | None = None
    """The numbers of the latest `mh scale`."""
    run_call: int = 0
