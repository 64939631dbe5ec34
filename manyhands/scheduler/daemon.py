"""`mh cluster up`: one process that takes submissions, decides by `react`, and carries that out through `LocalRuns`.

It listens on nothing: requests are files in the queue's directory. Every event is on disk before anything is done about
it, so the daemon may be killed at any moment: the next one compares the log with the runs that are there, and repeats
what was not done. Runs outlive it. Start reading at `QueueDaemon.serve`.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

from manyhands.control.processes.stop_signals import StopSignals
from manyhands.errors import ManyhandsError
from manyhands.scheduler.local_runs import LocalRuns, RunRefused
from manyhands.scheduler.policy import Policy
from manyhands.scheduler.queue_folder import QueueFolder
from manyhands.scheduler.queue_log import QueueEntry
from manyhands.scheduler.queue_state import (
    DECIDE_EVERY_S,
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
    QueuedJob,
    QueueEvent,
    QueueState,
    ScaleJob,
    StartJob,
    react,
)

__all__ = ["QueueDaemon"]

POLL_S = 0.25
# Orders that a run has not followed are repeated after this long.
REPEAT_S = 3.0
# A report of progress is an event on disk: of a job that only trains, at most so often.
REPORT_EVERY_S = 2.0

Say = Callable[[QueuedJob, QueuedJob | None], None]


class QueueDaemon:
    """Serves one queue on this machine. `say` is called with a job that has changed, and what it was before."""

    def __init__(self, folder: QueueFolder, workers: int, threads: int, policy: Policy, say: Say) -> None:
        self._folder, self._say = folder, say
        self._runs = LocalRuns(folder, threads)
        self._opened = ClusterOpened(hosts=(workers,), policy=policy)
        self._state = QueueState()
        self._known: set[str] = set()
        self._decided_at = 0.0
        self._repeated_at: dict[str, float] = {}
        self._reported_at: dict[str, float] = {}

    def serve(self, *, until_empty: bool = False) -> list[QueuedJob]:
        """Until a signal to stop, or until all jobs have ended; returns the jobs whose runs continue without it."""
        self._folder.make()
        lock = self._folder.lock()
        signals = StopSignals()
        try:
            self._take_over()
            while not signals.take():
                self._look()
                if until_empty and not self._state.unfinished:
                    break
                select.select([signals.fd], [], [], POLL_S)
        finally:
            signals.close()
            os.close(lock)
        return [one for one in self._state.unfinished if one.phase != "waiting"]

    def _take_over(self) -> None:
        self._state = self._folder.log.load()
        self._folder.log.begin(self._state)
        self._known = set(self._state.jobs)
        for job in self._state.unfinished:
            if job.phase != "waiting" and not self._runs.is_alive(job.job):
                self._feed(self._end_of(job))
        self._feed(self._opened)

    # ---- looking ----

    def _look(self) -> None:
        self._take_requests()
        for job in self._state.unfinished:
            if job.phase != "waiting":
                self._look_at(job)
        if time.time() - self._decided_at >= DECIDE_EVERY_S and self._state.unfinished:
            self._feed(DecisionDue())

    def _take_requests(self) -> None:
        for job in self._folder.submitted():
            if job not in self._known:
                self._known.add(job)
                self._submit(job)
        for one in self._state.unfinished:
            if not one.cancelled and self._folder.is_cancelled(one.job):
                self._feed(JobCancelled(job=one.job))

    def _submit(self, job: str) -> None:
        try:
            found = self._folder.submission(job)
        except ManyhandsError as error:
            self._feed(JobSubmitted(job=job, name="?"))
            self._feed(JobEnded(job=job, exit_code=None, note=error.what))
            return
        submitted = JobSubmitted(
            job=job,
            name=os.path.basename(found.script),
            least=found.least,
            most=found.most,
            priority=found.priority,
            after=tuple(found.after),
            grace_s=found.grace_s,
        )
        self._feed(submitted)

    def _look_at(self, job: QueuedJob) -> None:
        if not self._runs.is_alive(job.job):
            self._feed_progress(job, at_once=True)
            self._feed(self._end_of(job))
            return
        self._feed_progress(job)
        job = self._state.jobs[job.job]
        if job.phase in ENDED or time.time() - self._repeated_at.get(job.job, 0.0) < REPEAT_S:
            return
        if job.phase == "stopping":
            self._obey(NotifyJob(job=job.job))
        elif job.phase == "running" and job.held != job.placed:
            self._obey(ScaleJob(job=job.job, placed=job.placed))

    def _end_of(self, job: QueuedJob) -> JobEnded:
        return JobEnded(job=job.job, exit_code=self._runs.exit_code(job.job))

    def _feed_progress(self, job: QueuedJob, *, at_once: bool = False) -> None:
        since = time.time() - self._reported_at.get(job.job, 0.0)
        if not at_once and job.phase == "running" and job.held == job.placed and since < REPORT_EVERY_S:
            return
        if (found := self._runs.progress(job.job)) is None:
            return
        self._reported_at[job.job] = time.time()
        self._feed(
            JobProgressed(
                job=job.job,
                workers=found.workers,
                step=found.step,
                total_steps=found.total_steps,
                observed=found.observed,
                start_s=found.start_s,
                rescale_s=found.rescale_s,
            )
        )

    # ---- deciding and doing ----

    def _feed(self, event: QueueEvent) -> None:
        now, before = time.time(), self._state
        self._state, actions = react(before, event, now)
        self._folder.log.append(QueueEntry(at=now, event=event, actions=actions), self._state)
        if not isinstance(event, JobProgressed):
            self._decided_at = now
        for job in self._state.jobs.values():
            if job is not before.jobs.get(job.job):
                self._say(job, before.jobs.get(job.job))
        for action in actions:
            self._obey(action)

    def _obey(self, action: QueueAction) -> None:
        self._repeated_at[action.job] = time.time()
        match action:
            case StartJob():
                self._start(action)
            case ScaleJob():
                self._runs.scale(action.job, action.placed)
            case NotifyJob():
                self._runs.notify(action.job)
            case KillJob():
                self._runs.kill(action.job)

    def _start(self, action: StartJob) -> None:
        try:
            self._runs.start(action.job, action.placed)
        except RunRefused as refused:
            self._feed(JobEnded(job=action.job, exit_code=None, note=refused.what))
        except (ManyhandsError, OSError) as error:
            self._feed(JobEnded(job=action.job, exit_code=None, note=f"cannot be started: {error}"))
