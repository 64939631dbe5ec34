"""Several agents over tcp on loopback: joining, being refused, garbage, secrets. Real hosts are tested elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import stat
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from manyhands.comm.transport import open_port
from manyhands.control.messages.agent_messages import FromAgent, HostReport
from manyhands.control.messages.status_messages import StatusRequest
from manyhands.control.messages.worker_messages import FromWorker
from manyhands.control.security.keys import client_curve, new_key, read_join_file
from manyhands.control.security.rejected_peers import NO_KEY, WRONG_KEY
from tests.control.conftest import alive, until

pytestmark = pytest.mark.faults

EXCHANGE = """
    session = join()
    session.set(f"from/{RANK}", str(IDENTITY.host).encode())
    hosts = [session.get(f"from/{rank}", 60).decode() for rank in range(IDENTITY.world_size)]
    print("hosts", hosts, IDENTITY.num_hosts, flush=True)
    mark(f"up-{RANK}")
    wait_for("go")
"""


def first_host(launcher, script=EXCHANGE, **more):
    run = launcher(script, workers=1, hosts_wanted=2, listen="127.0.0.1", join_file="join.json", **more)
    path = run.folder / "join.json"
    until(path.exists)
    return run, path


def ticket(path: Path) -> dict:
    return json.loads(path.read_text())


def test_a_second_host_joins_with_the_join_file_and_gets_the_command_from_the_run(launcher):
    first, path = first_host(launcher)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    second = launcher(join=ticket(path), workers=2)
    first.wait_for("up-0"), first.wait_for("up-2")
    (launcher.folder / "go").touch()
    assert first.wait() == 0
    assert second.wait() == 0
    assert first.out == "hosts ['0', '1', '1'] 2\n"
    assert any("mh agent --join" in line for line in first.said())
    assert (first.run_dir() / "logs" / "attempt-1" / "rank-2.out").exists()


def test_a_worker_killed_on_one_host_restarts_both_and_a_spent_budget_ends_both_with_4(launcher):
    first, path = first_host(
        launcher,
        """
        session = join()
        mark(f"up-{IDENTITY.attempt}-{RANK}")
        time.sleep(300)
    """,
        max_restarts=1,
    )
    second = launcher(join=ticket(path), workers=1)
    pids = [int(first.wait_for(f"up-1-{rank}")) for rank in (0, 1)]
    os.kill(pids[1], signal.SIGKILL)
    pids = [int(first.wait_for(f"up-2-{rank}")) for rank in (0, 1)]
    os.kill(pids[0], signal.SIGKILL)
    assert first.wait() == 4
    assert second.wait() == 4
    assert not any(alive(pid) for pid in pids)


def test_an_agent_that_loses_the_first_host_ends_its_workers(launcher):
    first, path = first_host(launcher)
    second = launcher(join=ticket(path), workers=1, lost_after_s=2.0)
    pid = int(first.wait_for("up-1"))
    first.process.kill()
    assert second.wait() == 4
    assert "silent for 2 s" in second.err
    assert not alive(pid)


def test_joins_with_no_key_a_wrong_key_or_another_runs_key_are_refused_and_reported_once(launcher):
    first, path = first_host(launcher)
    right = ticket(path)
    address = f"tcp://{right['address']}"
    context: zmq.Context = zmq.Context()

    def knock(curve) -> None:
        port = open_port(context, zmq.DEALER, address, StatusRequest, curve=curve)
        port.send(StatusRequest(what="status"))
        assert port.socket.poll(300) == 0
        port.close()

    def reported(reason: str) -> bool:
        return any(event["text"].endswith(reason) for event in first.events("Warned"))

    knock(client_curve(new_key()))
    # A client without a key may see the mismatch and hang up before the run does; then its next try is reported.
    until(lambda: knock(None) or reported(NO_KEY))
    # The server's public key is no secret: with it, but without the run's client key, ZAP refuses.
    half = msgspec.structs.replace(
        client_curve(new_key()), server_key=client_curve(bytes.fromhex(right["key"])).server_key
    )
    port = open_port(context, zmq.DEALER, address, StatusRequest, curve=half)
    port.send(StatusRequest(what="status"))
    assert port.socket.poll(300) == 0
    port.close()
    context.term()
    other = launcher(join={**right, "key": new_key().hex()}, workers=1)
    assert other.wait() == 3
    assert "refused this host's key" in other.err
    refused = until(lambda: len(found := [event["text"] for event in first.events("Warned")]) >= 2 and found)
    assert {line.rpartition(": ")[2] for line in refused} == {WRONG_KEY, NO_KEY}
    assert len(refused) == len(set(refused)), "each peer is reported once"
    second = launcher(join=right, workers=1)
    first.wait_for("up-1")
    (launcher.folder / "go").touch()
    assert (first.wait(), second.wait()) == (0, 0)


def test_a_host_with_other_versions_or_another_runs_name_is_refused_by_name(launcher):
    _, path = first_host(launcher)
    right = ticket(path)
    other = launcher(join={**right, "run": "another"}, workers=1)
    assert other.wait() == 3
    assert "not another" in other.err
    context: zmq.Context = zmq.Context()
    from manyhands.control.messages.agent_messages import FromCoordinator

    port = open_port(
        context,
        zmq.DEALER,
        f"tcp://{right['address']}",
        FromCoordinator,
        curve=client_curve(bytes.fromhex(right["key"])),
    )
    port.send(HostReport(run="", agent="x", host="old", slots=1, term=0, versions={"torch": "1.0"}, data_address="x"))
    assert port.socket.poll(60_000)
    ((_, refusal),) = port.receive()
    port.close()
    context.term()
    assert "old has python none, the run has python 3" in refusal.what


def test_the_same_command_on_every_host_connects_to_the_master_address(launcher):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = (
        "session = join(); session.set(str(RANK), b''); session.wait(['0', '1'], 60); print(IDENTITY.host, flush=True)"
    )
    runs = [launcher(script, workers=1, hosts_wanted=2, master=["127.0.0.1", port], host_rank=rank) for rank in (1, 0)]
    assert [run.wait() for run in runs] == [0, 0]
    assert runs[1].out == "0\n"


def test_a_host_without_the_others_says_what_it_waits_for_and_a_signal_ends_it_at_once(launcher):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    master = {"hosts_wanted": 2, "master": ["127.0.0.1", port]}
    second = launcher("pass", workers=1, host_rank=1, **master)
    until(lambda: f"waiting: no run answers at tcp://127.0.0.1:{port}; trying for 300 s" in second.said())
    second.process.send_signal(signal.SIGTERM)
    assert second.wait() == 143
    first = launcher("pass", workers=1, host_rank=0, **master)
    until(lambda: "waiting: 1 of 2 hosts has joined; missing: host 1" in first.said())
    first.process.send_signal(signal.SIGINT)
    assert first.wait() == 130


def corpus(count: int) -> list[bytes]:
    """Random bytes, and real messages with a few bytes changed."""
    rng = random.Random(7)
    report = HostReport(run="r", agent="a", host="h", slots=1, term=0, versions={}, data_address="x", local=True)
    seeds = [
        msgspec.msgpack.encode(report),
        msgspec.msgpack.encode(StatusRequest(what="stop")),
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 5000,
    ]
    frames = []
    for number in range(count):
        if number % 2:
            frame = bytearray(rng.choice(seeds))
            for _ in range(rng.randint(1, 4)):
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            frames.append(bytes(frame))
        else:
            frames.append(rng.randbytes(rng.randint(0, 300)))
    return frames


def flood(launcher, address: str, frames: list[bytes]) -> None:
    """Every frame to every listener of the run: raw over tcp, without a credential, and as a message over ipc."""
    host, _, port = address.partition(":")
    for start in range(0, len(frames), 100):
        with socket.create_connection((host, int(port)), timeout=60) as raw, contextlib.suppress(OSError):
            raw.sendall(b"".join(frames[start : start + 100]))
    context: zmq.Context = zmq.Context()
    for name, types in (("coordinator", FromAgent), ("agent", FromWorker), ("control", StatusRequest)):
        for directory in launcher.sockets_left():
            if not Path(directory, name).exists():
                continue
            port_ = open_port(context, zmq.DEALER, f"ipc://{directory}/{name}", types)
            for frame in frames:
                if b"stop" not in frame:  # a well-formed request to stop would be obeyed
                    port_.socket.send(frame)
            port_.close(linger_ms=2000)
    context.term()


def test_ten_thousand_broken_frames_at_every_listener_change_nothing(launcher):
    first, path = first_host(launcher)
    second = launcher(join=ticket(path), workers=1)
    first.wait_for("up-0"), first.wait_for("up-1")
    frames = corpus(10_000)
    coordinator = first.coordinator()
    flood(launcher, ticket(path)["address"], frames)  # buffers grow to their bounds once
    for _ in range(3):  # on a busy machine a queue may first fill to its bound later; what leaks grows every time
        before = coordinator.memory_info().rss
        flood(launcher, ticket(path)["address"], frames)
        grown = coordinator.memory_info().rss - before
        if grown < 10 * 2**20:
            break
    assert grown < 10 * 2**20
    (launcher.folder / "go").touch()
    assert (first.wait(), second.wait()) == (0, 0)
    assert len(first.events("GenerationStarted")) == 1


def test_the_key_is_in_no_argument_environment_log_or_run_directory(launcher):
    first, path = first_host(launcher)
    second = launcher(join=ticket(path), workers=1)
    first.wait_for("up-0"), first.wait_for("up-1")
    key = ticket(path)["key"]
    derived = client_curve(bytes.fromhex(key))
    secrets = [key.encode(), bytes.fromhex(key), derived.secret]
    for process in [*first.descendants(), *second.descendants(), psutil.Process(first.process.pid)]:
        for name in ("environ", "cmdline"):
            content = Path(f"/proc/{process.pid}/{name}").read_bytes()
            assert not any(secret in content for secret in secrets)
    (launcher.folder / "go").touch()
    assert (first.wait(), second.wait()) == (0, 0)
    assert read_join_file(path).key == key
    written = [file for folder in (first.run_dir(), launcher.temp) for file in folder.rglob("*") if file.is_file()]
    assert written
    for file in [*written, *first.folder.glob("notes-*.jsonl")]:
        assert not any(secret in file.read_bytes() for secret in secrets), file
    assert not any(secret in (first.out + first.err).encode() for secret in secrets)


def test_a_run_on_one_host_listens_on_nothing_once_its_workers_have_said_hello(launcher):
    run = launcher("join(); mark('up'); wait_for('go')")
    run.wait_for("up")

    def listeners() -> list[str]:
        family = [psutil.Process(run.process.pid), *run.descendants()]
        return [str(c.laddr) for p in family for c in p.net_connections("inet") if c.status == "LISTEN"]

    until(lambda: not listeners(), what="the closing of the torch store's port")
    (run.folder / "go").touch()
    assert run.wait() == 0
