"""Values between real ranks that share memory; and what happens when a rank sends no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manyhands.comm.host_memory import Segment
from manyhands.comm.shared_memory_messages import ENTRIES, SharedMemoryPointToPoint
from manyhands.errors import PeerLost
from manyhands.native import library, why_not
from manyhands.testing import RankPool

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")

RING = 2**16
SIZES = (0, 1, RING - 200, RING, 5 * RING + 3, 3, RING // 2, RING // 2, RING // 2)


def opened(segments: list[Segment] | None = None, **settings: Any) -> tuple[SharedMemoryPointToPoint, Any]:
    """This rank's end, in rings so small that messages outgrow them."""
    from manyhands.training.worker.worker import _current_session

    session = _current_session.get()[0]
    known = [] if segments is None else segments

    def memory(name: str, num_bytes: int) -> Segment:
        known.append(session.shared_memory(name, num_bytes, 2))
        return known[-1]

    ranks = settings.pop("ranks", range(session.identity.world_size))
    return SharedMemoryPointToPoint(session.identity.rank, ranks, memory, first_bytes=RING, **settings), session


def see_off(session: Any) -> None:
    """The rank that made the memory removes it, not before all have opened it."""
    session.set(f"done {session.identity.rank}", b"1")
    session.wait([f"done {rank}" for rank in range(session.identity.world_size)], 20)


def value(rank: int, size: int) -> Any:
    data = torch.arange(size, dtype=torch.int64).add(rank).to(torch.uint8)
    rest = (rank, None, [torch.full((2, 3), 0.5).bfloat16(), 0.25], torch.tensor(True))
    return {"data": data, "rest": rest, "name": "text"}


def exchange() -> list[Any]:
    """Both send all, before either receives any; received in another order than sent."""
    values, session = opened(timeout_s=60)
    other = 1 - values.rank
    for tag, size in enumerate(SIZES):
        values.send(value(values.rank, size), other, tag, f"value {tag}")
    found = {tag: values.receive(other, tag, f"value {tag}") for tag in (8, 1, 5, 0, 3, 2, 4, 7, 6)}
    values.flush()
    see_off(session)
    return [found[tag] for tag in range(len(SIZES))]


def test_values_arrive_as_they_were_sent_in_rings_that_they_outgrow(ranks: RankPool) -> None:
    for rank, found in enumerate(ranks(2, exchange)):
        for size, got in zip(SIZES, found, strict=True):
            sent = value(1 - rank, size)
            assert got.pop("name") == sent.pop("name")
            torch.testing.assert_close(got, sent, rtol=0, atol=0)


def stream(count: int) -> list[int]:
    """Many small ones, more than the table has entries for; then one at a time, there and back."""
    values, session = opened(timeout_s=60)
    first = values.rank == 0
    found = []
    if first:
        for number in range(count):
            values.send(torch.tensor([number]), 1, 0, "a number")
    else:
        found += [int(values.receive(0, 0, "a number")) for _ in range(count)]
    number = torch.zeros(1000)
    for _ in range(count):
        if first:
            values.send(number, 1, 1, "ball")
            number = values.receive(1, 1, "ball")
        else:
            values.send(values.receive(0, 1, "ball").add_(1), 0, 1, "ball")
    see_off(session)
    return [*found, int(number[-1])]


def test_messages_come_in_order_and_rings_are_used_round_and_round(ranks: RankPool) -> None:
    count = 2 * ENTRIES + 10
    first, second = ranks(2, stream, count)
    assert first == [count]
    assert second == [*range(count), 0]


def changed_after_sending() -> list[float]:
    values, session = opened(timeout_s=60)
    found = []
    if values.rank == 0:
        sent = torch.ones(5)
        values.send(sent, 1, 0, "what changes")
        sent.zero_()
    else:
        found = values.receive(0, 0, "what changes").tolist()
    see_off(session)
    return found


def test_what_was_sent_may_change_afterwards(ranks: RankPool) -> None:
    assert ranks(2, changed_after_sending)[1] == [1.0] * 5


def wait_in_vain(timeout_s: float) -> str:
    values, _ = opened(timeout_s=timeout_s, missing=lambda: "No message so far.")
    if values.rank:
        return ""
    with pytest.raises(PeerLost) as error:
        values.receive(1, 0, "F3 of step 7, from stage 1")
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.faults
def test_a_rank_that_does_not_send_is_named(ranks: RankPool) -> None:
    said = ranks(2, wait_in_vain, 0.3)[0]
    assert "PeerTimeout: Rank 0 waited 0.3 s for rank 1 in 'F3 of step 7, from stage 1'. No message so far." in said


def be_lost() -> str:
    """The ranks are 4 and 6 of a run; a process that maps the memory says that the host's second, 5, is lost."""
    segments: list[Segment] = []
    values, session = opened(segments, ranks=[4, 6], here=[4, 5, 6], timeout_s=60)
    if values.rank == 1:
        values.send("here", 0, 0, "the first")
        session.get("waiting", 60)
        library.abort_plane(segments[0].address, 2, 1)
        session.get("done", 60)
        return ""
    first = values.receive(1, 0, "the first")
    session.set("waiting", b"1")
    with pytest.raises(PeerLost) as error:
        values.receive(1, 0, "F3 of step 7, from stage 1")
    session.set("done", b"1")
    return f"{first} {error.value}"


@pytest.mark.faults
def test_the_loss_of_a_rank_ends_the_wait_for_any_and_is_named(ranks: RankPool) -> None:
    assert "here Rank 4 was in 'F3 of step 7, from stage 1' when rank 5 was lost." in ranks(2, be_lost)[0]
