"""Where messages lie in a ring: never on one another, always whole, in the order in which they are taken."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from manyhands.comm.ring_buffer import LINE, RingBuffer


def test_messages_follow_one_another_and_go_round() -> None:
    room = RingBuffer(4 * LINE, most=8)
    assert [room.put(length) for length in (LINE, 1, 2 * LINE)] == [0, LINE, 2 * LINE]
    assert room.put(1) is None
    room.take(1)
    assert room.put(LINE + 1) is None, "one line is free, not two"
    assert room.put(LINE) == 0
    assert room.put(1) is None


def test_a_message_lies_whole_where_the_end_is_too_short_for_it() -> None:
    room = RingBuffer(4 * LINE, most=8)
    assert (room.put(2 * LINE), room.put(LINE)) == (0, 2 * LINE)
    room.take(1)
    assert room.put(2 * LINE) == 0, "one line is free at the end, two at the beginning"


def test_an_empty_room_begins_again_and_has_room_for_all_it_is_large() -> None:
    room = RingBuffer(4 * LINE, most=8)
    room.put(3 * LINE)
    room.take(1)
    assert room.put(4 * LINE) == 0
    room.take(1)
    assert room.put(4 * LINE + 1) is None


def test_no_more_are_under_way_than_the_table_has_entries_for() -> None:
    room = RingBuffer(100 * LINE, most=2)
    assert [room.put(0), room.put(0), room.put(0)] == [0, LINE, None]
    room.take(1)
    assert room.put(0) == 2 * LINE


@given(st.integers(1, 20), st.lists(st.one_of(st.just(-1), st.integers(0, 12 * LINE)), max_size=200))
def test_no_two_messages_overlap_in_any_order_of_events(lines: int, events: list[int]) -> None:
    room, held = RingBuffer(lines * LINE, most=5), deque[range]()
    for event in events:
        if event < 0:
            if held:
                held.popleft()
                room.take(1)
            continue
        begin = room.put(event)
        if begin is None:
            assert held or event > lines * LINE, "an empty room has room"
            continue
        new = range(begin, begin + max(1, event))
        assert new.start % LINE == 0 and new.stop <= lines * LINE
        assert all(new.stop <= one.start or one.stop <= new.start for one in held)
        held.append(new)
