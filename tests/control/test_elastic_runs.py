"""Elastic runs, end to end: real launchers, coordinators and workers, which die, hang, come and go. No training."""

from __future__ import annotations

import json
import os
import signal
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from click.testing import CliRunner
from conftest import Launched, Launcher, alive, until
from msgspec.structs import replace

from manyhands.cli.scale import scale
from manyhands.comm.transport import open_port
from manyhands.control.client import query, request_scale, request_stop
from manyhands.control.keys import client_curve, new_key, server_curve
from manyhands.control.launch_request import WorkerCommand
from manyhands.control.messages import FromAgent, HostReport, Job, Orders, Place, Plan, PlannedWorker
from manyhands.control.refusals import DoorKeeper
from manyhands.errors import UsageError

pytestmark = pytest.mark.faults

# A worker that makes steps of its own, goes over when told, and notes down each group that it enters.
TRAIN = """
import json
from manyhands.errors import PeerLost, PeerTimeout
def note(what, group, **more):
    facts = {"what": what, "slot": SEAT.slot, "pid": os.getpid(), "at": time.monotonic(), "rank": group.rank,
             "generation": group.generation, "lost": group.lost, "slots": group.slots, "hosts": group.hosts,
             "call": group.call, **more}
    with open(HERE / "groups.jsonl", "a") as file:
        file.write(json.dumps(facts) + "\\n")
def enter(session, group):
    session.enter(group)
    note("entered", group)
def begin(call=1):
    session = join()
    if SEAT.joining:
        enter(session, session.offer(call, 20))
    else:
        note("entered", session.group)
    return session
def leave(session):
    note("dismissed", session.newest)
    session.close()
    sys.exit(0)
def step(session):
    session.report(int(time.monotonic() * 100), "training", 1)
    if (newest := session.newest) is not None:
        leave(session) if newest.rank < 0 else enter(session, newest)
    time.sleep(0.002)
def train(session, end="end"):
    while not (HERE / end).exists():
        step(session)
"""
PLAIN = "train(begin())"


class Elastic:
    def __init__(self, launcher: Launcher, body: str, **request: Any) -> None:
        script = TRAIN + textwrap.dedent(body)
        self.folder, self.workers = launcher.folder, request.get("workers", 3)
        self.run: Launched = launcher(script, **{"workers": 3, "elastic": [1, 4], **request})

    def notes(self, what: str = "entered") -> list[dict[str, Any]]:
        path = self.folder / "groups.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [entry for entry in map(json.loads, lines) if entry["what"] == what]

    def members(self, slots: list[int], *, after: float = 0.0, timeout_s: float = 15.0) -> list[dict[str, Any]]:
        """Once a generation of these slots, in any order, is entered by all of them: what they noted, by rank."""

        def complete() -> list[dict[str, Any]]:
            found: dict[str, list[dict[str, Any]]] = {}
            for entry in self.notes():
                if sorted(entry["slots"]) == sorted(slots) and entry["at"] > after:
                    found.setdefault(entry["generation"], []).append(entry)
            whole = [entries for entries in found.values() if len(entries) == len(slots)]
            return sorted(whole[-1], key=lambda entry: entry["rank"]) if whole else []

        return until(complete, timeout_s, f"a group of {slots}; {self.notes()}")

    def end(self) -> None:
        (self.folder / "end").touch()
        assert self.run.wait() == 0, self.run.err


@pytest.fixture
def elastic(launcher) -> Callable[..., Elastic]:
    return lambda body=PLAIN, **request: Elastic(launcher, body, **request)


def by_slot(members: list[dict[str, Any]]) -> dict[int, int]:
    return {entry["slot"]: entry["pid"] for entry in members}


