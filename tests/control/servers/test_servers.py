"""Parameter servers as processes of a run: started, watched, replaced, informed of live workers, ended last."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import textwrap
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from manyhands.cli.runs.logs import logs
from manyhands.cli.runs.scale import scale
from manyhands.cli.runs.status import status
from manyhands.control.agent.user_requests import may_start_servers, with_servers
from manyhands.control.membership.orders import orders_for
from manyhands.control.messages.agent_messages import FailedServer
from manyhands.control.messages.failure import WorkerEnd
from manyhands.control.messages.launch_request import LaunchRequest, WorkerCommand
from manyhands.control.servers.server_processes import ServerLife, is_hopeless
from manyhands.control.session.run_client import query, request_scale, request_stop
from manyhands.errors import UsageError
from tests.control.conftest import Launched, Launcher, alive, until
from tests.control.membership.scene import started

# Workers make steps until the test ends them; servers note their list of live workers, at first and at each change.
SCRIPT = """
import json
def note(what, **more):
    facts = {"what": what, "server": IDENTITY.server, "pid": os.getpid(), "at": time.monotonic(), **more}
    with open(HERE / "notes.jsonl", "a") as file:
        file.write(json.dumps(facts) + "\\n")
def work():
    session = join()
    if IDENTITY.joining:
        session.enter(session.offer(1, 60))
    servers = [IDENTITY.num_servers, IDENTITY.servers]
    note("works", slot=IDENTITY.slot, generation=session.group.generation, servers=servers)
    while not (HERE / "end").exists() and session.stop_requested is None:
        session.report(int(time.monotonic() * 100), "training", 1)
        if (newest := session.newest) is not None:
            session.enter(newest)
            note("entered", slot=IDENTITY.slot, generation=newest.generation)
        time.sleep(0.002)
    sys.exit(75 if session.stop_requested else 0)
def begin():
    session = Session(IDENTITY)
    session.on_change = lambda: note("living", living=session.living)
    session.join(RunFacts())
    return session
def serve():
    session = begin()
    memory = session.shared_memory(f"weights of {IDENTITY.server}", 4096)
    held = memory.buffer
    held[0] += 1
    session.report(0, "serving")
    group = [session.group.rank, session.group.generation]
    note("serves", times=held[0], incarnation=IDENTITY.incarnation, group=group)
    session.await_stop()
    note("ends", kind=session.stop_requested)
