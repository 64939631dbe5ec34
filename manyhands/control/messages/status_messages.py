"""What a person asks an agent, by way of `run_client`, and what the agent answers: how its part of the run stands."""

from __future__ import annotations

from typing import Literal

from manyhands.comm.transport import Message
from manyhands.control.messages.agent_messages import Commit
from manyhands.control.messages.worker_messages import Value

__all__ = ["Ask", "MemberStatus", "ServerStatus", "Status"]


class Ask(Message, frozen=True, kw_only=True):
    what: Literal["status", "stop", "scale"]
    workers: int | None = None
    servers: int | None = None
    """scale: how many there should be; None: as before."""


class MemberStatus(Value, frozen=True, kw_only=True):
    rank: int
    """-1: it is not in the newest generation (yet, or any more)."""
    pid: int
    status: str
    """live, done, failed, left; of an elastic run's worker also starting, joining, leaving."""
    step: int | None
    phase: str
    age_s: float
    slot: int | None = None
    """Of an elastic run's worker."""
    generation: str = ""
    """The one that it speaks for."""
    call: int = 0


class ServerStatus(Value, frozen=True, kw_only=True):
    server: int
    pid: int
    status: str
    """starting, live, ending; of one that has ended: failed, left."""
    phase: str
    age_s: float
    """Since it was last heard."""
    step: int | None = None
    """Of a parameter server: how many updates it has applied. None: it has not said so far."""
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
    members: list[MemberStatus]
    servers: list[ServerStatus] = []
    spare: ServerStatus | None = None
    """A server that waits for the number of one that dies: starting, or ready."""
    committed: Commit | None = None
    elastic: tuple[int, int] | None = None
    workers_wanted: int | None = None
    servers_wanted: int | None = None
    """What `mh scale` said last."""
    run_call: int = 0
