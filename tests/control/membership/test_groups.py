"""What one host knows of the generations of an attempt."""

from __future__ import annotations

import os

from manyhands.comm.host_memory import HostMemory, Segment
from manyhands.control.membership.generations import Generations, group_for, is_later
from manyhands.control.messages.agent_messages import GroupMember, HostPlan
from manyhands.native import library


def plan(counter: int, members: list[tuple[int, int]], *, host: int = 0, lost: bool = False) -> HostPlan:
    """`members`: (incarnation, host), by rank; the slot is ten times the incarnation."""
    return HostPlan(
        generation=f"7.{counter}",
        attempt=1,
        world_size=len(members),
        num_hosts=2,
        host=host,
        first_rank=0,
        incarnations=[],
        master=("127.0.0.1", 1),
        group=[GroupMember(incarnation=incarnation, slot=10 * incarnation, host=at) for incarnation, at in members],
        lost=lost,
        call=3,
    )


def test_no_generation_is_earlier_than_any_and_counters_are_numbers():
    assert is_later("7.1", "")
    assert not is_later("", "7.1")
    assert not is_later("", "")
    assert is_later("7.10", "7.9")
    assert is_later("8.1", "7.99")
    assert not is_later("7.9", "7.9")


def test_a_worker_sees_its_ranks_in_the_group_and_an_outsider_sees_none():
    seen = group_for(plan(1, [(1, 0), (2, 1), (5, 1)], host=1, lost=True), 5)
    assert (seen.rank, seen.world_size, seen.local_rank, seen.local_world_size) == (2, 3, 1, 2)
    assert (seen.slots, seen.hosts, seen.lost, seen.call) == ([10, 20, 50], [0, 1, 1], True, 3)
    outsider = group_for(plan(1, [(1, 0), (2, 1)], host=1), 5)
    assert (outsider.rank, outsider.local_rank, outsider.world_size) == (-1, -1, 2)


def test_a_loss_ends_all_generations_before_and_a_planned_change_none():
    groups = Generations()
    assert groups.announce(plan(1, [(1, 0), (2, 0)])) == []
    assert groups.announce(plan(2, [(1, 0), (2, 0), (3, 0)])) == []
    assert groups.last_loss == ""
    assert groups.announce(plan(3, [(1, 0), (3, 0)], lost=True)) == ["7.1", "7.2"]
    assert groups.announce(plan(3, [(1, 0), (3, 0)], lost=True)) == [], "orders are repeated every second"
    assert groups.announce(plan(4, [(1, 0)])) == []
    assert groups.last_loss == "7.3"


def test_a_generation_is_left_when_its_last_living_member_here_speaks_for_a_later_one():
    groups = Generations()
    groups.announce(plan(1, [(1, 0), (9, 1), (2, 0)]))
    groups.announce(plan(2, [(1, 0), (2, 0)], lost=True))
    assert groups.local_rank("7.1", 2) == 1
    assert groups.local_rank("7.1", 9) is None
    assert groups.leave({1: "7.2", 2: "7.1"}) == []
    assert groups.gone("7.1", [1]) == [1]
    assert groups.leave({1: "7.2"}) == ["7.1"]
    assert groups.of(1) == ["7.2"]
    assert groups.leave({}) == [], "the newest stays"


def test_planes_of_a_generation_are_aborted_alone_and_their_memory_is_given_back():
    memory = HostMemory()
    try:
        size = 1 << 20
        one, two = (memory.allot("plane", size, 2, generation) for generation in ("7.1", "7.2"))
        weights = memory.allot("weights", size, generation="7.1")
        assert len({one, two, weights}) == 3
        assert memory.allot("weights", size, generation="7.2") == weights, "no generation's own"
        os.pwrite(memory.fd, b"w", weights)
        memory.lose(1, "7.1")
        assert _aborted(memory, one) == 2
        assert _aborted(memory, two) == 0
        memory.lose(None, "7.2")
        assert _aborted(memory, two) == 3, "one of another host: none of the two ranks here"
        held = os.fstat(memory.fd).st_blocks
        memory.free("7.1")
        assert held - os.fstat(memory.fd).st_blocks == size // 512
        assert os.pread(memory.fd, 1, weights) == b"w"
        memory.lose(0, "7.1")
    finally:
        memory.close()


def _aborted(memory: HostMemory, offset: int) -> int:
    """0, or 1 + the rank that the plane was aborted for, as the library reads it."""
    segment = Segment(memory.fd, 4096, offset)
    try:
        return int(library.lost_rank(segment.address)) + 1
    finally:
        segment.close()
