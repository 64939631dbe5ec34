"""This process's place in a run: its rank, its device, its line to the launcher, and the ranks it talks to.

How a process comes to be one is `enter_run`'s business. Start reading at `Worker`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec
import torch

from manyhands.comm.axis import Axis, Following, connect
from manyhands.comm.host_memory import Segment
from manyhands.comm.point_to_point import FollowingMessages, Messages, Values
from manyhands.comm.shared_memory_axis import PlaneAxis, connect_plane
from manyhands.comm.shared_memory_messages import MixedValues, SharedValues
from manyhands.comm.store import ControlStore
from manyhands.control.session.session import RunFacts, Session
from manyhands.errors import EnvironmentProblem, Preempted, UsageError
from manyhands.events import Event, Warned
from manyhands.launcher.solo_run import Solo
from manyhands.launcher.worker_process import process_settings
from manyhands.native import why_not
from manyhands.observe.recorder import Recorder
from manyhands.parallel.gradients.hierarchical_sum import AcrossHosts
from manyhands.parallel.weights.shared_memory_group import Sharing
from manyhands.spec import load
from manyhands.spec.load import Resolved
from manyhands.spec.run import RunSpec
from manyhands.spec.training_directory import home_of
from manyhands.spec.worker_identity import Group
from manyhands.training.worker.grid_position import InGrid
from manyhands.training.worker.script_trainings import Script
from manyhands.training.worker.strategy_lookup import Planned, StrategyChoice
from manyhands.training.worker.worker_descriptions import last_heard

__all__ = ["Worker", "seated"]

# Long enough for the chief to write or read the largest checkpoint; a dead chief ends the run long before.
CHIEF_TIMEOUT_S = 3600.0
# From the first worker that is ready to the last: scripts may differ in what they do before they train.
GATHER_TIMEOUT_S = 120.0

_seated: ContextVar[Any] = ContextVar("manyhands_session", default=None)


@contextmanager
def seated(session: Any) -> Iterator[None]:
    """Inside, `enter` takes this session instead of looking for a seat. For tests, whose processes stay warm."""
    script = Script(session)
    token = _seated.set((session, script))
    try:
        yield
    finally:
        _seated.reset(token)
        script.close()


class Worker(InGrid):
    """Everything about the process that training needs to know. `axis` is connected on first use."""

    def __init__(self, script: Script, resolved: Resolved, strategy: StrategyChoice, kind: str = "training") -> None:
        """A training of this script more; `kind` is what it calls that."""
        session: Session | Solo = script.session
        super().__init__(session, strategy)
        self.script, self.resolved, self.number = script, resolved, script.make(kind)
        seat, spec = session.seat, resolved.spec
        self.threads = process_settings.choose_threads(
            spec.launch.threads, seat.local_world_size, exact=spec.train.exact
        )
        self.is_server, self.num_servers = seat.is_server, seat.num_servers
        # Servers of a host with accelerators leave those to its workers.
        devices = ("cpu",) if seat.is_server else strategy.devices
        self.device = process_settings.choose_device(devices, seat.local_rank)
        self.in_trial = load.in_trial()
        self.planned: Planned | None = None
        """Only to say how others would do it."""
        self._way, self._connected = script.connections(f"{self.device} {spec.comm.plane} {spec.comm.timeout_s}")
        self.why_no_plane = _why_no_plane(session.group, spec, self.device)
        self.place = ""
        """In an elastic run, a name for where this worker stands; the same for all who stand there."""
        self._meetings = 0
        self._messages: dict[tuple[str, ...], Messages] = {}
        """Of this generation of an elastic run, by the axes that they go along."""
        self._lasting: list[Callable[[], object]] = []

    @property
    def call(self) -> int:
        """The number of the public call under way, over all trainings of the script."""
        return self.script.call

    @property
    def home(self) -> Path:
        """Where this training keeps its checkpoints and records."""
        return home_of(self.run_dir, self.number)

    def report(self, step: int, phase: str) -> None:
        """Steps of all trainings count: for the launcher, a script that gets on takes steps, whichever they are."""
        self.script.steps[self.number] = step
        if self.number > 1:
            phase = f"step {step} of training {self.number}" if phase == "training" else f"{phase}, {self._name}"
        self.session.report(sum(self.script.steps.values()), phase, self.call)

    def committed(self, step: int, path: Path) -> None:
        """A checkpoint is there."""
        self.script.steps[self.number] = max(step, self.script.steps.get(self.number, 0))
        others = sum(steps for number, steps in self.script.steps.items() if number != self.number)
        self.session.committed(others + step, str(path))

    @property
    def _name(self) -> str:
        return f"training {self.number}"

    def enter(self, group: Group) -> None:
        """Leave the group that this worker is in, for a newer one."""
        self.script.retire()
        assert isinstance(self.session, Session)
        self.session.enter(group)
        self.follow_group()

    def follow_group(self) -> None:
        """The group is another than it was, perhaps since another training was in use."""
        self._messages.clear()
        self._meetings, self._formation = 0, None
        self.why_no_plane = _why_no_plane(self.group, self.resolved.spec, self.device)
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
        ranks = self._stand().line(self.rank, *axes)
        key = f"step along {' and '.join(axes)} of {' '.join(map(str, ranks))}"
        if ranks == list(range(self.world_size)):  # where workers have come and gone, places need not follow ranks
            return self.axis
        if key not in self._connected:
            place, size, plane = ranks.index(self.rank), len(ranks), None
            follow = self.is_elastic or ranks == list(range(ranks[0], ranks[0] + size))
            if size > 1 and follow and not self.why_no_plane:
                plane = self._connect_plane(key, place, size, ranks)
            if plane is not None:
                plane.sockets = lambda: self.among(ranks, "step over sockets")
            self._connected[key] = plane or self._connect(key, self.device, place, size)
        return self._connected[key]

    def messages(self, *axes: str) -> Messages:
        """From one to another of the same workers: through shared memory to those of this host, else over sockets."""
        if not self.is_elastic:
            return self._messages_among(self._stand().line(self.rank, *axes))

        def find() -> Messages:
            if axes not in self._messages:
                self._messages[axes] = self._messages_among(self._stand().line(self.rank, *axes))
            return self._messages[axes]

        self._lasting.append(find)
        return FollowingMessages(find)

    def _messages_among(self, ranks: Sequence[int]) -> Messages:
        """Of this generation, which has memory of its own for them."""
        hosts = self.group.hosts
        shares = self._can_share() if len(set(hosts)) > 1 else isinstance(self.axis, PlaneAxis)
        near = [place for place, rank in enumerate(ranks) if shares and hosts[rank] == self.group.host]
        if len(near) < 2:
            return Values(self.among(ranks, "messages"))
        shared = SharedValues(
            ranks.index(self.rank),
            ranks,
            lambda name, num_bytes: self.shared_memory(f"messages {name}", num_bytes, 2),
            timeout_s=self.resolved.spec.comm.timeout_s,
            here=self._ranks_here(),
            missing=self._where_the_others_are,
        )
        return shared if len(near) == len(ranks) else MixedValues(shared, Values(self.among(ranks, "messages")), near)

    def lasting(self, find: Callable[[], Axis]) -> Axis:
        """The workers that `find` gives, for a layer or a stage, which does not ask again when the group changes."""
        if not self.is_elastic:
            return find()
        self._lasting.append(find)
        return Following(find)

    def connect_lasting(self) -> None:
        """In a new group, what `lasting` gave in the order in which it did: all workers at the same time."""
        for find in self._lasting:
            find()

    def _ranks_here(self) -> list[int]:
        return [rank for rank, host in enumerate(self.group.hosts) if host == self.group.host]

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
        axis, seat, group, use = self.axis, self.session.seat, self.group, self._use
        if isinstance(axis, PlaneAxis):
            slots = group.slots if self.is_elastic else None
            return Sharing(axis.plane, self.session.shared_memory, slots=slots, generation=group.generation, use=use)
        if self.is_elastic:  # hosts may have different numbers of workers
            return None
        if not self._shares_on_each_host():
            return None
        here = self._axes("step on this host", self.device)
        assert isinstance(here, PlaneAxis)
        key = f"step across hosts, place {seat.local_rank}"
        if key not in self._connected:
            self._connected[key] = self._connect(key, self.device, seat.host, seat.num_hosts)
        across = AcrossHosts(self._connected[key], here.plane)
        return Sharing(here.plane, self.session.shared_memory, across, use=use)

    @property
    def _use(self) -> str:
        """Names the time that this training is in use: what it shares then, it gives back when another one is."""
        return f"use {self.script.uses} " if self.script.uses > 1 else ""

    def shared_memory(self, name: str, num_bytes: int, ranks: int = 0) -> Segment:
        """Of this training alone."""
        return self.session.shared_memory(f"{self._name}/{name}" if self.number > 1 else name, num_bytes, ranks)

    def _shares_on_each_host(self) -> bool:
        """Whether the workers of every host share memory, and are as many; all workers come to the same answer."""
        seat = self.session.seat
        if seat.num_hosts == 1 or self.resolved.spec.comm.plane == "gloo":
            return False
        if "step on this host" in self._connected:
            return True
        can = seat.local_world_size > 1 and self._can_share()
        here = self._connect_plane("step on this host", seat.local_rank, seat.local_world_size) if can else None
        mine = f"{seat.host} {seat.local_world_size if here else 0} {seat.local_rank}".encode()
        everyone = [tuple(map(int, said.split())) for said in self.axis.all_gather_bytes("who shares memory", mine)]
        world = seat.local_world_size
        if here is None or everyone != [(r // world, world, r % world) for r in range(seat.world_size)]:
            return False
        self._connected["step on this host"] = here
        return True

    def _can_share(self) -> bool:
        """Whether workers of a host share memory where there are several hosts."""
        return self.resolved.spec.comm.plane != "gloo" and self.device.type == "cpu" and not why_not()

    def all_gather_bytes(self, name: str, data: bytes) -> list[bytes]:
        """For rows that some replicas lack: a group of its own, because these travel while a step is under way."""
        if not self.is_divided:
            return self._axes("rows", torch.device("cpu")).all_gather_bytes(name, data)
        return self.among(self._stand().line(self.rank, "data"), "rows").all_gather_bytes(name, data)

    def _axes(self, purpose: str, device: torch.device, *, shared: bool = True) -> Axis:
        key = purpose if shared else f"{purpose} over sockets"
        if key not in self._connected:
            group = self.group
            plane = None
            # Alone, too, where others may come: they find the weights in shared memory.
            if shared and (group.world_size > 1 or self.is_elastic) and not self.why_no_plane:
                plane = self._connect_plane(purpose, group.rank, group.world_size)
            if plane is not None:
                plane.sockets = lambda: self._axes(purpose, device, shared=False)
            self._connected[key] = plane or self._connect(key, device, group.rank, group.world_size)
        return self._connected[key]

    def _connect_plane(
        self, purpose: str, rank: int, size: int, ranks: Sequence[int] | None = None
    ) -> PlaneAxis | None:
        """Of this host's workers; where there is no memory for it, `why_no_plane` says so, the same on each."""
        session, comm, generation = self.session, self.resolved.spec.comm, self.group.generation
        if isinstance(session, Solo):
            return None
        try:
            axis = connect_plane(
                lambda num_bytes: session.shared_memory(f"plane {self._way}{purpose} {generation}", num_bytes, size),
                rank,
                size,
                timeout_s=comm.timeout_s,
                ranks=ranks or range(self.rank - rank, self.rank - rank + size),
                here=self._ranks_here(),
                missing=self._where_the_others_are,
            )
        except EnvironmentProblem as problem:
            self.why_no_plane = problem.what
            return None
        if self.group.lost:  # the others come from the middle of a step, and nobody has time to lose
            return axis
        self._gather(f"{self._way}{purpose}/{session.seat.host}", rank, size)
        return axis

    def wait_for_all(self, what: str) -> None:
        """Nobody goes on before all workers are here."""
        self._gather(f"{what}, {self._name}" if self.number > 1 else what, self.rank, self.world_size)

    def _gather(self, what: str, rank: int, size: int) -> None:
        """A collective's deadline is meant for steps; how long each worker takes to get somewhere is another matter."""
        if isinstance(self.session, Solo):
            return
        here = [f"{what}/{self.group.generation}/here/{other}" for other in range(size)]
        self.session.set(here[rank], b"1")
        self.session.wait(here, timeout_s=max(GATHER_TIMEOUT_S, self.resolved.spec.comm.timeout_s))

    def _connect(self, prefix: str, device: torch.device, rank: int, size: int, timeout_s: float | None = None) -> Axis:
        seat, store = self.session.seat, None
        if not isinstance(self.session, Solo):
            store = ControlStore(self.session, prefix=f"{self._way}{prefix}/{self.group.generation}/")
            if size > 1 and self.is_elastic and not self.group.lost:
                self._gather(f"{self._way}{prefix} over sockets", rank, size)
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
        if not (self.script.is_joined and isinstance(self.session, Solo)):
            self.session.join(facts)
        self.script.is_joined = True
        self._check_run_dir(facts.run_dir)
        self._take_office()
        spec = self.resolved.spec
        torch.set_num_threads(self.threads)
        if spec.launch.allocator == "keep" and isinstance(self.session, Solo):
            process_settings.keep_freed_memory()
        if spec.train.exact:
            process_settings.make_deterministic()

    def _check_run_dir(self, asked: str | None) -> None:
        if self.number > 1 and asked is not None and Path(asked).absolute() != self.run_dir.absolute():
            raise UsageError(
                f"{self.script.describe(self.number)} asks for the run directory {asked}, but the run has "
                f"{self.run_dir}: the trainings of a script have one.",
                fix=[f"no run_dir=: what it keeps is in {self.home}", "a script of its own"],
            )

    def _take_office(self) -> None:
        """The chief keeps the record of the run."""
        if self.is_chief and self.recorder is None:
            self.script.recorder = Recorder(self.run_dir / "events" / "chief.jsonl")
            if isinstance(self.session, Solo):
                self.session.recorder = self.recorder

    @property
    def recorder(self) -> Recorder | None:
        return self.script.recorder

    @property
    def stop_requested(self) -> str | None:
        """The wish that this run stop. In a trial, a kill follows: the script must not wake up in between."""
        return None if self.in_trial else self.session.stop_requested

    def interruptible(self) -> AbstractContextManager[None]:
        """Around steps, where this worker is in a notebook's kernel: see `Solo.interruptible`."""
        return self.session.interruptible() if isinstance(self.session, Solo) else nullcontext()

    def emit(self, event: Event) -> None:
        """Record a fact and show it; the chief's facts are the run's. Never blocks, never raises."""
        event = self._of_this_training(event)
        if self.is_chief:
            if self.recorder is not None:
                self.recorder.emit(event)
            self.session.publish(event)

    def tell(self, event: Event) -> None:
        """A fact about this worker alone, which its launcher records where it is not the chief's."""
        if self.is_chief:
            self.emit(event)
        else:
            self.session.publish(self._of_this_training(event))

    def _of_this_training(self, event: Event) -> Event:
        if self.number > 1 and hasattr(event, "training"):
            return msgspec.structs.replace(event, training=self.number)
        return event

    def warn(self, text: str) -> None:
        self.emit(Warned(text=text))

    def wait_for_chief(self, what: str) -> None:
        """The others wait here until the chief has come by, however long its own work takes.

        Through the run's store and not a collective: a collective's deadline is meant for steps.
        """
        if isinstance(self.session, Solo):
            return
        self._meetings += 1
        key = f"chief/{self.number}/{self.place or self._meetings}/{what}"
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
        """This ends all trainings of the script."""
        self.script.close()

    def _where_the_others_are(self) -> str:
        return last_heard(self.session.positions(), but=self.rank)


def _why_no_plane(group: Group, spec: RunSpec, device: torch.device) -> str:
    if spec.comm.plane == "gloo":
        return '[comm] plane = "gloo"'
    if group.num_hosts > 1:
        return "several hosts"
    return f"on {device}" if device.type != "cpu" else why_not()
