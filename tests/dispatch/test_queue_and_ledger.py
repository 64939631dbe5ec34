"""The queue of calls and the ledger of variables: under kills, every call ends once and every change counts once."""

from __future__ import annotations

import re

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from manyhands.dispatch.call_queue import MOST_LOSSES, CallQueue, HandOut
from manyhands.dispatch.variable_ledger import MOST_BEHIND, WINDOW, Change, VariableCommit, VariableLedger, Versions

pick = st.integers(0, 10**6)


def queue_with(calls: int, *workers: str) -> CallQueue[str]:
    queue: CallQueue[str] = CallQueue()
    for _ in range(calls):
        queue.schedule()
    for worker in workers:
        queue.came(worker)
    return queue


def test_calls_are_sent_in_order_to_the_worker_that_has_been_free_the_longest() -> None:
    queue = queue_with(3, "a", "b")
    assert queue.hand_out(0) == HandOut(1, 1, "a", 0)
    assert queue.hand_out(7) == HandOut(2, 1, "b", 7)
    assert queue.hand_out(7) is None
    assert queue.oldest_snapshot(9) == 0
    assert queue.done("b", 2, 1)
    assert queue.hand_out(8) == HandOut(3, 1, "b", 8)


def test_a_lost_workers_call_comes_first_and_only_its_newest_attempt_counts() -> None:
    queue = queue_with(2, "a", "b")
    queue.hand_out(0)
    assert queue.lost("a").call == 1
    assert queue.hand_out(0) == HandOut(1, 2, "b", 0)
    queue.came("a")
    assert not queue.done("a", 1, 1)
    assert not queue.done("b", 1, 1)
    assert queue.failed("a", 1, 2) is None
    assert queue.done("b", 1, 2)
    assert not queue.done("b", 1, 2)


def test_a_failure_cancels_what_waits_and_is_due_when_nothing_is_under_way() -> None:
    queue = queue_with(4, "a", "b", "c")
    queue.hand_out(0), queue.hand_out(0), queue.hand_out(0)
    assert queue.failed("a", 1, 1) == [4]
    assert not queue.room
    assert queue.failure_due is None
    assert queue.done("b", 2, 1)
    assert queue.lost("c").cancelled == (3,)
    assert queue.failure_due == 1
    queue.raised()
    assert queue.room and queue.idle
    assert queue.schedule() == 5


def test_a_call_that_takes_every_worker_with_it_fails() -> None:
    queue = queue_with(2)
    for number in range(MOST_LOSSES):
        queue.came(f"w{number}")
        given = queue.hand_out(0)
        assert given and given.call == 1
        loss = queue.lost(f"w{number}")
    assert loss.failed and loss.losses == MOST_LOSSES and loss.cancelled == (2,)
    assert queue.failure_due == 1


def test_a_full_queue_has_no_room() -> None:
    queue: CallQueue[str] = CallQueue(most_waiting=2)
    queue.schedule(), queue.schedule()
    assert not queue.room
    queue.came("a")
    queue.hand_out(0)
    assert queue.room


