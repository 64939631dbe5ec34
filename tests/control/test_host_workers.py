"""A host's workers and their channel, with real processes, memory and sockets; the plans are made up here."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from manyhands.comm.host_memory import Segment
from manyhands.comm.transport import open_port
from manyhands.control.agent.hang_watch import HangWatch
from manyhands.control.agent.host_workers import HostWorkers, SpawnContext
from manyhands.control.agent.worker_channel import WorkerChannel
from manyhands.control.membership.hang_detection import HangLimits
from manyhands.control.messages.agent_messages import GroupMember, HostPlan, JobDescription, PlannedWorker
from manyhands.control.messages.launch_request import WorkerCommand
from manyhands.control.messages.worker_messages import (
    Announce,
    Heartbeat,
    MemoryRequest,
    Offer,
    RunFacts,
    StopRequest,
    StoreReply,
    StoreRequest,
    ToWorker,
    WorkerHello,
    WorkerReport,
)
from manyhands.control.processes.fence import Guard
from manyhands.control.processes.worker_process import WorkerProcess
from manyhands.native import library
from tests.control.conftest import alive, until

PLANE_BYTES = 1 << 20


def plan(counter: int, group: list[int], *, workers: list[int] | None = None, **more) -> HostPlan:
    """Incarnation n is in slot n % 10; `workers` are planned in all, those in the group among them."""
    return HostPlan(
        generation=f"7.{counter}",
        attempt=1,
        world_size=len(group),
        num_hosts=1,
        host=0,
        first_rank=0,
        incarnations=group,
        master=("127.0.0.1", 1),
        workers=[
            PlannedWorker(slot=number % 10, incarnation=number, joining=number not in group)
            for number in (group if workers is None else workers)
        ],
        group=[GroupMember(incarnation=number, slot=number % 10, host=0) for number in group],
        **more,
    )


class Hands:
    def __init__(self, folder: Path) -> None:
        (folder / "sleep.py").write_text("import time\ntime.sleep(60)\n")
        (folder / "guarded").mkdir()
        self.guard = Guard(folder / "guarded")
        self.started: list[WorkerProcess] = []
        self.around = SpawnContext(
            agent="ipc://unused",
            host="here",
            run="r",
            job=JobDescription(
                command=WorkerCommand("script", str(folder / "sleep.py")),
                flags={},
                grace_s=30.0,
                max_restarts=0,
                most_workers=4,
            ),
            num_workers=2,
            data_address="127.0.0.1",
            environment=dict(os.environ),
            guard=self.guard,
            output=lambda worker, stream, data: None,
            started=self.started.append,
        )
        self.host_workers: HostWorkers | None = None

    def begin(self, first: HostPlan) -> HostWorkers:
        self.host_workers = HostWorkers(first, self.around)
        return self.host_workers

    def see_deaths(self) -> None:
        """As the agent's loop does."""
        assert self.host_workers is not None
        for worker in self.host_workers.everyone:
            if worker.alive and not alive(worker.pid):
                self.host_workers.attend(worker.pidfd, worker)
        self.host_workers.tick(time.monotonic())

    def close(self) -> None:
        if self.host_workers is not None:
            self.host_workers.kill_and_wait()
            self.host_workers.close()
        self.guard.close()


@pytest.fixture
def hands(tmp_path: Path) -> Iterator[Hands]:
    made = Hands(tmp_path)
    yield made
    made.close()


def ask(host_workers: HostWorkers, generation: str, incarnation: int = 1, name: str = "plane", ranks: int = 2) -> int:
    return host_workers.allot(
        MemoryRequest(
            generation=generation, incarnation=incarnation, ticket=1, name=name, num_bytes=PLANE_BYTES, ranks=ranks
        )
    )


def lost_rank(host_workers: HostWorkers, offset: int) -> int:
    segment = Segment(host_workers.memory.fd, 4096, offset)
    try:
        return int(library.lost_rank(segment.address))
    finally:
        segment.close()


def held_bytes(host_workers: HostWorkers) -> int:
    return os.fstat(host_workers.memory.fd).st_blocks * 512


