"""What a launch is asked to do, and what it may tell the person watching.

The command line, `mh.launch` and a script that becomes its own launcher all fill in one `LaunchRequest` and hand it to
`control.agent.agent.run_agent`. Nothing here starts, opens or reads anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from manyhands.events import Event

if TYPE_CHECKING:
    from manyhands.control.messages.failure import Failure

__all__ = ["Display", "JoinTicket", "LaunchRequest", "WorkerCommand"]


class WorkerCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every worker runs, as a vector; no shell ever sees it."""

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
    """The run's name; empty: whichever run holds this key."""
    key: str
    """The run's 32-byte key in hexadecimal. Never put it on a command line or into an environment variable."""


class LaunchRequest(msgspec.Struct, kw_only=True):
    command: WorkerCommand | None
    """None only with `join`: the command then comes from the run that is joined."""
    workers: int = 1
    """Workers on this host. 0: it has a server, or only the coordinator."""
    threads: int | None = None
    """OMP_NUM_THREADS of each worker. None: as inherited, else cores / workers."""
    run_dir: str | None = None
    overwrite: bool = False
    group_readable: bool = False
    elastic: tuple[int, int] | None = None
    """The least and the most workers, over all hosts; the run goes on as they come, go and die. None: all or none."""
    servers: int = 0
    """Parameter servers of the run; they are on its first host, unless they are tasks of a cluster."""
    server_tasks: bool = False
    server: int | None = None
    """This host is such a task: it has the server of this number and no worker."""
    server_address: tuple[str, int] | None = None
    """Where the cluster has that server."""
    heartbeat_s: float = 3.0
    hang_s: float = 10.0
    """Elastic runs only: when a silent worker, and one that gets nowhere, are taken for hung."""
    hosts_wanted: int = 1
    begin_with_fewer_s: float | None = None
    """Elastic runs only: how long hosts that are enough to begin wait for the others. None: until all are there."""
    listen: str | None = None
    """ADDR or ADDR:PORT that other hosts reach this one at. For a joining host: the address its tensors travel by."""
    join: JoinTicket | None = None
    key: bytes | None = None
    """The run's key, where the user brought one (MANYHANDS_KEY_FILE); else one is made."""
    insecure_data_plane: bool = False
    max_restarts: int = 3
    always_restart: bool = False
    """torchrun's rule: any failure restarts while the budget lasts, also an exception before the first step."""
    grace_s: float = 30.0
    flags: dict[str, Any] = {}
    host_rank: int | None = None
    """torchrun's --node-rank. 0 holds the coordinator at `master`, the others join there."""
    master: tuple[str, int] | None = None
    """Where host_rank 0 listens and the others connect: torchrun's --master-addr and -port, TF_CONFIG's chief."""
    join_file: str | None = None
    """Where the join file is written. None: in the run's private directory; its path is said on the display."""
    join_timeout_s: float = 300.0
    """How long a joining host waits for the run to answer, and the first host for the others."""
    lost_after_s: float = 15.0
    """A joined host whose first host is silent for this long ends its workers and itself."""
    store_after_s: float = 10.0
    """A TCPStore listens at MASTER_PORT when a script asks for it; unasked, after this long without a word from any
    worker. torch's clients keep trying for minutes."""
    environment: dict[str, str] = {}
    """What workers inherit: the launcher's own environment as `spec.load` read it, plus what the caller adds
    (allocator settings). The agent adds the seat, torchrun's contract and OMP_NUM_THREADS."""
    resume: str | None = None
    """The command that resumes this run, for the failure block; "{run_dir}" in it is replaced."""
    result_file: str | None = None
    """kind "call": the chief's return value is written here as JSON."""


class Display(Protocol):
    """What the launcher shows. Calls come from the agent's only thread: an implementation must not block."""

    def event(self, event: Event) -> None: ...

    def output(self, rank: int, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        """Bytes the chief wrote. The other workers' go to their log files only."""

    def say(self, line: str) -> None:
        """A line of the launcher itself."""

    def failure(self, block: Failure) -> None: ...

    def close(self) -> None: ...
