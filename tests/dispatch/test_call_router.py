"""What a cluster's call router does with the messages of members, with real memory and without processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from manyhands.comm.host_memory import HostMemory
from manyhands.comm.tensor_messages import pack, raw_bytes
from manyhands.dispatch.call_queue import MOST_LOSSES
from manyhands.dispatch.call_router import CallRouter, Peer
from manyhands.dispatch.messages import (
    Apply,
    CallDone,
    CannotFinish,
    Map,
    RunCall,
    ServerHello,
    ServerWelcome,
    VariableLocation,
)
from manyhands.dispatch.variable_ledger import Change
from manyhands.dispatch.variable_server import KeptVariable, region_bytes
from manyhands.errors import CallCancelled, StepFailed

SERVER: Peer = ("ipc", b"server")


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    found = HostMemory()
    yield found
    found.close()


@pytest.fixture
def sent() -> list[tuple[Peer, Any, Any]]:
    return []


@pytest.fixture
def router(memory: HostMemory, sent: list[Any]) -> CallRouter:
    made = CallRouter(memory, lambda *message: sent.append(message))
    made.ledger.add_server(0)
    made.server_came(SERVER, ServerHello(server=0, pid=1, addresses={"ipc": "ipc://a", "tcp": "tcp://b"}))
    return made


def worker(number: int) -> Peer:
    return ("tcp", b"worker %d" % number)


def add(value: int, **other: Any) -> Change:
    fields: dict[str, Any] = {"name": "w", "op": "assign", "shape": (), "dtype": "int64", "num_bytes": 8} | other
    return Change(**fields)


def done(
    router: CallRouter, peer: Peer, *changes: Change, payloads: list[bytes], call: int = 1, attempt: int = 1
) -> None:
    value = pack(None, "nothing")
    message = CallDone(call=call, attempt=attempt, value_frames=len(value), changes=list(changes))
    router.take(peer, message, [*map(bytes, value), *payloads])


EIGHT = bytes(raw_bytes(torch.tensor(5)))


def test_a_worker_receives_the_addresses_of_variables_in_its_own_network(router: CallRouter, sent: list[Any]) -> None:
    router.commit([add(1)], [EIGHT], "here")
    router.schedule("step", [])
    router.queue.came(worker(1))
    router.pump()
    kinds = [type(message) for _, message, _ in sent]
    assert kinds == [ServerWelcome, Apply, Map, RunCall]
    assert sent[2][1] == Map(servers={0: "tcp://b"}, places={"w": 0})
    assert (sent[3][1].snapshot, sent[3][1].marks) == (1, {0: 1})


def test_a_call_that_each_worker_dies_in_fails_and_cancels_the_rest(router: CallRouter) -> None:
    first, second = router.schedule("step", []), router.schedule("other", [])
    for number in range(MOST_LOSSES):
        assert not first.ended
        router.queue.came(worker(number))
        router.pump()
        router.lost(worker(number), f"worker {number}")
    assert isinstance(first.error, StepFailed) and f"{MOST_LOSSES} workers, and each died during it" in first.error.what
    assert isinstance(second.error, CallCancelled)
    assert router.take_failure() is first.error
    assert router.take_failure() is None


def test_a_worker_that_leaves_gives_its_call_back_without_blame(router: CallRouter) -> None:
    outcome = router.schedule("step", [])
    for number in range(2 * MOST_LOSSES):
        router.queue.came(worker(number))
        router.pump()
        router.left(worker(number))
    assert not outcome.ended
    assert router.queue.num_waiting == 1


def test_what_a_lost_worker_says_late_changes_nothing(router: CallRouter) -> None:
    router.schedule("step", [])
    router.queue.came(worker(1)), router.queue.came(worker(2))
    router.pump()
    router.lost(worker(1), "worker 1")
    router.pump()
    done(router, worker(1), add(1), payloads=[EIGHT])
    assert (router.refused, router.ledger.commits) == (1, 0)
    done(router, worker(2), add(1), payloads=[EIGHT], attempt=2)
    done(router, worker(2), add(1), payloads=[EIGHT], attempt=2)
    assert (router.refused, router.ledger.commits) == (2, 1)


@pytest.mark.parametrize(
    ("change", "payloads"),
    [
        (add(1), []),
        (add(1), [EIGHT, EIGHT]),
        (add(1), [EIGHT[:7]]),
        (add(1, shape=(2**40,)), [EIGHT]),
        (add(1, shape=(-1,)), [EIGHT]),
        (add(1, dtype="object"), [EIGHT]),
        (add(1, num_bytes=2**60), [EIGHT]),
    ],
)
def test_changes_whose_bytes_do_not_fit_are_refused(router: CallRouter, change: Change, payloads: list[bytes]) -> None:
    outcome = router.schedule("step", [])
    router.queue.came(worker(1))
    router.pump()
    done(router, worker(1), change, payloads=payloads)
    assert (router.refused, router.ledger.commits, outcome.ended) == (1, 0, False)


def test_a_call_whose_snapshot_is_gone_begins_again_with_a_newer_one(router: CallRouter, sent: list[Any]) -> None:
    router.schedule("step", [])
    router.queue.came(worker(1))
    router.pump()
    router.commit([add(1)], [EIGHT], "here")
    router.take(worker(1), CannotFinish(call=1, attempt=1), [])
    router.pump()
    runs = [message for _, message, _ in sent if isinstance(message, RunCall)]
    assert [(run.attempt, run.snapshot) for run in runs] == [(1, 0), (2, 1)]


def test_a_server_that_is_started_again_receives_what_it_had_and_what_it_lacks(
    router: CallRouter, sent: list[Any]
) -> None:
    router.commit([add(1)], [EIGHT], "here")
    router.pump()
    router.server_lost(0)
    router.commit([add(1, op="add")], [EIGHT], "here")
    sent.clear()
    router.pump()
    assert sent == []
    router.server_came(("ipc", b"next"), ServerHello(server=0, pid=2, addresses={"ipc": "ipc://a"}))
    router.pump()
    welcome, *applies = [message for peer, message, _ in sent if peer == ("ipc", b"next")]
    assert welcome.applied == 0 and [kept.name for kept in welcome.kept] == ["w"]
    assert [apply.commit for apply in applies] == [1, 2]


def test_a_kept_variable_is_the_old_or_the_new_one_whenever_its_writer_ends(memory: HostMemory) -> None:
    kept = VariableLocation("w", (3,), "float32", memory.allot("w", region_bytes(12)))
    writer = KeptVariable(memory.fd, kept)
    assert writer.newest() is None
    for commit in (1, 2, 5):
        writer.write(commit, torch.full((3,), float(commit)))
        found = KeptVariable(memory.fd, kept).newest()
        assert found is not None and found[0] == commit
        assert torch.equal(found[1], torch.full((3,), float(commit)))
    # Killed before its last word, it has spoiled the copy that does not count.
    writer._copy(1 - writer._mark[0] % 2).fill_(9.0)
    found = KeptVariable(memory.fd, kept).newest()
    assert found is not None and found[0] == 5 and torch.equal(found[1], torch.full((3,), 5.0))