"""
PLAIN = "serve() if IDENTITY.is_server else work()"


class Served:
    def __init__(self, launcher: Launcher, body: str, **request: Any) -> None:
        servers = request.pop("servers", 2)
        script = SCRIPT + textwrap.dedent(body)
        asked = {"workers": 2, "elastic": [1, 2], "servers": servers, **request}
        self.folder, self.run = launcher.folder, launcher(script, **asked)

    def notes(self, what: str, **same: Any) -> list[dict[str, Any]]:
        path = self.folder / "notes.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [entry for entry in map(json.loads, lines) if entry["what"] == what]
        return [entry for entry in found if all(entry[name] == value for name, value in same.items())]

    def wait(self, what: str, number: int, **same: Any) -> list[dict[str, Any]]:
        return until(lambda: len(found := self.notes(what, **same)) >= number and found, what=f"{number} x {what}")

    def end(self) -> Launched:
        (self.folder / "end").touch()
        assert self.run.wait() == 0, self.run.err
        return self.run


@pytest.fixture
def served(launcher) -> Callable[..., Served]:
    return lambda body=PLAIN, **request: Served(launcher, body, **request)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.faults
def test_a_killed_server_comes_back_with_its_number_and_memory_and_no_worker_notices(served):
    run = served('print("mine is", IDENTITY.role, flush=True)\n' + PLAIN)
    serving = {entry["server"]: entry for entry in run.wait("serves", 2)}
    workers = run.wait("works", 2)
    assert [entry["group"] for entry in serving.values()] == [[-1, ""]] * 2
    prefix = workers[0]["servers"][1]
    assert [entry["servers"] for entry in workers] == [[2, prefix]] * 2
    assert re.fullmatch(r"ipc:///.*/server-", prefix)
    coordinator = run.run.coordinator()
    coordinator.suspend()  # no process waits for the coordinator here
    kill(serving[1]["pid"])
    again = run.wait("serves", 2, server=1)[1]
    with contextlib.suppress(psutil.NoSuchProcess):  # on a slow machine its agent has replaced it
        coordinator.resume()
    assert again["times"] == 2, "the memory stayed"
    assert again["pid"] != serving[1]["pid"]
    assert again["incarnation"] > serving[1]["incarnation"] > max(serving[0]["incarnation"], 1000)
    seen = query(run.run.run_dir())
    assert [(one.server, one.status, one.deaths) for one in seen.servers] == [(0, "live", 0), (1, "live", 1)]
    assert len(seen.members) == 2
    ended = run.end()
    assert run.notes("entered") == [], "no other generation"
    assert ended.out == "mine is worker\n", "the chief's output alone is the run's"
    assert [event["server"] for event in ended.events("ServerStarted")] == [0, 1, 1]
    (lost,) = ended.events("ServerLost")
    assert (lost["server"], lost["pid"], lost["reason"]) == (1, serving[1]["pid"], "signal 9 (SIGKILL)")
    assert ended.events("WorkerLost") == []
    assert [(entry["server"], entry["kind"]) for entry in sorted(run.notes("ends"), key=lambda e: e["server"])] == [
        (0, "end"),
        (1, "end"),
    ]
    text = (ended.run_dir() / "logs" / "attempt-1" / "server-1.out").read_text()
    assert text == f"mine is server\n--- server 1 again: pid {again['pid']} ---\nmine is server\n"


@pytest.mark.faults
def test_servers_learn_at_once_of_a_worker_that_died_and_of_the_one_that_replaces_it(served):
    run = served(servers=1)
    run.wait("serves", 1)
    pids = {entry["slot"]: entry["pid"] for entry in run.wait("works", 2)}
    (first, *_) = run.notes("living")
    assert sorted(first["living"].values()) == [0, 1]
    kill(pids[1])
    killed = next(number for number, slot in first["living"].items() if slot == 1)
    without = run.wait("living", 2)[1]
    # The coordinator's plan for after the death has the next one in it: this was said before.
    assert without["living"] == {number: slot for number, slot in first["living"].items() if number != killed}
    again = until(lambda: [entry for entry in run.notes("living")[2:] if len(entry["living"]) == 2], what="a newcomer")
    assert sorted(again[0]["living"].values()) == [0, 1]
    assert killed not in again[0]["living"]
    run.end()


@pytest.mark.faults
def test_a_server_that_dies_quickly_again_and_again_ends_the_run_with_its_last_words(served):
    run = served("""
        session = begin() if IDENTITY.is_server else work()
        memory = session.shared_memory("times", 4096).buffer
        memory[0] += 1
        if memory[0] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        elif memory[0] == 2:
            sys.exit(0)
        raise ValueError("no such table")
    """, servers=1, max_restarts=0)  # fmt: skip
    assert run.run.wait() == 1, run.run.err
    assert len(run.run.events("ServerStarted")) == 3
    reasons = [event["reason"] for event in run.run.events("ServerLost")]
    assert reasons == ["signal 9 (SIGKILL)", "exit code 0", "ValueError: no such table"]
    block, text = run.run.failure()["block"], run.run.failure()["text"]
    assert (block["first"]["role"], block["first"]["rank"]) == ("server", 0)
    assert re.search(r"first failure +server 0 on .* \(pid \d+\)  at ", text), text
    assert re.search(r"^ +ValueError: no such table$", text, re.M) and text.count("ValueError: no such table") == 1, (
        text
    )
    assert re.search(r'File ".*train.py", line \d+, in <module>', text), "the server's own traceback"
    assert block["first"]["log"].endswith("attempt-1/server-0.err")


@pytest.mark.faults
def test_a_servers_usage_error_ends_the_run_at_once(served):
    run = served("""
        from manyhands.errors import SpecError
        session = begin() if IDENTITY.is_server else work()
        raise SpecError("LBFGS cannot run on a server.", fix=["SGD"])
    """)
    assert run.run.wait() == 2
    assert len(run.run.events("ServerLost")) >= 1
    assert len(run.run.events("ServerStarted")) == 2, "no server was started again"
    assert "SpecError: LBFGS cannot run on a server." in run.run.failure()["text"]


@pytest.mark.faults
def test_a_stopped_server_is_found_by_its_silence_and_replaced(served):
    run = served(servers=1, heartbeat_s=1.0)
    (first,) = run.wait("serves", 1)
    until(lambda: [one.phase for one in query(run.run.run_dir()).servers] == ["serving"], what="its report")
    os.kill(first["pid"], signal.SIGSTOP)
    run.wait("serves", 2)
    (lost,) = run.end().events("ServerLost")
    assert re.fullmatch(
        r"hung: no sign of life for [1-9]\d*\.\d s: the process is stopped, in step 0, serving", lost["reason"]
    )


@pytest.mark.faults
def test_when_all_workers_die_the_next_attempt_has_new_servers(served):
    run = served(servers=1)
    (first,) = run.wait("serves", 1)
    for entry in run.wait("works", 2):
        kill(entry["pid"])
    again = run.wait("serves", 2)[1]
    assert again["times"] == 1, "and other memory"
    run.wait("works", 4)
    run.end()
    assert not alive(first["pid"])
    assert [entry["pid"] for entry in run.notes("ends")] == [again["pid"]], "the first was not asked, but killed"


@pytest.mark.faults
def test_a_stop_ends_the_workers_first_and_kills_a_process_that_ignores_it(served):
    run = served("""
        if IDENTITY.is_server and IDENTITY.server == 1:
            begin().await_stop()
            note("stays")
            time.sleep(300)
        serve() if IDENTITY.is_server else work()
    """, grace_s=1.0)  # fmt: skip
    run.wait("works", 2)
    run.wait("living", 2)
    request_stop(run.run.run_dir())
    assert run.run.wait() == 75
    assert [(entry["server"], entry["kind"]) for entry in run.notes("ends")] == [(0, "end")]
    (stays,) = run.notes("stays")
    assert not alive(stays["pid"])
    (lost,) = run.run.events("ServerLost")
    assert (lost["server"], lost["reason"][:24]) == (1, "hung: did not end within")


@pytest.mark.faults
def test_servers_die_with_their_agent(served):
    run = served()
    pids = [entry["pid"] for entry in run.wait("serves", 2)]
    kill(run.run.process.pid)
    until(lambda: not any(map(alive, pids)), what="the servers' end")


@pytest.mark.faults
def test_servers_are_added_at_once_and_leave_when_they_have_handed_over(served):
    run = served("""
        def leave_on_request():
            session, changes = Session(IDENTITY), threading.Semaphore(0)
            session.on_change = changes.release
            session.join(RunFacts())
            note("serves", num_servers=IDENTITY.num_servers)
            while session.servers_wanted > IDENTITY.server and session.stop_requested is None:
                changes.acquire()
            while session.stop_requested is None and not (HERE / "handed over").exists():
                time.sleep(0.01)
        def work_with_many():
            session = join()
            session.on_change = lambda: note("wanted", number=session.servers_wanted)
            note("listens")
            while not (HERE / "end").exists():
                session.report(int(time.monotonic() * 100), "training", 1)
                time.sleep(0.01)
        import threading
        work_with_many() if not IDENTITY.is_server else leave_on_request() if IDENTITY.server else serve()
    """, servers=1, workers=1)  # fmt: skip
    run.wait("serves", 1)
    run.wait("listens", 1)
    folder = str(run.run.run_dir())
    said = CliRunner().invoke(scale, [folder, "--servers", "3"], catch_exceptions=False).output
    assert said == f"{folder}: requested 3 servers; on this host it has 1.\n"
    assert [entry["num_servers"] for entry in run.wait("serves", 3)[1:]] == [3, 3]
    assert run.wait("wanted", 1)[0]["number"] == 3
    kill(run.run.coordinator().pid)
    facts = json.loads(CliRunner().invoke(scale, [folder, "1", "--servers", "2", "--json"]).output)
    assert (facts["workers_wanted"], facts["servers_wanted"]) == (1, 2)
    run.wait("wanted", 2)
    assert [one.status for one in query(folder).servers] == ["live", "live", "leaving"]
    (pid,) = [entry["pid"] for entry in run.notes("serves", server=2)]
    kill(pid)
    run.wait("serves", 2, server=2)
    (run.folder / "handed over").touch()
    until(lambda: [one.server for one in query(folder).servers] == [0, 1], what="server 2 to leave")
    with pytest.raises(UsageError, match="0 parameter servers are too few"):
        request_scale(folder, servers=0)
    assert [event["pid"] for event in run.end().events("ServerLost")] == [pid]
    assert [entry["number"] for entry in run.notes("wanted")] == [3, 2]


@pytest.mark.faults
def test_status_and_logs_show_servers(served):
    run = served('print("hello from", IDENTITY.role, file=sys.stderr)\n' + PLAIN)
    run.wait("serves", 2)
    until(lambda: all(one.phase == "serving" for one in query(run.run.run_dir()).servers), what="their first words")
    folder = str(run.run.run_dir())
    lines = CliRunner().invoke(status, [folder]).output
    assert re.search(r"^server 0    live, serving, last report \d+s ago, pid \d+$", lines, re.M), lines
    document = json.loads(CliRunner().invoke(status, [folder, "--json"]).output)
    assert [(one["role"], one["server"], one["status"]) for one in document["servers"]] == [
        ("server", 0, "live"),
        ("server", 1, "live"),
    ]
    assert {one["pid"] for one in document["servers"]} == {entry["pid"] for entry in run.notes("serves")}
    run.end()
    assert CliRunner().invoke(logs, [folder, "--server", "1"]).output == "hello from server\n"
    assert "[rank 0 err] hello from worker\n[rank 1 err] hello from worker\n[server 0 err] hello from server\n" in (
        CliRunner().invoke(logs, [folder]).output
    )
    (line,) = CliRunner().invoke(logs, [folder, "--server", "0", "--json"]).output.splitlines()
    assert json.loads(line) == {"attempt": 1, "server": 0, "stream": "err", "line": "hello from server"}


# ---- decisions ----------------------------------------------------------------------------------------------------


def test_three_deaths_in_a_row_soon_after_the_start_are_hopeless():
    killed = WorkerEnd(rank=0, role="server", host="h", pid=1, kind="signal", signal=9)
    short, long, useful = ServerLife(9.9, 9), ServerLife(11.0, 0), ServerLife(1.0, 10)
    assert not is_hopeless(killed, [short, short])
    assert is_hopeless(killed, [short, short, short])
    assert is_hopeless(killed, [long, short, short, short])
    assert not is_hopeless(killed, [short, long, short])
    assert not is_hopeless(killed, [short, short, useful])
    assert is_hopeless(replace(killed, kind="exception", error="SpecError", exit_code=2), [useful])


def test_every_host_receives_who_lives_on_all_of_them():
    scene = started(hosts=2, slots=2)
    everyone = {place.incarnation: place.slot for place in scene.plan("a").group}
    assert scene.plan("a").living == scene.plan("b").living == everyone
    victim = scene.plan("b").workers[0].incarnation
    scene.kill(victim)
    survivors = {number: slot for number, slot in everyone.items() if number != victim}
    assert {number: scene.plan("a").living[number] for number in survivors} == survivors
    assert victim not in scene.plan("a").living


def test_a_silent_hosts_workers_live_until_the_run_continues_without_them():
    scene = started(hosts=2, slots=1)
    everyone = scene.plan("a").living
    scene.tick(4.0, "b")
    assert scene.plan("a").living == everyone
    scene.tick(2.0, "b")
    assert len(scene.group) == 1
    (gone,) = set(everyone) - set(scene.plan("a").living)
    assert gone not in scene.group


def test_a_server_that_is_given_up_on_ends_the_attempt_it_was_in():
    scene = started(slots=2)
    end = WorkerEnd(rank=0, role="server", host="a", pid=9, kind="exception", error="ValueError", exit_code=1)
    scene.say("a", failed_server=FailedServer(attempt=7, end=end))
    assert scene.state.phase == "running", "of another attempt"
    scene.say("a", failed_server=FailedServer(attempt=1, end=end))
    assert scene.state.phase == "stopping"
    assert not orders_for(scene.state, "a", scene.now).well
    for number in scene.group:
        scene.kill(number, kind="stopped", signal=0)
    outcome = scene.state.outcome
    assert (outcome.exit_code, outcome.failure.first) == (1, end)


def test_servers_may_take_their_time_when_the_workers_were_done():
    scene = started(slots=2)
    for number in scene.group:
        scene.words[number] = replace(scene.words[number], status="done", ended=True, exit_code=0)
    scene.say("a", clear=False)
    orders = orders_for(scene.state, "a", scene.now)
    assert (orders.do, orders.well) == ("stop", True)
    scene.say("a")
    assert scene.state.outcome.exit_code == 0


@pytest.mark.parametrize("elastic", [None, pytest.param([1, 3], marks=pytest.mark.long)], ids=["static", "elastic"])
def test_a_script_that_asks_for_servers_is_started_again_with_them(launcher: Launcher, elastic: Any) -> None:
    body = """
        from manyhands.training.worker.server_requests import ask_for_servers
        if not IDENTITY.num_servers:
            note("asks", servers=[IDENTITY.num_servers, IDENTITY.most_workers])
            ask_for_servers(IDENTITY, 1)
        serve() if IDENTITY.is_server else work()
    """
    run = Served(launcher, body, servers=0, elastic=elastic)
    until(lambda: len(run.notes("works")) == 2 and run.notes("serves"), what="a run with a server")
    (launcher.folder / "end").touch()
    assert run.run.wait() == 0, run.run.err
    assert {note["servers"][0] for note in run.notes("works")} == {1}
    assert "the script asks for 1 parameter server: restarting it" in run.run.said()
    assert len(run.run.events("ServerStarted")) == 1
    assert len(list((launcher.folder / "runs").iterdir())) == 1, "one run, one directory"
    assert not any(alive(note["pid"]) for note in run.notes("asks"))


def test_only_a_run_of_one_host_without_servers_is_started_again() -> None:
    request = LaunchRequest(command=WorkerCommand("script", "train.py"), workers=3)
    assert may_start_servers(request)
    assert not may_start_servers(replace(request, servers=2)), "a flag has the last word"
    assert not may_start_servers(replace(request, hosts_wanted=2))
    assert with_servers(request, 2).elastic == (1, 3) and with_servers(request, 2).servers == 2
    assert with_servers(replace(request, elastic=(2, 3)), 1).elastic == (2, 3)
