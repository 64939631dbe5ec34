"""What a worker used: counted right, shown in a line, and kept with the run."""

from __future__ import annotations

import io
import multiprocessing
import time

import pytest

from manyhands.comm.handed_over import count_handed_over
from manyhands.events import ResourcesUsed, RunEnded, decode, encode
from manyhands.observe.event_text import used_lines
from manyhands.observe.progress_display import make_display
from manyhands.strategies.base import StepStats
from manyhands.training.step import resource_meter
from manyhands.training.step.resource_meter import ResourceMeter

MIB = 2**20


def used(rank: int = 0, **changes: object) -> ResourcesUsed:
    fields = {
        "rank": rank, "step": 10, "steps": 10, "seconds": 2.0, "cpu_s": 3.0, "peak_rss_bytes": 300_000_000,
        "bytes_sent": 50_000_000, "phases": {"forward": 1.5, "load": 0.5},
    }  # fmt: skip
    return ResourcesUsed(**(fields | changes))


def busy(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_a_meter_reports_cores_memory_bytes_and_phases() -> None:
    meter = ResourceMeter(rank=1, world_size=2)
    for _ in range(3):
        meter.add(StepStats(loss=0.0, rows=4, seconds={"forward": 0.25, "reduce": 0.5}, bytes_sent=100), slices=2)
    count_handed_over(9)
    busy(0.05)
    found = meter.used(7, ended=True)
    assert found is not None
    assert (found.rank, found.step, found.steps, found.bytes_sent) == (1, 7, 3, 300)
    assert (found.slices, found.handed_over) == (6, 9)
    assert found.phases == {"forward": 0.75, "reduce": 1.5}
    assert 0.04 < found.cpu_s <= found.seconds * 64
    assert found.peak_rss_bytes > 10 * MIB
    assert found.pss_bytes is not None and MIB < found.pss_bytes <= found.peak_rss_bytes
    assert decode(encode(found)) == found


def test_what_takes_the_kernel_a_while_is_asked_at_the_end_only() -> None:
    meter = ResourceMeter(rank=0, world_size=2)
    meter.add(StepStats(loss=0.0, rows=4), slices=1)
    found = meter.used(1)
    assert found is not None and found.pss_bytes is None


def test_a_meter_without_a_step_reports_nothing() -> None:
    meter = ResourceMeter(rank=0, world_size=1)
    assert meter.used(0) is None
    meter.add(StepStats(loss=0.0, rows=4, bytes_sent=100), slices=1)
    found = meter.used(1)
    assert found is not None and found.bytes_sent == 0, "one worker sends nothing to anybody"
    meter.start()
    assert meter.used(1) is None, "another call counts anew"


def test_a_meter_is_due_every_ten_seconds() -> None:
    meter = ResourceMeter(rank=0, world_size=1)
    now = time.perf_counter()
    assert not meter.due(now)
    assert meter.due(now + resource_meter.EVERY_S + 1)
    assert not meter.due(now + resource_meter.EVERY_S + 2)
    assert meter.due(now + 2 * resource_meter.EVERY_S + 2)


@pytest.mark.slow
def test_loader_processes_count_alive_and_ended() -> None:
    context = multiprocessing.get_context("spawn")
    done, seen = context.Event(), context.Event()
    child = context.Process(target=_busy_until, args=(0.3, done, seen))
    meter = ResourceMeter(rank=0, world_size=1)
    meter.add(StepStats(loss=0.0, rows=4), slices=1)
    child.start()
    assert done.wait(100)
    alive = meter.used(1)
    seen.set()
    child.join(100)
    ended = meter.used(1)
    assert alive is not None and ended is not None
    assert 0.25 < alive.cpu_s <= ended.cpu_s + 0.02, "a tick of the kernel's clock is 10 ms"


def _busy_until(
    seconds: float, done: multiprocessing.synchronize.Event, seen: multiprocessing.synchronize.Event
) -> None:
    busy(seconds)
    done.set()
    assert seen.wait(100)


def test_each_worker_has_a_line_and_many_workers_one_for_all() -> None:
    assert used_lines([used(1, pss_bytes=200_000_000), used(0, bytes_sent=0, phases={})]) == [
        "rank 0: 1.50 cores, 300 MB at most",
        "rank 1: 1.50 cores, 300 MB at most, 200 MB with shared pages divided, "
        "sent 5 MB a step, 25 MB a second; load 25% forward 75%",
    ]
    (line,) = used_lines([used(rank, cpu_s=1.0 + rank) for rank in range(9)])
    assert line.startswith("9 workers: 0.50 to 4.50 cores, 300 MB at most, sent 5 MB a step, 25 MB a second; load 25%")
    assert used_lines([]) == []


@pytest.mark.parametrize("ui", ["plain", "live"])
def test_the_last_word_of_each_worker_is_shown_when_the_run_ends(ui: str) -> None:
    stderr = io.StringIO()
    display = make_display(ui, stdout=io.StringIO(), stderr=stderr, verbose=True)
    for event in (used(0, cpu_s=1.0), used(1), used(0)):
        display.event(event)
    display.event(RunEnded(exit_code=0, step=10, reason="done"))
    display.close()
    lines = [line for line in stderr.getvalue().splitlines() if line]
    assert [line.split(",")[0] for line in lines[:2]] == ["used by rank 0: 1.50 cores", "used by rank 1: 1.50 cores"]
    assert lines[2].startswith("finished")