def kill(*pids: int) -> float:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def test_a_killed_worker_is_missed_at_once_and_replaced_while_the_others_keep_their_processes(elastic):
    run = elastic("""
        print(f"slot {SEAT.slot} {'joins' if SEAT.joining else 'starts'}", flush=True)
        train(begin())
    """)
    pids = by_slot(run.members([0, 1, 2]))
    killed_at = kill(pids[1])
    survivors = run.members([0, 2])
    assert max(entry["at"] for entry in survivors) - killed_at < 1.0
    assert all(entry["lost"] for entry in survivors)
    whole = run.members([0, 1, 2], after=killed_at)
    assert [entry["slot"] for entry in whole] == [0, 2, 1], "the newcomer comes last"
    assert not any(entry["lost"] for entry in whole)
    assert {slot: by_slot(whole)[slot] for slot in (0, 2)} == {slot: pids[slot] for slot in (0, 2)}
    run.end()
    assert run.run.out == "slot 0 starts\n", "the chief's output is the run's"
    log = (run.run.run_dir() / "logs" / "attempt-1" / "rank-1.out").read_text()
    assert log == f"slot 1 starts\n--- worker 1 again: pid {by_slot(whole)[1]} ---\nslot 1 joins\n"
    started = run.run.events("WorkerStarted")
    assert [(event["slot"], event["joining"]) for event in started] == [(0, False), (1, False), (2, False), (1, True)]
    assert started[3]["pid"] == by_slot(whole)[1]
    why = [event["why"] for event in run.run.events("GenerationStarted")]
    assert why[0] == ""
    assert f"(pid {pids[1]}) died: SIGKILL" in why[1]
    assert why[2] == "1 joined"
    assert [event["pid"] for event in run.run.events("WorkerLost")] == [pids[1]]


def test_when_the_chief_is_killed_another_takes_its_place_and_its_output(elastic):
    run = elastic("""
        session = begin()
        was_chief = session.group.rank == 0
        while not (HERE / "end").exists():
            step(session)
            if session.group.rank == 0 and not was_chief:
                print("chief:", SEAT.slot, flush=True)
                was_chief = True
    """)
    pids = by_slot(run.members([0, 1, 2]))
    killed_at = kill(pids[0])
    assert [entry["slot"] for entry in run.members([1, 2])] == [1, 2]
    assert [entry["slot"] for entry in run.members([0, 1, 2], after=killed_at)] == [1, 2, 0]
    run.end()
    assert run.run.out == "chief: 1\n"


def test_two_killed_at_once_are_both_replaced_and_what_they_had_started_is_gone(elastic):
    run = elastic("""
        import subprocess
        loader = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        session = begin()
        note("loader", session.group, loader=loader.pid)
        train(session)
        loader.kill()
    """)
    pids = by_slot(run.members([0, 1, 2]))
    loaders = until(lambda: len(found := run.notes("loader")) == 3 and found)
    killed_at = kill(pids[0], pids[2])
    alone = run.members([1])
    assert alone[0]["pid"] == pids[1]
    assert by_slot(run.members([0, 1, 2], after=killed_at))[1] == pids[1]
    assert {entry["slot"] for entry in loaders if alive(entry["loader"])} == {1}
    run.end()
    assert len(run.run.events("WorkerStarted")) == 5


def test_below_the_lower_bound_the_living_get_a_group_to_finish_their_step_in_and_then_a_replacement(elastic):
    run = elastic("""
        session = begin()
        if SEAT.slot == 0:
            while session.newest is None:
                time.sleep(0.001)
            note("first heard", session.newest)
            session.enter(session.await_group(0.1))
            note("entered", session.group)
        train(session)
    """, workers=2, elastic=[2, 2])  # fmt: skip
    pids = by_slot(run.members([0, 1]))
    killed_at = kill(pids[1])
    run.members([0, 1], after=killed_at)
    (heard,) = run.notes("first heard")
    assert heard["slots"] == [0]
    assert heard["lost"]
    run.end()


def test_a_run_grows_and_shrinks_as_it_is_asked_and_who_is_dismissed_leaves_by_itself(elastic):
    run = elastic(workers=2)
    pids = by_slot(run.members([0, 1]))
    directory = until(lambda: query(run.run.run_dir())) and run.run.run_dir()
    said = CliRunner().invoke(scale, [str(directory), "4", "--json"], catch_exceptions=False)
    assert json.loads(said.output) == {
        "run": directory.name,
        "run_dir": str(directory),
        "workers_wanted": 4,
        "elastic": [1, 4],
    }
    grown = by_slot(run.members([0, 1, 2, 3]))
    assert {slot: grown[slot] for slot in (0, 1)} == pids
    stood = query(directory)
    assert [(member.rank, member.slot, member.status) for member in stood.members] == [
        (rank, rank, "live") for rank in range(4)
    ]
    assert (stood.workers_wanted, stood.run_call) == (4, 1)
    for number, nearest in ((0, 1), (5, 4)):
        with pytest.raises(UsageError, match=f"{number} workers are outside of this run's bounds, 1 to 4") as refused:
            request_scale(directory, number)
        assert refused.value.fix == (f"mh scale {directory} {nearest}",)
    said = CliRunner().invoke(scale, [str(directory), "1"], catch_exceptions=False)
    assert said.output == f"{directory} was asked to go on with 1 worker; here it has 4.\n"
    (left,) = run.members([0])
    assert left["pid"] == pids[0]
    assert not left["lost"]
    until(lambda: not any(alive(grown[slot]) for slot in (1, 2, 3)), 10, "the end of those who left")
    assert sorted(entry["slot"] for entry in run.notes("dismissed")) == [1, 2, 3]
    until(lambda: len(query(directory).members) == 1, 5, "only one member")
    run.end()
    with pytest.raises(UsageError, match="is not running here"):
        request_scale(directory, 2)
    assert run.run.events("WorkerLost") == []


