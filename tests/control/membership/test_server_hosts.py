"""Servers and workers on several hosts: tcp under CURVE, lists of live workers, tasks of a cluster."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from manyhands.comm.transport import open_port
from manyhands.control.membership.orders import orders_for
from manyhands.control.membership.react import begin, restored
from manyhands.control.security.keys import client_curve, new_key
from manyhands.control.security.rejected_peers import WRONG_KEY
from tests.control.conftest import Launcher, until
from tests.control.membership.scene import CALL, Scene

# Servers answer every peer that connects; workers ask each server now and then, and note who answered.
SCRIPT = """
import json, zmq
from manyhands.comm.transport import open_port
from manyhands.control.security.rejected_peers import PeerGate
def note(what, **more):
    with open(HERE / "notes.jsonl", "a") as file:
        file.write(json.dumps({"what": what, "pid": os.getpid(), **more}) + "\\n")
def serve():
    session = Session(IDENTITY)
    session.on_change = lambda: note("living", living=sorted(session.living or []))
    session.join(RunFacts())
    context = zmq.Context()
    door = PeerGate(context, session.clients)
    ports = [
        open_port(context, zmq.ROUTER, IDENTITY.listen, dict, bind=True, curve=session.curve),
        open_port(context, zmq.ROUTER, session.server_endpoint(IDENTITY.server), dict, bind=True),
    ]
    door.watch(ports[0])
    note("serves", server=IDENTITY.server, at=IDENTITY.listen)
    while session.stop_requested is None:
        for refused in door.attend():
            note("refuses", why=refused)
        for port in ports:
            for peer, asked in port.receive():
                port.send({"server": IDENTITY.server, "pid": os.getpid()}, to=peer)
        time.sleep(0.005)
def work():
    session = join()
    if IDENTITY.joining:
        session.enter(session.offer(1, 60))
    context = zmq.Context()
    places = [session.server_endpoint(number) for number in range(IDENTITY.num_servers)]
    ports = [
        open_port(context, zmq.DEALER, place, dict, curve=session.curve if place.startswith("tcp") else None)
        for place in places
    ]
    me, rank = IDENTITY, session.group.rank
    note("works", slot=me.slot, incarnation=me.incarnation, host=me.host, places=places, rank=rank)
    answered = set()
    while not (HERE / "end").exists():
        session.report(int(time.monotonic() * 100), "training", 1)
        if (newest := session.newest) is not None:
            session.enter(newest)
        for port in ports:
            port.send({"ask": 1})
            for _, answer in port.receive():
                if answer["pid"] not in answered:
                    answered.add(answer["pid"])
                    note("answered", slot=IDENTITY.slot, server=answer["server"], by=answer["pid"])
        time.sleep(0.02)
serve() if IDENTITY.is_server else work()
"""


class Notes:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, what: str, **same: Any) -> list[dict[str, Any]]:
        path = self.folder / "notes.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [entry for entry in map(json.loads, lines) if entry["what"] == what]
        return [entry for entry in found if all(entry[name] == value for name, value in same.items())]

    def wait(self, what: str, number: int, **same: Any) -> list[dict[str, Any]]:
        return until(lambda: len(found := self(what, **same)) >= number and found, what=f"{number} x {what}")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def intrude(endpoint: str, notes: Notes) -> str:
    """Knock with another run's key, until that was refused: why."""
    context: zmq.Context[Any] = zmq.Context()
    port = open_port(context, zmq.DEALER, endpoint, dict, curve=client_curve(new_key()))
    port.send({"ask": 1})
    refused = notes.wait("refuses", 1)
    assert not port.socket.poll(300)
    port.close()
    context.term()
    return str(refused[0]["why"])


