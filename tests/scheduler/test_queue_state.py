"""The queue's state machine, its log, and the simulation that drives it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.errors import EnvironmentProblem, UsageError
from manyhands.planner.step_time import ObservedSteps
from manyhands.scheduler.queue_log import QueueEntry, QueueLog
from manyhands.scheduler.queue_state import (
    ENDED,
    ClusterOpened,
    DecisionDue,
    JobCancelled,
    JobEnded,
    JobProgressed,
    JobSubmitted,
    KillJob,
    NotifyJob,
    QueueAction,
    QueueEvent,
    QueueState,
    ScaleJob,
    StartJob,
    react,
)
from manyhands.scheduler.simulate import TracedJob, simulate
from manyhands.scheduler.trace import read_trace


class Played:
    """A queue to which events happen; `now` is advanced by hand."""

    def __init__(self, *hosts: int) -> None:
        self.state, self.now, self.actions = QueueState(), 1000.0, list[QueueAction]()
        self.feed(ClusterOpened(hosts=hosts, policy="jct"))

    def feed(self, event: QueueEvent, after_s: float = 1.0) -> list[QueueAction]:
        self.now += after_s
        self.state, self.actions = react(self.state, event, self.now)
        return self.actions

    def submit(self, job: str, least: int = 1, most: int = 1, **more: object) -> list[QueueAction]:
        return self.feed(JobSubmitted(job=job, name=f"{job}.py", least=least, most=most, **more))  # type: ignore[arg-type]

    def progress(self, job: str, workers: int, step: int, step_s: float, *, after_s: float = 1.0) -> list[QueueAction]:
        seen = (ObservedSteps(1, workers, 20, 20 * step_s),)
        event = JobProgressed(job=job, workers=workers, step=step, total_steps=1000, observed=seen, rescale_s=0.1)
        return self.feed(event, after_s)

    def job(self, name: str):
        return self.state.jobs[name]


def test_a_job_starts_grows_when_it_was_measured_and_ends():
    queue = Played(4)
    assert queue.submit("1", most=4) == [StartJob(job="1", placed=(1,), number=1)]
    assert queue.progress("1", 1, 20, 1.0) == [ScaleJob(job="1", placed=(2,))]
    assert "1 -> 2 workers: 100 % faster, 8 min earlier" in queue.job("1").why
    assert queue.progress("1", 2, 60, 0.5) == [], "at most once a minute"
    queue.feed(DecisionDue(), 61.0)
    assert queue.actions == [ScaleJob(job="1", placed=(4,))]
    queue.feed(JobEnded(job="1", exit_code=0))
    assert queue.job("1").phase == "done"


def test_a_newcomer_starts_only_when_the_workers_that_it_gets_are_free():
    queue = Played(2)
    queue.submit("1", most=2)
    queue.progress("1", 1, 20, 1.0)
    queue.progress("1", 2, 40, 0.5)
    assert queue.submit("2") == [ScaleJob(job="1", placed=(1,))]
    assert queue.progress("1", 2, 50, 0.5) == [], "it has not left yet"
    assert queue.progress("1", 1, 51, 1.0) == [StartJob(job="2", placed=(1,), number=1)]


def test_a_job_that_is_preempted_gets_a_notice_is_killed_after_its_grace_and_resumes():
    queue = Played(1)
    queue.submit("1", grace_s=20.0)
    queue.progress("1", 1, 10, 100.0)
    queue.submit("2")  # never measured, so expected to be short
    assert queue.actions == [NotifyJob(job="1")]
    assert "stops with a checkpoint: all 1 worker go to job 2" in queue.job("1").why
    queue.feed(DecisionDue(), 15.0)
    assert queue.actions == []
    queue.feed(DecisionDue(), 20.0)
    assert queue.actions == [KillJob(job="1")]
    assert queue.feed(JobEnded(job="1", exit_code=None)) == [StartJob(job="2", placed=(1,), number=1)]
    assert "resumes from its last checkpoint" in queue.job("1").why or "waits" in queue.job("1").why
    assert queue.feed(JobEnded(job="2", exit_code=0)) == [StartJob(job="1", placed=(1,), number=2)]


def test_a_script_that_fails_at_once_does_not_block_the_queue():
    queue = Played(1)
    queue.submit("1")
    queue.submit("2")
    assert queue.feed(JobEnded(job="1", exit_code=1)) == [StartJob(job="2", placed=(1,), number=1)]
    assert queue.job("1").why == "failed with exit code 1"


def test_a_job_whose_processes_are_killed_is_started_again_but_not_for_ever():
    queue = Played(1)
    queue.submit("1")
    starts = 1
    for _ in range(5):
        starts += sum(isinstance(one, StartJob) for one in queue.feed(JobEnded(job="1", exit_code=None)))
    assert starts == 3
    assert queue.job("1").phase == "failed"
    assert "killed 3 times in a row" in queue.job("1").why


def test_jobs_after_others_wait_for_them_and_end_with_them():
    queue = Played(4)
    for name, after in (("1", ()), ("2", ("1",)), ("3", ("2",)), ("4", ("9",)), ("5", ("5",))):
        queue.submit(name, after=after)
    assert [queue.job(name).phase for name in "12345"] == ["starting", "waiting", "waiting", "failed", "failed"]
    assert queue.job("2").why == "waits for job 1 to finish"
    assert "is to run after 5, which was not submitted before it" in queue.job("5").why
    queue.feed(JobEnded(job="1", exit_code=0))
    assert queue.actions == [StartJob(job="2", placed=(1,), number=1)]
    queue.feed(JobCancelled(job="2"))
    assert queue.actions == [NotifyJob(job="2")]
    queue.feed(JobEnded(job="2", exit_code=75))
    assert queue.job("2").phase == "cancelled"
    assert queue.job("3").why == "was to run after 2, which was cancelled"


def test_a_job_that_needs_more_than_the_cluster_has_waits_and_lets_others_pass():
    queue = Played(2)
    queue.submit("1", least=8, most=8)
    assert queue.submit("2") == [StartJob(job="2", placed=(1,), number=1)]
    assert queue.job("1").why == "needs 8 workers, and the cluster has 2: waits for a larger cluster"
    queue.feed(ClusterOpened(hosts=(9,), policy="jct"))
    assert queue.actions == [StartJob(job="1", placed=(8,), number=1)]


def test_a_cluster_that_is_opened_with_fewer_workers_takes_them_from_jobs_and_stops_those_that_need_more():
    queue = Played(4)
    queue.submit("1", most=4)
    queue.progress("1", 1, 20, 1.0)
    queue.progress("1", 2, 60, 0.5)
    queue.submit("2", least=2, most=2)
    queue.progress("2", 2, 5, 1.0)
    queue.feed(ClusterOpened(hosts=(1,), policy="jct"))
    assert queue.actions == [NotifyJob(job="2"), ScaleJob(job="1", placed=(1,))]
    assert queue.job("2").why.endswith("waits for a larger cluster")


EVENTS = st.lists(
    st.one_of(
        st.builds(
            JobSubmitted, job=st.sampled_from("123"), name=st.just("x"), least=st.integers(1, 3), most=st.just(4)
        ),
        st.builds(
            JobProgressed,
            job=st.sampled_from("123"),
            workers=st.integers(1, 4),
            step=st.integers(0, 500),
            total_steps=st.just(500),
            observed=st.tuples(
                st.builds(ObservedSteps, st.just(1), st.integers(1, 4), st.just(30.0), st.floats(1, 90))
            ),
        ),
        st.builds(JobEnded, job=st.sampled_from("123"), exit_code=st.sampled_from([0, 1, 75, 143, None])),
        st.builds(JobCancelled, job=st.sampled_from("123")),
        st.just(DecisionDue()),
    ),
    max_size=30,
)


def record(log: QueueLog, events: list[QueueEvent]) -> tuple[QueueState, list[QueueAction]]:
    state, done = QueueState(), list[QueueAction]()
    log.begin(state)
    for number, event in enumerate([ClusterOpened(hosts=(4,), policy="jct"), *events]):
        state, actions = react(state, event, 1000.0 + 20.0 * number)
        log.append(QueueEntry(at=1000.0 + 20.0 * number, event=event, actions=actions), state)
        done += actions
    return state, done


@settings(max_examples=30, deadline=None)
@given(EVENTS)
def test_any_events_in_any_order_keep_the_workers_within_the_cluster_and_start_no_job_twice(events):
    state, alive = QueueState(), set[str]()
    for number, event in enumerate([ClusterOpened(hosts=(4,), policy="jct"), *events]):
        if isinstance(event, JobEnded):
            alive.discard(event.job)
        state, actions = react(state, event, 1000.0 + 20.0 * number)
        assert sum(sum(one.placed) for one in state.unfinished) <= 4
        for action in actions:
            if isinstance(action, StartJob):
                assert action.job not in alive or state.jobs[action.job].starts == 1
                alive.add(action.job)
            assert state.jobs[action.job].phase not in ENDED


def test_a_recorded_queue_that_is_replayed_decides_the_same_and_a_log_torn_at_any_byte_is_read_to_there(tmp_path):
    log = QueueLog(tmp_path / "queue.log")
    events: list[QueueEvent] = [JobSubmitted(job="1", name="a.py", most=4), JobSubmitted(job="2", name="b.py", most=2)]
    seen = (ObservedSteps(1, 1, 20, 9.0),)
    events += [JobProgressed(job=job, workers=1, step=20, total_steps=900, observed=seen) for job in "12"]
    events += [DecisionDue(), JobCancelled(job="2"), JobEnded(job="2", exit_code=75), JobEnded(job="1", exit_code=0)]
    state, done = record(log, events)
    begin, entries = QueueLog(tmp_path / "queue.log").read()
    replayed, again = begin, list[QueueAction]()
    for entry in entries:
        replayed, actions = react(replayed, entry.event, entry.at)
        assert actions == entry.actions
        again += actions
    assert (replayed, again) == (state, done)
    assert len(done) > 3
    whole = (tmp_path / "queue.log").read_bytes()
    ends = [at for at, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(0, len(whole), 31):
        (tmp_path / "queue.log").write_bytes(whole[:cut])
        torn = QueueLog(tmp_path / "queue.log")
        _, left = torn.read()
        assert len(list(left)) == max(0, sum(end <= cut for end in ends) - 1), "all whole lines, and only those"
    torn.begin(torn.load())
    torn.append(QueueEntry(at=2000.0, event=DecisionDue(), actions=[]), torn.load())
    assert len(list(QueueLog(tmp_path / "queue.log").read()[1])) == 1, "nothing is written behind a torn line"


def test_a_damaged_line_before_others_is_not_guessed(tmp_path):
    log = QueueLog(tmp_path / "queue.log")
    record(log, [JobSubmitted(job="1", name="a.py"), DecisionDue()])
    lines = (tmp_path / "queue.log").read_bytes().splitlines(keepends=True)
    (tmp_path / "queue.log").write_bytes(b"".join([lines[0], lines[1][:-9] + b"x" * 8 + b"\n", *lines[2:]]))
    with pytest.raises(EnvironmentProblem, match="Line 2 of 4 of the queue's log is damaged"):
        QueueLog(tmp_path / "queue.log").load()


def test_a_long_log_is_replaced_by_the_state_that_it_led_to(tmp_path):
    log = QueueLog(tmp_path / "queue.log", max_bytes=4000)
    state, _ = record(log, [JobSubmitted(job="1", name="a.py"), *[DecisionDue()] * 60])
    assert (tmp_path / "queue.log").stat().st_size < 8000
    assert msgspec.to_builtins(QueueLog(tmp_path / "queue.log").load()) == msgspec.to_builtins(state)


# ---- simulation ------------------------------------------------------------------------------------------------


def traced(name: str, arrives_s: float, steps: float, *, most: int = 4, **more: object) -> TracedJob:
    return TracedJob(
        name=name, arrives_s=arrives_s, steps=steps, most=most, step_s=lambda p: 1.0 / sum(p) + 0.02, **more
    )  # type: ignore[arg-type]


def test_a_simulated_job_alone_takes_its_start_its_steps_and_its_pauses():
    (job,) = simulate([traced("a", 0.0, 100, most=1)], [1], start_s=30.0).jobs
    assert job.completion_s == pytest.approx(30.0 + 100 * 1.02, abs=0.1)
    assert (job.starts, job.rescales) == (1, 0)


def test_short_jobs_do_not_wait_for_a_long_one_under_jct():
    trace = [traced("long", 0.0, 4000), *(traced(f"short-{n}", 100.0 + n, 60) for n in range(6))]
    jct = simulate(trace, [2, 2], "jct")
    assert all(job.completion_s is not None for job in jct.jobs)
    shorts = [job.completion_s for job in jct.jobs if job.name != "long" and job.completion_s is not None]
    assert max(shorts) < 400


def test_simulated_events_replayed_give_the_same_decisions():
    played = simulate([traced("a", 0.0, 300), traced("b", 20.0, 200), traced("c", 30.0, 50, after=("a",))], [4])
    state, twice = QueueState(), QueueState()
    for at, event in played.events:
        state, first = react(state, event, at)
        twice, second = react(twice, msgspec.json.decode(msgspec.json.encode(event), type=QueueEvent), at)
        assert first == second
    assert [job.phase for job in state.jobs.values()] == ["done"] * 3


def write_trace(folder: Path, *jobs: dict[str, object]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text(
        "".join(json.dumps({"arrives_s": 0, "steps": 10, "step_s": {"1": 1.0}, **job}) + "\n" for job in jobs)
    )
    return path


@pytest.mark.parametrize(
    ("jobs", "says"),
    [
        ([], "has no job"),
        ([{"name": "a"}, {"name": "a"}], "two jobs of the same name"),
        ([{"name": "a", "after": ["b"]}], "which is not in the trace"),
        ([{"name": "a", "after": ["b"]}, {"name": "b", "after": ["a"]}], "in a circle: a, b"),
        ([{"name": "a", "steps": 0}], "steps and priority have to be above 0"),
        ([{"name": "a", "most": 9}], "within the sizes of step_s"),
        ([{"name": "a", "stepps": 9}], "unknown field `stepps`"),
    ],
)
def test_a_trace_that_cannot_be_played_is_refused(tmp_path, jobs, says):
    with pytest.raises(UsageError, match=says):
        read_trace(write_trace(tmp_path, *jobs))


def test_times_of_a_trace_are_interpolated_between_the_given_numbers_of_workers(tmp_path):
    (job,) = read_trace(write_trace(tmp_path, {"name": "a", "step_s": {"1": 1.0, "4": 0.25}}))
    assert [job.step_s((n,)) for n in (1, 2, 4)] == pytest.approx([1.0, 0.5, 0.25])
    assert (job.least, job.most) == (1, 4)