def test_a_dismissed_worker_that_does_not_go_is_killed_after_the_grace_time(elastic):
    run = elastic("""
        session = begin()
        if SEAT.slot == 1:
            while True:
                session.report(int(time.monotonic() * 100), "training", 1)
                time.sleep(0.01)
        train(session)
    """, workers=2, grace_s=0.5)  # fmt: skip
    pids = by_slot(run.members([0, 1]))
    request_scale(run.run.run_dir(), 1)
    run.members([0])
    until(lambda: not alive(pids[1]), 5, "the end of the dismissed worker")
    run.end()
    assert run.run.events("WorkerLost") == []


def test_a_coordinator_killed_together_with_a_worker_does_not_cost_the_others_their_processes(elastic):
    run = elastic()
    pids = by_slot(run.members([0, 1, 2]))
    coordinator = run.run.coordinator()
    killed_at = kill(coordinator.pid, pids[1])
    whole = by_slot(run.members([0, 1, 2], after=killed_at, timeout_s=20))
    assert (whole[0], whole[2]) == (pids[0], pids[2])
    run.end()
    assert len(run.run.events("WorkerStarted")) == 4


def test_a_worker_that_raises_is_named_with_its_error_and_replaced_even_if_it_does_not_end(elastic):
    run = elastic("""
        import atexit
        session = begin()
        for _ in range(100):
            step(session)
        if SEAT.slot == 1 and not SEAT.joining:
            atexit.register(time.sleep, 60)
            raise ValueError("row 17 is not a number")
        train(session)
    """, workers=2)  # fmt: skip
    pids = by_slot(run.members([0, 1]))
    run.members([0])
    whole = run.members([0, 1], after=run.members([0])[0]["at"])
    assert by_slot(whole)[0] == pids[0]
    run.end()
    (loss,) = run.run.events("WorkerLost")
    assert (loss["pid"], loss["reason"]) == (pids[1], "ValueError: row 17 is not a number")


def test_a_call_that_waits_for_a_dead_member_ends_at_once_and_the_store_serves_the_next_generation(elastic):
    run = elastic("""
        session = begin()
        if SEAT.slot == 0 and not SEAT.joining:
            session.report(1, "training", 1)
            try:
                session.get("never set", 30)
            except PeerLost as lost:
                assert not isinstance(lost, PeerTimeout)
                note("lost", session.group, text=str(lost))
            try:
                session.set("too late", b"")
            except PeerLost:
                note("still lost", session.group)
            enter(session, session.await_group(10))
            session.set("a", b"b")
            note("set", session.group, value=session.get("a", 5).decode())
        train(session)
    """, workers=2)  # fmt: skip
    pids = by_slot(run.members([0, 1]))
    until(lambda: any(member.step is not None for member in query(run.run.run_dir()).members if member.slot == 0))
    killed_at = kill(pids[1])
    (lost,) = until(lambda: run.notes("lost"), 10, "PeerLost")
    assert lost["at"] - killed_at < 1.0
    assert "is gone" in lost["text"] or "is over" in lost["text"]
    run.members([0])
    assert until(lambda: run.notes("set"), 5)[0]["value"] == "b"
    assert len(run.notes("still lost")) == 1
    run.end()


