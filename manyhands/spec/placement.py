"""Decides how many workers this host has, which host of how many it is, and where the coordinator listens.

The input is our own settings, torchrun's flags with torchrun's meaning, a TF_CONFIG task, or the seat that Slurm or
MPI gave this process. Pure: the machine's
resources are passed in as a `Machine`; keys, sockets and processes are handled elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from manyhands.errors import ClusterError, SpecError
from manyhands.spec.addresses import Address, is_loopback, parse_task_address
from manyhands.spec.cluster import ClusterTask
from manyhands.spec.load import flag_name
from manyhands.spec.run import LaunchSection
from manyhands.spec.seat import Seat

__all__ = [
    "IGNORED_FLAGS",
    "TORCHRUN_FLAGS",
    "Machine",
    "Placement",
    "from_cluster",
    "from_cluster_with_servers",
    "from_seat",
    "from_settings",
    "from_torchrun",
]

DEFAULT_PORT = 29500
"""torchrun's, for --master-port and for a --rdzv-endpoint without a port."""

IGNORED_FLAGS = {
    "rdzv_id": "runs are identified by their key",
    "role": "workers have no roles; ROLE_NAME is default",
    "rdzv_conf": "the coordinator has no such settings",
    "monitor_interval": "the agent notices at once when a worker dies",
    "start_method": "workers are always fresh processes",
    "event_log_handler": "events go to the run directory",
    "log_dir": "logs go to the run directory; --run-dir moves it",
    "redirects": "output always goes to the run directory's logs",
    "tee": "rank 0 is shown, every rank is in the run directory's logs",
    "local_ranks_filter": "rank 0 is shown, `mh logs --rank` shows the others",
    "signals_to_handle": "SIGINT, SIGTERM and SIGUSR1 are handled",
    "shutdown_timeout": "use --grace",
    "numa_binding": "workers are not bound to cores",
}
"""torchrun's flags that change nothing here, and why."""

