"""The recorder keeps facts when it can, counts what it cannot, and never troubles the loop."""

import contextlib
import itertools
import math
import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from manyhands.events import EpochDone, RunEnded, StepDone, Warned, encode
from manyhands.observe.recorder import Recorder, follow, read_events


def step(number, **changes):
    fields = {"epoch": 1, "loss": 0.5, "rows": 8, "samples_per_s": 100.0, "phases": {"load": 0.1}} | changes
    return StepDone(step=number, **fields)


def wait_until(condition):
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@pytest.mark.forged_record
def test_events_come_back_as_they_were_emitted(tmp_path):
    path = tmp_path / "events" / "chief.jsonl"
    with Recorder(path) as recorder:
        for number in range(1000):
            recorder.emit(step(number))
    assert [event.step for event in read_events(path)] == list(range(1000))
    assert recorder.dropped == 0


def test_an_event_without_a_time_is_stamped_when_emitted_and_a_given_time_is_kept(tmp_path):
    before_s = time.time()
    with Recorder(tmp_path / "e.jsonl") as recorder:
        recorder.emit(step(1))
        recorder.emit(step(2, time_s=12.5))
    stamped, given = read_events(tmp_path / "e.jsonl")
    assert before_s <= stamped.time_s <= time.time()
    assert given.time_s == 12.5


def test_events_are_readable_soon_while_the_run_trains(tmp_path):
    with Recorder(tmp_path / "e.jsonl") as recorder:
        recorder.emit(step(1))
        wait_until(lambda: list(read_events(tmp_path / "e.jsonl")))


def test_emitting_costs_microseconds(tmp_path):
    event = step(1)
    with Recorder(tmp_path / "e.jsonl", max_queue=100_000) as recorder:
        costs = []
        for _ in range(20):
            started = time.perf_counter()
            for _ in range(100):
                recorder.emit(event)
            costs.append((time.perf_counter() - started) / 100)
    assert min(costs) < 20e-6  # measured: 0.6 microseconds; the bound only catches I/O or encoding on this path


def test_a_full_queue_drops_the_oldest_and_counts_them(tmp_path, stuck_disk):
    recorder = Recorder(stuck_disk.path, max_queue=10)
    for number in range(1000):
        recorder.emit(step(number))
    recorder.close(timeout_s=0.1)
    assert recorder.dropped == 1000


def test_what_is_emitted_after_closing_is_counted_not_raised(tmp_path):
    recorder = Recorder(tmp_path / "e.jsonl")
    recorder.close()
    recorder.emit(step(1))
    assert recorder.dropped == 1


def test_something_that_is_no_event_is_counted_and_hurts_nothing(tmp_path):
    with Recorder(tmp_path / "e.jsonl") as recorder:
        recorder.emit("not an event")
        recorder.emit(step(2, phases={"load": object()}))
        recorder.emit(step(3))
    assert [event.step for event in read_events(tmp_path / "e.jsonl") if isinstance(event, StepDone)] == [3]
    assert recorder.dropped == 2


def test_many_threads_may_emit_at_once_and_none_is_lost(tmp_path):
    with Recorder(tmp_path / "e.jsonl") as recorder:
        threads = [
            threading.Thread(target=lambda n=n: [recorder.emit(step(n * 1000 + i)) for i in range(500)])
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len({event.step for event in read_events(tmp_path / "e.jsonl")}) == 2000
    assert recorder.dropped == 0


@pytest.fixture
def stuck_disk(tmp_path):
    """A file whose directory cannot be made, because a file has its name, until `free()`."""

    class StuckDisk:
        path = tmp_path / "in_the_way" / "e.jsonl"

        def free(self):
            (tmp_path / "in_the_way").unlink()

    (tmp_path / "in_the_way").write_text("")
    return StuckDisk()


def test_when_the_disk_is_back_the_newest_events_are_written_with_a_note_of_the_missing(stuck_disk):
    with Recorder(stuck_disk.path, max_queue=10) as recorder:
        for number in range(100):
            recorder.emit(step(number))
        wait_until(lambda: recorder.dropped == 90)
        stuck_disk.free()
        wait_until(lambda: stuck_disk.path.exists())
    warned, *steps = read_events(stuck_disk.path)
    assert isinstance(warned, Warned)
    assert "90 events" in warned.text
    assert [event.step for event in steps] == list(range(90, 100))


IN_A_PRIVATE_MOUNT = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="NOT SHOWN HERE: mounting a small or read-only disk needs root"
)

LOOP = """
import pathlib, subprocess, sys, time
from manyhands.events import StepDone, RunEnded
from manyhands.observe.recorder import Recorder, read_events

def step(n): return StepDone(step=n, epoch=1, loss=0.5, rows=8, samples_per_s=1.0, phases={"load": 0.1})
def mount(*args): subprocess.run(["mount", *args], check=True)
disk = pathlib.Path(sys.argv[1])
"""


