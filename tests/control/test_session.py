"""A worker's session against an agent's socket that this test speaks through."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from manyhands.comm.transport import MAX_MESSAGE_BYTES, open_port
from manyhands.control.messages.worker_messages import Announce, FromWorker, Heartbeat, Offer, StoreReply, StoreRequest
from manyhands.control.session.session import Session
from manyhands.errors import EnvironmentProblem, PeerLost, PeerTimeout
from manyhands.spec.worker_identity import Group, WorkerIdentity
from tests.control.conftest import until


def group(counter: int, rank: int = 0, **more: Any) -> Group:
    known = {"world_size": 2, "local_rank": max(rank, 0), "local_world_size": 2, "host": 0, "num_hosts": 1}
    return Group(generation=f"7.{counter}", rank=rank, slots=[0, 1], hosts=[0, 0], **{**known, **more})


class FakeAgent:
    def __init__(self, folder: Path, *, joining: bool) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        endpoint = f"ipc://{folder}/agent"
        self.port = open_port(self.context, zmq.ROUTER, endpoint, FromWorker, bind=True)
        identity = WorkerIdentity(
            agent=endpoint,
            rank=0,
            world_size=2,
            local_rank=0,
            local_world_size=2,
            generation="" if joining else "7.1",
            incarnation=5,
            most_workers=4,
            joining=joining,
        )
        self.session = Session(identity)
        self.peer = b""
        self.receive()

    def receive(self, kind: type = Heartbeat) -> Any:
        """The next message of this kind."""
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            self.port.socket.poll(100)
            for peer, message in self.port.receive(1):
                self.peer = peer
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"no {kind.__name__}")

    def announce(self, group: Group, *, last_loss: str = "", run_call: int = 0) -> None:
        self.port.send(Announce(group=group, last_loss=last_loss, run_call=run_call), to=self.peer)

    def close(self) -> None:
        self.session.close()
        self.port.close()
        self.context.term()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Callable[..., FakeAgent]]:
    made: list[FakeAgent] = []

    def make(*, joining: bool = False) -> FakeAgent:
        made.append(FakeAgent(tmp_path, joining=joining))
        return made[-1]

    yield make
    for agent in made:
        agent.close()


def newest(session: Session, generation: str) -> Group:
    return until(lambda: (found := session.newest) is not None and found.generation == generation and found)


def test_a_heart_beats_five_times_a_second_and_says_for_which_generation(agents):
    agent = agents()
    started = time.monotonic()
    assert [agent.receive().generation for _ in range(5)] == ["7.1"] * 5
    assert 0.7 < time.monotonic() - started < 10.0  # a second, unless others have the processors
    agent.session.enter(group(2))
    until(lambda: agent.receive().generation == "7.2")


def test_the_newest_generation_is_announced_and_late_news_of_older_ones_is_not(agents):
    agent = agents()
    assert agent.session.newest is None
    agent.announce(group(3, rank=1))
    assert newest(agent.session, "7.3").rank == 1
    agent.announce(group(2))
    agent.announce(group(3, rank=1), run_call=9)
    until(lambda: agent.session.run_call == 9)
    found = newest(agent.session, "7.3")
    agent.session.enter(found)
    assert agent.session.newest is None
    assert agent.session.group == found


def test_a_loss_that_was_missed_makes_a_planned_change_urgent_and_one_that_was_seen_does_not(agents):
    agent = agents()
    agent.announce(group(3), last_loss="7.2")
    assert newest(agent.session, "7.3").lost
    agent.session.enter(group(2))
    assert not newest(agent.session, "7.3").lost, "it has been in the one that began with the loss"


def test_a_dismissed_worker_receives_the_generation_without_it(agents):
    agent = agents()
    agent.announce(group(2, rank=-1))
    assert newest(agent.session, "7.2").rank == -1


def test_a_newcomer_receives_generations_with_it_only(agents):
    agent = agents(joining=True)
    assert (agent.session.group.rank, agent.session.group.generation) == (-1, "")
    agent.announce(group(2, rank=-1), run_call=4)
    until(lambda: agent.session.run_call == 4)
    assert agent.session.newest is None
    agent.announce(group(3, rank=1), last_loss="7.2")
    assert not newest(agent.session, "7.3").lost


def test_an_offer_is_repeated_until_the_worker_is_admitted(agents):
    agent = agents(joining=True)
    answers: list[Group | None] = []
    offering = threading.Thread(target=lambda: answers.append(agent.session.offer(3, 60.0)))
    offering.start()
    assert [agent.receive(Offer).call for _ in range(3)] == [3, 3, 3]
    agent.announce(group(4, rank=1, call=3))
    offering.join(60)
    assert answers[0] is not None
    assert (answers[0].generation, answers[0].call) == ("7.4", 3)


def test_an_offer_ends_when_the_run_has_moved_past_its_call_or_its_time_is_up(agents):
    agent = agents(joining=True)
    agent.announce(group(2, rank=-1), run_call=4)
    assert agent.session.offer(3, 60.0) is None
    until(lambda: isinstance(agent.receive((Offer, Heartbeat)), Heartbeat), what="the offer's withdrawal")
    with pytest.raises(PeerTimeout, match="did not admit this worker to its call 4 within"):
        agent.session.offer(4, 0.1)
    with pytest.raises(PeerTimeout, match="No generation after the first was announced within"):
        agent.session.await_group(0.1)


def test_calls_that_wait_end_with_a_loss_and_only_then(agents):
    agent = agents()
    ended: list[BaseException | bytes] = []

    def get() -> None:
        try:
            ended.append(agent.session.get("key", 100))
        except PeerLost as error:
            ended.append(error)

    waiting = threading.Thread(target=get)
    waiting.start()
    request = agent.receive(StoreRequest)
    assert (request.generation, request.incarnation) == ("7.1", 5)
    agent.announce(group(2))
    newest(agent.session, "7.2")
    assert not ended, "a planned change: members finish their step"
    agent.announce(group(3), last_loss="7.3")
    waiting.join(60)
    assert "A member of generation 7.1 is gone; 7.3 continues without it." in str(ended[0])
    with pytest.raises(PeerLost):
        agent.session.set("key", b"")
    agent.session.enter(newest(agent.session, "7.3"))
    answering = threading.Thread(target=lambda: _refuse(agent))
    answering.start()
    with pytest.raises(PeerLost, match=r"generation 7\.3 is over") as refused:
        agent.session.get("key", 60)
    assert type(refused.value) is PeerLost, "not a timeout"
    answering.join()


def _refuse(agent: FakeAgent) -> None:
    request = agent.receive(StoreRequest)
    reply = StoreReply(ticket=request.ticket, ok=False, error=f"generation {request.generation} is over")
    agent.port.send(reply, to=agent.peer)


def test_a_request_that_is_too_large_to_be_sent_fails_at_once(agents):
    """It was dropped: its caller waited for a minute and blamed the agent."""
    session, started = agents().session, time.monotonic()
    with pytest.raises(EnvironmentProblem, match="could not be sent to the agent: it is larger than"):
        session.get("k" * MAX_MESSAGE_BYTES, 60.0)
    assert time.monotonic() - started < 30.0