class QueueUnderLosses(RuleBasedStateMachine):
    """Random schedules of a few workers; the machine keeps what each call came to."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: CallQueue[int] = CallQueue(most_waiting=6, most_losses=3)
        self.ended: dict[int, str] = {}
        self.scheduled = self.workers = 0
        self.living: list[int] = []
        self.said: list[HandOut[int]] = []

    def end(self, how: str, *calls: int) -> None:
        for call in calls:
            assert call not in self.ended
            self.ended[call] = how

    @precondition(lambda self: self.queue.room)
    @rule()
    def schedule(self) -> None:
        self.scheduled += 1
        assert self.queue.schedule() == self.scheduled

    @precondition(lambda self: len(self.living) < 3)
    @rule()
    def a_worker_comes(self) -> None:
        self.workers += 1
        self.living.append(self.workers)
        self.queue.came(self.workers)

    @rule()
    def hand_out(self) -> None:
        if (given := self.queue.hand_out(0)) is not None:
            assert given.call not in self.ended
            self.said.append(given)

    @precondition(lambda self: self.said)
    @rule(which=pick, how=st.sampled_from(["done", "failed", "again"]))
    def something_is_said(self, which: int, how: str) -> None:
        """By anyone who was ever given a call, dead or alive, as often as it likes."""
        given = self.said[which % len(self.said)]
        said = (given.worker, given.call, given.attempt)
        counts = self.queue.is_at(*said)
        assert counts == (self.queue.running.get(given.worker) == given)
        if how == "done":
            assert self.queue.done(*said) == counts
            self.end("done", *([given.call] if counts else []))
        elif how == "failed":
            cancelled = self.queue.failed(*said)
            assert (cancelled is not None) == counts
            self.end("cancelled", *(cancelled or []))
            self.end("failed", *([given.call] if counts else []))
        elif counts and not self.queue.begin_again(*said):
            self.end("cancelled", given.call)

    @precondition(lambda self: self.living)
    @rule(which=pick)
    def a_worker_is_lost(self, which: int) -> None:
        loss = self.queue.lost(self.living.pop(which % len(self.living)))
        self.end("cancelled", *loss.cancelled)
        self.end("failed", *([loss.call] if loss.failed and loss.call else []))

    @precondition(lambda self: self.queue.failure_due is not None)
    @rule()
    def the_failure_is_raised(self) -> None:
        assert not self.queue.running
        assert self.ended[self.queue.failure_due or 0] == "failed"
        self.queue.raised()

    @invariant()
    def every_call_is_somewhere_once(self) -> None:
        running = [given.call for given in self.queue.running.values()]
        assert len(set(running)) == len(running)
        assert not set(running) & self.ended.keys()
        assert self.queue.num_waiting + len(running) + len(self.ended) == self.scheduled
        assert not self.queue.num_waiting or self.queue.failure_due is None

    def teardown(self) -> None:
        """Once no worker dies any more, every call ends."""
        self.a_worker_comes()
        for _ in range(2 * self.scheduled + 2):
            self.hand_out()
            for given in self.queue.running.values():
                assert self.queue.done(given.worker, given.call, given.attempt)
                self.end("done", given.call)
        assert self.queue.idle
        assert set(self.ended) == set(range(1, self.scheduled + 1))


TestQueueUnderLosses = QueueUnderLosses.TestCase
TestQueueUnderLosses.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# ---- variables -------------------------------------------------------------------------------------------------


def change(name: str, op: str = "add", shape: tuple[int, ...] = (), num_bytes: int = 8) -> Change:
    return Change(name=name, op=op, shape=shape, dtype="int64", num_bytes=num_bytes)  # type: ignore[arg-type]


def ledger_of(servers: int, **sizes: int) -> VariableLedger:
    ledger = VariableLedger()
    for server in range(servers):
        ledger.add_server(server)
    for name, size in sizes.items():
        create(ledger, change(name, "assign", num_bytes=size))
    return ledger


def create(ledger: VariableLedger, *changes: Change) -> int:
    return ledger.commit(changes, [0] * len(changes), ledger.place(changes))


def test_variables_go_where_the_fewest_bytes_are() -> None:
    ledger = ledger_of(2, large=100, small=10, next=10, last=10)
    assert {name: info.server for name, info in ledger.catalogue.items()} == {
        "large": 0, "small": 1, "next": 1, "last": 1,
    }  # fmt: skip


def test_a_server_that_was_added_gets_the_next_variables() -> None:
    ledger = ledger_of(1, a=10, b=10)
    ledger.add_server(1)
    create(ledger, change("c", "assign"), change("d", "assign"))
    assert [info.server for info in ledger.catalogue.values()] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ([change("absent")], "adds to variable 'absent', which does not exist"),
        ([change("w"), change("w", "assign")], "changes a variable twice"),
        ([change("w", shape=(2,))], r"is int64\[\], but it would add int64\[2\]"),
    ],
)
def test_changes_that_cannot_be_made_are_refused(changes: list[Change], why: str) -> None:
    with pytest.raises(AssertionError):
        create(ledger_of(1, w=8), *changes)
    assert re.search(why, ledger_of(1, w=8).refusal(changes) or "")


def test_without_servers_changes_are_refused_and_calls_without_any_are_not() -> None:
    assert "no server" in (VariableLedger().refusal([change("w", "assign")]) or "")
    assert VariableLedger().commit([], []) == 0


def test_no_more_is_sent_than_the_window_and_calls_wait_when_servers_are_far_behind() -> None:
    ledger = ledger_of(1, w=8)
    while not ledger.behind:
        ledger.commit([change("w")], [1])
    assert ledger.commits == MOST_BEHIND
    assert len(ledger.due(0)) == WINDOW
    assert ledger.due(0) == []
    ledger.applied(0, 10)
    assert [commit.number for commit in ledger.due(0)] == list(range(WINDOW + 1, WINDOW + 11))
    ledger.started_again(0)
    assert ledger.due(0)[0].number == 11


class SimulatedServer:
    """Keeps one newest version per variable over its own death, as the memory that outlives a server does."""

    def __init__(self, kept: dict[str, tuple[int, int]], applied: int = 0) -> None:
        self.kept, self.applied = kept, applied
        self.inbox: list[tuple[VariableCommit, int]] = []
        self.versions = {name: Versions(found) for name, found in kept.items()}

    def take(self, commit: VariableCommit, oldest: int, changes: int | None = None) -> None:
        """With `changes`, it dies after so many of them."""
        for one, payload in list(zip(commit.changes, commit.payloads, strict=True))[:changes]:
            versions = self.versions.setdefault(one.name, Versions())
            if not versions.has(commit.number):
                newest = versions.newest
                value = payload + (newest[1] if one.op == "add" and newest else 0)
                versions.put(commit.number, value)
                self.kept[one.name] = (commit.number, value)
            versions.forget(oldest)
        self.applied = commit.number


class StoreUnderLosses(RuleBasedStateMachine):
    """Two servers that die at any moment; the oracle has every state that there ever was."""

    names = ("a", "b")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ledger_of(2)
        self.kept: list[dict[str, tuple[int, int]]] = [{}, {}]
        self.servers = [SimulatedServer(kept) for kept in self.kept]
        self.history: list[dict[str, int]] = [{}]
        self.pinned: list[tuple[int, dict[int, int]]] = []
        self.mortal = False

    @initialize(mortal=st.booleans())
    def begin(self, mortal: bool) -> None:
        self.mortal = mortal

    def oldest(self) -> int:
        return min([snapshot for snapshot, _ in self.pinned], default=self.ledger.commits)

    @precondition(lambda self: not self.ledger.behind)
    @rule(ops=st.dictionaries(st.sampled_from(names), st.tuples(st.sampled_from(["assign", "add"]), pick), min_size=1))
    def a_call_is_done(self, ops: dict[str, tuple[str, int]]) -> None:
        changes = [change(name, op) for name, (op, _) in ops.items()]
        if self.ledger.refusal(changes):
            return
        number = self.ledger.commit(changes, [value for _, value in ops.values()], self.ledger.place(changes))
        before = self.history[-1]
        after = {name: value + (before[name] if op == "add" else 0) for name, (op, value) in ops.items()}
        self.history.append({**before, **after})
        assert number == len(self.history) - 1

    @rule(server=st.integers(0, 1), arrive=st.integers(1, 9))
    def some_commits_arrive(self, server: int, arrive: int) -> None:
        self.servers[server].inbox += [(commit, self.oldest()) for commit in self.ledger.due(server)]
        for _ in range(min(arrive, len(self.servers[server].inbox))):
            self.servers[server].take(*self.servers[server].inbox.pop(0))

    @rule(server=st.integers(0, 1))
    def an_acknowledgement_arrives(self, server: int) -> None:
        self.ledger.applied(server, self.servers[server].applied)

    @precondition(lambda self: self.mortal)
    @rule(server=st.integers(0, 1), torn=st.integers(0, 3))
    def a_server_dies_in_the_middle_of_a_commit(self, server: int, torn: int) -> None:
        if self.servers[server].inbox:
            self.servers[server].take(*self.servers[server].inbox[0], changes=torn)
        self.servers[server] = SimulatedServer(self.kept[server], self.ledger.started_again(server))

    @rule()
    def a_call_begins(self) -> None:
        self.pinned.append((self.ledger.commits, self.ledger.marks))

    @precondition(lambda self: self.pinned)
    @rule(which=pick)
    def a_call_ends(self, which: int) -> None:
        self.pinned.pop(which % len(self.pinned))

    @invariant()
    def what_a_call_reads_is_its_snapshot_or_said_to_be_gone(self) -> None:
        for snapshot, marks in self.pinned:
            for name, info in self.ledger.catalogue.items():
                server = self.servers[info.server]
                if server.applied < marks[info.server] or name not in server.versions:
                    continue
                found = server.versions[name].at(snapshot)
                right = found == self.history[snapshot].get(name, "absent")
                assert right or (found == "gone" and self.mortal)

    def teardown(self) -> None:
        """Once no process dies any more, every change has been made, and none twice."""
        for number in (0, 1):
            server = SimulatedServer(self.kept[number], self.ledger.started_again(number))
            while commits := self.ledger.due(number):
                for commit in commits:
                    server.take(commit, self.ledger.commits)
                self.ledger.applied(number, server.applied)
            assert server.applied == self.ledger.marks[number]
        found = {name: value for kept in self.kept for name, (_, value) in kept.items()}
        assert found == self.history[-1]


TestStoreUnderLosses = StoreUnderLosses.TestCase
TestStoreUnderLosses.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


BROKEN = {
    "a commit that comes again is applied again": (StoreUnderLosses, Versions, "has", lambda *_: False),
    "what calls under way may read is forgotten": (
        StoreUnderLosses, Versions, "forget", lambda self, _: self.__init__(self.newest),
    ),
    "an attempt that was given up counts": (
        QueueUnderLosses, CallQueue, "is_at",
        lambda self, worker, call, _: worker in self._running and self._running[worker].call == call,
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", BROKEN)
def test_what_would_break_the_promise_is_found_out(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, part, method, broken = BROKEN[how]
    monkeypatch.setattr(part, method, broken)
    once = settings(
        max_examples=4000,  # about 110 find it; drawn anew whenever the machine is renamed
        stateful_step_count=50,
        deadline=None,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=once)