def test_an_offer_for_a_call_that_is_over_is_answered_so_and_the_right_one_is_admitted(elastic):
    run = elastic("""
        if not SEAT.joining:
            session = begin()
            while not (HERE / "end").exists():
                session.report(int(time.monotonic() * 100), "training", 3)
                if (newest := session.newest) is not None:
                    enter(session, newest)
                time.sleep(0.002)
        else:
            session = join()
            assert session.run_call == 3
            assert session.offer(2, 10) is None
            enter(session, session.offer(3, 10))
            note("admitted", session.group)
            train(session)
    """, workers=2)  # fmt: skip
    pids = by_slot(run.members([0, 1]))
    until(lambda: query(run.run.run_dir()).run_call == 3, 5, "the call to be known")
    kill(pids[0])
    (admitted,) = until(lambda: run.notes("admitted"), 15, "the right offer's admission")
    assert admitted["call"] == 3
    run.end()


def test_everybody_killed_starts_the_run_again_as_a_new_attempt(elastic):
    run = elastic(workers=2)
    pids = by_slot(run.members([0, 1]))
    killed_at = kill(*pids.values())
    again = run.members([0, 1], after=killed_at)
    assert not set(by_slot(again).values()) & set(pids.values())
    run.end()
    assert (run.run.run_dir() / "logs" / "attempt-2" / "rank-0.out").exists()


def test_a_stop_asks_all_members_and_ends_the_run(elastic):
    run = elastic("""
        session = begin()
        while session.stop_requested is None:
            step(session)
        sys.exit(75)
    """)
    run.members([0, 1, 2])
    request_stop(run.run.run_dir())
    assert run.run.wait() == 75
    assert len(run.run.events("WorkerStarted")) == 3


# ---- a host that goes ---------------------------------------------------------------------------------------------


def test_a_joined_host_that_is_told_to_go_lets_its_workers_leave_and_ends_with_0(elastic, launcher):
    run = elastic(workers=1, hosts_wanted=2, listen="127.0.0.1", join_file="join.json")
    ticket = until(lambda: (run.folder / "join.json").exists() and json.loads((run.folder / "join.json").read_text()))
    second = launcher(join=ticket, workers=2)
    all_of_them = run.members([0, 1, 2])
    assert [entry["hosts"] for entry in all_of_them] == [[0, 1, 1]] * 3
    pids = by_slot(all_of_them)
    second.process.send_signal(signal.SIGTERM)
    (alone,) = run.members([0])
    assert (alone["pid"], alone["lost"]) == (pids[0], False)
    assert second.wait() == 0, second.err
    assert sorted(entry["slot"] for entry in run.notes("dismissed")) == [1, 2]
    run.end()
    assert run.run.events("WorkerLost") == []


def test_a_joined_host_whose_workers_do_not_leave_in_time_kills_them_and_ends_with_143(elastic, launcher):
    run = elastic(
        """
        session = begin()
        while SEAT.slot and not (HERE / "end").exists():
            session.report(int(time.monotonic() * 100), "training", 1)
            time.sleep(0.01)
        train(session)
    """,
        workers=1,
        hosts_wanted=2,
        listen="127.0.0.1",
        join_file="join.json",
        grace_s=0.5,
    )
    ticket = until(lambda: (run.folder / "join.json").exists() and json.loads((run.folder / "join.json").read_text()))
    second = launcher(join=ticket, workers=1)
    pids = by_slot(run.members([0, 1]))
    second.process.send_signal(signal.SIGTERM)
    assert second.wait() == 143
    assert not alive(pids[1])
    run.members([0])
    run.end()


def test_a_joined_host_that_is_killed_is_missed_and_the_run_goes_on(elastic, launcher):
    run = elastic(workers=2, hosts_wanted=2, listen="127.0.0.1", join_file="join.json")
    ticket = until(lambda: (run.folder / "join.json").exists() and json.loads((run.folder / "join.json").read_text()))
    second = launcher(join=ticket, workers=1)
    pids = by_slot(run.members([0, 1, 2]))
    second.process.send_signal(signal.SIGKILL)
    survivors = run.members([0, 1], timeout_s=20)
    assert all(entry["lost"] for entry in survivors)
    assert by_slot(survivors) == {0: pids[0], 1: pids[1]}
    run.end()