def test_fifty_generations_hold_no_more_memory_than_two(hands):
    host_workers = hands.begin(plan(1, [1, 2]))
    weights = ask(host_workers, "7.1", name="weights", ranks=0)
    for counter in range(2, 52):
        ask(host_workers, f"7.{counter - 1}")
        host_workers.follow(plan(counter, [1, 2], lost=True))
        assert ask(host_workers, f"7.{counter}") not in (weights, None)
        assert held_bytes(host_workers) <= 3 * PLANE_BYTES, "weights, and the planes of two generations"
        for worker in host_workers.workers:
            worker.heard(f"7.{counter}")
        host_workers.tick(0.0)
        assert held_bytes(host_workers) == 2 * PLANE_BYTES
    assert [worker.identity.incarnation for worker in hands.started] == [1, 2]
    assert ask(host_workers, "7.51", name="weights", ranks=0) == weights


def test_a_death_ends_the_planes_of_every_generation_it_was_in_those_asked_for_later_included(hands):
    host_workers = hands.begin(plan(1, [1, 2, 3]))
    first = ask(host_workers, "7.1", ranks=3)
    host_workers.follow(plan(2, [3, 1, 2]))
    second = ask(host_workers, "7.2", ranks=3)
    hands.started[1].kill(ours=False)
    until(lambda: not alive(hands.started[1].pid))
    hands.see_deaths()
    assert (lost_rank(host_workers, first), lost_rank(host_workers, second)) == (1, 2)
    assert lost_rank(host_workers, ask(host_workers, "7.2", name="late", ranks=3)) == 2
    assert lost_rank(host_workers, ask(host_workers, "7.1", name="late", ranks=3)) == 1


def test_a_generation_that_began_with_a_loss_elsewhere_ends_the_planes_of_those_before(hands):
    host_workers = hands.begin(plan(1, [1, 2]))
    first = ask(host_workers, "7.1")
    host_workers.follow(plan(2, [1, 2]))
    assert lost_rank(host_workers, first) == -1
    second = ask(host_workers, "7.2")
    host_workers.follow(plan(3, [1, 2], lost=True))
    assert (lost_rank(host_workers, first), lost_rank(host_workers, second)) == (2, 2), "none of the two here"
    assert lost_rank(host_workers, ask(host_workers, "7.3")) == -1
    assert lost_rank(host_workers, ask(host_workers, "7.2", name="late")) == 2


def test_a_worker_that_is_not_planned_is_killed_and_its_slot_filled_only_when_it_is_gone(hands):
    host_workers = hands.begin(plan(1, [1, 2]))
    host_workers.follow(plan(2, [1], workers=[1, 12], lost=True))
    assert [worker.identity.incarnation for worker in hands.started] == [1, 2], "slot 2 is still taken"
    until(lambda: not alive(hands.started[1].pid), what="the end of the one that is not planned")
    hands.see_deaths()
    assert [worker.identity.incarnation for worker in hands.started] == [1, 2, 12]
    identity = hands.started[2].identity
    assert (identity.slot, identity.joining, identity.generation, identity.most_workers) == (2, True, "", 4)
    assert {number: report.ended for number, report in host_workers.reports(0.0).items()} == {
        1: False,
        2: True,
        12: False,
    }
    host_workers.follow(plan(2, [1], workers=[1, 12], lost=True))
    assert [worker.identity.incarnation for worker in host_workers.workers] == [1, 12], (
        "its end was reported; the plan does not mention it"
    )


def test_a_dismissed_worker_ends_without_a_signal_and_has_left(hands):
    host_workers = hands.begin(plan(1, [1, 2]))
    host_workers.follow(plan(2, [1], dismissed=[2]))
    assert hands.started[1].alive
    assert host_workers.reports(0.0)[2].status == "live"
    hands.started[1].kill(ours=False)
    until(lambda: not alive(hands.started[1].pid))
    hands.see_deaths()
    report = host_workers.reports(0.0)[2]
    assert (report.status, report.ended, report.end) == ("left", True, None)
    host_workers.follow(plan(2, [1]))
    assert len(host_workers.workers) == 1


def test_messages_are_taken_from_the_living_for_generations_that_they_were_in(hands):
    host_workers = hands.begin(plan(1, [1, 2]))
    host_workers.follow(plan(2, [1], workers=[1, 13], dismissed=[2]))
    assert host_workers.member("7.1", 1) is hands.started[0]
    assert host_workers.member("7.2", 1) is hands.started[0]
    assert host_workers.member("7.1", 2) is hands.started[1], "dismissed, and still at its last step"
    assert host_workers.member("", 13) is hands.started[2]
    assert host_workers.member("7.2", 2) is None, "it is not in this one"
    assert host_workers.member("", 1) is None
    assert host_workers.member("7.9", 1) is None
    assert host_workers.member("7.1", 99) is None


