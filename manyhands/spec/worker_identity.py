"""A seat: who a worker is in the current generation, or which server, as its agent says it through the environment.

The agent writes a seat with `seat_environment`; the process reads it back with `spec.load.seat`. Plain data:
nothing here opens the endpoint or the pipe that a seat names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from manyhands.errors import SpecError

__all__ = ["SEAT_VARIABLES", "SPARE", "Group", "Seat", "parse_seat", "seat_environment", "server_endpoint"]

SPARE = -1
"""In place of a server's number: it has none yet, and takes that of one that dies."""


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The members of one generation, as one of them sees it."""

    generation: str
    rank: int
    """-1: this worker is not in it."""
    world_size: int
    local_rank: int
    local_world_size: int
    host: int
    num_hosts: int
    slots: list[int]
    """Of all members, by rank."""
    hosts: list[int]
    """The same of the numbers of their hosts."""
    lost: bool = False
    """A member of the generation before is gone: whoever is in that one goes over at once."""
    call: int = 0
    """With newcomers: the public call that they wait in."""


class Seat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    """A pipe to the agent: the failure record goes there, and its end tells the agent of a death."""
    memory_fd: int | None = None
    """The host's shared memory, of which the agent allots regions."""
    slot: int = 0
    """In an elastic run: the place that this process fills; a replacement takes the same."""
    most_workers: int = 0
    """Above 0: the run is elastic, and this is its upper bound."""
    least_workers: int = 0
    """With fewer than these, an elastic run waits for others between steps."""
    joining: bool = False
    """Started into a running attempt: in no group yet, and its generation is empty."""
    flags: dict[str, Any] = {}
    """Command-line settings by dotted key ("run.seed"); they win over constructor arguments."""
    role: Literal["worker", "server"] = "worker"
    """A server is in no group: its rank is -1, and its generation empty."""
    server: int = 0
    """Of a server: its number, or `SPARE`. A replacement takes the same."""
    num_servers: int = 0
    servers: str = ""
    """Where the servers are, for `server_endpoint`: on this host, or one tcp:// endpoint for each."""
    listen: str = ""
    """Of a server: the tcp:// endpoint at which other hosts reach it, under CURVE; empty where there are none."""

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
        """The group that this process is started in. A static run has no other; hosts have as many workers each."""
        here, in_none = self.local_world_size, self.joining or self.is_server
        return Group(
            generation=self.generation,
            rank=-1 if in_none else self.rank,
            world_size=0 if in_none else self.world_size,
            local_rank=self.local_rank,
            local_world_size=here,
            host=self.host,
            num_hosts=self.num_hosts,
            slots=[] if in_none else list(range(self.world_size)),
            hosts=[] if in_none else [rank // here for rank in range(self.world_size)],
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

SEAT_VARIABLES = frozenset(_VARIABLES.values())


def server_endpoint(servers: str, number: int) -> str:
    """Of one server, by a seat's `servers`: endpoints separated by commas, or what comes before the number of each."""
    return servers.split(",")[number] if servers.startswith("tcp:") else f"{servers}{number}"


def seat_environment(seat: Seat) -> dict[str, str]:
    """The variables a process on this seat is started with; `parse_seat` reads them back."""
    values = {_VARIABLES[name]: getattr(seat, name) for name in _VARIABLES if name != "flags"}
    environment = {variable: str(value) for variable, value in values.items() if value is not None}
    environment[_VARIABLES["flags"]] = msgspec.json.encode(seat.flags).decode()
    return environment


def parse_seat(environ: Mapping[str, str]) -> Seat | None:
    """The seat in these variables, or None where no agent started this process."""
    if not environ.get(_VARIABLES["agent"]):
        return None
    raw: dict[str, Any] = {name: environ[variable] for name, variable in _VARIABLES.items() if variable in environ}
    try:
        raw["flags"] = msgspec.json.decode(raw.get("flags", "{}"))
        return msgspec.convert(raw, Seat, strict=False)
    except msgspec.MsgspecError as error:
        raise SpecError(
            f"The variables of this worker's seat are broken: {error}.",
            where="MANYHANDS_AGENT and its companions in the environment",
            fix=["let `mh run` start workers; to run the script alone, unset MANYHANDS_AGENT"],
        ) from error
