"""Plays a trace of jobs on a simulated cluster, with the `react` that the daemon uses. No process, no clock.

Only the cluster and the runs are simulated. The policy gets what it gets from real runs: the number of steps once a job
has begun, and the time of steps that were taken. Start reading at `simulate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import msgspec

from manyhands.planner.step_time import ObservedSteps
from manyhands.scheduler.policy import Policy
from manyhands.scheduler.queue_state import (
    DECIDE_EVERY_S,
    ClusterOpened,
    DecisionDue,
    JobEnded,
    JobProgressed,
    JobSubmitted,
    NotifyJob,
    QueueAction,
    QueueEvent,
    QueueState,
    ScaleJob,
    StartJob,
    react,
)

__all__ = ["SimulatedCluster", "SimulatedJob", "SimulatedRun", "TracedJob", "simulate"]

MAX_EVENTS = 5_000_000
WHOLE = 1e-9


class TracedJob(msgspec.Struct, kw_only=True):
    """One job of a trace. `step_s` gives the seconds of a step for workers per host, as (4, 4, 1)."""

    name: str
    arrives_s: float
    steps: float
    step_s: Callable[[tuple[int, ...]], float]
    least: int = 1
    most: int = 1
    priority: float = 1.0
    after: tuple[str, ...] = ()


class SimulatedJob(msgspec.Struct, kw_only=True):
    name: str
    arrives_s: float
    completion_s: float | None = None
    """From its arrival to its end; None: it never ran."""
    waited_s: float | None = None
    fair_s: float | None = None
    """The completion time with an equal share of the cluster at every moment; None: it ended before."""
    starts: int = 0
    rescales: int = 0

    @property
    def fair_ratio(self) -> float:
        return self.completion_s / self.fair_s if self.completion_s is not None and self.fair_s is not None else 1.0


class SimulatedCluster(msgspec.Struct, kw_only=True):
    jobs: list[SimulatedJob]
    events: list[tuple[float, QueueEvent]]
    mean_completion_s: float
    largest_fair_ratio: float
    """The largest completion time of a job, in multiples of that with an equal share; at least 1."""
    makespan_s: float
    utilization: float


def simulate(
    trace: Sequence[TracedJob],
    hosts: Sequence[int],
    policy: Policy = "jct",
    *,
    start_s: float = 30.0,
    rescale_s: float = 2.0,
) -> SimulatedCluster:
    """Play the trace to its end. A start pauses a job for `start_s`, a change of size for `rescale_s`."""
    return _Play(trace, tuple(hosts), policy, start_s, rescale_s).play()


class SimulatedRun:
    """A job on the simulated cluster: how many steps it has taken, and what it would have taken with its fair share."""

    def __init__(self, traced: TracedJob, width: int, start_s: float) -> None:
        self.traced, self.result = traced, SimulatedJob(name=traced.name, arrives_s=traced.arrives_s)
        self._width, self._start_s = width, start_s
        self.done = self.fair_done = 0.0
        self.placed: tuple[int, ...] = ()
        self.pause_until = math.inf
        self._new_steps = self._new_seconds = 0.0
        self._fair_speeds: list[float] = [0.0]

    def advance(self, start: float, end: float, share: float) -> None:
        if self.placed and end > (begins := max(start, self.pause_until)):
            steps = (end - begins) / self.step_s
            self.done += steps
            self._new_steps, self._new_seconds = self._new_steps + steps, self._new_seconds + end - begins
        fair_begins = max(start, self.traced.arrives_s + self._start_s)
        if self.result.fair_s is None and end > fair_begins:
            fair_speed = self._fair_speed(min(share, self.traced.most))
            left_s = (self.traced.steps - self.fair_done) / fair_speed
            if left_s <= end - fair_begins:
                self.result.fair_s = fair_begins + left_s - self.traced.arrives_s
            self.fair_done += (end - fair_begins) * fair_speed

    @property
    def step_s(self) -> float:
        return self.traced.step_s(tuple(filter(None, self.placed)))

    def ends_from(self, now: float) -> float:
        """When it ends, given that nothing changes; inf while it waits."""
        left = max(0.0, self.traced.steps - self.done)
        return max(now, self.pause_until) + left * self.step_s if self.placed else math.inf

    def take_observed(self) -> tuple[ObservedSteps, ...]:
        """The steps since the last call, all of the same size."""
        if self._new_steps <= 0:
            return ()
        hosts = sum(number > 0 for number in self.placed)
        found = ObservedSteps(hosts, sum(self.placed), self._new_steps, self._new_seconds)
        self._new_steps = self._new_seconds = 0.0
        return (found,)

    def _fair_speed(self, share: float) -> float:
        """Steps per second with `share` workers, used as well as possible; between whole numbers, a straight line."""
        while len(self._fair_speeds) <= math.ceil(share):
            number = len(self._fair_speeds)
            full, rest = divmod(number, self._width)
            found = 1.0 / self.traced.step_s((self._width,) * full + (rest,) * (rest > 0))
            self._fair_speeds.append(max(found, self._fair_speeds[-1]))
        below = math.floor(share)
        low, high = self._fair_speeds[below], self._fair_speeds[math.ceil(share)]
        return low + (share - below) * (high - low)


class _Play:
    def __init__(
        self, trace: Sequence[TracedJob], hosts: tuple[int, ...], policy: Policy, start_s: float, rescale_s: float
    ) -> None:
        self._start_s, self._rescale_s, self._hosts = start_s, rescale_s, hosts
        self._coming = sorted(trace, key=lambda one: one.arrives_s)
        self._runs: dict[str, SimulatedRun] = {}
        self._now, self._busy_s = 0.0, 0.0
        self._state = QueueState()
        self._events: list[tuple[float, QueueEvent]] = []
        self._feed(ClusterOpened(hosts=hosts, policy=policy))

    def play(self) -> SimulatedCluster:
        for _ in range(MAX_EVENTS):
            if not self._coming and not self._active():
                break
            self._advance(self._next_time())
            self._end_finished()
            self._admit()
            if self._now % DECIDE_EVERY_S < WHOLE:
                self._report_all()
                self._feed(DecisionDue())
        return self._result()

    def _active(self) -> list[SimulatedRun]:
        """Runs of jobs that have not ended; jobs that can never run are not among them."""
        total = sum(self._hosts)
        alive = [one for one in self._state.unfinished if one.least <= total]
        return [self._runs[one.job] for one in alive]

    def _next_time(self) -> float:
        tick = (math.floor(self._now / DECIDE_EVERY_S + WHOLE) + 1) * DECIDE_EVERY_S
        arrival = self._coming[0].arrives_s if self._coming else math.inf
        end = min((run.ends_from(self._now) for run in self._active()), default=math.inf)
        if end == math.inf and arrival == math.inf:
            return tick
        return min(tick, arrival, end) if self._active() else arrival

    def _advance(self, until: float) -> None:
        active = self._active()
        share = sum(self._hosts) / max(1, len(active))
        for run in active:
            run.advance(self._now, until, share)
            self._busy_s += sum(run.placed) * (until - self._now)
        self._now = until

    def _end_finished(self) -> None:
        for run in self._active():
            if run.placed and run.ends_from(self._now) <= self._now + WHOLE * max(1.0, self._now):
                self._report(run)
                run.result.completion_s = self._now - run.traced.arrives_s
                run.placed = ()
                self._feed(JobEnded(job=run.traced.name, exit_code=0))

    def _admit(self) -> None:
        while self._coming and self._coming[0].arrives_s <= self._now:
            traced = self._coming.pop(0)
            self._runs[traced.name] = SimulatedRun(traced, max(self._hosts), self._start_s)
            submitted = JobSubmitted(
                job=traced.name,
                name=traced.name,
                least=traced.least,
                most=traced.most,
                priority=traced.priority,
                after=traced.after,
            )
            self._feed(submitted)

    def _report_all(self) -> None:
        for run in self._active():
            self._report(run)

    def _report(self, run: SimulatedRun) -> None:
        if run.placed and self._now >= run.pause_until:
            progressed = JobProgressed(
                job=run.traced.name,
                workers=sum(run.placed),
                step=math.floor(run.done),
                total_steps=math.ceil(run.traced.steps),
                observed=run.take_observed(),
                start_s=self._start_s,
                rescale_s=self._rescale_s,
            )
            self._feed(progressed)

    def _feed(self, event: QueueEvent) -> None:
        self._events.append((self._now, event))
        self._state, actions = react(self._state, event, self._now)
        self._obey(actions)

    def _obey(self, actions: Iterable[QueueAction]) -> None:
        for action in actions:
            run = self._runs[action.job]
            match action:
                case StartJob():
                    run.placed, run.pause_until = action.placed, self._now + self._start_s
                    run.result.starts += 1
                    if run.result.waited_s is None:
                        run.result.waited_s = self._now - run.traced.arrives_s
                case ScaleJob():
                    self._report(run)
                    run.placed, run.pause_until = action.placed, max(run.pause_until, self._now + self._rescale_s)
                    run.result.rescales += 1
                    self._feed(JobProgressed(job=action.job, workers=sum(run.placed), step=math.floor(run.done)))
                case NotifyJob():
                    run.placed = ()
                    self._feed(JobEnded(job=action.job, exit_code=75))

    def _result(self) -> SimulatedCluster:
        jobs = [run.result for run in self._runs.values()]
        times = [one.completion_s for one in jobs if one.completion_s is not None]
        first = min((one.arrives_s for one in jobs), default=0.0)
        return SimulatedCluster(
            jobs=jobs,
            events=self._events,
            mean_completion_s=sum(times) / max(1, len(times)),
            largest_fair_ratio=max((one.fair_ratio for one in jobs), default=1.0),
            makespan_s=self._now - first,
            utilization=self._busy_s / max(WHOLE, (self._now - first) * sum(self._hosts)),
        )
