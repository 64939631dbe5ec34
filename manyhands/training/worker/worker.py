"""A worker process in its run: its rank, its device, and its connections to the launcher and to other ranks.

`enter_run` turns a process into a worker. Start reading at `Worker`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from manyhands.comm.axis import Axis, Following, connect
from manyhands.comm.host_memory import Segment
from manyhands.comm.mesh import Formation, Grid, by_slots, in_order
from manyhands.comm.point_to_point import FollowingMessages, Messages, PointToPoint
from manyhands.comm.shared_memory_axis import PlaneAxis, connect_plane
from manyhands.comm.shared_memory_messages import MixedPointToPoint, SharedMemoryPointToPoint
from manyhands.comm.store import ControlStore
from manyhands.control.messages.worker_messages import WorkerPosition
from manyhands.control.session.run_session import RunSession
from manyhands.control.session.session import RunFacts, Session
from manyhands.errors import EnvironmentProblem, Preempted, UsageError
from manyhands.launcher.evaluator_session import EvaluatorSession
from manyhands.launcher.worker_process import process_settings
from manyhands.native import why_not
from manyhands.observe.run_events import RunEvents
from manyhands.parallel.gradients.hierarchical_sum import HostAxis
from manyhands.parallel.weights.shared_memory_group import SharedMemoryGroup
from manyhands.spec import load
from manyhands.spec.load import Resolved
from manyhands.spec.run import RunSpec
from manyhands.spec.strategy_names import AVERAGING
from manyhands.spec.training_directory import home_of
from manyhands.spec.worker_identity import Group
from manyhands.strategies.choices import Sharded
from manyhands.strategies.model_parallel import DIVIDED, Mesh, grid_of, replica_of
from manyhands.training.worker.script_trainings import ScriptTrainings
from manyhands.training.worker.strategy_lookup import Planned, StrategyChoice

__all__ = ["GridPosition", "Worker", "last_reports", "machine_of", "with_session"]


def machine_of(worker: Worker) -> str:
    """The settings chosen for this machine, for the first line that a run prints."""
    _ = worker.axis  # connects: `why_no_plane` is final only after that
    launch, reducer = worker.resolved.spec.launch, worker.resolved.spec.comm.reducer
    allocator = "freed memory kept" if launch.allocator == "keep" else "system allocator"
    machine = f"{worker.device}, {launch.memory_format} memory, {allocator}"
    if worker.world_size == 1:
        return machine
    backend = "NCCL" if worker.device.type == "cuda" else "Gloo"
    way = f"over {backend} ({worker.why_no_plane})" if worker.why_no_plane else "through shared memory"
    what = "weights" if worker.strategy.name in AVERAGING else "gradients"
    exchange = f", {what} exchanged as {reducer}" if reducer != "exact" else ""
    words = worker.strategy.divided if isinstance(worker.strategy, Sharded | Mesh) else ""
    divided = f", {words} divided" if words else ""
    return f"{machine}, workers talk {way}{exchange}{divided}"


def last_reports(positions: Mapping[int, WorkerPosition], *, but: int) -> str:
    """The last report of every rank except `but`, for messages about a rank that is missing."""
    seen = {rank: position for rank, position in positions.items() if rank != but}
    if not seen:
        return "No other rank has reported."
    return "Last reports: " + "; ".join(
        f"rank {rank} at step {position.step}, {position.phase}, {position.age_s:.0f} s ago"
        for rank, position in sorted(seen.items())
    )


class GridPosition:
    """A worker's rank in its group and its position in the grid of data, pipeline and tensor parallelism."""

    def __init__(self, session: RunSession, strategy: StrategyChoice) -> None:
        self.session, self.strategy = session, strategy
        identity = session.identity
        self.is_elastic = identity.most_workers > 0
        self.most_workers = identity.most_workers or identity.world_size
        """Upper bound of the number of workers."""
        self._formation: Formation | None = None

    rank = property(lambda self: self.session.group.rank)
    world_size = property(lambda self: self.session.group.world_size)
    is_chief = property(lambda self: self.session.group.rank == 0)

    @property
    def group(self) -> Group:
        return self.session.group

    @property
    def formation(self) -> Formation | None:
        """The grid positions of all ranks; None: too few workers to train. In an elastic run a slot is a grid position.

        If the strategy does not partition the model, each worker is a replica of it.
        """
        if self._formation is None:
            if self.is_elastic and self.is_divided:
                enough = self.world_size >= self.session.identity.least_workers
                self._formation = by_slots(self.one_replica, self.group.slots) if enough else None
            else:
                self._formation = in_order(grid_of(self.strategy, self.world_size))
        return self._formation

    @property
    def one_replica(self) -> Grid:
        """The grid of one replica of a partitioned model; in an elastic run, of the number of workers it began with."""
        return replica_of(self.strategy, self.session.identity.world_size)

    @property
    def grid(self) -> Grid:
        """The grid of the group; on a worker that is not admitted yet, the largest grid that the run may have."""
        if self.is_waiting and self.is_divided:
            return self.one_replica._replace(data=self.most_replicas)
        return self._require_formation().grid

    @property
    def grid_position(self) -> Grid:
        """This worker's position in the grid."""
        return self._require_formation().places[int(self.rank)]

    def _require_formation(self) -> Formation:
        assert self.formation is not None, "the group has too few workers to train"
        return self.formation

    @property
    def is_divided(self) -> bool:
        """Whether a replica of the model is partitioned over several workers."""
        return isinstance(self.strategy, DIVIDED)

    @property
    def replica(self) -> int:
        """The replica of the model that this worker is, or belongs to; a worker that is not admitted yet has none."""
        return self.grid_position.data if self.is_divided and not self.is_waiting else int(self.rank)

    def rank_in(self, replica: int) -> int:
        """The worker of another replica that has the same part of the model as this one."""
        return self._require_formation().line(int(self.rank), "data")[replica]

    @property
    def num_replicas(self) -> int:
        return self.grid.data if self.is_divided else int(self.world_size)

    @property
    def most_replicas(self) -> int:
        """Upper bound of the number of replicas, among which a batch is divided."""
        if not self.is_divided:
            return self.most_workers
        return self.most_workers // self.one_replica.size if isinstance(self.strategy, Mesh) else 1

    @property
    def is_waiting(self) -> bool:
        """Whether this worker was started during the run, and is not admitted yet."""
        return self.session.group.rank < 0