@pytest.mark.parametrize("restarted", [False, True], ids=["same attempt", "next attempt"])
def test_a_joined_host_that_was_away_for_a_while_ends_what_it_has_and_joins_again(elastic, launcher, restarted):
    run = elastic(workers=1, hosts_wanted=2, listen="127.0.0.1", join_file="join.json")
    ticket = until(lambda: (run.folder / "join.json").exists() and json.loads((run.folder / "join.json").read_text()))
    second = launcher(join=ticket, workers=1)
    pids = by_slot(run.members([0, 1]))
    second.process.send_signal(signal.SIGSTOP)
    alone_at = run.members([0], timeout_s=20)[0]["at"]
    if restarted:
        kill(pids[0])
        run.members([0], after=alone_at)
    assert alive(pids[1]), "only its agent stood still"
    back_at = time.monotonic()
    second.process.send_signal(signal.SIGCONT)
    again = by_slot(run.members([0, 1], after=back_at))
    assert (again[0] == pids[0]) is not restarted
    assert again[1] != pids[1]
    assert not alive(pids[1])
    run.end()
    assert second.wait() == 0


# ---- workers that hang --------------------------------------------------------------------------------------------

HANGING = """
session = begin()
for _ in range(200):
    step(session)
if SEAT.slot == 1 and not SEAT.joining:
    note("hangs", session.group)
    hang(session)
train(session)
"""


def hung(run: Elastic) -> tuple[str, float]:
    """The reason that the run gives for the loss of slot 1, and how long that took."""
    pids = by_slot(run.members([0, 1, 2]))
    run.members([0, 2], timeout_s=20)
    (loss,) = run.run.events("WorkerLost")
    (began,) = run.notes("hangs")
    took_s = min(entry["at"] for entry in run.notes() if entry["lost"]) - began["at"]
    whole = run.members([0, 1, 2], after=began["at"])
    assert (loss["rank"], loss["pid"]) == (1, pids[1])
    assert {slot: by_slot(whole)[slot] for slot in (0, 2)} == {slot: pids[slot] for slot in (0, 2)}
    run.end()
    return loss["reason"], took_s


def test_a_stopped_process_is_found_by_its_silence(elastic):
    run = elastic("def hang(session): os.kill(os.getpid(), signal.SIGSTOP)\n" + HANGING, heartbeat_s=1.0)
    reason, took_s = hung(run)
    assert reason.startswith("hung: no sign of life for 1.")
    assert "the process is stopped, in step " in reason
    assert 0.75 <= took_s < 4.0  # its last sign of life came up to 0.2 s before it hung


DEADLOCK = """
import ctypes
def hang(session):
    mutex, keeps_the_interpreter = ctypes.create_string_buffer(128), ctypes.PyDLL(None)
    keeps_the_interpreter.pthread_mutex_lock(mutex)
    keeps_the_interpreter.pthread_mutex_lock(mutex)  # for ever
"""


def test_a_deadlock_that_holds_the_interpreter_is_found_and_its_line_named(elastic):
    run = elastic("os.dup2(1, 2)\n" + DEADLOCK + HANGING, heartbeat_s=1.0)  # its stderr is not ours any more
    reason, took_s = hung(run)
    assert reason.startswith("hung: no sign of life for 1."), reason
    lines = (run.folder / "train.py").read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines, 1) if text.endswith("# for ever")]
    assert f"train.py line {line}, in hang" in reason
    assert ", in step " in reason
    assert f"line {line} in hang" in (run.run.run_dir() / "logs" / "attempt-1" / "rank-1.err").read_text()
    assert 0.75 <= took_s < 5.0


def test_a_loop_without_progress_is_found_although_its_heart_beats(elastic):
    run = elastic("def hang(session):\n    while True:\n        sum(range(1000))\n" + HANGING, hang_s=1.0)
    reason, took_s = hung(run)
    assert reason.startswith("hung: no progress for 2."), reason
    assert ", in hang" in reason
    assert 2.0 <= took_s < 6.0


def test_whoever_waits_for_others_is_not_killed_for_it(elastic):
    run = elastic("""
        session = begin()
        for _ in range(200):
            step(session)
        if SEAT.slot == 1:
            note("waits", session.group)
            session.get("go on", 30)
            note("went on", session.group)
        elif SEAT.slot == 0:
            for _ in range(4000):
                step(session)
                if (HERE / "go").exists():
                    break
            session.set("go on", b"")
        train(session)
    """, hang_s=1.0)  # fmt: skip
    pids = by_slot(run.members([0, 1, 2]))
    (waits,) = until(lambda: run.notes("waits"))
    log = run.run.run_dir() / "logs" / "attempt-1" / "rank-1.err"
    until(
        lambda: log.read_text().count("most recent call first") and time.monotonic() - waits["at"] > 2.6, 10, "a dump"
    )
    (run.folder / "go").touch()
    until(lambda: run.notes("went on"), 10, "the end of its wait")
    assert alive(pids[1])
    run.end()
    assert run.run.events("WorkerLost") == []