def test_the_hang_watch_starts_anew_after_its_agent_stood_still_and_then_asks_before_it_kills(hands):
    hands.begin(plan(1, [1]))
    (worker,) = hands.started
    worker.moved(7, "training", 1)
    worker.peer, worker.heard_at, worker.stepped_at = b"peer", 100.0, 100.0
    watch, limits = HangWatch(), HangLimits(heartbeat_s=3.0, hang_s=10.0)
    seen: dict[str, float] = {}
    for now in (100.0, 100.2, *(150.0 + 0.2 * turn for turn in range(25))):
        watch.look([worker], limits, now)
        seen.setdefault("killed" if worker.killed_by_us else worker.verdict, now)
    assert list(seen) == ["fine", "silent", "killed"]
    assert 153.0 < seen["silent"] < 153.4, "not at 150, when it was missed for 50 s"
    assert seen["killed"] - seen["silent"] >= 0.5, "it has had time to write its stack"
    assert worker.hung.startswith("no sign of life for 5")
    assert worker.hung.endswith("in step 7, training"), "this test does not read the pipe that its stack comes through"


# ---- what the channel makes of it ----------------------------------------------------------------------------------


class Line:
    """A channel, and the socket of one worker that says what a test wants it to."""

    def __init__(self, folder: Path, host_workers: HostWorkers) -> None:
        self.host_workers, self.context = host_workers, zmq.Context()
        endpoint = f"ipc://{folder}/channel"
        self.sent: list[object] = []
        self.takes = 10_000
        """How many messages to the coordinator the queue takes."""
        self.channel = WorkerChannel(
            self.context, endpoint, "agent", send=self.relay, hello=lambda *_: None, event=print
        )
        self.port = open_port(self.context, zmq.DEALER, endpoint, ToWorker)

    def relay(self, message: object) -> bool:
        self.sent += [message] if len(self.sent) < self.takes else []
        return message in self.sent

    def reply(self) -> StoreReply:
        while True:
            assert self.port.socket.poll(60_000)
            for _, message in self.port.receive(1):
                if isinstance(message, StoreReply):
                    return message

    def say(self, message: object) -> bool:
        """True when the coordinator should get a report at once."""
        self.port.send(message)
        assert self.channel.port.socket.poll(60_000)
        return self.channel.attend(self.host_workers)

    def announced(self, now: float) -> list[Announce]:
        """What it announces now; the word to stop, which it is given to send next, comes after all of that."""
        self.channel.announce(self.host_workers, now)
        peer = next(worker.peer for worker in self.host_workers.everyone if worker.peer is not None)
        self.channel.port.send(StopRequest(kind="stop"), to=peer)
        received: list[object] = []
        while not any(isinstance(message, StopRequest) for message in received):
            assert self.port.socket.poll(60_000)
            received += [message for _, message in self.port.receive()]
        return [message for message in received if isinstance(message, Announce)]

    def close(self) -> None:
        self.port.close()
        self.channel.close()
        self.context.term()


@pytest.fixture
def line(tmp_path: Path, hands: Hands) -> Iterator[Line]:
    made = Line(tmp_path, hands.begin(plan(1, [1, 2])))
    assert not made.say(WorkerHello(generation="7.1", incarnation=1, rank=0, pid=1, facts=RunFacts()))
    made.announced(0.0)
    yield made
    made.close()


def test_a_newer_generation_is_announced_at_once_and_again_until_the_worker_speaks_for_it(line):
    line.host_workers.follow(plan(2, [2, 1], lost=True))
    (first,) = line.announced(10.0)
    assert (first.group.generation, first.group.rank, first.last_loss) == ("7.2", 1, "7.2")
    assert line.announced(10.5) == []
    assert line.announced(11.0) == [first], "it may have been lost"
    assert line.say(Heartbeat(generation="7.2", incarnation=1)), "it has switched to it"
    assert line.announced(12.0) == []
    line.channel.run_call = 4
    assert [message.run_call for message in line.announced(12.1)] == [4], "news for those who wait in a call"