@pytest.mark.faults
def test_workers_of_another_host_reach_servers_by_tcp_with_keys_and_those_of_the_same_host_by_ipc(launcher: Launcher):
    notes = Notes(launcher.folder)
    first = launcher(
        SCRIPT, workers=1, servers=2, elastic=[1, 2], hosts_wanted=2, listen="127.0.0.1", join_file="join.json"
    )
    path = launcher.folder / "join.json"
    until(path.exists)
    second = launcher(join=json.loads(path.read_text()), workers=1)
    works = {entry["host"]: entry for entry in notes.wait("works", 2)}
    assert [place[:6] for place in works[0]["places"]] == ["ipc://"] * 2
    serves = sorted(notes.wait("serves", 2), key=lambda entry: entry["server"])
    assert [entry["at"] for entry in serves] == works[1]["places"]
    notes.wait("answered", 4)
    kill(serves[1]["pid"])
    again = notes.wait("serves", 3)[2]
    assert (again["server"], again["at"]) == (1, serves[1]["at"]), "at the same port"
    assert {entry["slot"] for entry in notes.wait("answered", 2, by=again["pid"])} == {0, 1}
    assert WRONG_KEY in intrude(serves[0]["at"], notes)
    killed = works[1]["incarnation"]
    assert all(killed in entry["living"] for entry in notes("living") if entry["living"])
    kill(works[1]["pid"])
    until(lambda: killed not in notes("living")[-1]["living"], what="news from the other host")
    assert works[0]["incarnation"] in notes("living")[-1]["living"]
    notes.wait("works", 3)
    (launcher.folder / "end").touch()
    assert [first.wait(), second.wait()] == [0, 0], first.err