def test_an_agent_that_was_suspended_itself_does_not_blame_its_workers(elastic):
    run = elastic(heartbeat_s=1.0)
    run.members([0, 1, 2])
    time.sleep(0.5)  # the workers have reported steps
    run.run.process.send_signal(signal.SIGSTOP)
    time.sleep(1.7)
    run.run.process.send_signal(signal.SIGCONT)
    time.sleep(0.7)
    run.end()
    assert run.run.events("WorkerLost") == []


# ---- an agent and a coordinator that this test plays ----------------------------------------------------


class FakeCoordinator:
    """Gives one agent whatever orders a test wants; each is sent until the agent reports what it should lead to."""

    def __init__(self, launcher: Launcher) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        key = new_key()
        self.door = DoorKeeper(self.context, client_curve(key).public)
        self.port = open_port(
            self.context, zmq.ROUTER, "tcp://127.0.0.1:*", FromAgent, bind=True, curve=server_curve(key)
        )
        self.door.watch(self.port)
        address = self.port.socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        (launcher.folder / "train.py").write_text("import time\ntime.sleep(60)\n")
        self.job = Job(
            command=WorkerCommand("script", str(launcher.folder / "train.py")),
            flags={},
            grace_s=1.0,
            max_restarts=0,
            most_workers=4,
        )
        self.agent = launcher(join={"address": address, "run": "r", "key": key.hex()}, workers=1)

    def order(self, until_reported: Callable[[HostReport], bool], **orders: Any) -> HostReport:
        deadline = time.monotonic() + 15.0
        while time.monotonic() < deadline:
            self.door.attend()
            self.port.socket.poll(20)
            for peer, message in self.port.receive():
                if isinstance(message, HostReport):
                    if until_reported(message):
                        return message
                    self.port.send(Orders(term=1, run="r", job=self.job, **orders), to=peer)
        raise AssertionError(f"the agent did not come to stand as ordered: {orders}")

    def close(self) -> None:
        self.door.close()
        self.port.close()
        self.context.term()


def plan_of_one(attempt: int, counter: int, incarnation: int) -> Plan:
    return Plan(
        generation=f"1.{counter}",
        attempt=attempt,
        world_size=1,
        num_hosts=1,
        host=0,
        first_rank=0,
        incarnations=[incarnation],
        master=("127.0.0.1", 1),
        workers=[PlannedWorker(slot=0, incarnation=incarnation)],
        group=[Place(incarnation=incarnation, slot=0, host=0)],
    )


@pytest.fixture
def coordinator(launcher) -> Iterator[FakeCoordinator]:
    made = FakeCoordinator(launcher)
    yield made
    made.close()


def started(*incarnations: int) -> Callable[[HostReport], bool]:
    return lambda report: [member.incarnation for member in report.members if not member.ended] == list(incarnations)


def test_a_host_that_the_run_has_gone_on_without_ends_what_it_has(coordinator):
    first = coordinator.order(started(1), do="run", plan=plan_of_one(1, 1, 1))
    coordinator.order(started(2), do="run", plan=plan_of_one(2, 5, 2))
    assert not alive(first.members[0].pid), "of the attempt before"
    coordinator.order(lambda report: report.clear, do="wait", generation="1.9")


def test_orders_that_are_older_than_what_was_heard_change_nothing(coordinator):
    alone = plan_of_one(1, 1, 1)
    with_another = replace(alone, workers=[*alone.workers, PlannedWorker(slot=1, incarnation=2, joining=True)])
    coordinator.order(started(1), do="run", revision=3, plan=alone)
    coordinator.order(started(1, 2), do="run", revision=5, plan=with_another)
    seen: list[HostReport] = []
    coordinator.order(lambda report: seen.append(report) or len(seen) == 3, do="run", revision=4, plan=alone)
    assert all(started(1, 2)(report) for report in seen), "the newcomer was not killed"