def in_private_mounts(script, *args):
    command = ["unshare", "--mount", sys.executable, "-c", LOOP + textwrap.dedent(script), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@IN_A_PRIVATE_MOUNT
@pytest.mark.faults
def test_with_the_log_volume_full_training_continues_and_the_dropped_are_counted(tmp_path):
    done = in_private_mounts(
        """
        mount("-t", "tmpfs", "-o", "size=1m", "none", str(disk))
        recorder = Recorder(disk / "e.jsonl", max_queue=1000)
        slowest = 0.0
        for n in range(40_000):                      # about 5 MB of events onto 1 MB of disk
            began = time.perf_counter(); recorder.emit(step(n)); slowest = max(slowest, time.perf_counter() - began)
            if n % 500 == 0: time.sleep(0.005)
        deadline = time.monotonic() + 60
        while recorder.dropped < 20_000 and time.monotonic() < deadline: time.sleep(0.01)
        recorder.close(60.0)
        kept = [event.step for event in read_events(disk / "e.jsonl") if isinstance(event, StepDone)]
        assert kept and kept == sorted(set(kept)), "out of order or repeated"
        assert len(kept) + recorder.dropped == 40_000, (len(kept), recorder.dropped)
        assert slowest < 3.0, slowest
        print("trained on")
        """,
        tmp_path,
    )
    assert done.stdout == "trained on\n", done.stderr


@IN_A_PRIVATE_MOUNT
@pytest.mark.faults
def test_room_on_a_full_disk_is_used_again_and_no_line_is_torn(tmp_path):
    done = in_private_mounts(
        """
        mount("-t", "tmpfs", "-o", "size=1m", "none", str(disk))
        (disk / "filler").write_bytes(bytes(1_040_000))
        recorder = Recorder(disk / "e.jsonl", max_queue=1000)
        for n in range(500): recorder.emit(step(n))
        deadline = time.monotonic() + 60
        while not recorder._file.pending and time.monotonic() < deadline: time.sleep(0.01)
        (disk / "filler").unlink()
        while recorder._file.pending and time.monotonic() < deadline: time.sleep(0.01)
        recorder.close()
        assert [event.step for event in read_events(disk / "e.jsonl")] == list(range(500))
        assert recorder.dropped == 0
        print("all there")
        """,
        tmp_path,
    )
    assert done.stdout == "all there\n", done.stderr


@IN_A_PRIVATE_MOUNT
@pytest.mark.faults
def test_with_the_log_volume_read_only_training_continues_and_the_dropped_are_counted(tmp_path):
    done = in_private_mounts(
        """
        mount("-t", "tmpfs", "-o", "ro", "none", str(disk))
        recorder = Recorder(disk / "events" / "e.jsonl", max_queue=100)
        for n in range(5000): recorder.emit(step(n))
        recorder.close(2.0)
        assert recorder.dropped == 5000
        print("trained on")
        """,
        tmp_path,
    )
    assert done.stdout == "trained on\n", done.stderr


def test_a_torn_last_line_is_skipped_and_the_next_process_starts_a_fresh_one(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_bytes(encode(step(1)) + b"\n" + encode(step(2))[:-9])
    assert [event.step for event in read_events(path)] == [1]
    with Recorder(path) as recorder:
        recorder.emit(step(3))
    assert [event.step for event in read_events(path)] == [1, 3]


def test_kinds_and_fields_of_a_later_version_do_not_stop_the_reader(tmp_path):
    path = tmp_path / "e.jsonl"
    later = encode(step(2)).replace(b'"step":2', b'"step":2,"joules":7')
    path.write_bytes(b'{"event":"Levitated","height":3}\n' + later + b"\n\xff\xfe\n[]\n\n")
    assert [event.step for event in read_events(path)] == [2]


def test_a_diverged_loss_is_recorded_and_read_back_as_nan(tmp_path):
    with Recorder(tmp_path / "e.jsonl") as recorder:
        recorder.emit(step(1, loss=math.nan))
        recorder.emit(EpochDone(epoch=1, step=1, results={"loss": math.inf, "accuracy": 0.1}))
    diverged, epoch = read_events(tmp_path / "e.jsonl")
    assert math.isnan(diverged.loss)
    assert epoch.results["loss"] == math.inf
    assert epoch.results["accuracy"] == 0.1
    assert recorder.dropped == 0


def test_reading_a_file_that_is_not_there_gives_nothing(tmp_path):
    assert list(read_events(tmp_path / "none.jsonl")) == []


def test_following_delivers_events_as_they_are_written_and_ends_after_the_last(tmp_path):
    path = tmp_path / "e.jsonl"
    ended = threading.Event()
    stream = follow(path, poll_s=0.01, done=ended.is_set)
    recorder = Recorder(path)
    recorder.emit(step(1))
    assert next(stream).step == 1
    recorder.emit(step(2))
    assert next(stream).step == 2
    recorder.emit(RunEnded(exit_code=0, step=2, reason="done"))
    recorder.close()
    ended.set()
    assert [type(event) for event in stream] == [RunEnded]


def test_following_waits_for_the_rest_of_a_half_written_line(tmp_path):
    path = tmp_path / "e.jsonl"
    line = encode(step(7)) + b"\n"
    asked = itertools.count()

    def write_the_rest_when_asked_again():
        times = next(asked)
        if times == 1:
            with path.open("ab") as file:
                file.write(line[20:])
        return times > 3

    path.write_bytes(line[:20])
    with contextlib.closing(follow(path, poll_s=0.01, done=write_the_rest_when_asked_again)) as stream:
        assert next(stream).step == 7
