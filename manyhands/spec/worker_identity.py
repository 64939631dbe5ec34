"""Identity of a worker or server process (rank, generation, endpoints), passed by its agent through the environment.

The agent writes it with `identity_environment`; the process reads it back with `spec.load.own_identity`. Plain data:
nothing here opens the endpoint or the pipe that it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from manyhands.errors import SpecError

__all__ = [
    "IDENTITY_VARIABLES",
    "SPARE",
    "Group",
    "WorkerIdentity",
    "identity_environment",
    "parse_identity",
    "server_endpoint",
]

SPARE = -1
"""Server number of a spare: it has none yet, and takes over the number of a server that dies."""


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The members of one generation, and this worker's position in it."""

    generation: str
    rank: int
    """-1: this worker is not a member."""
    world_size: int
    local_rank: int
    local_world_size: int
    host: int
    num_hosts: int
    slots: list[int]
    """Slot of each member, by rank."""
    hosts: list[int]
    """Host number of each member, by rank."""
    lost: bool = False
    """A member of the previous generation was lost: its other members switch to this generation at once."""
    call: int = 0
    """If new workers join: the public call that they wait in."""


class WorkerIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    agent: str
    """ipc:// endpoint of the agent."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: int = 0
    num_hosts: int = 1
    generation: str
    """"term.counter"; never repeated."""
    incarnation: int
    attempt: int = 1
    """1, 2, …: restarts + 1."""
    data_address: str = "127.0.0.1"
    """The address that collectives bind to on this host."""
    lifeline_fd: int | None = None
    """A pipe to the agent: the worker writes its failure record there, and end-of-file means that it died."""
    memory_fd: int | None = None
    """The host's shared memory, in which the agent allocates regions."""
    slot: int = 0
    """In an elastic run: number of this worker that survives restarts; a replacement gets the same."""
    most_workers: int = 0
    """Above 0: the run is elastic, and this is its upper bound."""
    least_workers: int = 0
    """With fewer workers, an elastic run waits for more between steps."""
    joining: bool = False
    """Started during a running attempt: not yet in a group, and its generation is empty."""
    flags: dict[str, Any] = {}
    """Command-line settings by dotted key ("run.seed"); they override constructor arguments."""
    role: Literal["worker", "server"] = "worker"
    """A server is in no group: its rank is -1, and its generation empty."""
    server: int = 0
    """Number of this server, or `SPARE`. A replacement gets the same."""
    num_servers: int = 0
    servers: str = ""
    """Server endpoints, for `server_endpoint`: a prefix on this host, or one tcp:// endpoint per server."""
    listen: str = ""
    """tcp:// endpoint at which other hosts reach this server, under CURVE; empty in a run of one host."""

    @property
    def is_chief(self) -> bool:
        return self.rank == 0

    @property
    def is_server(self) -> bool:
        return self.role == "server"

    @property
    def is_spare(self) -> bool:
        return self.is_server and self.server == SPARE

    def group(self) -> Group:
        """The group that this process starts in. A static run has only this one, with equally many workers per host."""
        per_host, no_group = self.local_world_size, self.joining or self.is_server
        return Group(
            generation=self.generation,
            rank=-1 if no_group else self.rank,
            world_size=0 if no_group else self.world_size,
            local_rank=self.local_rank,
            local_world_size=per_host,
            host=self.host,
            num_hosts=self.num_hosts,
            slots=[] if no_group else list(range(self.world_size)),
            hosts=[] if no_group else [rank // per_host for rank in range(self.world_size)],
        )


_VARIABLES = {
    "agent": "MANYHANDS_AGENT",
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "host": "MANYHANDS_HOST",
    "num_hosts": "MANYHANDS_NUM_HOSTS",
    "generation": "MANYHANDS_GENERATION",
    "incarnation": "MANYHANDS_INCARNATION",
    "attempt": "MANYHANDS_ATTEMPT",
    "data_address": "MANYHANDS_DATA_ADDRESS",
    "lifeline_fd": "MANYHANDS_LIFELINE_FD",
    "memory_fd": "MANYHANDS_MEMORY_FD",
    "slot": "MANYHANDS_SLOT",
    "most_workers": "MANYHANDS_MOST_WORKERS",
    "least_workers": "MANYHANDS_LEAST_WORKERS",
    "joining": "MANYHANDS_JOINING",
    "flags": "MANYHANDS_FLAGS",
    "role": "MANYHANDS_ROLE",
    "server": "MANYHANDS_SERVER_NUMBER",
    "num_servers": "MANYHANDS_NUM_SERVERS",
    "servers": "MANYHANDS_SERVER_ENDPOINTS",
    "listen": "MANYHANDS_SERVER_LISTEN",
}

IDENTITY_VARIABLES = frozenset(_VARIABLES.values())


def server_endpoint(servers: str, number: int) -> str:
    """Endpoint of one server from `WorkerIdentity.servers`: a comma-separated list, or a prefix of the number."""
    return servers.split(",")[number] if servers.startswith("tcp:") else f"{servers}{number}"


def identity_environment(identity: WorkerIdentity) -> dict[str, str]:
    """The environment variables that carry this identity; `parse_identity` reads them back."""
    values = {_VARIABLES[name]: getattr(identity, name) for name in _VARIABLES if name != "flags"}
    environment = {variable: str(value) for variable, value in values.items() if value is not None}
    environment[_VARIABLES["flags"]] = msgspec.json.encode(identity.flags).decode()
    return environment


def parse_identity(environ: Mapping[str, str]) -> WorkerIdentity | None:
    """The identity in these variables, or None if no agent started this process."""
    if not environ.get(_VARIABLES["agent"]):
        return None
    raw: dict[str, Any] = {name: environ[variable] for name, variable in _VARIABLES.items() if variable in environ}
    try:
        raw["flags"] = msgspec.json.decode(raw.get("flags", "{}"))
        return msgspec.convert(raw, WorkerIdentity, strict=False)
    except msgspec.MsgspecError as error:
        raise SpecError(
            f"The environment variables of this worker's identity are invalid: {error}.",
            where="MANYHANDS_AGENT and the variables set with it",
            fix=["let `mh run` start workers; to run the script alone, unset MANYHANDS_AGENT"],
        ) from error
