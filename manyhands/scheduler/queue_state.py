"""The queue's state, and how it changes: `react` takes an event and returns the new state and what is to be done. Pure.

The daemon and the simulation call the same `react`; the log on disk is the sequence of its events. What is to be done
is carried out in any order and may be lost with the daemon: the daemon compares what is with this state and repeats it.

    waiting -> starting -> running -> done | failed
                  stopping (noticed) -> waiting again: it resumes later; or cancelled

Start reading at `react`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from manyhands.planner.step_time import ObservedSteps, StepTime, fit_step_time
from manyhands.scheduler import reasons
from manyhands.scheduler.packing import pack
from manyhands.scheduler.policy import Allocation, JobView, Policy, allocate

__all__ = [
    "ENDED",
    "ClusterOpened",
    "DecisionDue",
    "JobCancelled",
    "JobEnded",
    "JobProgressed",
    "JobSubmitted",
    "KillJob",
    "NotifyJob",
    "QueueAction",
    "QueueEvent",
    "QueueState",
    "QueuedJob",
    "ScaleJob",
    "StartJob",
    "react",
]

DECIDE_EVERY_S = 15.0
# A job's size changes at most once in this time.
KEEP_SIZE_S = 60.0
# Workers that leave are counted as there until the job reports that they are gone, for at most this long.
LEAVING_S = 60.0
# A run ends its own workers after the grace; a job that is there this long after it is killed.
KILL_AFTER_S = 10.0
# Steps from which a size counts as measured; large steps count sooner.
ENOUGH_STEPS, ENOUGH_S = 20, 5.0
# Older steps count less and less: conditions change.
FULL_STEPS = 1000.0
# How often in a row a job may end without an exit code and without a step before it counts as failed.
MAX_CRASHES = 3
RESUMES = 75
SIGNALLED = (130, 137, 143)

Phase = Literal["waiting", "starting", "running", "stopping", "done", "failed", "cancelled"]
ENDED = ("done", "failed", "cancelled")


class QueuedJob(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    order: int
    name: str
    least: int
    most: int
    priority: float = 1.0
    after: tuple[str, ...] = ()
    grace_s: float = 30.0
    phase: Phase = "waiting"
    submitted_s: float
    started_s: float | None = None
    ended_s: float | None = None
    share_at: float = 0.0
    """`QueueState.share_s` when it was submitted."""
    wanted: tuple[int, ...] = ()
    """Workers per host that it is to have as soon as they are free."""
    placed: tuple[int, ...] = ()
    """Workers per host that it was last ordered to have; empty: none."""
    held: tuple[int, ...] = ()
    """Workers per host that are not free because of it: until it has reported a smaller size, the larger one."""
    changed_s: float | None = None
    """When its size was last changed; a start does not count."""
    starts: int = 0
    crashes: int = 0
    cancelled: bool = False
    notice_s: float | None = None
    killed: bool = False
    observed: tuple[ObservedSteps, ...] = ()
    step: int = 0
    total_steps: int | None = None
    start_s: float = 30.0
    rescale_s: float = 2.0
    exit_code: int | None = None
    why: str = ""
    """The last decision about it, in one line."""

    @property
    def workers(self) -> int:
        return sum(self.placed)


class QueueState(msgspec.Struct, frozen=True, kw_only=True):
    hosts: tuple[int, ...] = ()
    """Workers that each host can have."""
    policy: Policy = "jct"
    jobs: dict[str, QueuedJob] = {}
    at: float = 0.0
    share_s: float = 0.0
    """Integral over time of the workers that each unfinished job would have in equal parts."""

    @property
    def unfinished(self) -> list[QueuedJob]:
        return [one for one in self.jobs.values() if one.phase not in ENDED]


# ---- events and actions ----------------------------------------------------------------------------------------


class _QueueEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=True, forbid_unknown_fields=True):
    pass


class ClusterOpened(_QueueEvent, frozen=True, kw_only=True):
    """A daemon took over the queue."""

    hosts: tuple[int, ...]
    policy: Policy


class JobSubmitted(_QueueEvent, frozen=True, kw_only=True):
    job: str
    name: str
    least: int = 1
    most: int = 1
    priority: float = 1.0
    after: tuple[str, ...] = ()
    grace_s: float = 30.0


class JobProgressed(_QueueEvent, frozen=True, kw_only=True):
    """What a run reported since the last time."""

    job: str
    workers: int
    step: int
    total_steps: int | None = None
    observed: tuple[ObservedSteps, ...] = ()
    start_s: float | None = None
    rescale_s: float | None = None
    """Measured pauses of training, if there was a start or a change of size."""


class JobEnded(_QueueEvent, frozen=True, kw_only=True):
    job: str
    exit_code: int | None
    """None: its process is gone, and left no record of its end."""
    note: str = ""
    """Why it could not be started, if so."""


class JobCancelled(_QueueEvent, frozen=True, kw_only=True):
    job: str


class DecisionDue(_QueueEvent, frozen=True, kw_only=True):
    pass


QueueEvent = ClusterOpened | JobSubmitted | JobProgressed | JobEnded | JobCancelled | DecisionDue


class _QueueAction(msgspec.Struct, frozen=True, kw_only=True, tag_field="action", tag=True):
    job: str


class StartJob(_QueueAction, frozen=True, kw_only=True):
    placed: tuple[int, ...]
    number: int
    """Which start of this job it is, from 1."""


class ScaleJob(_QueueAction, frozen=True, kw_only=True):
    placed: tuple[int, ...]


class NotifyJob(_QueueAction, frozen=True, kw_only=True):
    """Ask it to commit a checkpoint and end."""


class KillJob(_QueueAction, frozen=True, kw_only=True):
    """It did not end within its grace."""


QueueAction = StartJob | ScaleJob | NotifyJob | KillJob


# ---- reacting --------------------------------------------------------------------------------------------------


def react(state: QueueState, event: QueueEvent, now: float) -> tuple[QueueState, list[QueueAction]]:
    now = max(now, state.at)  # a clock that was set back
    state, decide = _take(_pass_time(state, now), event, now)
    actions: list[QueueAction] = []
    if decide:
        state = _end_unreachable(state, now)
        state = _decide(state, now, actions)
    return _carry_out(state, now, actions), actions


def _pass_time(state: QueueState, now: float) -> QueueState:
    share = sum(state.hosts) / max(1, len(state.unfinished))
    return replace(state, at=now, share_s=state.share_s + share * (now - state.at if state.at else 0.0))


def _take(state: QueueState, event: QueueEvent, now: float) -> tuple[QueueState, bool]:
    """The state after the event, and whether it calls for a decision. Events of unknown or ended jobs are ignored."""
    match event:
        case ClusterOpened():
            return _open(state, event), True
        case JobSubmitted():
            return (_with(state, _new_job(state, event, now)), True) if event.job not in state.jobs else (state, False)
        case DecisionDue():
            return state, True
    job = state.jobs.get(event.job)
    if job is None or job.phase in ENDED:
        return state, False
    match event:
        case JobProgressed():
            after = _progressed(job, event)
            return _with(state, after), len(_measured(after)) > len(_measured(job))
        case JobEnded():
            return _with(state, _ended(job, event, now)), True
        case JobCancelled():
            return _with(state, _cancelled(job, now)), True


def _with(state: QueueState, job: QueuedJob) -> QueueState:
    return replace(state, jobs={**state.jobs, job.job: job})


def _open(state: QueueState, event: ClusterOpened) -> QueueState:
    """Jobs that still run on a host that is no longer there keep what they hold; new decisions are for these hosts."""
    return replace(state, hosts=event.hosts, policy=event.policy)


def _new_job(state: QueueState, event: JobSubmitted, now: float) -> QueuedJob:
    fields: dict[str, Any] = {name: getattr(event, name) for name in event.__struct_fields__}
    return QueuedJob(**fields, order=len(state.jobs), submitted_s=now, share_at=state.share_s)


def _progressed(job: QueuedJob, event: JobProgressed) -> QueuedJob:
    settled = event.workers == job.workers
    return replace(
        job,
        phase="running" if job.phase == "starting" else job.phase,
        held=job.placed if settled else job.held,
        step=event.step,
        crashes=0 if event.step > job.step else job.crashes,
        total_steps=event.total_steps if event.total_steps is not None else job.total_steps,
        observed=_merge([*job.observed, *event.observed]),
        start_s=event.start_s if event.start_s is not None else job.start_s,
        rescale_s=event.rescale_s if event.rescale_s is not None else job.rescale_s,
    )


def _merge(points: Iterable[ObservedSteps]) -> tuple[ObservedSteps, ...]:
    sums: dict[tuple[int, int], tuple[float, float]] = {}
    for one in points:
        steps, seconds = sums.get((one.hosts, one.workers), (0.0, 0.0))
        steps, seconds = steps + one.steps, seconds + one.seconds
        kept = min(1.0, FULL_STEPS / steps) if steps > 0 else 1.0
        sums[one.hosts, one.workers] = steps * kept, seconds * kept
    return tuple(ObservedSteps(*size, *sums[size]) for size in sorted(sums))


def _ended(job: QueuedJob, event: JobEnded, now: float) -> QueuedJob:
    noticed, code = job.phase == "stopping", event.exit_code
    freed = replace(job, placed=(), held=(), wanted=(), notice_s=None, killed=False, exit_code=code)
    crashes = job.crashes + (code is None or code in SIGNALLED)
    if code == 0:
        return _over(freed, "done", now, "finished")
    if job.cancelled:
        return _over(freed, "cancelled", now, "cancelled")
    if code == RESUMES or (noticed and (code is None or code in SIGNALLED)):
        how = "stopped with a checkpoint" if code == RESUMES else "was killed; resumes from its last checkpoint"
        return replace(freed, phase="waiting", why=f"{job.why}; {how}" if noticed and job.why else how)
    if (code is None or code in SIGNALLED) and crashes < MAX_CRASHES and not event.note:
        return replace(
            freed, phase="waiting", crashes=crashes, why=f"its processes were killed; start {job.starts + 1}"
        )
    return _over(replace(freed, crashes=crashes), "failed", now, event.note or reasons.failed(code, crashes))


def _over(job: QueuedJob, phase: Phase, now: float, why: str) -> QueuedJob:
    return replace(job, phase=phase, ended_s=now, why=why)


def _cancelled(job: QueuedJob, now: float) -> QueuedJob:
    if job.phase == "waiting":
        return _over(job, "cancelled", now, "cancelled")
    return replace(job, cancelled=True)


def _end_unreachable(state: QueueState, now: float) -> QueueState:
    """Jobs after one that failed, was cancelled, or was not submitted before them, never start."""
    for job in state.jobs.values():
        if job.phase != "waiting":
            continue
        for name in job.after:
            before = state.jobs.get(name)
            if before is None or before.order >= job.order:
                state = _with(
                    state, _over(job, "failed", now, f"is to run after {name}, which was not submitted before it")
                )
            elif before.phase in ("failed", "cancelled"):
                how = "failed" if before.phase == "failed" else "was cancelled"
                state = _with(state, _over(job, "cancelled", now, f"was to run after {name}, which {how}"))
    return state


# ---- deciding --------------------------------------------------------------------------------------------------


def _decide(state: QueueState, now: float, actions: list[QueueAction]) -> QueueState:
    ready = [one for one in state.unfinished if not one.cancelled and _is_ready(state, one)]
    width, total = max(state.hosts, default=0), sum(state.hosts)
    views = {one.job: _view(state, one, now) for one in ready if one.least <= total}
    decided = allocate(list(views.values()), state.hosts, state.policy)
    runs = [state.jobs[job] for job in views if state.jobs[job].phase in ("starting", "running")]
    placed = {one.job: one.placed for one in runs}
    scattered = [
        one.job
        for one in runs
        if not (views[one.job].pinned or views[one.job].recent) and _is_scattered(one, views[one.job], width)
    ]
    numbers = {job: number for job, number in decided.workers.items() if number}
    wanted = pack(numbers, placed, state.hosts, scattered)
    jobs = dict(state.jobs)
    for one in state.unfinished:
        why = _reason(state, one, views, decided, width)
        jobs[one.job] = _ordered(one, wanted.get(one.job, ()), why, now, actions)
    return replace(state, jobs=jobs)


def _is_scattered(job: QueuedJob, view: JobView, width: int) -> bool:
    """Whether fewer hosts would regain the pause of a move, or were never tried with as many workers."""
    hosts, needed = sum(number > 0 for number in job.placed), -(-job.workers // width)
    if hosts == needed or view.step_time is None:
        return False
    if all((one.hosts, one.workers) != (needed, job.workers) for one in _measured(job)):
        return True
    faster = view.step_time.at(hosts, job.workers) / view.step_time.at(needed, job.workers) - 1.0
    return faster * KEEP_SIZE_S > job.rescale_s


def _is_ready(state: QueueState, job: QueuedJob) -> bool:
    return all(state.jobs[name].phase == "done" for name in job.after)


def _ordered(job: QueuedJob, wanted: tuple[int, ...], why: str, now: float, actions: list[QueueAction]) -> QueuedJob:
    """Note what the job is to have; one that is to have nothing gets its notice, one that ignores that is killed."""
    job = replace(job, wanted=() if job.cancelled else wanted, why=why or job.why)
    if job.phase in ("starting", "running") and not job.wanted:
        actions.append(NotifyJob(job=job.job))
        return replace(job, phase="stopping", notice_s=now)
    if job.notice_s is not None and not job.killed and now - job.notice_s > job.grace_s + KILL_AFTER_S:
        actions.append(KillJob(job=job.job))
        return replace(job, killed=True)
    return job


def _view(state: QueueState, job: QueuedJob, now: float) -> JobView:
    age_s, measured = now - job.submitted_s, _measured(job)
    runs = job.phase in ("starting", "running")
    return JobView(
        job=job.job,
        order=job.order,
        least=job.least,
        most=min(job.most, sum(state.hosts)),
        workers=job.workers if runs else 0,
        pinned=runs and (job.phase == "starting" or job.wanted != job.placed),
        recent=runs and job.changed_s is not None and now - job.changed_s < KEEP_SIZE_S,
        step_time=_model(measured),
        tried=tuple(one.workers for one in measured),
        steps=job.total_steps,
        steps_left=None if job.total_steps is None else max(0, job.total_steps - job.step),
        age_s=age_s,
        mean_share=(state.share_s - job.share_at) / age_s if age_s > 0 else sum(state.hosts),
        start_s=job.start_s,
        rescale_s=job.rescale_s,
        priority=job.priority,
    )


def _measured(job: QueuedJob) -> list[ObservedSteps]:
    return [one for one in job.observed if one.steps >= ENOUGH_STEPS or (one.steps >= 2 and one.seconds >= ENOUGH_S)]


def _model(measured: list[ObservedSteps]) -> StepTime | None:
    # Rounded, so that predictions are made again only if steps change by a part in a thousand.
    return _fit(tuple(ObservedSteps(one.hosts, one.workers, 1.0, float(f"{one.step_s:.3g}")) for one in measured))


_fit = functools.lru_cache(10_000)(fit_step_time)


def _reason(state: QueueState, job: QueuedJob, views: dict[str, JobView], decided: Allocation, width: int) -> str:
    if job.cancelled:
        return "cancelled"
    view = views.get(job.job)
    if view is None:
        return reasons.not_ready(
            job.least, sum(state.hosts), [one for one in job.after if state.jobs[one].phase != "done"]
        )
    if job.phase == "stopping":
        return ""
    return reasons.explain(view, decided, width, sum(state.hosts), resumes=job.starts > 0)


# ---- carrying out ----------------------------------------------------------------------------------------------


def _carry_out(state: QueueState, now: float, actions: list[QueueAction]) -> QueueState:
    """Give each job what it is to have, as far as its hosts have room. Workers that leave hold their place."""
    for fits in (_is_smaller, _is_other):
        for job in state.unfinished:
            if (
                job.wanted
                and job.wanted != job.placed
                and fits(job)
                and (_is_smaller(job) or _has_room(state, job, now))
            ):
                state = _with(state, _give(job, now, actions))
    return state


def _is_smaller(job: QueuedJob) -> bool:
    return job.phase == "running" and _covers(job.placed, job.wanted)


def _is_other(job: QueuedJob) -> bool:
    return job.phase in ("waiting", "running") and not _is_smaller(job)


def _covers(larger: tuple[int, ...], smaller: tuple[int, ...]) -> bool:
    return len(larger) == len(smaller) and all(one >= other for one, other in zip(larger, smaller, strict=True))


def _has_room(state: QueueState, job: QueuedJob, now: float) -> bool:
    if len(job.wanted) != len(state.hosts):
        return False
    others = [_holds(one, now) for one in state.unfinished if one.job != job.job]
    return all(
        number + sum(held[host] for held in others if host < len(held)) <= state.hosts[host]
        for host, number in enumerate(job.wanted)
        if number
    )


def _holds(job: QueuedJob, now: float) -> tuple[int, ...]:
    if job.phase == "running" and job.changed_s is not None and now - job.changed_s > LEAVING_S:
        return job.placed
    return job.held


def _give(job: QueuedJob, now: float, actions: list[QueueAction]) -> QueuedJob:
    if job.phase == "waiting":
        actions.append(StartJob(job=job.job, placed=job.wanted, number=job.starts + 1))
        started_s = job.started_s if job.started_s is not None else now
        return replace(
            job, phase="starting", placed=job.wanted, held=job.wanted, starts=job.starts + 1, started_s=started_s
        )
    actions.append(ScaleJob(job=job.job, placed=job.wanted))
    larger: Callable[[int, int], int] = max
    held = tuple(map(larger, _holds(job, now) or job.wanted, job.wanted))
    return replace(job, placed=job.wanted, held=held, changed_s=now)
