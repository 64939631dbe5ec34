"""Calls on a cluster of real processes: values, failures, variables, datasets, and those who do not belong."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import zmq
from torch import Tensor

import manyhands as mh
from manyhands.comm.transport import socket_event
from manyhands.control.messages.launch_request import JoinTicket
from manyhands.control.security.keys import client_curve, write_join_file
from manyhands.data.randomness import randomness
from manyhands.data.sample_order import slice_key
from manyhands.errors import CallCancelled, PeerLost, SpecError, StepFailed, UsageError
from tests.dispatch.proxies import Line
from tests.dispatch.step_gates import StepGate


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and all(map(same, left, right)) and len(left) == len(right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return type(left) is type(right) and left == right


def test_values_come_back_as_they_went(coordinator: mh.dispatch.Dispatcher) -> None:
    args = (None, True, -(2**63), 2.5, "å", b"\0", [1, (2, [])], torch.rand(2, 3, dtype=torch.bfloat16))
    kwargs = {
        "empty": torch.empty(0, 4),
        "deep": {"strided": torch.arange(6).reshape(2, 3).T, "one": torch.tensor(True)},
    }
    assert same(coordinator.schedule("give_back", args, kwargs).fetch(), {"args": list(args), "kwargs": kwargs})


def test_what_cannot_be_sent_is_refused_before_anything_is_scheduled(coordinator: mh.dispatch.Dispatcher) -> None:
    value = coordinator.schedule("who")
    for step, argument, why in (
        ("give_back", {1, 2}, r"arguments of 'give_back'\[0\]\[0\] is a set"),
        ("give_back", {"a": [object()]}, r"\['a'\]\[0\] is a object"),
        ("give_back", 2**70, "more than 64 bits"),
        ("give_back", torch.eye(2).to_sparse(), "cannot be sent"),
        ("give_back", [torch.zeros(1)] * 10_000, "contains 10001 tensors; a message carries at most 9998"),
        ("give_back", value, "is a RemoteValue"),
        ("give_bakc", 1, "(?s)No step is called 'give_bakc'.*try: \"give_back\""),
    ):
        with pytest.raises(UsageError, match=why):
            coordinator.schedule(step, (argument,))
    coordinator.join()


def test_a_call_that_returns_what_cannot_be_sent_fails_and_says_so(coordinator: mh.dispatch.Dispatcher) -> None:
    value = coordinator.schedule("return_a_set")
    with pytest.raises(StepFailed, match="what return_a_set returned is a set"):
        value.fetch()
    with pytest.raises(StepFailed):
        coordinator.join()


def test_a_full_queue_blocks_schedule_and_join_waits_for_a_thousand_calls(
    warm: mh.dispatch.Cluster, coordinator: mh.dispatch.Dispatcher, gate: StepGate
) -> None:
    held = [coordinator.schedule("wait_at", (gate.place,)) for _ in range(2)]
    gate.await_one(), gate.await_one()
    values: list[mh.dispatch.RemoteValue] = []
    blocked = threading.Event()

    def schedule_all() -> None:
        for number in range(1000):
            if number == 500:
                blocked.set()
            values.append(coordinator.schedule("give_back", (number,)))

    thread = threading.Thread(target=schedule_all)
    thread.start()
    assert blocked.wait(60)
    assert len(values) == 500 and not coordinator.done()
    assert warm.hub.desk.queue.num_waiting == 500
    gate.let_go()
    thread.join()
    coordinator.join()
    assert coordinator.done() and all(value.ready for value in [*held, *values])
    assert [found["args"] for found in coordinator.fetch(values)] == [[number] for number in range(1000)]


def test_a_failure_is_raised_once_cancels_the_rest_and_leaves_nothing_running(
    warm: mh.dispatch.Cluster, coordinator: mh.dispatch.Dispatcher, gate: StepGate, tmp_path: Path
) -> None:
    under_way = coordinator.schedule("wait_at", (gate.place,))
    gate.await_one()
    with contextlib.closing(
        StepGate(tmp_path / "until all are scheduled")
    ) as first:  # after a failure `schedule` raises
        coordinator.schedule("wait_at", (first.place,))
        first.await_one()
        failing = coordinator.schedule("fail", ("one of these",))
        waiting = [coordinator.schedule("wait_at", (gate.place,)) for _ in range(20)]
    with pytest.raises(StepFailed, match="raised ValueError: one of these"):
        failing.fetch()
    with pytest.raises(CallCancelled, match=r"wait_at.*was cancelled"):
        coordinator.fetch(waiting)
    assert not coordinator.done()  # one call is still under way, and the failure is not due before it ends
    gate.let_go()
    with pytest.raises(StepFailed, match=r"(?s)raised ValueError: one of these.*dispatch_steps.py"):
        coordinator.join()
    assert isinstance(under_way.fetch(), int)
    assert not warm.hub.desk.queue.running
    assert coordinator.done()
    assert coordinator.schedule("give_back", (1,)).fetch()["args"] == [1]
    assert "never" not in [info.name for info in warm.variables()]


def test_schedule_raises_the_failure_too(coordinator: mh.dispatch.Dispatcher) -> None:
    with pytest.raises(StepFailed):
        coordinator.schedule("fail", ("",)).get()
    with pytest.raises(StepFailed):
        while True:
            coordinator.schedule("who")
    coordinator.join()


def test_what_a_call_draws_depends_on_its_number_alone(coordinator: mh.dispatch.Dispatcher, gate: StepGate) -> None:
    value = coordinator.schedule("wait_at", (gate.place,))
    gate.await_one()
    gate.let_go()
    number = value.fetch()
    drawn = coordinator.fetch([coordinator.schedule("draw") for _ in range(4)])
    expected = []
    for call in range(number + 1, number + 5):
        with randomness(slice_key(7, call, 0, "compute")):
            expected.append((random.random(), float(torch.rand(()))))
    assert drawn == expected


# ---- variables -------------------------------------------------------------------------------------------------


def test_a_call_sees_variables_as_they_were_when_it_began(
    warm: mh.dispatch.Cluster, coordinator: mh.dispatch.Dispatcher, gate: StepGate
) -> None:
    for name in ("first", "second"):
        warm.assign(name, torch.tensor(1))
    value = coordinator.schedule("see_twice", (gate.place,))
    gate.await_one()
    for name in ("first", "second"):
        for _ in range(3):
            warm.add(name, torch.tensor(1))
        assert int(warm.read(name)) == 4
    gate.let_go()
    assert value.fetch() == (1, 1, 1)


def test_changes_count_together_and_when_the_call_is_done(
    warm: mh.dispatch.Cluster, coordinator: mh.dispatch.Dispatcher
) -> None:
    warm.assign("both", torch.tensor(10))
    assert coordinator.schedule("twice").fetch() == [10, 10]
    assert int(warm.read("both")) == 13
    [info] = [info for info in warm.variables() if info.name == "both"]
    assert (info.shape, info.dtype, info.num_bytes, info.server, info.version) == ((), "int64", 8, 0, 2)


@pytest.mark.parametrize(
    ("op", "name", "value", "why"),
    [
        ("add", "absent", torch.ones(1), "adds to variable 'absent', which does not exist"),
        ("assign", "fixed", torch.ones(3), r"'fixed' is float32\[2\], but it would assign float32\[3\]"),
        ("add", "fixed", torch.ones(2, dtype=torch.float64), r"add float64\[2\]"),
    ],
)
def test_changes_that_cannot_be_made_fail_their_call(
    warm: mh.dispatch.Cluster, coordinator: mh.dispatch.Dispatcher, op: str, name: str, value: Tensor, why: str
) -> None:
    warm.assign("fixed", torch.ones(2))
    coordinator.schedule("change", (op, name, value))
    with pytest.raises(StepFailed, match=why):
        coordinator.join()
    assert torch.equal(warm.read("fixed"), torch.ones(2))
    with pytest.raises(UsageError, match="No variable is called 'absent'"):
        warm.read("absent")


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("type", "'odd' is a tensor of torch.float8_e4m3fn"),
        ("layout", "'odd' is a tensor of torch.float32, torch.sparse_coo"),
        ("name", "5 is a int; variables have names"),
        ("long name", r"takes 1\.0 MB beside its tensors"),
        ("many", "contains 10002 tensors"),
    ],
)
def test_changes_that_cannot_be_sent_fail_their_call_and_no_other(
    warm: mh.dispatch.Cluster, coordinator: mh.dispatch.Dispatcher, how: str, why: str
) -> None:
    pids = warm.worker_pids, warm.server_pids
    coordinator.schedule("change_oddly", (how,))
    with pytest.raises(StepFailed, match=why):
        coordinator.join()
    assert coordinator.schedule("give_back", (1,)).fetch(60)["args"] == [1]
    assert (warm.worker_pids, warm.server_pids) == pids


def test_what_cannot_be_is_refused_from_outside_too(warm: mh.dispatch.Cluster) -> None:
    for name, value, why in (
        ("odd", torch.ones(2).to(torch.float8_e4m3fn), "float8_e4m3fn"),
        ("odd", torch.eye(2).to_sparse(), "sparse_coo"),
        (5, torch.ones(2), "variables have names"),
        ("n" * 2**20, torch.ones(2), "does not fit into one message"),
    ):
        with pytest.raises(UsageError, match=why):
            warm.assign(name, value)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="count is -1"):  # which would give two servers one number
        warm.start_server(-1)
    warm.assign("even", torch.ones(2))
    assert torch.equal(warm.read("even"), torch.ones(2))


class Pair(NamedTuple):
    left: Any
    right: Any


def test_results_take_the_place_of_remote_values_in_named_tuples(coordinator: mh.dispatch.Dispatcher) -> None:
    found = coordinator.fetch(Pair(coordinator.schedule("give_back", (1,)), [2]))
    assert found == Pair({"args": [1], "kwargs": {}}, [2])


def test_a_thousand_bytes_and_none_are_kept_alike(
    warm: mh.dispatch.Cluster, coordinator: mh.dispatch.Dispatcher
) -> None:
    for name, value in (("none", torch.empty(0, 3)), ("many", torch.rand(1000, dtype=torch.float64))):
        coordinator.schedule("change", ("assign", name, value)).fetch()
        assert same(warm.read(name), value)


# ---- workers ---------------------------------------------------------------------------------------------------


def test_each_worker_keeps_its_own_iterator(coordinator: mh.dispatch.Dispatcher) -> None:
    dataset = coordinator.create_per_worker_dataset("numbers")
    first, second = iter(dataset), iter(dataset)
    taken = coordinator.fetch([coordinator.schedule("take_next", (first,)) for _ in range(30)])
    for pid in {pid for pid, _ in taken}:
        mine = [number for who, number in taken if who == pid]
        assert sorted(mine) == list(range(len(mine)))
    coordinator.schedule("take_next", kwargs={"iterator": second}).fetch()
    with pytest.raises(UsageError, match="only be advanced inside a step"):
        next(first)


def test_a_worker_wired_by_hand_takes_calls_and_leaves(
    warm: mh.dispatch.Cluster, coordinator: mh.dispatch.Dispatcher, gate: StepGate, tmp_path: Path
) -> None:
    warm.assign("mine", torch.tensor(3))
    held = [coordinator.schedule("wait_at", (gate.place,)) for _ in range(2)]
    gate.await_one(), gate.await_one()
    warm.write_join_file(tmp_path / "cluster.join")
    worker = mh.dispatch.RemoteWorker(tmp_path / "cluster.join").start()
    try:
        assert worker.session is not None and worker.session.number == 2
        assert worker.config.address.startswith("tcp://127.0.0.1:")
        assert coordinator.schedule("who").fetch() == (2, os.getpid())
        warm.assign("both", torch.tensor(0))
        assert coordinator.schedule("twice").fetch() == [0, 0]  # read over TCP, encrypted
    finally:
        worker.stop()
    assert worker.session is None and worker.join()
    gate.let_go()
    coordinator.join()
    assert all(value.ready for value in held)
    assert int(warm.read("both")) == 3


def test_a_worker_that_gives_no_sign_of_life_loses_its_call_to_another(
    warm: mh.dispatch.Cluster, coordinator: mh.dispatch.Dispatcher, gate: StepGate
) -> None:
    held = [coordinator.schedule("wait_at", (gate.place,)) for _ in range(2)]
    gate.await_one(), gate.await_one()
    context: Any = zmq.Context()
    silent = context.socket(zmq.DEALER)
    silent.connect(warm.hub.address)
    silent.send(msgspec.msgpack.encode({"m": "WorkerReady", "number": -1, "pid": 1, "host": "nowhere"}))
    value = coordinator.schedule("give_back", (1,))
    while b"RunCall" not in silent.recv_multipart()[0]:
        continue
    gate.let_go()
    coordinator.fetch(held)
    assert not value.ready
    with warm.hub.changed:
        [member] = [member for member in warm.hub._members.values() if member.child is None]
        member.heard_at -= 1000  # as if all that time had passed
    assert value.fetch()["args"] == [1]
    silent.close(0)
    context.term()


@pytest.mark.parametrize("how", ["cut", "forgotten"])
def test_a_worker_that_is_no_longer_in_its_cluster_learns_of_it_and_its_call_is_done(
    how: str, warm: mh.dispatch.Cluster, coordinator: mh.dispatch.Dispatcher, gate: StepGate, tmp_path: Path
) -> None:
    line = Line(warm.hub.tcp_address.removeprefix("tcp://"))
    write_join_file(tmp_path / "cluster.join", JoinTicket(line.address, "", warm.hub.settings.key.hex()))
    worker = mh.dispatch.RemoteWorker(tmp_path / "cluster.join").start()
    values = [coordinator.schedule("wait_at", (gate.place,)) for _ in range(3)]
    gate.await_one(), gate.await_one(), gate.await_one()
    if how == "cut":
        line.cut()
    [member] = [member for member in warm.hub._members.values() if member.child is None]
    while member in warm.hub._members.values():
        member.heard_at -= 1000  # as if it had been silent all that time; a sign of life on its way undoes it
        warm.hub.wait_for(lambda: member not in warm.hub._members.values(), 1.0)
    gate.let_go()
    gate.await_one()  # its call, once more, elsewhere
    gate.let_go()
    assert len(set(coordinator.fetch(values))) == 3
    with pytest.raises(
        PeerLost, match={"cut": "connection to the cluster was lost", "forgotten": "continues without it"}[how]
    ):
        worker.join()
    assert worker.session is None
    line.close()


def test_a_peer_without_the_key_or_with_another_is_refused(
    warm: mh.dispatch.Cluster, coordinator: mh.dispatch.Dispatcher
) -> None:
    context: Any = zmq.Context()
    curve = client_curve(b"\1" * 32)
    stranger = context.socket(zmq.DEALER)
    stranger.curve_publickey, stranger.curve_secretkey = curve.public, curve.secret
    stranger.curve_serverkey = client_curve(warm.hub.settings.key).server_key
    monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    stranger.connect(warm.hub.tcp_address)
    try:
        assert monitor.poll(60_000)
        assert socket_event(monitor).kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    finally:
        stranger.disable_monitor()
        context.destroy(0)
    assert coordinator.schedule("give_back", (1,)).fetch()["args"] == [1]


def test_frames_that_are_none_of_ours_are_refused_counted_and_harmless(
    warm: mh.dispatch.Cluster, coordinator: mh.dispatch.Dispatcher, gate: StepGate
) -> None:
    held = coordinator.schedule("wait_at", (gate.place,))
    gate.await_one()
    [given] = warm.hub.desk.queue.running.values()
    encode = msgspec.msgpack.encode
    forged = {"m": "CallDone", "call": given.call, "attempt": given.attempt, "value_frames": 1, "changes": []}
    dice = random.Random(5)
    noise = [[dice.randbytes(dice.randrange(200)) for _ in range(dice.randrange(1, 4))] for _ in range(300)]
    messages = [
        *noise,
        [encode(forged), encode("forged")],
        [encode({**forged, "extra": 1})],
        [encode({"m": "CommitApplied", "commit": 10**9})],
        [encode({"m": "ReadReply", "ticket": 1, "found": "there"})],
        [encode({"m": "ServerHello", "server": 9, "pid": 1, "addresses": {}})],
        [b"\x91" * 100_000],
    ]
    before = warm.refused
    context: Any = zmq.Context()
    for address in (warm.hub.address, warm.hub.address.replace("hub", "server-0")):
        stranger = context.socket(zmq.DEALER)
        stranger.connect(address)
        for message in messages:
            stranger.send_multipart(message)
        stranger.close(10_000)
    context.term()  # by now all of it has left
    warm.hub.wait_for(lambda: warm.refused - before >= len(messages), 60)
    assert warm.refused - before == len(messages)
    assert not held.ready
    gate.let_go()
    assert held.fetch() == given.call
    warm.assign("first", torch.tensor(1))
    assert int(warm.read("first")) == 1


def test_settings_that_cannot_work_are_refused_before_anything_starts() -> None:
    for settings, why in (
        ({"workers": 0}, "cannot run steps"),
        ({"workers": -1}, "workers is -1"),
        ({"workers": 1, "servers": True}, "servers is True"),
        ({"workers": 1, "silent_s": 0}, "silent_s is 0"),
    ):
        with pytest.raises(SpecError, match=why):
            mh.dispatch.Cluster(**settings)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not started"):
        mh.dispatch.Dispatcher(mh.dispatch.Cluster(workers=1))
    with pytest.raises(UsageError, match="cannot be a step"):
        mh.dispatch.remote(lambda ctx: None)
