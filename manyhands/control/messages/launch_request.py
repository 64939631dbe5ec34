"""What a launch is asked to do, and the interface through which it shows progress to the user.

The command line, `mh.launch` and a script that becomes its own launcher all fill in one `LaunchRequest` and hand it to
`control.agent.agent.run_agent`. This module does no I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from manyhands.events import Event

if TYPE_CHECKING:
    from manyhands.control.messages.failure import Failure

__all__ = ["Display", "HostSeat", "JoinTicket", "LaunchRequest", "PlacerTimes", "WorkerCommand"]


class WorkerCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every worker runs, as an argument vector; no shell is involved."""

    kind: Literal["script", "module", "call"]
    target: str
    """script: a path. module: a dotted name. call: "module:qualname" or "path.py:qualname"."""
    args: list[str] = []
    """script, module: its arguments. call: one JSON document, {"args": [...], "kwargs": {...}}."""


class JoinTicket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What another host needs to join; the content of a join file (see `control.security.keys`)."""

    address: str
    """ADDR:PORT of the coordinator."""
    run: str
    """The run's name; empty: any run that has this key."""
    key: str
    """The run's 32-byte key in hexadecimal. Never put it on a command line or into an environment variable."""


class HostSeat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a placer (Slurm, MPI, Ray, Kubernetes, ssh) told the agent that it placed on a host."""

    placer: str
    job: str = ""
    node: str = ""
    """The placer's name of the host; empty: its host name."""
    seconds_left: float | None = None
    """When it was reported: how long the placer lets this agent run. None: unknown, or without limit."""


class PlacerTimes(Protocol):
    """How long a placer lets an agent run, as far as it has said so."""

    deadline: float | None
    """By `time.monotonic`."""
    kill_after_s: float | None
    """How long after its notice it kills."""

    def poll(self, now: float) -> bool:
        """True, once: it has said what it will say. Must not block: it is called from the agent's loop."""

    def close(self) -> None: ...


class LaunchRequest(msgspec.Struct, kw_only=True):
    command: WorkerCommand | None
    """None only with `join`: the joined run then supplies the command."""
    workers: int = 1
    """Number of workers on this host. 0: it runs a server, or only the coordinator."""
    threads: int | None = None
    """OMP_NUM_THREADS of each worker. None: as inherited, else cores / workers."""
    run_dir: str | None = None
    overwrite: bool = False
    group_readable: bool = False
    elastic: tuple[int, int] | None = None
    """The least and the most workers over all hosts, between which workers may join, leave and die while the run
    continues. None: a fixed number; the run restarts as a whole."""
    servers: int = 0
    """Number of parameter servers; they run on the first host, unless they are tasks of a cluster."""
    server_tasks: bool = False
    server: int | None = None
    """This host is such a task: it runs the server with this number, and no worker."""
    server_address: tuple[str, int] | None = None
    """The address of that server in the cluster."""
    heartbeat_s: float = 3.0
    hang_s: float = 10.0
    """Elastic runs only: after how long a worker without heartbeats, or without progress, counts as hung."""
    hosts_wanted: int = 1
    begin_with_fewer_s: float | None = None
    """Elastic runs only: how long hosts that suffice to begin wait for the rest. None: until all have joined."""
    listen: str | None = None
    """ADDR or ADDR:PORT at which other hosts reach this one. For a joining host: its address for tensor traffic."""
    join: JoinTicket | None = None
    key: bytes | None = None
    """The run's key, if the user supplies one (MANYHANDS_KEY_FILE); otherwise one is generated."""
    insecure_data_plane: bool = False
    max_restarts: int = 3
    always_restart: bool = False
    """torchrun's rule: any failure causes a restart while the budget lasts, even an exception before the first step."""
    grace_s: float = 30.0
    flags: dict[str, Any] = {}
    host_rank: int | None = None
    """torchrun's --node-rank. 0 runs the coordinator at `master`; the other hosts connect to it."""
    master: tuple[str, int] | None = None
    """Where host_rank 0 listens and the other hosts connect: torchrun's --master-addr and -port, TF_CONFIG's chief."""
    seat: HostSeat | None = None
    """The placer that placed this agent; its `seconds_left` counts from the start of the agent."""
    times: PlacerTimes | None = None
    lifeline: bool = False
    """Standard input stays open as long as what placed this agent wants it: its end counts as one SIGTERM."""
    join_file: str | None = None
    """Path of the join file to write. None: in the run's private directory; the display shows the path."""
    removes_join_file: bool = False
    """The join file is removed once all wanted hosts have joined: its name belongs to this start of a job."""
    join_hint: str = ""
    """Said with what the first host waits for, when hosts have not joined for a while."""
    own_command: WorkerCommand | None = None
    """With `join`: what was typed on this host, which has to be what the run's first host runs."""
    same_program: bool = False
    """Hosts whose user starts each of them (torchrun's --node-rank): their scripts have to be equal."""
    join_timeout_s: float = 300.0
    """How long a joining host waits for the run to answer, and the first host for the other hosts."""
    lost_after_s: float = 15.0
    """A joined host that receives nothing from the first host for this long ends its workers and itself."""
    store_after_s: float = 10.0
    """A TCPStore listens at MASTER_PORT once a script needs it; otherwise, after this long without a message from any
    worker. torch's clients keep trying for minutes."""
    environment: dict[str, str] = {}
    """What workers inherit: the launcher's environment as `spec.load` read it, plus what the caller adds (allocator
    settings). The agent adds the worker's identity, torchrun's variables and OMP_NUM_THREADS."""
    forks: bool = False
    """Workers are forked from a process that has imported torch. False: each is a new interpreter."""
    resume: str | None = None
    """The command that resumes this run, for the failure block; "{run_dir}" in it is replaced."""
    result_file: str | None = None
    """kind "call": the chief's return value is written here as JSON."""


class Display(Protocol):
    """What the launcher shows. Calls come from the agent's only thread: an implementation must not block."""

    def event(self, event: Event) -> None: ...

    def output(self, rank: int, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        """Bytes that the chief wrote. Output of other workers goes to their log files only."""

    def say(self, line: str) -> None:
        """A line from the launcher itself."""

    def failure(self, block: Failure) -> None: ...

    def close(self) -> None: ...
