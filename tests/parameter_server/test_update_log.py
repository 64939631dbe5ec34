"""A log of updates on disk: what is read again after it was cut off, changed, or written to a full disk."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from manyhands.errors import CheckpointCorrupt, EnvironmentProblem
from manyhands.parameter_server.log.log_format import Begin, Broken, Terms, UpdateRecord, frames, obsolete, surviving
from manyhands.parameter_server.log.write_ahead_log import SYNC_BYTES, WriteAheadLog
from manyhands.parameter_server.protocol.messages import RowGradients
from manyhands.parameter_server.protocol.shard import SliceGradient

TERMS = Terms(servers=2, part="abc", batch_size=16, slices=4)


def begin(low: int = 0, *seen: int) -> Begin:
    return Begin(terms=TERMS, low=low, seen=list(seen))


def small_update(step: int) -> UpdateRecord:
    return UpdateRecord(contributions=[], groups=[])


def update(step: int) -> UpdateRecord:
    one = SliceGradient(step, 0, 3, 5, 7, step - 1, 0.5, 16.0, (2,), b"changes")
    piece = RowGradients(number=(1, 1, 1), filling=5, order=0, table="t", ids=b"8 bytes.", gradients=b"4444")
    groups = [{"lr": 0.1, "betas": [0.9, 0.99], "nesterov": False}]
    return UpdateRecord(contributions=[one], groups=groups, statistics=[b"12345678"], pieces=[piece])


def open_log(directory: Path, saved: int | None = 0) -> WriteAheadLog:
    return WriteAheadLog(directory / "server-0", lambda: saved)


def write(
    log: WriteAheadLog,
    *steps: int,
    low: int = 0,
    settle: bool = True,
    make: Callable[[int], UpdateRecord] = small_update,
) -> None:
    for step in steps:
        log.write(step, make(step), [b"gradient", memoryview(b"of %d" % step)], lambda: begin(low))
        assert not settle or log.settle(more=False)


def steps_in(log: WriteAheadLog, version: int = 0, applied: int = 0) -> list[int]:
    return [one.step for one in log.reader.past(version, lambda step: step <= applied)]


def segment(directory: Path) -> Path:
    (found,) = directory.glob("server-0/*.log")
    return found


def test_what_rests_on_lost_memory_is_of_no_use_and_what_came_after_it_is() -> None:
    kept, lost, again = begin(), replace(begin(17), unsynced=True), replace(begin(2), unsynced=True)
    segments = [(kept, [1, 2]), (lost, [18]), (again, [3, 4])]
    assert surviving(segments, 0) == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert surviving([(lost, [18])], 17) == [(0, 0)]
    with pytest.raises(Broken, match="step 3 is missing"):
        surviving([(kept, [1, 2]), (begin(17), [18])], 0)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write(open_log(tmp_path), 1, 2, make=update)
    first, second = open_log(tmp_path).reader.past(0, lambda step: False)
    assert (first.step, first.begin, first.update) == (1, begin(), update(1))
    assert (second.update, bytes(second.payload)) == (update(2), b"gradientof 2")
    assert steps_in(open_log(tmp_path), applied=1) == [2]


def test_records_torn_off_the_end_are_not_read(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    write(log, 1, 2)
    write(log, 3, 4, settle=False)
    path = segment(tmp_path)
    data = path.read_bytes()
    ends = [frame.end for frame in frames(data)[0]]
    for length in reversed(range(len(data))):
        os.truncate(path, length)
        assert steps_in(log) == [step for step, end in enumerate(ends) if step and end <= length]


def change(path: Path, data: bytes, place: int) -> None:
    """One byte; the rest is as it was."""
    with open(path, "r+b") as file:
        file.write(data[:place] + bytes([data[place] ^ 64]) + data[place + 1 :])


def test_one_byte_that_changes_is_found(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    write(log, 1, 2)
    write(log, 3, 4, settle=False)
    path = segment(tmp_path)
    data = path.read_bytes()
    vouched_for = frames(data)[0][3].synced
    for place in range(len(data)):
        change(path, data, place)
        if place < vouched_for:
            with pytest.raises(CheckpointCorrupt, match=r"cannot be read: .*has changed"):
                steps_in(log)
        else:
            assert steps_in(log) in ([1, 2], [1, 2, 3]), "an update is there that was not written"


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 200))
def test_nonsense_is_refused_or_left_out(tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int) -> None:
    directory = tmp_path_factory.mktemp("log")
    write(open_log(directory), 1, 2)
    path = segment(directory)
    data = path.read_bytes()
    path.write_bytes(data[:at] + noise + data[at:])
    with contextlib.suppress(CheckpointCorrupt):
        assert steps_in(open_log(directory)) in ([], [1], [1, 2])


def test_a_successor_says_what_counts_of_its_predecessors_log(tmp_path: Path) -> None:
    write(open_log(tmp_path), 1, 2, 3)
    write(open_log(tmp_path), 3, 4, low=2)  # the first to apply it for good
    assert [(one.step, one.begin.low) for one in open_log(tmp_path).reader.past(0, lambda step: False)] == [
        (1, 0), (2, 0), (3, 2), (4, 2)
    ]  # fmt: skip


def test_another_server_sees_how_far_a_log_goes(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    write(log, 1, 2)
    write(log, 3, settle=False)
    reader = log.reader_of(0)
    assert [reader.reach(0), reader.reach(1), log.reader_of(1).reach(0)] == [3, 3, 0]
    os.truncate(segment(tmp_path), len(segment(tmp_path).read_bytes()) - 1)
    assert reader.reach(0) == 2


def test_updates_out_of_order_count_as_the_next_segment_says() -> None:
    log = [(begin(0), [2, 1, 5, 4]), (begin(2, 5), [3, 4])]
    assert surviving(log, 0) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert surviving(log[:1], 0) == [(0, 0), (0, 1), (0, 2), (0, 3)]


@pytest.mark.parametrize(("version", "missing"), [(0, 1), (3, 4)])
def test_a_log_that_continues_another_state_is_refused(version: int, missing: int) -> None:
    with pytest.raises(Broken, match=f"step {missing} is missing.*after step {version}"):
        surviving([(begin(5), [6, 7])], version)


def test_segments_go_once_a_checkpoint_has_what_they_have(tmp_path: Path) -> None:
    saved = 0
    log = WriteAheadLog(tmp_path / "server-0", lambda: saved)
    write(log, 1, 2)
    log.end_segment()
    write(log, 3, low=2)
    assert steps_in(log) == [1, 2, 3], "there is no checkpoint of them yet"
    log.end_segment()
    saved = 2
    write(log, 4, low=3)
    assert [path.stem for path in sorted(tmp_path.glob("server-0/*"))] == ["00000002", "00000003"]
    assert steps_in(log, version=2) == [3, 4]
    saved = 4
    log.close(begin(4))
    assert not (tmp_path / "server-0").exists()


def test_what_is_still_open_when_a_checkpoint_comes_stays() -> None:
    assert obsolete([begin(0), begin(3, 5), begin(6)], saved=4) == 0
    assert obsolete([begin(0), None, begin(6)], saved=6) == 2


def test_updates_go_to_disk_together_while_there_are_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.parameter_server.log.write_ahead_log.SYNC_S", 3600.0)
    log = open_log(tmp_path)
    write(log, 1, 2, settle=False)
    assert not log.settle(more=True) and not log.is_settled
    assert log.settle(more=False) and log.is_settled
    log.write(3, update(3), [bytes(SYNC_BYTES)], begin)
    assert log.settle(more=True), "that is enough for once"


@pytest.fixture
def small_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_log_that_cannot_grow_says_so_and_keeps_the_acknowledged_records(tmp_path: Path, small_files: None) -> None:
    log = open_log(tmp_path)
    acknowledged = list[int]()
    with pytest.raises(
        EnvironmentProblem, match=r"cannot be written: File too large\. No update that workers know of is lost"
    ):
        for step in range(1, 100):
            write(log, step)
            acknowledged.append(step)
    assert acknowledged and steps_in(log) == acknowledged


def test_a_server_that_does_not_see_the_checkpoints_says_so(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="There is no checkpoint beside"):
        write(open_log(tmp_path, saved=None), 1)
