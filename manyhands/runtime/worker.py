"""This process's place in a run: its rank, its device, its line to the launcher, and the ranks it talks to.

`enter` is what `Trainer` and `join` call first. In a process that an agent started it takes the seat; alone it runs
solo, and when more workers are asked for, or a cluster is described, the process becomes the launcher and never
returns. Start reading at `enter`.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from manyhands.comm.axis import Axis, connect
from manyhands.comm.mesh import Grid
from manyhands.comm.plane_axis import PlaneAxis, connect_plane
from manyhands.comm.store import ControlStore
from manyhands.control.session import RunFacts, Session
from manyhands.errors import EnvironmentProblem, Preempted, SpecError, UsageError
from manyhands.events import Event, Warned
from manyhands.native import why_not
from manyhands.parallel.across_hosts import AcrossHosts
from manyhands.parallel.shared_gradients import Sharing
from manyhands.runtime import launch, process
from manyhands.runtime.late_compiler import load_compiler_late
from manyhands.runtime.recorder import Recorder
from manyhands.runtime.server import Server
from manyhands.runtime.solo import Solo, watch_ending
from manyhands.spec import load
from manyhands.spec.check_order import order_of_this_worker
from manyhands.spec.cluster import ClusterTask
from manyhands.spec.load import Resolved
from manyhands.spec.plan_order import PlanOrder, plan_order
from manyhands.spec.run import AVERAGING, RunSpec
from manyhands.spec.seat import Group, Seat
from manyhands.strategies.choices import (
    CentralStorage,
    LocalSGD,
    Mirrored,
    MultiWorker,
    ParameterServer,
    Sharded,
    Single,
)
from manyhands.strategies.divided import DIVIDED, Mesh, Pipeline, Tensor, grid_of

__all__ = ["StrategyChoice", "Worker", "as_strategy", "enter", "seated"]

StrategyChoice = (
    Single | Mirrored | MultiWorker | ParameterServer | LocalSGD | Tensor | Pipeline | Mesh | Sharded | CentralStorage
)
_STRATEGIES: dict[str, Callable[..., StrategyChoice]] = {
    "single": Single,
    "mirrored": Mirrored,
    "multi_worker": MultiWorker,
    "parameter_server": ParameterServer,
    "local_sgd": LocalSGD,
    "diloco": partial(LocalSGD, outer="nesterov"),
    "tensor": Tensor,
    "pipeline": Pipeline,
    "mesh": Mesh,
    "sharded": Sharded,
    "central_storage": CentralStorage,
}

# Long enough for the chief to write or read the largest checkpoint; a dead chief ends the run long before.
CHIEF_TIMEOUT_S = 3600.0
# From the first worker that is ready to the last: scripts may differ in what they do before they train.
GATHER_TIMEOUT_S = 120.0

_seated: ContextVar[Any] = ContextVar("manyhands_session", default=None)


@contextmanager
def seated(session: Any) -> Iterator[None]:
    """Inside, `enter` takes this session instead of looking for a seat. For tests, whose processes stay warm."""
    workers: list[Worker] = []
    token = _seated.set((session, workers))
    try:
        yield
    finally:
        _seated.reset(token)
        for worker in workers:
            worker.close()


class Worker:
    """Everything about the process that training needs to know. `axis` is connected on first use."""

    def __init__(self, session: Session | Solo, resolved: Resolved, strategy: StrategyChoice) -> None:
        self.session, self.resolved, self.strategy = session, resolved, strategy
        seat, spec = session.seat, resolved.spec
        self.is_elastic = seat.most_workers > 0
        self.most_workers = seat.most_workers or seat.world_size
        """How many there may ever be."""
        self.threads = process.choose_threads(spec.launch.threads, seat.local_world_size, exact=spec.train.exact)
        self.is_server, self.num_servers = seat.is_server, seat.num_servers
        # Servers of a host with accelerators leave those to its workers.
        devices = ("cpu",) if seat.is_server else strategy.devices
        self.device = process.choose_device(devices, seat.local_rank)
        self.in_trial = load.in_trial()
        self.planned: Planned | None = None
        """Only to say how others would do it."""
        self.recorder: Recorder | None = None
        self.why_no_plane = _why_no_plane(session.group, spec, self.device)
        self.call = 0
        """The number of the public call under way."""
        self.place = ""
        """In an elastic run, a name for where this worker stands; the same for all who stand there."""
        self._connected: dict[str, Axis] = {}
        self._meetings = 0

    rank = property(lambda self: self.session.group.rank)
    world_size = property(lambda self: self.session.group.world_size)
    is_chief = property(lambda self: self.session.group.rank == 0)

    @property
    def group(self) -> Group:
        return self.session.group

    @property
    def grid(self) -> Grid:
        """How the workers stand: where the strategy does not divide the model, each is a replica of it."""
        return grid_of(self.strategy, self.world_size)

    @property
    def is_divided(self) -> bool:
        """Whether a replica of the model takes several workers."""
        return isinstance(self.strategy, DIVIDED)

    @property
    def replica(self) -> int:
        """Which replica of the model this worker is, or belongs to; a waiting one has none yet."""
        return self.grid.place(self.rank).data if self.is_divided else int(self.rank)

    @property
    def num_replicas(self) -> int:
        return self.grid.data if self.is_divided else int(self.world_size)

    @property
    def is_waiting(self) -> bool:
        """Started into a running run, and not admitted yet."""
        return self.session.group.rank < 0

    def report(self, step: int, phase: str) -> None:
        self.session.report(step, phase, self.call)

    def enter(self, group: Group) -> None:
        """Leave the group that this worker is in, for a newer one."""
        for axis in self._connected.values():
            axis.retire()
        self._connected.clear()
        self._meetings = 0
        assert isinstance(self.session, Session)
        self.session.enter(group)
        self.why_no_plane = _why_no_plane(group, self.resolved.spec, self.device)
        self._take_office()

    @property
    def run_dir(self) -> Path:
        return self.session.run_dir

    @property
    def axis(self) -> Axis:
        """All workers, for the step. One thread only: every rank must start the same operations in the same order."""
        return self._axes("step", self.device)

    @property
    def network(self) -> Axis:
        """The same workers over sockets, whatever they share."""
        return self._axes("step", self.device, shared=False) if isinstance(self.axis, PlaneAxis) else self.axis

    @property
    def saving(self) -> Axis:
        """The same, for what is written as they send it: who waits for the chief's disk waits as long as it takes."""
        return self.among(range(self.world_size), "saving", timeout_s=CHIEF_TIMEOUT_S)

    def line(self, *axes: str) -> Axis:
        """The workers that differ from this one in their places on `axes` alone.

        Through shared memory where they follow one another on this host, which the ones on the tensor axis do.
        """
        ranks = self.grid.line(self.rank, *axes)
        key = f"step along {' and '.join(axes)} from {ranks[0]}"
        if len(ranks) == self.world_size:
            return self.axis
        if key not in self._connected:
            place, size, plane = ranks.index(self.rank), len(ranks), None
            if size > 1 and ranks == list(range(ranks[0], ranks[0] + size)) and not self.why_no_plane:
                plane = self._connect_plane(key, place, size)
            self._connected[key] = plane or self._connect(key, self.device, place, size)
        return self._connected[key]

    def line_over_sockets(self, *axes: str) -> Axis:
        """The same workers, for those who send to one another."""
        return self.among(self.grid.line(self.rank, *axes), f"messages along {' and '.join(axes)}")

    def among(self, ranks: Sequence[int], purpose: str, timeout_s: float | None = None) -> Axis:
        """These workers, of which this is one, over sockets."""
        key = f"{purpose} of {' '.join(map(str, ranks))}"
        if key not in self._connected:
            place = list(ranks).index(self.rank)
            self._connected[key] = self._connect(key, self.device, place, len(ranks), timeout_s)
        return self._connected[key]

    @property
    def replicas(self) -> Axis:
        """One worker of every replica, for what replicas tell each other."""
        return self.line("data") if self.is_divided else self.axis

    @property
    def sharing(self) -> Sharing | None:
        """What the workers have in common where they share memory: all of them, or those of each host."""
        axis, seat, group = self.axis, self.session.seat, self.group
        if isinstance(axis, PlaneAxis):
            slots = group.slots if self.is_elastic else None
            return Sharing(axis.plane, self.session.shared_memory, slots=slots, generation=group.generation)
        if self.is_elastic:  # hosts may have different numbers of workers
            return None
        if not self._shares_on_each_host():
            return None
        here = self._axes("step on this host", self.device)
        assert isinstance(here, PlaneAxis)
        across = self._connect(f"step across hosts, place {seat.local_rank}", self.device, seat.host, seat.num_hosts)
        return Sharing(here.plane, self.session.shared_memory, AcrossHosts(across, here.plane))

    def _shares_on_each_host(self) -> bool:
        """Whether the workers of every host share memory, and are as many; all workers come to the same answer."""
        seat = self.session.seat
        if seat.num_hosts == 1 or self.resolved.spec.comm.plane == "gloo":
            return False
        can = seat.local_world_size > 1 and self.device.type == "cpu" and not why_not()
        here = self._connect_plane("step on this host", seat.local_rank, seat.local_world_size) if can else None
        mine = f"{seat.host} {seat.local_world_size if here else 0} {seat.local_rank}".encode()
        everyone = [tuple(map(int, said.split())) for said in self.axis.all_gather_bytes("who shares memory", mine)]
        world = seat.local_world_size
        if here is None or everyone != [(r // world, world, r % world) for r in range(seat.world_size)]:
            return False
        self._connected["step on this host"] = here
        return True

    def all_gather_bytes(self, name: str, data: bytes) -> list[bytes]:
        """For rows that some replicas lack: a group of its own, because these travel while a step is under way."""
        if not self.is_divided:
            return self._axes("rows", torch.device("cpu")).all_gather_bytes(name, data)
        return self.among(self.grid.line(self.rank, "data"), "rows").all_gather_bytes(name, data)

    def _axes(self, purpose: str, device: torch.device, *, shared: bool = True) -> Axis:
        key = purpose if shared else f"{purpose} over sockets"
        if key not in self._connected:
            group = self.group
            plane = None
            # Alone, too, where others may come: they find the weights in shared memory.
            if shared and (group.world_size > 1 or self.is_elastic) and not self.why_no_plane:
                plane = self._connect_plane(purpose, group.rank, group.world_size)
            self._connected[key] = plane or self._connect(key, device, group.rank, group.world_size)
        return self._connected[key]

    def _connect_plane(self, purpose: str, rank: int, size: int) -> PlaneAxis | None:
        """Of this host's workers; where there is no memory for it, `why_no_plane` says so, the same on each."""
        session, comm, generation = self.session, self.resolved.spec.comm, self.group.generation
        if isinstance(session, Solo):
            return None
        try:
            axis = connect_plane(
                lambda num_bytes: session.shared_memory(f"plane {purpose} {generation}", num_bytes, size),
                rank,
                size,
                timeout_s=comm.timeout_s,
                first_rank=self.rank - rank,
                missing=self._where_the_others_are,
            )
        except EnvironmentProblem as problem:
            self.why_no_plane = problem.what
            return None
        if self.group.lost:  # the others come from the middle of a step, and nobody has time to lose
            return axis
        # A collective's deadline is meant for steps; how long each worker takes to get here is another matter.
        here = [f"{purpose}/{session.seat.host}/here/{other}" for other in range(size)]
        session.set(here[rank], b"1")
        session.wait(here, timeout_s=max(GATHER_TIMEOUT_S, comm.timeout_s))
        return axis

    def _connect(self, prefix: str, device: torch.device, rank: int, size: int, timeout_s: float | None = None) -> Axis:
        seat, store = self.session.seat, None
        if not isinstance(self.session, Solo):
            store = ControlStore(self.session, prefix=f"{prefix}/{self.group.generation}/")
        return connect(
            store,
            rank,
            size,
            address=seat.data_address,
            device=device,
            timeout_s=timeout_s or self.resolved.spec.comm.timeout_s,
            missing=self._where_the_others_are,
            lost=self._has_lost_someone if self.is_elastic else None,
        )

    def _has_lost_someone(self) -> bool:
        newest = self.session.newest
        return newest is not None and newest.lost

    def settle_in(self, facts: RunFacts) -> None:
        """Join the run, then apply the machine's settings. Raises when the run directory is somebody else's."""
        self.session.join(facts)
        self._take_office()
        spec = self.resolved.spec
        torch.set_num_threads(self.threads)
        if spec.launch.allocator == "keep" and isinstance(self.session, Solo):
            process.keep_freed_memory()
        if spec.train.exact:
            process.make_deterministic()

    def _take_office(self) -> None:
        """The chief keeps the record of the run."""
        if self.is_chief and self.recorder is None:
            self.recorder = Recorder(self.run_dir / "events" / "chief.jsonl")
            if isinstance(self.session, Solo):
                self.session.recorder = self.recorder

    def machine(self) -> str:
        """What was chosen for this machine, for the run's first line."""
        _ = self.axis  # only now is it known whether there is memory to share
        launch, reducer = self.resolved.spec.launch, self.resolved.spec.comm.reducer
        allocator = "freed memory kept" if launch.allocator == "keep" else "system allocator"
        machine = f"{self.device}, {launch.memory_format} memory, {allocator}"
        if self.world_size == 1:
            return machine
        backend = "NCCL" if self.device.type == "cuda" else "Gloo"
        way = f"over {backend} ({self.why_no_plane})" if self.why_no_plane else "through shared memory"
        what = "weights" if self.strategy.name in AVERAGING else "gradients"
        exchange = f", {what} exchanged as {reducer}" if reducer != "exact" else ""
        divided = f", {self.strategy.divided} divided" if isinstance(self.strategy, Sharded) else ""
        return f"{machine}, workers talk {way}{exchange}{divided}"

    @property
    def stop_requested(self) -> str | None:
        """The wish that this run stop. In a trial, a kill follows: the script must not wake up in between."""
        return None if self.in_trial else self.session.stop_requested

    def emit(self, event: Event) -> None:
        """Record a fact and show it; the chief's facts are the run's. Never blocks, never raises."""
        if self.is_chief:
            if self.recorder is not None:
                self.recorder.emit(event)
            self.session.publish(event)

    def tell(self, event: Event) -> None:
        """A fact about this worker alone, which its launcher records where it is not the chief's."""
        if self.is_chief:
            self.emit(event)
        else:
            self.session.publish(event)

    def warn(self, text: str) -> None:
        self.emit(Warned(text=text))

    def wait_for_chief(self, what: str) -> None:
        """The others wait here until the chief has come by, however long its own work takes.

        Through the run's store and not a collective: a collective's deadline is meant for steps.
        """
        if isinstance(self.session, Solo):
            return
        self._meetings += 1
        key = f"chief/{self.place or self._meetings}/{what}"
        if self.is_chief:
            self.session.set(key, b"1")
        else:
            self.session.wait([key], timeout_s=CHIEF_TIMEOUT_S)

    def end_trial(self) -> None:
        """In a trial of `mh tune`, end the process here, so that nothing of the script runs after its training."""
        if self.in_trial:
            self.wait_for_chief("end of trial")
            self.close()
            os._exit(Preempted.exit_code)

    def close(self) -> None:
        for axis in self._connected.values():
            axis.close()
        if self.recorder is not None and not isinstance(self.session, Solo):  # a solo run has one more thing to record
            self.recorder.close(timeout_s=5.0)
        self.session.close()

    def _where_the_others_are(self) -> str:
        seen = {rank: place for rank, place in self.session.positions().items() if rank != self.rank}
        if not seen:
            return "Nothing was heard of the others."
        return "Last heard: " + "; ".join(
            f"rank {rank} at step {place.step}, {place.phase}, {place.age_s:.0f} s ago"
            for rank, place in sorted(seen.items())
        )


def _why_no_plane(group: Group, spec: RunSpec, device: torch.device) -> str:
    if spec.comm.plane == "gloo":
        return '[comm] plane = "gloo"'
    if group.num_hosts > 1:
        return "several hosts"
    return f"on {device}" if device.type != "cpu" else why_not()


def as_strategy(strategy: str | StrategyChoice | None) -> StrategyChoice:
    if strategy is None:
        return Mirrored()
    if not isinstance(strategy, str):
        return strategy
    if strategy not in _STRATEGIES:
        near = load.nearest(strategy, _STRATEGIES)
        raise SpecError(
            f"There is no strategy {strategy!r}.", fix=[f'strategy="{name}"' for name in near or _STRATEGIES]
        )
    return _STRATEGIES[strategy]()


def enter(strategy: str | StrategyChoice | None, arguments: Mapping[str, Any], *, tune: bool = False) -> Worker:
    """Find this process's seat. Does not return where the process turns into the launcher of several workers.

    With `tune`, a script started by hand first measures which settings to go on with.
    """
    load_compiler_late()
    order = plan_order()
    if order is not None:
        return _planning(as_strategy(strategy), order, arguments)
    seated_here: tuple[Any, list[Worker]] = _seated.get() or (None, [])
    session, seated_workers = seated_here
    seat = session.seat if session is not None else load.seat()
    if seat is None:
        watch_ending()
    chosen = as_strategy(strategy)
    reducer = getattr(chosen, "reducer", None)
    given = {
        "strategy": chosen.name if strategy is not None else None,
        "workers": getattr(chosen, "workers", None),
        "servers": getattr(chosen, "servers", None),
        "threads": chosen.threads,
        "reducer": reducer if isinstance(reducer, str) else None,  # a pipeline's is a function
        "elastic": getattr(chosen, "elastic", None),
        **arguments,
    }
    flags = seat.flags if seat is not None else _tuned(chosen, given) if tune else {}
    resolved = load.resolve(flags=flags, arguments=given)
    if resolved.spec.train.strategy != chosen.name:  # a flag, the environment or a config file asked for another one
        chosen = _STRATEGIES[resolved.spec.train.strategy](devices=chosen.devices, threads=chosen.threads)
    checked = order_of_this_worker()
    if checked is not None:
        chosen = _STRATEGIES[checked.strategy](devices=chosen.devices, threads=chosen.threads, **checked.settings)
    if seat is None:
        task = _task_of(chosen)
        if launch.needs_launcher(resolved, task=task):
            launch.become_launcher(resolved, task=task)
        worker = _closed_at_exit(Worker(Solo(resolved), resolved, chosen))
        for line in _not_there(chosen, worker.session.seat):
            worker.warn(line)
        return worker
    _check_strategy(chosen, seat, resolved.spec)
    if session is None:
        worker = _closed_at_exit(Worker(Session(seat), resolved, chosen))
    else:
        worker = Worker(session, resolved, chosen)
        seated_workers.append(worker)
    for line in (*resolved.overrides, *_differences(resolved, seat), *_not_there(chosen, seat)):
        worker.warn(line)
    return worker


class Planned(NamedTuple):
    """What `mh plan show` wants to know."""

    strategy: StrategyChoice
    workers: int
    slices: int | None
    path: str


def _planning(chosen: StrategyChoice, order: PlanOrder, arguments: Mapping[str, Any]) -> Worker:
    """One process that trains nothing: it says how others would."""
    if order.strategy and order.strategy != chosen.name:
        chosen = as_strategy(order.strategy)
    workers = order.workers or getattr(chosen, "workers", None) or 1
    alone = {"train.strategy": "single", "launch.workers": 1, "launch.ui": "none"}
    resolved = load.resolve(flags=alone, arguments={"slices": arguments.get("slices")})
    worker = Worker(Solo(resolved), resolved, Single())
    worker.planned = Planned(chosen, workers, resolved.spec.train.slices, order.path)
    return worker


def _not_there(strategy: StrategyChoice, seat: Seat) -> Iterator[str]:
    """Devices of this worker that the machine does not have: it computes on the CPU instead."""
    if strategy.devices and not seat.is_server:
        asked = strategy.devices[seat.local_rank % len(strategy.devices)]
        if not process.is_there(torch.device(asked)):
            yield f"rank {seat.rank} is to compute on {asked}, which this machine does not have: it takes the CPU."


def _differences(resolved: Resolved, seat: Seat) -> Iterator[str]:
    """What the script asks for and its launcher, which came first, has done otherwise."""
    launch = resolved.spec.launch
    if launch.elastic is not None and not seat.most_workers:
        least, most = launch.elastic
        yield f"The script asks for elastic=({least}, {most}), the launcher does not: mh run --elastic {least}:{most}"
    for name, flag, started in (
        ("workers", "-n", seat.local_world_size),
        ("servers", "--servers", seat.num_servers),
    ):
        wanted = getattr(launch, name)
        if resolved.origins[f"launch.{name}"] == "constructor" and wanted != started:
            yield f"The script asks for {wanted} {name}, the launcher started {started}: mh run {flag} {wanted}"


def _tuned(strategy: StrategyChoice, arguments: Mapping[str, Any]) -> dict[str, Any]:
    from manyhands.runtime.trials import tune_this_script

    if _task_of(strategy) is not None:
        raise UsageError("tune=True measures one host, and cluster= describes several.", fix=["mh tune on one of them"])
    return tune_this_script(arguments)


def _closed_at_exit(worker: Worker) -> Worker:
    atexit.register(worker.close)
    return worker


def _task_of(strategy: StrategyChoice) -> ClusterTask | None:
    cluster = getattr(strategy, "cluster", None)
    if cluster is None or isinstance(cluster, ClusterTask):
        return cluster
    if isinstance(cluster, Server):
        return cluster.task
    raise SpecError(
        f"cluster= is a {type(cluster).__name__}, which does not say which task this process is.",
        fix=['mh.MultiWorker(cluster=mh.Server(cluster, "worker", 0))', "TF_CONFIG, and no cluster="],
    )


def _check_strategy(strategy: StrategyChoice, seat: Seat, spec: RunSpec) -> None:
    if strategy.name == "single" and seat.world_size > 1:
        raise SpecError(
            f'strategy="single" runs one worker, but this run has {seat.world_size}.',
            fix=['strategy="mirrored"', "mh run -n 1"],
        )
    if strategy.name == "mirrored" and seat.num_hosts > 1:
        raise SpecError(
            f'strategy="mirrored" keeps to one host, but this run has {seat.num_hosts}.',
            fix=['strategy="multi_worker"'],
        )
    if strategy.name == "central_storage" and seat.num_hosts > 1:
        raise SpecError(
            f'strategy="central_storage" has all weights in one host\'s memory, and this run has {seat.num_hosts}.',
            fix=['strategy=mh.Sharded("optimizer")', 'strategy="multi_worker"'],
        )
    if strategy.on_servers and not seat.num_servers:
        raise SpecError(
            f"The script asks for {spec.num_servers} parameter servers, but the launcher was not asked for any.",
            fix=[f"mh run --servers {spec.num_servers} -n {seat.local_world_size} ..."],
        )
    if isinstance(strategy, DIVIDED):
        grid_of(strategy, seat.world_size)
        if seat.most_workers:
            raise SpecError(
                f'strategy="{strategy.name}" divides the model over as many workers as there are: none may come or go.',
                fix=["no elastic=", 'strategy="mirrored"'],
            )
    if isinstance(strategy, LocalSGD) and strategy.quorum is not None and seat.num_servers > 1:
        raise SpecError(
            f"One server decides who is in a round, but this run has {seat.num_servers}.",
            where="quorum",
            fix=["mh run --servers 1"],
        )
    if not strategy.on_servers and seat.num_servers:
        raise SpecError(
            f'This run has {seat.num_servers} parameter servers, but strategy="{strategy.name}" has no use for them.',
            fix=["strategy=mh.ParameterServer(...)", "mh run without --servers"],
        )