# Long enough for the chief to write or read the largest checkpoint. If the chief dies, the run ends much earlier.
CHIEF_TIMEOUT_S = 3600.0
# From the first worker that is ready to the last: what the script does before it trains may take longer on some.
BARRIER_TIMEOUT_S = 120.0

_current_session: ContextVar[Any] = ContextVar("manyhands_session", default=None)


@contextmanager
def with_session(session: RunSession) -> Iterator[None]:
    """Within the context, `enter` uses this session, not the environment. For tests, which reuse their processes."""
    script = ScriptTrainings(session)
    token = _current_session.set((session, script))
    try:
        yield
    finally:
        _current_session.reset(token)
        script.close()


class Worker(GridPosition):
    """What training needs to know about its process. `axis` is connected on first use."""

    def __init__(
        self, script: ScriptTrainings, resolved: Resolved, strategy: StrategyChoice, kind: str = "training"
    ) -> None:
        """Add a training to the script; `kind` is what messages call it."""
        session = script.session
        super().__init__(session, strategy)
        self.script, self.resolved, self.number = script, resolved, script.make(kind)
        self.events = RunEvents(session, lambda: script.recorder, self.number)
        identity, spec = session.identity, resolved.spec
        self.threads = process_settings.choose_threads(
            spec.launch.threads, identity.local_world_size, exact=spec.train.exact
        )
        self.is_server, self.num_servers = identity.is_server, identity.num_servers
        # Servers leave the accelerators of a host to its workers.
        devices = ("cpu",) if identity.is_server else strategy.devices
        self.device = process_settings.choose_device(devices, identity.local_rank)
        self.in_trial = load.in_trial()
        self.is_evaluator = isinstance(session, EvaluatorSession)
        """Whether this process evaluates the checkpoints of a run beside it, and so writes nothing else."""
        self.planned: Planned | None = None
        """Set under `mh plan show`, where the script is planned, not trained."""
        self._key_prefix, self._connected = script.connections(f"{self.device} {spec.comm.plane} {spec.comm.timeout_s}")
        self.why_no_plane = _why_no_plane(session.group, spec, self.device)
        self.place = ""
        """In an elastic run, a key for the current call, step and operation: the same on all workers that are in it."""
        self._chief_waits = 0
        self._messages: dict[tuple[str, ...], Messages] = {}
        """Connections of this generation of an elastic run, by the axes of the mesh that they follow."""
        self._persistent_axes: list[Callable[[], object]] = []

    @property
    def call(self) -> int:
        """The number of the current public call, over all trainings of the script."""
        return self.script.call

    @property
    def home(self) -> Path:
        """Where this training keeps its checkpoints and records."""
        return home_of(self.run_dir, self.number)

    def report(self, step: int, phase: str) -> None:
        """Report progress to the launcher: the sum of the steps of all trainings, which grows whichever one trains."""
        self.script.steps[self.number] = step
        if self.number > 1:
            phase = f"step {step} of training {self.number}" if phase == "training" else f"{phase}, {self._name}"
        self.session.report(sum(self.script.steps.values()), phase, self.call)

    def committed(self, step: int, path: Path) -> None:
        """Report a committed checkpoint to the launcher."""
        self.script.steps[self.number] = max(step, self.script.steps.get(self.number, 0))
        others = sum(steps for number, steps in self.script.steps.items() if number != self.number)
        self.session.committed(others + step, str(path))

    @property
    def _name(self) -> str:
        return f"training {self.number}"

    def enter(self, group: Group) -> None:
        """Leave the current group and enter a newer one."""
        self.script.retire()
        self.agent_session.enter(group)
        self.follow_group()

    def follow_group(self) -> None:
        """Adapt to a group that has changed, perhaps while another training was in use."""
        self._messages.clear()
        self._chief_waits, self._formation = 0, None
        self.why_no_plane = _why_no_plane(self.group, self.resolved.spec, self.device)
        self.script.open_record()

    @property
    def agent_session(self) -> Session:
        """The session of an elastic run, or of one with servers: such a run has an agent."""
        assert isinstance(self.session, Session)
        return self.session

    @property
    def run_dir(self) -> Path:
        return self.session.run_dir

    @property
    def axis(self) -> Axis:
        """All workers, for steps. For one thread only: every rank must start the same operations in the same order."""
        return self._axes("step", self.device)

    @property
    def network(self) -> Axis:
        """The same workers over sockets, even if they share memory."""
        return self._axes("step", self.device, shared=False) if isinstance(self.axis, PlaneAxis) else self.axis

    @property
    def saving(self) -> Axis:
        """The same workers, for saves. The timeout is long: ranks that send tensors to the chief wait for its disk."""
        return self.among(range(self.world_size), "saving", timeout_s=CHIEF_TIMEOUT_S)

    def line(self, *axes: str) -> Axis:
        """The workers whose grid positions differ from this one's on `axes` only.

        Through shared memory if their ranks are consecutive on this host, as those of the tensor axis are.
        """
        ranks = self._require_formation().line(self.rank, *axes)
        key = f"step along {' and '.join(axes)} of {' '.join(map(str, ranks))}"
        if ranks == list(range(self.world_size)):  # after workers joined and left, positions may not follow ranks
            return self.axis
        if key not in self._connected:
            index, size, plane = ranks.index(self.rank), len(ranks), None
            consecutive = self.is_elastic or ranks == list(range(ranks[0], ranks[0] + size))
            if size > 1 and consecutive and not self.why_no_plane:
                plane = self._connect_plane(key, index, size, ranks)
            if plane is not None:
                plane.sockets = lambda: self.among(ranks, "step over sockets")
            self._connected[key] = plane or self._connect(key, self.device, index, size)
        return self._connected[key]

    def messages(self, *axes: str) -> Messages:
        """Messages between two workers of `line(*axes)`: through shared memory on this host, else over sockets."""
        if not self.is_elastic:
            return self._messages_among(self._require_formation().line(self.rank, *axes))

        def find() -> Messages:
            if axes not in self._messages:
                self._messages[axes] = self._messages_among(self._require_formation().line(self.rank, *axes))
            return self._messages[axes]

        self._persistent_axes.append(find)
        return FollowingMessages(find)

    def _messages_among(self, ranks: Sequence[int]) -> Messages:
        """For this generation, whose shared memory is freed with it."""
        hosts = self.group.hosts
        shares = self._can_share() if len(set(hosts)) > 1 else isinstance(self.axis, PlaneAxis)
        near = [index for index, rank in enumerate(ranks) if shares and hosts[rank] == self.group.host]
        if len(near) < 2:
            return PointToPoint(self.among(ranks, "messages"))
        shared = SharedMemoryPointToPoint(
            ranks.index(self.rank),
            ranks,
            lambda name, num_bytes: self.shared_memory(f"messages {name}", num_bytes, 2),
            timeout_s=self.resolved.spec.comm.timeout_s,
            here=self._ranks_here(),
            missing=self._last_reports,
        )
        return (
            shared
            if len(near) == len(ranks)
            else MixedPointToPoint(shared, PointToPoint(self.among(ranks, "messages")), near)
        )

    def persistent_axis(self, find: Callable[[], Axis]) -> Axis:
        """The workers that `find` returns, as an axis that stays valid in a layer or stage when the group changes."""
        if not self.is_elastic:
            return find()
        self._persistent_axes.append(find)
        return Following(find)

    def connect_persistent_axes(self) -> None:
        """Connect the axes of `persistent_axis` in a new group, in order of creation, on all workers at once."""
        for find in self._persistent_axes:
            find()

    def _ranks_here(self) -> list[int]:
        return [rank for rank, host in enumerate(self.group.hosts) if host == self.group.host]

    def among(self, ranks: Sequence[int], purpose: str, timeout_s: float | None = None) -> Axis:
        """The workers `ranks`, this one included, over sockets."""
        key = f"{purpose} of {' '.join(map(str, ranks))}"
        if key not in self._connected:
            index = list(ranks).index(self.rank)
            self._connected[key] = self._connect(key, self.device, index, len(ranks), timeout_s)
        return self._connected[key]

    @property
    def replicas(self) -> Axis:
        """One worker of every replica, for exchanges between replicas."""
        return self.line("data") if self.is_divided else self.axis

    @property
    def sharing(self) -> SharedMemoryGroup | None:
        """The group of workers that share memory: all of them, or those of each host; None if they do not."""
        axis, identity, group, use = self.axis, self.session.identity, self.group, self._use
        if isinstance(axis, PlaneAxis):
            slots = group.slots if self.is_elastic else None
            return SharedMemoryGroup(
                axis.plane, self.session.shared_memory, slots=slots, generation=group.generation, use=use
            )
        if self.is_elastic:  # hosts may have different numbers of workers
            return None
        if not self._shares_on_each_host():
            return None
        here = self._axes("step on this host", self.device)
        assert isinstance(here, PlaneAxis)
        key = f"step across hosts, local rank {identity.local_rank}"
        if key not in self._connected:
            self._connected[key] = self._connect(key, self.device, identity.host, identity.num_hosts)
        across = HostAxis(self._connected[key], here.plane)
        return SharedMemoryGroup(here.plane, self.session.shared_memory, across, use=use)

    @property
    def _use(self) -> str:
        """Prefix for the shared memory of this use of the training; it is freed when another training is used."""
        return f"use {self.script.uses} " if self.script.uses > 1 else ""

    def shared_memory(self, name: str, num_bytes: int, ranks: int = 0) -> Segment:
        """A segment that belongs to this training only."""
        return self.session.shared_memory(f"{self._name}/{name}" if self.number > 1 else name, num_bytes, ranks)

    def _shares_on_each_host(self) -> bool:
        """Whether the workers of every host share memory, and every host has the same number; equal on all workers."""
        identity = self.session.identity
        if identity.num_hosts == 1 or self.resolved.spec.comm.plane == "gloo":
            return False
        if "step on this host" in self._connected:
            return True
        can = identity.local_world_size > 1 and self._can_share()
        here = self._connect_plane("step on this host", identity.local_rank, identity.local_world_size) if can else None
        mine = f"{identity.host} {identity.local_world_size if here else 0} {identity.local_rank}".encode()
        answers = [tuple(map(int, text.split())) for text in self.axis.all_gather_bytes("who shares memory", mine)]
        world = identity.local_world_size
        if here is None or answers != [(r // world, world, r % world) for r in range(identity.world_size)]:
            return False
        self._connected["step on this host"] = here
        return True

    def _can_share(self) -> bool:
        """Whether, in a run on several hosts, the workers of each host can share memory."""
        return self.resolved.spec.comm.plane != "gloo" and self.device.type == "cpu" and not why_not()

    def all_gather_bytes(self, name: str, data: bytes) -> list[bytes]:
        """Exchange rows that some replicas lack, over separate connections, because a step may be using the others."""
        if not self.is_divided:
            return self._axes("rows", torch.device("cpu")).all_gather_bytes(name, data)
        return self.among(self._require_formation().line(self.rank, "data"), "rows").all_gather_bytes(name, data)

    def _axes(self, purpose: str, device: torch.device, *, shared: bool = True) -> Axis:
        key = purpose if shared else f"{purpose} over sockets"
        if key not in self._connected:
            group = self.group
            plane = None
            # Also for a single worker of an elastic run: newcomers map the weights from shared memory.
            if shared and (group.world_size > 1 or self.is_elastic) and not self.why_no_plane:
                plane = self._connect_plane(purpose, group.rank, group.world_size)
            if plane is not None:
                plane.sockets = lambda: self._axes(purpose, device, shared=False)
            self._connected[key] = plane or self._connect(key, device, group.rank, group.world_size)
        return self._connected[key]

    def _connect_plane(
        self, purpose: str, rank: int, size: int, ranks: Sequence[int] | None = None
    ) -> PlaneAxis | None:
        """The plane of this host's workers; None without memory for it: then `why_no_plane` says so on each of them."""
        session, comm, generation = self.session, self.resolved.spec.comm, self.group.generation
        try:
            axis = connect_plane(
                lambda num_bytes: session.shared_memory(
                    f"plane {self._key_prefix}{purpose} {generation}", num_bytes, size
                ),
                rank,
                size,
                timeout_s=comm.timeout_s,
                ranks=ranks or range(self.rank - rank, self.rank - rank + size),
                here=self._ranks_here(),
                missing=self._last_reports,
            )
        except EnvironmentProblem as problem:
            self.why_no_plane = problem.what
            return None
        if self.group.lost:  # the others are in the middle of a step: no time for a barrier
            return axis
        self._barrier(f"{self._key_prefix}{purpose}/{session.identity.host}", rank, size)
        return axis

    def wait_for_all(self, what: str) -> None:
        """A barrier of all workers, without the deadline of a collective."""
        self._barrier(f"{what}, {self._name}" if self.number > 1 else what, self.rank, self.world_size)

    def _barrier(self, what: str, rank: int, size: int) -> None:
        """A barrier through the run's store: the deadline of a collective is for steps, and workers may need longer."""
        here = [f"{what}/{self.group.generation}/here/{other}" for other in range(size)]
        self.session.set(here[rank], b"1")
        self.session.wait(here, timeout_s=max(BARRIER_TIMEOUT_S, self.resolved.spec.comm.timeout_s))

    def _connect(self, prefix: str, device: torch.device, rank: int, size: int, timeout_s: float | None = None) -> Axis:
        if size > 1 and self.is_elastic and not self.group.lost:
            self._barrier(f"{self._key_prefix}{prefix} over sockets", rank, size)
        return connect(
            ControlStore(self.session, prefix=f"{self._key_prefix}{prefix}/{self.group.generation}/"),
            rank,
            size,
            address=self.session.identity.data_address,
            device=device,
            timeout_s=timeout_s or self.resolved.spec.comm.timeout_s,
            missing=self._last_reports,
            lost=self._has_lost_worker if self.is_elastic else None,
        )

    def _has_lost_worker(self) -> bool:
        newest = self.session.newest
        return newest is not None and newest.lost

    def join_run(self, facts: RunFacts) -> None:
        """Join the run, then apply the machine's settings. Raises if the run directory belongs to another run."""
        self.session.join(facts)
        self._check_run_dir(facts.run_dir)
        self.script.open_record()
        spec = self.resolved.spec
        torch.set_num_threads(self.threads)
        if spec.train.exact:
            process_settings.make_deterministic()

    def _check_run_dir(self, asked: str | None) -> None:
        if self.number > 1 and asked is not None and Path(asked).absolute() != self.run_dir.absolute():
            raise UsageError(
                f"{self.script.describe(self.number)} has run_dir={asked}, but the run directory is "
                f"{self.run_dir}: all trainings of a script share it.",
                fix=[f"no run_dir=: its files are in {self.home}", "a separate script"],
            )

    @property
    def stop_requested(self) -> str | None:
        """The request to stop this run. None in a trial, which is killed: no more of the script may run before that."""
        return None if self.in_trial else self.session.stop_requested

    def wait_for_chief(self, what: str) -> None:
        """Wait until the chief has reached this call, however long its own work takes.

        Through the run's store, not a collective: the deadline of a collective is meant for steps.
        """
        self._chief_waits += 1
        key = f"chief/{self.number}/{self.place or self._chief_waits}/{what}"
        if self.is_chief:
            self.session.set(key, b"1")
        else:
            self.session.wait([key], timeout_s=CHIEF_TIMEOUT_S)

    def end_trial(self) -> None:
        """In a trial of `mh tune`, end the process, so that nothing of the script runs after its training."""
        if self.in_trial:
            self.wait_for_chief("end of trial")
            self.close()
            os._exit(Preempted.exit_code)

    def close(self) -> None:
        """Close all trainings of the script."""
        self.script.close()

    def _last_reports(self) -> str:
        return last_reports(self.session.positions(), but=self.rank)


def _why_no_plane(group: Group, spec: RunSpec, device: torch.device) -> str:
    if spec.comm.plane == "gloo":
        return '[comm] plane = "gloo"'
    if group.num_hosts > 1:
        return "several hosts"
    return f"on {device}" if device.type != "cpu" else why_not()