TORCHRUN_FLAGS = (
    *("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "standalone"),
    *("rdzv_backend", "rdzv_endpoint", "local_addr", *IGNORED_FLAGS),
)


class Machine(msgspec.Struct, frozen=True):
    cores: int
    accelerators: int
    may_listen: Callable[[str, int], bool] = lambda host, port: False
    """Whether an address belongs to this machine and its port is free."""

    @property
    def default_workers(self) -> int:
        return self.accelerators or 1


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    workers: int
    num_hosts: int = 1
    host_rank: int | None = 0
    """None: the coordinator assigns the next free one."""
    coordinates: bool = True
    """Whether this host's agent starts the coordinator."""
    master: Address | None = None
    """Address of the coordinator, with several hosts."""
    listen: str | None = None
    """Address at which other hosts reach this one."""
    trains: bool = True
    """True if this task trains or runs a server; False if it only waits for the run to end."""
    evaluates: bool = False
    """This task, which does not train, evaluates the run's checkpoints."""
    total_workers: int | None = None
    """Over all hosts, if they have different numbers of workers."""
    elastic: tuple[int, int] | None = None
    """The least and the most workers, if the placer says so (`--nnodes 2:4`) and no setting does."""
    begins_with_fewer: bool = False
    """Workers of the cluster that are missing at the start may join later."""
    seat: Seat | None = None
    """With several hosts: what says who the others are."""
    server_tasks: int = 0
    """Number of parameter servers that are tasks of the cluster."""
    server: int | None = None
    """If this host is such a task: its server number; `server_address` is its address in the cluster."""
    server_address: Address | None = None
    announce: Address | None = None
    """Where tasks that do not train can check that the run is alive, if no coordinator listens for other hosts."""
    notes: list[str] = []
    """One line for each request that has no effect."""

    @property
    def beyond_loopback(self) -> bool:
        addresses = [self.master[0] if self.master else None, self.listen]
        return any(not is_loopback(address) for address in addresses if address)


def from_settings(launch: LaunchSection, machine: Machine) -> Placement:
    if launch.hosts_wanted > 1 and launch.listen is None:
        raise SpecError(
            f"{launch.hosts_wanted} hosts are requested, but they have no address at which to reach this one.",
            where="--hosts-wanted",
            fix=["--listen ADDR, this host's address on the network that connects them"],
        )
    workers = launch.workers or _most(launch, launch.hosts_wanted) or machine.default_workers
    if launch.hosts_wanted > 1 or (launch.elastic is not None and launch.listen is not None):
        return Placement(workers=workers, num_hosts=launch.hosts_wanted, listen=launch.listen)
    ignored = ["--listen is ignored in a run of one host; --hosts-wanted N makes it a run of several."]
    return Placement(workers=workers, notes=ignored if launch.listen else [])


def from_seat(seat: Seat, launch: LaunchSection, machine: Machine) -> Placement:
    """Each task of a job is a host of the run: the first one coordinates, the others find its address by the seat."""
    num_hosts, rank = seat.num_hosts, seat.host_rank
    assert num_hosts is not None and rank is not None
    if launch.hosts_wanted not in (1, num_hosts):
        raise SpecError(
            f"{launch.hosts_wanted} hosts are requested, but {seat.command} has started this command on {num_hosts}.",
            where="--hosts-wanted",
            fix=["no --hosts-wanted", f"--hosts-wanted {num_hosts}"],
        )
    workers = launch.workers or _most(launch, num_hosts) or machine.default_workers
    _check_elastic(launch, workers, num_hosts, seat.command)
    return Placement(
        workers=workers,
        num_hosts=num_hosts,
        host_rank=rank,
        coordinates=rank == 0,
        listen=launch.listen if rank == 0 else None,
        seat=seat,
    )


def _most(launch: LaunchSection, num_hosts: int) -> int | None:
    """Without an explicit number of workers, an elastic run starts with its upper bound."""
    return max(1, launch.elastic[1] // num_hosts) if launch.elastic else None


def _check_elastic(launch: LaunchSection, workers: int, num_hosts: int, where: str) -> None:
    """Refuse numbers of workers and hosts from outside the settings that do not fit `elastic`."""
    if launch.elastic is None or launch.elastic[0] <= workers * num_hosts <= launch.elastic[1]:
        return
    least, most = launch.elastic
    what = f"{workers} workers on each of {num_hosts} hosts are not within elastic, {least}:{most}."
    raise SpecError(what, where=where, fix=[f"--elastic {min(least, workers * num_hosts)}:{workers * num_hosts}"])


def from_torchrun(flags: Mapping[str, Any], launch: LaunchSection, machine: Machine) -> Placement:
    """`flags` by name, only those given; values as text or numbers."""
    fewest, num_hosts = (1, 1) if flags.get("standalone") else _num_nodes(flags.get("nnodes", "1"))
    # torchrun's default is one process per node.
    nproc = flags.get("nproc_per_node", launch.workers or _most(launch, num_hosts) or 1)
    common: dict[str, Any] = {
        "workers": _num_workers(str(nproc), machine),
        "num_hosts": num_hosts,
        "listen": flags.get("local_addr") or launch.listen if num_hosts > 1 else None,
        "notes": _notes(flags),
    }
    _check_elastic(launch, common["workers"], num_hosts, "--nproc-per-node")
    if fewest < num_hosts:
        # torchrun counts hosts, we count workers; a host more or less is that many workers more or less.
        bounds = (fewest * common["workers"], num_hosts * common["workers"])
        common |= {"elastic": launch.elastic or bounds, "begins_with_fewer": True}
    if num_hosts == 1:
        return Placement(**common)
    if flags.get("rdzv_backend", "static") == "static":
        return _static(flags, common)
    return _dynamic(flags, common, machine)


def _static(flags: Mapping[str, Any], common: dict[str, Any]) -> Placement:
    endpoint = str(flags.get("rdzv_endpoint") or "")
    host, port = _endpoint(endpoint) if endpoint else (str(flags.get("master_addr", "127.0.0.1")), None)
    port = port or _number(flags.get("master_port", DEFAULT_PORT), "--master-port", 1, 65535)
    rank = _number(flags.get("node_rank", 0), "--node-rank", 0, common["num_hosts"] - 1)
    return Placement(**common, host_rank=rank, coordinates=rank == 0, master=(host.strip("[]"), port))


def _dynamic(flags: Mapping[str, Any], common: dict[str, Any], machine: Machine) -> Placement:
    """Dynamic rendezvous such as c10d: the node named by the endpoint coordinates and assigns the others their rank."""
    endpoint = str(flags.get("rdzv_endpoint") or "")
    if not endpoint:
        what = f"{common['num_hosts']} nodes have no rendezvous endpoint."
        raise SpecError(what, where="--rdzv-backend", fix=[f"--rdzv-endpoint 10.0.0.1:{DEFAULT_PORT}"])
    host, port = _endpoint(endpoint)
    master = (host, port or DEFAULT_PORT)
    is_local = machine.may_listen(*master)
    return Placement(**common, host_rank=0 if is_local else None, coordinates=is_local, master=master)


def _endpoint(text: str) -> tuple[str, int | None]:
    if ":" not in text or text.endswith("]"):
        return text.strip("[]"), None
    try:
        return parse_task_address(text, "--rdzv-endpoint")
    except ClusterError as error:
        raise SpecError(error.what, where="--rdzv-endpoint", fix=error.fix) from None


def _num_nodes(text: Any) -> tuple[int, int]:
    """The fewest and the most hosts: "4", or "2:4"."""
    least, colon, most = str(text).partition(":")
    fewest = _number(least, "--nnodes", 1, 65536)
    return fewest, _number(most, "--nnodes", fewest, 65536) if colon else fewest


def _num_workers(text: str, machine: Machine) -> int:
    if text == "cpu":
        return machine.cores
    if text == "auto":
        return machine.accelerators or machine.cores
    if text == "gpu":
        if machine.accelerators:
            return machine.accelerators
        raise SpecError("There is no GPU on this machine.", where="--nproc-per-node", fix=["--nproc-per-node cpu"])
    return _number(text, "--nproc-per-node", 1, 65536, also=", or auto, cpu or gpu")


def _number(value: Any, flag: str, least: int, most: int, also: str = "") -> int:
    text = str(value)
    if not (text.isascii() and text.isdigit() and least <= int(text[:9]) <= most):
        what = f"{flag} is {text[:40]!r}, but must be a number from {least} to {most}{also}."
        raise SpecError(what, where=flag, fix=[f"{flag} {least}"])
    return int(text)


def _notes(flags: Mapping[str, Any]) -> list[str]:
    return [f"{flag_name(name)} is ignored: {why}." for name, why in IGNORED_FLAGS.items() if name in flags]


def from_cluster(task: ClusterTask, launch: LaunchSection, machine: Machine) -> Placement:
    """Each chief and worker task is a host of the run; ps and evaluator tasks do not train under these strategies."""
    num_hosts, address = len(task.trainers), task.address
    listen = launch.listen or (address[0] if address else None)
    workers = launch.workers or _most(launch, num_hosts) or machine.default_workers
    _check_elastic(launch, workers, num_hosts, "TF_CONFIG")
    others_wait = task.is_chief and num_hosts == 1 and len(task.cluster.jobs) > 1
    return Placement(
        workers=workers,
        num_hosts=num_hosts,
        host_rank=task.host_rank if task.trains else None,
        coordinates=task.is_chief,
        master=task.chief_address,
        listen=listen if num_hosts > 1 else None,
        trains=task.trains,
        evaluates=task.job == "evaluator",
        begins_with_fewer=launch.elastic is not None and num_hosts > 1,
        announce=task.chief_address if others_wait else None,
    )


def from_cluster_with_servers(task: ClusterTask, launch: LaunchSection, machine: Machine) -> Placement:
    """As in TensorFlow: worker tasks train, each ps task runs a server, and a chief only coordinates.

    Without ps tasks, the servers run on the first host.
    """
    if (task.job, task.index) not in task.hosts:
        return from_cluster(task, launch, machine)  # an evaluator
    training = [host for host in task.hosts if host[0] == "worker"]
    _check_servers(task, launch, training)
    workers = launch.workers or _most(launch, len(training)) or machine.default_workers
    _check_elastic(launch, workers, len(training), "TF_CONFIG")
    several, is_server = len(task.hosts) > 1, task.job == "ps"
    assert task.address is not None
    return Placement(
        workers=workers if task.job == "worker" else 0,
        total_workers=workers * len(training),
        num_hosts=len(task.hosts),
        host_rank=task.hosts.index((task.job, task.index)),
        coordinates=task.is_chief,
        master=task.chief_address,
        listen=(launch.listen or task.address[0]) if several else None,
        begins_with_fewer=len(training) > 1,
        server_tasks=len(task.servers),
        server=task.servers.index(task.index) if is_server else None,
        server_address=task.address if is_server else None,
    )


def _check_servers(task: ClusterTask, launch: LaunchSection, training: list[tuple[str, int]]) -> None:
    if not training:
        raise ClusterError(
            '"cluster" has no worker: under parameter servers a chief coordinates and does not train.',
            where="TF_CONFIG",
            fix=['"worker": ["10.0.0.2:2222"]'],
        )
    if task.servers and launch.servers not in (None, len(task.servers)):
        raise SpecError(
            f"{launch.servers} parameter servers are requested, but the cluster has {len(task.servers)} ps tasks.",
            where="TF_CONFIG",
            fix=[f"servers = {len(task.servers)}", f"{launch.servers} addresses of ps tasks"],
        )