def test_a_worker_that_missed_a_lost_member_learns_of_it_with_a_later_planned_change(line):
    line.host_workers.follow(plan(2, [1, 2], lost=True))
    line.host_workers.follow(plan(3, [1, 2], workers=[1, 2, 13]))
    (news,) = line.announced(10.0)
    assert (news.group.generation, news.group.lost, news.last_loss) == ("7.3", False, "7.2")


def test_a_report_for_an_older_generation_counts_and_one_of_a_replaced_worker_does_not(line):
    line.host_workers.follow(plan(2, [1], workers=[1, 12], lost=True))
    assert line.say(WorkerReport(generation="7.1", incarnation=1, step=5, phase="training", call=2)), "another call"
    assert not line.say(WorkerReport(generation="7.1", incarnation=1, step=6, phase="training", call=2))
    assert (line.host_workers.workers[0].step, line.host_workers.workers[0].generation) == (6, "7.1")
    assert line.channel.stale == 0
    line.say(WorkerReport(generation="7.2", incarnation=2, step=6, phase="training"))
    line.say(WorkerReport(generation="7.1", incarnation=77, step=6, phase="training"))
    assert line.channel.stale == 2


def test_an_offer_is_valid_until_it_is_withdrawn_or_the_worker_is_admitted(line):
    line.host_workers.follow(plan(2, [1, 2], workers=[1, 2, 13]))
    newcomer = line.host_workers.workers[2]
    assert line.say(Offer(generation="", incarnation=13, call=3))
    assert not line.say(Offer(generation="", incarnation=13, call=3))
    assert newcomer.report(0.0).offers == 3
    assert line.say(Heartbeat(generation="", incarnation=13))
    assert newcomer.report(0.0).offers == 0
    line.say(Offer(generation="", incarnation=13, call=3))
    line.host_workers.follow(plan(3, [1, 2, 13]))
    assert line.say(Heartbeat(generation="7.3", incarnation=13))
    assert (newcomer.report(0.0).offers, newcomer.report(0.0).generation) == (0, "7.3")


def test_after_a_stop_servers_end_when_no_worker_is_left_and_do_not_wait_for_one_never_started(hands):
    hands.around = dataclasses.replace(hands.around, servers_here=lambda plan: range(plan.servers))
    living = {1: 1, 2: 2, 9: 9}
    host_workers = hands.begin(plan(1, [1], servers=1, living=living))
    server, worker = hands.started
    assert (server.identity.is_server, worker.identity.incarnation) == (True, 1)
    host_workers.ask_to_stop("preempt", 15, 30.0, lambda worker: None)
    host_workers.follow(plan(1, [1, 2], servers=1, living=living))
    until(lambda: hands.see_deaths() or worker.cleared, what="the worker's end")
    hands.see_deaths()
    assert not host_workers.servers.asked_to_end, "worker 9 lives on another host"
    host_workers.follow(plan(1, [1, 2], servers=1, living={2: 2}))
    hands.see_deaths()
    assert host_workers.servers.asked_to_end
    until(lambda: hands.see_deaths() or host_workers.clear, what="the server's end")
    assert len(hands.started) == 2, "neither worker 2 nor another server was started"


def wants(ticket: int, op: str, key: str, value: bytes = b"") -> StoreRequest:
    return StoreRequest(generation="7.1", incarnation=1, ticket=ticket, op=op, keys=[key], value=value, timeout_s=60.0)


def test_a_request_that_the_coordinator_cannot_be_sent_is_answered_at_once(line):
    """It was dropped, and the worker waited for a minute, to end with an error that named the wrong culprit."""
    line.takes = 0
    line.say(wants(5, "get", "k"))
    reply = line.reply()
    assert (reply.ticket, reply.ok) == (5, False) and "could not send" in reply.error


def test_a_new_coordinator_gets_every_value_even_if_the_queue_is_full_at_first(line):
    for number in range(3):
        line.say(wants(number + 1, "set", f"k{number}", b"x" * 400_000))
        line.channel.answer(StoreReply(ticket=number + 1, ok=True))
        line.reply()
    line.say(wants(9, "get", "other"))
    line.sent, line.takes = [], 2
    line.channel.resend()
    assert line.reply().ticket == 9, "the request that waited was not sent: its worker knows"
    line.takes = 10
    line.channel.attend(line.host_workers)
    assert {key for message in line.sent for key in message.values} == {"k0", "k1", "k2"}
    line.channel.attend(line.host_workers)
    assert len(line.sent) == 3, "once"