def free_ports(number: int) -> list[int]:
    probes = [socket.socket() for _ in range(number)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.mark.faults
def test_a_clusters_chief_coordinates_its_ps_task_has_the_server_and_its_worker_trains(launcher: Launcher):
    notes, (master, ps) = Notes(launcher.folder), free_ports(2)
    cluster = {
        "master": ["127.0.0.1", master],
        "hosts_wanted": 3,
        "elastic": [1, 2],
        "servers": 1,
        "server_tasks": True,
    }
    chief = launcher(SCRIPT, workers=0, host_rank=0, **cluster)
    worker = launcher(SCRIPT, workers=2, host_rank=1, **cluster)
    server = launcher(SCRIPT, workers=0, host_rank=2, server=0, server_address=["127.0.0.1", ps], **cluster)
    works = notes.wait("works", 2)
    assert [entry["places"] for entry in works] == [[f"tcp://127.0.0.1:{ps}"]] * 2
    (serves,) = notes.wait("serves", 1)
    notes.wait("answered", 2)
    kill(serves["pid"])
    again = notes.wait("serves", 2)[1]
    assert again["at"] == serves["at"]
    notes.wait("answered", 2, by=again["pid"])
    assert [event["server"] for event in server.events("ServerStarted")] == [0, 0]
    assert chief.events("ServerStarted") == worker.events("ServerStarted") == []
    (launcher.folder / "end").touch()
    assert [run.wait() for run in (chief, worker, server)] == [0, 0, 0], chief.err


# ---- decisions ----------------------------------------------------------------------------------------------------

AT = {0: "tcp://10.0.0.3:1"}


def cluster_scene() -> Scene:
    """Two hosts with a worker each, the first of them the coordinator's, and one with a server."""
    scene = Scene(hosts=2, slots=1)
    job = replace(scene.settings.job, servers=1)
    settings = replace(scene.settings, job=job, hosts_wanted=3)
    scene.state = replace(scene.state, settings=settings, roster=None, phase="gathering", hosts={})
    scene.slots["c"], scene.extra["c"] = 0, {"servers": AT, "host_rank": 2}
    for agent in scene.slots:
        scene.say(agent)
    scene.obey()
    return scene


def test_a_host_with_a_server_gets_orders_and_no_worker():
    scene = cluster_scene()
    assert set(scene.state.roster.agents) == {"a", "b", "c"}
    assert [len(scene.plan(agent).workers) for agent in "abc"] == [1, 1, 0]
    assert [scene.plan(agent).servers_at for agent in "abc"] == [AT] * 3
    scene.extra["a"] = {"workers_wanted": 8}
    scene.tick(2.0)
    assert len(scene.joining) == 6
    assert scene.plan("c").workers == [], "however many are asked for"


def test_a_run_waits_for_a_silent_host_with_a_server_and_then_ends():
    scene = cluster_scene()
    scene.tick(30.0, "c")
    assert scene.state.phase == "running"
    scene.tick(40.0, "c")
    assert orders_for(scene.state, "a", scene.now).do == "stop"
    first = scene.state.roster.failed_server.end
    assert (first.role, first.rank, first.kind, first.host) == ("server", 0, "lost", "host-c")


def test_a_server_task_that_was_started_again_takes_the_place_of_the_silent_one():
    scene = cluster_scene()
    scene.tick(6.0, "c")
    scene.slots["d"], scene.extra["d"] = 0, {"servers": AT, "host_rank": 2}
    scene.say("d")
    assert scene.plan("d").servers == 1
    scene.tick(70.0, "c")
    assert scene.state.phase == "running"
    assert scene.state.roster.failed_server is None


# ---- a cluster whose tasks come one after the other ------------------------------------------------------------------


def cluster(least: int = 1, **more) -> Scene:
    """A chief without workers, two hosts with servers and two with a worker are wanted; so far the chief is there."""
    scene = Scene(1, 1)
    scene.slots["a"] = 0
    job = replace(scene.settings.job, servers=2)
    settings = replace(scene.settings, job=job, hosts_wanted=5, elastic=(least, 2), begin_with_fewer_s=10.0, **more)
    scene.state = begin(settings, term=7, now=0.0)
    scene.say("a")
    return scene


def come(scene: Scene, agent: str, slots: int = 0, servers: dict[int, str] | None = None) -> None:
    scene.slots[agent] = slots
    scene.extra[agent] = {"servers": servers or {}}
    scene.say(agent)


def test_training_begins_with_the_workers_that_are_there_and_later_ones_join():
    scene = cluster()
    come(scene, "b", servers={0: "tcp://h:1"})
    come(scene, "c", servers={1: "tcp://h:2"})
    come(scene, "d", slots=1)
    assert "training begins soon" in orders_for(scene.state, "a", scene.now).waiting_for
    scene.tick(9.5)
    assert scene.state.phase == "gathering", "others may be about to come"
    scene.tick(1.0)
    assert (scene.state.phase, len(scene.group)) == ("running", 1)
    assert scene.plan("d").why == "4 of 5 hosts are there, others may join"
    assert [orders_for(scene.state, agent, 0.0).do for agent in "abcd"] == ["run"] * 4
    scene.obey()
    scene.step(3)
    come(scene, "e", slots=1)
    scene.obey()
    (newcomer,) = scene.joining
    scene.set(newcomer, offers=CALL)
    assert (scene.group[1], scene.plan("e").why) == (newcomer, "1 joined")


def test_all_who_are_wanted_do_not_wait_any_longer():
    scene = cluster()
    come(scene, "b", servers={0: "tcp://h:1"})
    come(scene, "c", servers={1: "tcp://h:2"})
    come(scene, "d", slots=1)
    come(scene, "e", slots=1)
    assert (scene.state.phase, len(scene.group)) == ("running", 2)


def test_without_a_server_or_below_the_lower_bound_nothing_begins_and_it_is_said_what_lacks():
    scene = cluster(least=2)
    come(scene, "b", servers={0: "tcp://h:1"})
    come(scene, "d", slots=1)
    scene.tick(30.0)
    assert scene.state.phase == "gathering"
    said = orders_for(scene.state, "a", scene.now).waiting_for
    assert said.endswith("needed to begin: server 1 and 1 more worker")
    come(scene, "c", servers={1: "tcp://h:2"})
    scene.tick(30.0)
    assert orders_for(scene.state, "a", scene.now).waiting_for.endswith("needed to begin: 1 more worker")


def test_a_host_that_goes_before_the_start_is_waited_for_again():
    scene = cluster()
    come(scene, "b", servers={0: "tcp://h:1", 1: "tcp://h:2"})
    come(scene, "d", slots=1)
    scene.tick(2.0)
    scene.tick(9.0, "d")
    assert scene.state.phase == "gathering"
    scene.tick(9.0)
    assert scene.state.phase == "gathering", "its time begins anew when it is back"
    scene.tick(2.0)
    assert scene.state.phase == "running"


def test_a_restarted_coordinator_waits_once_more_for_those_who_are_missing():
    scene = cluster()
    come(scene, "b", servers={0: "tcp://h:1", 1: "tcp://h:2"})
    come(scene, "d", slots=1)
    scene.tick(8.0)
    scene.state = restored(scene.state, term=8, now=scene.now)
    scene.tick(8.0)
    assert scene.state.phase == "gathering"
    scene.tick(3.0)
    assert scene.state.phase == "running"
