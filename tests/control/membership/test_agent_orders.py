"""An agent whose coordinator is played by the test: orders that come late, or after the run went on without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from manyhands.comm.transport import open_port
from manyhands.control.messages.agent_messages import (
    FromAgent,
    GroupMember,
    HostPlan,
    HostReport,
    JobDescription,
    Orders,
    PlannedWorker,
)
from manyhands.control.messages.launch_request import WorkerCommand
from manyhands.control.security.keys import client_curve, new_key, server_curve
from manyhands.control.security.rejected_peers import PeerGate
from tests.control.conftest import Launcher, alive

pytestmark = pytest.mark.faults


class FakeCoordinator:
    """Gives one agent the orders that a test wants; each is sent until the agent reports what it should lead to."""

    def __init__(self, launcher: Launcher) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        key = new_key()
        self.door = PeerGate(self.context, client_curve(key).public)
        self.port = open_port(
            self.context, zmq.ROUTER, "tcp://127.0.0.1:*", FromAgent, bind=True, curve=server_curve(key)
        )
        self.door.watch(self.port)
        address = self.port.socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        (launcher.folder / "train.py").write_text("import time\ntime.sleep(300)\n")
        self.job = JobDescription(
            command=WorkerCommand("script", str(launcher.folder / "train.py")),
            flags={},
            grace_s=1.0,
            max_restarts=0,
            most_workers=4,
        )
        self.agent = launcher(join={"address": address, "run": "r", "key": key.hex()}, workers=1)

    def order(self, until_reported: Callable[[HostReport], bool], **orders: Any) -> HostReport:
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            self.door.attend()
            self.port.socket.poll(20)
            for peer, message in self.port.receive():
                if isinstance(message, HostReport):
                    if until_reported(message):
                        return message
                    self.port.send(Orders(term=1, run="r", job=self.job, **orders), to=peer)
        raise AssertionError(f"the agent never reported what was ordered: {orders}")

    def close(self) -> None:
        self.door.close()
        self.port.close()
        self.context.term()


def plan_of_one(attempt: int, counter: int, incarnation: int) -> HostPlan:
    return HostPlan(
        generation=f"1.{counter}",
        attempt=attempt,
        world_size=1,
        num_hosts=1,
        host=0,
        first_rank=0,
        incarnations=[incarnation],
        master=("127.0.0.1", 1),
        workers=[PlannedWorker(slot=0, incarnation=incarnation)],
        group=[GroupMember(incarnation=incarnation, slot=0, host=0)],
    )


@pytest.fixture
def coordinator(launcher) -> Iterator[FakeCoordinator]:
    made = FakeCoordinator(launcher)
    yield made
    made.close()


def started(*incarnations: int) -> Callable[[HostReport], bool]:
    return lambda report: [name for name, member in report.members.items() if not member.ended] == list(incarnations)


def test_a_host_that_the_run_has_gone_on_without_ends_what_it_has(coordinator):
    first = coordinator.order(started(1), do="run", plan=plan_of_one(1, 1, 1))
    coordinator.order(started(2), do="run", plan=plan_of_one(2, 5, 2))
    assert not alive(first.members[1].pid), "of the attempt before"
    coordinator.order(lambda report: report.clear, do="wait", generation="1.9")


def test_orders_older_than_the_last_received_change_nothing(coordinator):
    alone = plan_of_one(1, 1, 1)
    with_another = replace(alone, workers=[*alone.workers, PlannedWorker(slot=1, incarnation=2, joining=True)])
    coordinator.order(started(1), do="run", revision=3, plan=alone)
    coordinator.order(started(1, 2), do="run", revision=5, plan=with_another)
    seen: list[HostReport] = []
    coordinator.order(lambda report: seen.append(report) or len(seen) == 3, do="run", revision=4, plan=alone)
    assert all(started(1, 2)(report) for report in seen), "the newcomer was not killed"
