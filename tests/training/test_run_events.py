"""`RunEvents` takes the events of a worker; `mh.read_events` yields those of a run, also when its files are damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

import manyhands as mh
from manyhands.errors import UsageError
from manyhands.events import Event, GenerationStarted, RunEnded, StepDone, Warned, encode_lines
from manyhands.observe.recorder import Recorder, read_events
from manyhands.observe.run_events import RunEvents
from manyhands.spec.worker_identity import WorkerIdentity

pytestmark = pytest.mark.forged_record


def step(number: int, time_s: float) -> StepDone:
    return StepDone(step=number, epoch=0, loss=0.5, rows=8, samples_per_s=1.0, phases={}, time_s=time_s)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "events").mkdir()
    agent = [
        GenerationStarted(generation="1.1", workers=2, hosts=1, time_s=1.0),
        GenerationStarted(generation="1.2", workers=1, hosts=1, time_s=3.0),
    ]
    (tmp_path / "events" / "agent-a.jsonl").write_bytes(encode_lines(agent))
    (tmp_path / "events" / "chief.jsonl").write_bytes(encode_lines([step(1, 2.0), step(2, 4.0)]))
    return tmp_path


def test_events_of_all_files_come_in_the_order_of_their_time(run: Path) -> None:
    kinds = [type(event).__name__ for event in mh.read_events(run)]
    assert kinds == ["GenerationStarted", "StepDone", "GenerationStarted", "StepDone"]
    assert list(mh.read_events(str(run))) == list(mh.read_events(run))


def test_a_torn_last_line_of_a_live_run_is_left_out(run: Path) -> None:
    with (run / "events" / "chief.jsonl").open("ab") as file:
        file.write(encode_lines([step(3, 5.0)])[:-20])
    assert [event.step for event in mh.read_events(run) if isinstance(event, StepDone)] == [1, 2]


def test_a_clock_that_is_set_back_changes_no_order_within_a_file(run: Path) -> None:
    later = [step(3, 0.5), RunEnded(exit_code=0, step=3, reason="", time_s=6.0)]
    with (run / "events" / "chief.jsonl").open("ab") as file:
        file.write(encode_lines(later))
    assert [event.step for event in mh.read_events(run) if isinstance(event, StepDone)] == [1, 2, 3]


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no events"):
        mh.read_events(tmp_path)


class Listener:
    """A session of which a test sees what it publishes."""

    def __init__(self, rank: int) -> None:
        self.group = WorkerIdentity(
            agent="", rank=rank, world_size=2, local_rank=rank, local_world_size=2, generation="1.1", incarnation=1
        ).group()
        self.published: list[Event] = []

    def publish(self, event: Event) -> None:
        self.published.append(event)


def test_an_event_of_the_run_is_that_of_the_chief_and_each_worker_reports_its_own(tmp_path: Path) -> None:
    chief, other = Listener(0), Listener(1)
    with Recorder(tmp_path / "events.jsonl") as recorder:
        for session in (chief, other):
            events = RunEvents(session, lambda: recorder, training=2)
            events.emit(step(1, 2.0))
            events.emit_own(Warned(text=f"of rank {session.group.rank}"))
    assert chief.published == [replace(step(1, 2.0), training=2), Warned(text="of rank 0")]
    assert other.published == [Warned(text="of rank 1")]
    recorded = list(read_events(tmp_path / "events.jsonl"))
    assert [type(one) for one in recorded] == [StepDone, Warned]


def test_before_the_record_is_open_events_are_shown_only() -> None:
    chief = Listener(0)
    RunEvents(chief, lambda: None, training=1).warn("early")
    assert chief.published == [Warned(text="early")]
