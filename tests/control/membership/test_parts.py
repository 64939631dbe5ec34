"""The parts of the control plane that need no second process: store, log, lock, keys, transport, output."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import msgspec
import pytest
import zmq

from manyhands.comm.transport import MAX_MESSAGE_BYTES, open_port
from manyhands.control.agent.preflight import check_command, resolve
from manyhands.control.coordinator import key_value_store
from manyhands.control.coordinator.key_value_store import KeyValueStore
from manyhands.control.coordinator.membership_log import MembershipLog
from manyhands.control.membership.react import begin
from manyhands.control.membership.state import MembershipSettings
from manyhands.control.messages.agent_messages import JobDescription
from manyhands.control.messages.launch_request import JoinTicket, LaunchRequest, WorkerCommand
from manyhands.control.messages.status_messages import StatusRequest
from manyhands.control.messages.worker_messages import StoreReply, StoreRequest
from manyhands.control.processes.private_directory import lock, remove_abandoned
from manyhands.control.processes.worker_output import KEPT_BYTES, WorkerLog
from manyhands.control.run_directory import RunDirectory, default_path, read_run, run_name
from manyhands.control.security.keys import (
    client_curve,
    new_key,
    read_join_file,
    server_curve,
    why_not_private,
    write_join_file,
)
from manyhands.errors import (
    ClusterError,
    EnvironmentProblem,
    ManyhandsError,
    RunDirectoryInUse,
    RunFinished,
    UsageError,
)
from manyhands.launcher.machine import read_key, write_key
from manyhands.spec.addresses import parse_address

CLIENT = ("ipc", b"me")


def ask(store: KeyValueStore, op: str, *keys: str, now: float = 0.0, **more) -> list[StoreReply]:
    request = StoreRequest(generation="1.1", incarnation=1, ticket=1, op=op, keys=list(keys), **more)
    return [reply for _, reply in store.handle(CLIENT, request, now)]


def test_a_get_waits_until_the_key_is_set():
    store = KeyValueStore("1.1")
    assert ask(store, "get", "a", timeout_s=5) == []
    mine, waiters = ask(store, "set", "a", value=b"x")
    assert (mine.ok, waiters.value) == (True, b"x")


def test_a_wait_for_several_keys_ends_with_the_last_or_with_the_time():
    store = KeyValueStore("1.1")
    ask(store, "wait", "a", "b", timeout_s=5)
    assert len(ask(store, "set", "a", value=b"")) == 1
    assert list(store.due(4.9)) == []
    ((_, reply),) = store.due(5.1)
    assert reply.error == "timeout: b not set within 5 s"


def test_numbers_are_added_and_keys_checked_and_deleted():
    store = KeyValueStore("1.1")
    assert [ask(store, "add", "n", amount=amount)[0].number for amount in (3, 4)] == [3, 7]
    assert ask(store, "check", "n")[0].number == 1
    assert ask(store, "check", "n", "m")[0].number == 0
    assert [ask(store, "delete", "n")[0].number for _ in range(2)] == [1, 0]
    ask(store, "set", "t", value=b"text")
    assert "does not hold a number" in ask(store, "add", "t", amount=1)[0].error


def test_requests_of_another_generation_are_refused():
    assert "generation 1.1 is over" in ask(KeyValueStore("1.2"), "get", "a", timeout_s=5)[0].error


def test_the_store_is_bounded(monkeypatch):
    monkeypatch.setattr(key_value_store, "MAX_KEYS", 2)
    monkeypatch.setattr(key_value_store, "MAX_BYTES", 10)
    monkeypatch.setattr(key_value_store, "MAX_WAITERS", 1)
    store = KeyValueStore("1.1")
    assert ask(store, "set", "a", value=b"x" * 8)[0].ok
    assert "full" in ask(store, "set", "b", value=b"x" * 8)[0].error
    assert ask(store, "set", "b", value=b"")[0].ok
    assert "full" in ask(store, "set", "c", value=b"")[0].error
    ask(store, "get", "z", timeout_s=5)
    assert "already waiting" in ask(store, "get", "z", timeout_s=5)[0].error
    assert "characters" in ask(store, "get", "k" * 513, timeout_s=5)[0].error


def test_values_put_back_do_not_replace_newer_ones():
    store = KeyValueStore("1.1")
    ask(store, "set", "a", value=b"new")
    store.put_back("1.0", {"b": b"of another generation"})
    store.put_back("1.1", {"a": b"old", "b": b"kept"})
    assert [ask(store, "get", key, timeout_s=1)[0].value for key in "ab"] == [b"new", b"kept"]


def test_the_log_gives_the_last_whole_state_and_ignores_a_torn_line(tmp_path):
    job = JobDescription(command=WorkerCommand("script", "x"), flags={}, grace_s=1.0, max_restarts=1)
    settings = MembershipSettings(run="r", job=job, versions={})
    log = MembershipLog(tmp_path / "log")
    assert log.last() is None
    for term in (1, 2):
        log.append(begin(settings, term, 0.0))
    whole = (tmp_path / "log").read_bytes()
    for cut in range(1, 40, 7):
        (tmp_path / "log").write_bytes(whole[:-cut])
        assert log.last().term == (2 if cut == 1 else 1)
        successor = MembershipLog(tmp_path / "log")
        successor.append(begin(settings, 3, 0.0))
        successor.append(begin(settings, 4, 0.0))
        assert successor.last().term == 4, "nothing is written behind the torn line"


def test_the_log_begins_anew_before_it_is_too_long(tmp_path):
    job = JobDescription(command=WorkerCommand("script", "x"), flags={}, grace_s=1.0, max_restarts=1)
    settings = MembershipSettings(run="r", job=job, versions={})
    log = MembershipLog(tmp_path / "log", max_bytes=5000)
    sizes = set()
    for term in range(1, 60):
        log.append(begin(settings, term, 0.0))
        assert MembershipLog(tmp_path / "log").last().term == term
        sizes.add((tmp_path / "log").stat().st_size)
    assert len(sizes) > 2 and max(sizes) <= 5000
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_directory_is_locked_while_owned_and_free_afterwards(tmp_path):
    owner = RunDirectory.adopt(tmp_path / "run", False)
    with pytest.raises(RunDirectoryInUse, match=f"pid {os.getpid()} on"):
        RunDirectory.adopt(tmp_path / "run", False)
    owner.mark("failed", 1)
    owner.release()
    again = RunDirectory.adopt(tmp_path / "run", False)
    again.mark("finished", 0)
    again.release()
    with pytest.raises(RunFinished):
        RunDirectory.adopt(tmp_path / "run", False)


def test_overwrite_removes_what_we_wrote_and_nothing_else(tmp_path):
    owner = RunDirectory.adopt(tmp_path, False)
    owner.checkpoints.mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    owner.mark("finished", 0)
    owner.release()
    owner = RunDirectory.adopt(tmp_path, True)
    assert not owner.checkpoints.exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert read_run(tmp_path).status == "running"
    owner.release()


def test_run_names_are_safe_and_default_paths_new(tmp_path):
    assert run_name("../we ird;$(x).py").split("-", 2)[2] == "we_ird___x_"
    assert run_name("work/train.v2.py").split("-", 2)[2] == "train.v2"
    assert run_name("package.recipes.digits").split("-", 2)[2] == "digits"
    assert default_path("a", tmp_path) == tmp_path / "a"
    (tmp_path / "a").mkdir()
    assert default_path("a", tmp_path) == tmp_path / "a-2"


def test_a_broken_record_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(UsageError, match=r"no run\.json"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        read_run(tmp_path)


def test_a_join_file_is_private_and_read_back(tmp_path):
    path, ticket = tmp_path / "join.json", JoinTicket("10.0.0.1:5", "r", new_key().hex())
    write_join_file(path, ticket)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_join_file(path) == ticket


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (b"{", 0o600, "not a join file"),
        (b'{"address": "a", "run": "r", "key": "00"}', 0o600, "32 bytes"),
        (b'{"address": "a", "run": "r", "key": "", "x": 1}', 0o600, "not a join file"),
        (b"{}", 0o644, "chmod 600"),
        (b"{}", 0o440, "chmod 600"),
        (b"\xff\xfe", 0o600, "not a join file"),
    ],
)
def test_a_broken_join_file_says_what_is_wrong(tmp_path, content, mode, words):
    path = tmp_path / "join.json"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(ClusterError) as caught:
        read_join_file(path)
    assert words in str(caught.value)
    with pytest.raises(ClusterError, match="cannot be read"):
        read_join_file(tmp_path / "absent")


@pytest.mark.parametrize("path", ["join.json", "run.key"])
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_join_file_or_key_of_another_user_is_refused_with_any_mode(tmp_path, path):
    file = tmp_path / path
    if path == "run.key":
        write_key(file)
    else:
        write_join_file(file, JoinTicket("10.0.0.1:5", "r", new_key().hex()))
    os.chown(file, 12345, -1)
    with pytest.raises(ManyhandsError, match=r"belongs to another user \(uid 12345; you are 0\)") as caught:
        read_key(str(file)) if path == "run.key" else read_join_file(file)
    assert "install -m 600" in caught.value.fix[0]


def test_who_may_have_written_a_secret():
    def found(mode, uid):
        return os.stat_result((mode, 0, 0, 1, uid, 0, 0, 0, 0, 0))

    assert why_not_private(found(0o100600, os.geteuid())) is None
    assert why_not_private(found(0o100400, 0)) is None, "root could read and write it anyway"
    assert "mode 0640" in why_not_private(found(0o100640, os.geteuid()))
    assert "another user" in why_not_private(found(0o100600, os.geteuid() + 1))


def test_a_directory_whose_agent_and_guard_were_killed_is_removed_by_the_next_start(tmp_path):
    abandoned, living, foreign = (tmp_path / f"mh-{name}" for name in ("abandoned", "living", "foreign"))
    for folder in (abandoned, living, foreign):
        folder.mkdir(mode=0o700)
        (folder / "socket").touch()
    os.close(lock(abandoned))  # as the kernel does with a process that is killed
    held = lock(living)
    remove_abandoned(str(tmp_path))
    assert sorted(tmp_path.iterdir()) == [foreign, living]
    os.close(held)


def test_both_ends_derive_the_same_keys_and_other_keys_differ():
    key = new_key()
    assert client_curve(key).server_key == server_curve(key).public
    assert client_curve(key).secret != server_curve(key).secret
    assert client_curve(key).public != client_curve(new_key()).public


def test_garbage_is_counted_and_too_large_messages_are_not_sent(tmp_path):
    context: zmq.Context = zmq.Context()
    endpoint = f"ipc:///tmp/mhp-{os.getpid()}"
    server = open_port(context, zmq.ROUTER, endpoint, StatusRequest, bind=True)
    client = open_port(context, zmq.DEALER, endpoint, StatusRequest)
    client.socket.send(b"\xc1")
    client.socket.send_multipart([b"two", b"frames"])
    client.socket.send(msgspec.msgpack.encode({"m": "StatusRequest", "what": "status", "more": 1}))
    assert client.send(StatusRequest(what="status"))
    assert not client.send({"x": b"0" * (MAX_MESSAGE_BYTES + 1)})
    received = []
    while not received and server.socket.poll(60_000):
        received = list(server.receive())
    assert [message for _, message in received] == [StatusRequest(what="status")]
    assert (server.garbage, client.dropped) == (3, 1)
    server.close(), client.close()
    context.term()
    Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


def test_output_is_kept_in_bounded_memory_until_there_is_a_file(tmp_path):
    log = WorkerLog("rank-3")
    for _ in range(40):
        log.write("stdout", b"x" * 10_000)
    assert log.dropped_bytes == 400_000 - (KEPT_BYTES // 10_000) * 10_000
    log.write("stderr", b"one\ntwo\nthr")
    log.write("stderr", b"ee")
    assert log.last_lines() == ["one", "two", "three"]
    log.move_to(tmp_path / "first")
    log.write("stderr", b"\n")
    log.move_to(tmp_path / "second")
    assert (tmp_path / "second" / "rank-3.err").read_bytes() == b"one\ntwo\nthree\n"
    log.close()


def test_a_full_log_volume_loses_lines_and_nothing_else():
    log = WorkerLog("rank-0")
    log.move_to(Path("/proc/nowhere"))
    log.write("stderr", b"lost\n")
    assert log.dropped_bytes == 5
    assert log.last_lines() == ["lost"]
    log.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10.0.0.1", ("10.0.0.1", 0)), ("h:7", ("h", 7)), ("[::1]:7", ("::1", 7)), ("fe80::1", ("fe80::1", 0))],
)
def test_addresses_are_read(text, expected):
    assert parse_address(text) == expected


@pytest.mark.parametrize("text", ["", ":5", "h:x", "h:99999", "0.0.0.0:5", "[::]:1", "*"])
def test_broken_and_open_addresses_are_refused(text):
    with pytest.raises(UsageError):
        parse_address(text)


@pytest.mark.parametrize(
    "command",
    [
        WorkerCommand("script", "absent.py"),
        WorkerCommand("module", "absent.module"),
        WorkerCommand("call", "absent:f"),
        WorkerCommand("call", "absent.py:f"),
        WorkerCommand("call", "f"),
    ],
)
def test_commands_that_cannot_be_found_are_refused(command):
    with pytest.raises(UsageError):
        check_command(command)


def test_a_script_that_is_not_python_is_refused_with_its_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os\ndef f(:\n")
    with pytest.raises(UsageError, match="is not Python: invalid syntax") as refused:
        check_command(WorkerCommand("script", str(script)))
    assert refused.value.where == f"{script} line 2"
    script.write_text(r"pattern = '\d'")
    check_command(WorkerCommand("script", str(script)))


def test_modules_are_found_without_being_imported():
    check_command(WorkerCommand("module", "manyhands.control.agent.agent"))
    check_command(WorkerCommand("module", "json.tool"))
    check_command(WorkerCommand("call", "manyhands.control.run_directory:run_name"))


def test_a_taken_port_is_reported_before_anything_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        request = LaunchRequest(command=None, hosts_wanted=2, listen=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(EnvironmentProblem, match="Cannot listen"):
            resolve(request)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"listen": "0.0.0.0"}, "every interface"),
        ({}, "no address to be joined at"),
        ({"listen": "203.0.113.7"}, "--insecure-data-plane"),
        ({"master": ("203.0.113.7", 29500), "host_rank": 0, "insecure_data_plane": True}, "MANYHANDS_KEY_FILE"),
        ({"master": ("203.0.113.7", 29500), "host_rank": 1, "insecure_data_plane": True}, "MANYHANDS_KEY_FILE"),
        ({"listen": "203.0.113.7", "insecure_data_plane": True}, "Cannot listen on 203.0.113.7"),
    ],
)
def test_what_would_be_open_or_in_the_clear_is_refused(asked, words):
    with pytest.raises(ManyhandsError) as caught:
        resolve(LaunchRequest(command=None, hosts_wanted=2, **asked))
    assert words in str(caught.value)
