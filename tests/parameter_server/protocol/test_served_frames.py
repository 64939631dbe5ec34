"""Streams arrive whole when frames are lost, repeated or out of order."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.comm.host_memory import HostMemory, Segment
from manyhands.parameter_server.memory.frames import (
    FRAME_BYTES,
    WINDOW,
    Fetching,
    FrameSpan,
    Sending,
    SpanStream,
    checksum,
)
from manyhands.parameter_server.protocol.messages import FromServer, FromWorker, Got, GradientPart


@pytest.fixture(scope="module")
def memory() -> Iterator[Segment]:
    host = HostMemory()
    yield Segment(host.fd, 2**16, host.allot("frames", 2**16))
    host.close()


# Ranges of one region that do not overlap, in any order: (gap before it, length).
cuts = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 300)), max_size=8)


def stream_over(memory: Segment, cut: list[tuple[int, int]], order: random.Random) -> tuple[SpanStream, list[int]]:
    """A stream, and where in the region each of its bytes is."""
    spans, end = [], 0
    for gap, length in cut:
        spans.append(FrameSpan(memory, end + gap, length))
        end += gap + length
    order.shuffle(spans)
    return SpanStream(spans), [at for _, start, length in spans for at in range(start, start + length)]


@given(cuts, st.integers(0, 2**32), st.data())
def test_a_stream_is_its_memory_ranges_one_after_the_other(memory: Segment, cut, seed, data):
    order = random.Random(seed)
    stream, places = stream_over(memory, cut, order)
    assert stream.num_bytes == len(places)
    memory.buffer[:4096] = order.randbytes(4096)
    start = data.draw(st.integers(0, len(places)))
    stop = data.draw(st.integers(start, len(places)))
    assert stream.read(start, stop - start) == bytes(memory.buffer[at] for at in places[start:stop])
    before, new = memory.buffer[:4096], order.randbytes(stop - start)
    stream.write(start, new)
    expected = bytearray(before)
    for at, byte in zip(places[start:stop], new, strict=True):
        expected[at] = byte
    assert memory.buffer[:4096] == expected


@given(st.integers(-(2**63), 2**64 - 1), st.integers(-(2**63), 2**64 - 1))
def test_only_frames_within_a_stream_are_its_own(memory: Segment, offset: int, num_bytes: int):
    stream = SpanStream([FrameSpan(memory, 0, 1000), FrameSpan(memory, 2000, 24)])
    fits = offset >= 0 and num_bytes > 0 and offset + num_bytes <= 1024
    assert stream.has(offset, num_bytes) == fits


lengths = st.integers(0, 3 * WINDOW * FRAME_BYTES)


@settings(max_examples=50)
@given(lengths, st.integers(0, 2**32).map(random.Random))
def test_what_is_sent_arrives_in_order_though_frames_and_answers_are_lost_repeated_and_late(num_bytes, chance):
    sending, received, under_way, answers = Sending(num_bytes), 0, list[tuple[int, int]](), [0]
    for turn in range(2000):
        if sending.is_done:
            break
        due = sending.due()
        assert sum(length for _, length in due) <= WINDOW * FRAME_BYTES
        under_way += [frame for frame in due if turn > 200 or chance.random() > 0.3]
        if under_way and chance.random() < 0.9:
            offset, length = under_way.pop(chance.randrange(len(under_way)) if turn < 200 else 0)
            received += length if offset == received else 0
            answers.append(received)
            sending.hear(chance.choice(answers) if turn < 200 else received)
        else:
            sending.again()
    assert sending.is_done
    assert received == num_bytes


@settings(max_examples=50)
@given(lengths, st.integers(0, 2**32).map(random.Random))
def test_what_is_asked_for_comes_once_though_questions_and_answers_are_lost_and_late(num_bytes, chance):
    fetching, got, asked = Fetching(), list[int](), list[int]()
    for turn in range(4000):
        if fetching.is_done:
            break
        asked += [offset for offset in fetching.due() if turn > 200 or chance.random() > 0.3]
        if asked and chance.random() < 0.9:
            offset = asked.pop(chance.randrange(len(asked)))
            got += [offset] if fetching.hear(offset, num_bytes) else []
        else:
            fetching.again()
    assert fetching.is_done
    assert sorted(got) == (list(range(0, num_bytes, FRAME_BYTES)) or [0])


def test_an_answer_that_no_request_waits_for_is_ignored():
    fetching = Fetching()
    assert not fetching.hear(0, 10)
    assert fetching.due() == [0]
    assert not fetching.hear(FRAME_BYTES, 10)
    assert fetching.hear(0, 10)
    assert not fetching.hear(0, 10)
    assert fetching.is_done


@given(st.binary(min_size=1, max_size=64), st.integers(0, 2**40), st.integers(0, 2**63), st.data())
def test_a_flipped_bit_and_a_frame_in_another_place_have_another_checksum(data, offset, filling, draw):
    right = checksum(filling, offset, data)
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    assert checksum(filling, offset, bytes(flipped)) != right
    assert checksum(filling, offset + FRAME_BYTES, data) != right
    assert checksum(filling + 1, offset, data) != right


@pytest.mark.parametrize("accepts", [FromWorker, FromServer])
@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused_and_nothing_else(accepts, data):
    decoder = msgspec.msgpack.Decoder(accepts)
    with pytest.raises((ValueError, RecursionError)):  # those that a port counts
        decoder.decode(data)


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_spoiled_message_decodes_to_something_or_is_refused(at, byte):
    piece = GradientPart(number=(1, 1, 1), worker=1, held=(1, 0, 2, 3), offset=0, crc=5, data=bytes(300))
    for message, accepts in ((piece, FromWorker), (Got(number=(1, 1, 1), server=0, filling=3, received=4), FromServer)):
        data = bytearray(msgspec.msgpack.encode(message))
        data[at % len(data)] = byte
        try:
            found = msgspec.msgpack.decode(data, type=accepts)
        except (ValueError, RecursionError):
            continue
        assert isinstance(found, msgspec.Struct)
