"""Slurm's commands: submits a plan, follows the job's output to its end, and lists, adds and drops helper jobs.

What they print is read by `slurm`, which is pure. Start reading at `submit` and `follow`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from manyhands.control.run_directory import read_run
from manyhands.errors import EnvironmentProblem, UsageError
from manyhands.launcher.placers.slurm import (
    HELPER,
    STOP,
    JobState,
    cannot_requeue,
    helpers,
    job_number,
    parse_state,
    refused,
)
from manyhands.launcher.placers.spec import LaunchPlan, PlacedRun
from manyhands.private_files import make_directory, write_private
from manyhands.spec.cluster_section import ClusterSection

__all__ = ["SlurmJob", "add_hosts", "cancel", "drop_host", "find_job", "follow", "helper_jobs", "submit"]

COMMAND_TIMEOUT_S = 60.0
LOOK_EVERY_S = 2.0
READ_EVERY_S = 0.2
CHUNK_BYTES = 1 << 16
CONTROLLER_GONE_S = 600.0
END_WITHIN_S = 15.0
"""Beside `grace_s`: how long a job that was asked to end may take before it is cancelled."""

Say = Callable[[str], None]


class SlurmJob(msgspec.Struct, frozen=True, kw_only=True):
    """A submitted job; kept in a private file beside its output, so that hosts can be added later."""

    number: str
    run: PlacedRun
    cluster: ClusterSection

    @property
    def output(self) -> Path:
        return Path(self.run.jobs_dir, f"slurm-{self.number}.out")


def submit(plan: LaunchPlan, cluster: ClusterSection, run: PlacedRun) -> SlurmJob:
    """The job and its helper jobs; if the helper jobs are refused, the job is cancelled again."""
    _check_config(cluster)
    make_directory(Path(run.jobs_dir))
    job = SlurmJob(number=_sbatch(plan.commands[0].argv, plan.commands[0].stdin, cluster), run=run, cluster=cluster)
    try:
        for command in plan.commands[1:]:
            _submit_helpers(job, command.argv, command.stdin)
        write_private(_record(job), msgspec.json.encode(job))
    except BaseException:
        _run(["scancel", job.number])
        raise
    return job


def _submit_helpers(job: SlurmJob, argv: Sequence[str], script: str) -> str:
    words = [word.replace("{job}", job.number) for word in argv]
    return _sbatch(words, script.replace("{job}", job.number), job.cluster)


def _sbatch(argv: Sequence[str], script: str, cluster: ClusterSection) -> str:
    done = _run(argv, script)
    number = job_number(done.stdout)
    if done.returncode or number is None:
        said = done.stderr.strip().removeprefix("sbatch: error: ") or f"sbatch ended with {done.returncode}"
        partitions = sorted(set(_run(["sinfo", "-h", "-o", "%R"]).stdout.split())) if "artition" in said else []
        raise UsageError(
            f"Slurm did not accept the job: {said}", where="--on slurm", fix=refused(said, cluster, partitions)
        )
    return number


def _check_config(cluster: ClusterSection) -> None:
    config = _run(["scontrol", "show", "config"]).stdout
    if cluster.requeue and cannot_requeue(config):
        raise UsageError(
            "This Slurm does not queue jobs again (JobRequeue=0): after a time limit the run would not resume.",
            where="--requeue",
            fix=["--no-requeue; the same command resumes the run"],
        )


def _run(argv: Sequence[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    if shutil.which(argv[0]) is None:
        raise EnvironmentProblem(
            f"{argv[0]} is not installed here: this host cannot submit to Slurm.",
            where="--on slurm",
            fix=[
                "the same on a login node of the cluster",
                "mh run --on slurm --print ..., which prints the job's script",
            ],
        )
    try:
        return subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        what = f"{argv[0]} has not answered for {COMMAND_TIMEOUT_S:g} s."
        raise EnvironmentProblem(what, where="--on slurm", fix=["scontrol ping"]) from error


def follow(job: SlurmJob, grace_s: float, say: Say) -> int:
    """Show the job's output until it ends; one Ctrl-C asks it to commit a checkpoint and end, a second one ends it."""
    watch = _Watch(job, say)
    while True:
        try:
            if (code := watch.look()) is not None:
                return code
            if watch.asked_at is not None and time.monotonic() - watch.asked_at > grace_s + END_WITHIN_S:
                cancel(job.number)
            time.sleep(READ_EVERY_S)
        except KeyboardInterrupt:
            if watch.asked_at is not None:
                cancel(job.number)
                say(f"slurm {job.number} is cancelled")
                return 130
            say(f"slurm {job.number}: asked to commit a checkpoint and end; Ctrl-C again cancels it at once")
            watch.asked_at = time.monotonic()
            give_notice(job)


class _Watch:
    """What is known of a job, and how far its output was shown."""

    def __init__(self, job: SlurmJob, say: Say) -> None:
        self._job, self._say = job, say
        self._tail = _Tail(job.output)
        self._state: JobState | None = None
        self._looked = self._known = time.monotonic() - LOOK_EVERY_S
        self._began = time.time()
        self.asked_at: float | None = None

    def look(self) -> int | None:
        """Show what is new; the exit code, once the job has ended."""
        self._tail.show()
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return None
        self._looked, found = now, look(self._job.number)
        if found is None:
            if now - self._known > CONTROLLER_GONE_S:
                what = f"Slurm has not known job {self._job.number} for {CONTROLLER_GONE_S:g} s."
                raise EnvironmentProblem(what, fix=["squeue", "scontrol ping"])
            return None
        self._known = now
        if self._state is None or found.text != self._state.text:
            self._say(f"slurm {self._job.number}: {found.text}")
        self._state = found
        if not found.has_ended:
            return None
        self._tail.show()
        return _exit_code(self._job, found, self._began)


def give_notice(job: SlurmJob) -> None:
    """SIGTERM to the tasks; the script stays, shows their last lines, and does not queue the job again."""
    state = look(job.number)
    if state is None or state.state != "RUNNING":
        cancel(job.number)
        return
    write_private(job.output.with_suffix(STOP), b"")
    _run(["scancel", "--signal=TERM", job.number])


def cancel(number: str) -> None:
    """SIGTERM to all of the job, and after KillWait its end. A cancelled job is not queued again."""
    _run(["scancel", "--quiet", number])
    _run(["scancel", "--quiet", f"--name={HELPER}-{number}"])


def look(number: str) -> JobState | None:
    return parse_state(_run(["scontrol", "--oneliner", "show", "job", number]).stdout)


def _exit_code(job: SlurmJob, state: JobState, began: float) -> int:
    """That of the run, if it has ended since `began`; else what Slurm knows of the script.

    After the death of a host srun does not end with 0, though the others have finished the run.
    """
    if state.state == "COMPLETED":
        return 0
    try:
        record, written = read_run(job.run.run_dir), os.path.getmtime(Path(job.run.run_dir, "run.json"))
    except (UsageError, OSError):
        return state.code or EnvironmentProblem.exit_code
    if record.status == "running" or record.exit_code is None or written < began:
        return state.code or EnvironmentProblem.exit_code
    return record.exit_code


class _Tail:
    """Copies what is appended to a file, which need not exist yet, to standard output."""

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, 0

    def show(self) -> None:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._position)
                while data := file.read(CHUNK_BYTES):
                    sys.stdout.buffer.write(data)
                    self._position += len(data)
        except FileNotFoundError:
            return
        sys.stdout.flush()


def _record(job: SlurmJob) -> Path:
    return Path(job.run.jobs_dir, f"slurm-{job.number}.json")


def find_job(run_dir: str, jobs_dir: str) -> SlurmJob:
    """The newest job of this user that was submitted for the run."""
    for path in sorted(Path(jobs_dir).glob("slurm-*.json"), key=os.path.getmtime, reverse=True):
        try:
            job = msgspec.json.decode(path.read_bytes(), type=SlurmJob)
        except (OSError, msgspec.MsgspecError):
            continue
        if os.path.realpath(job.run.run_dir) == os.path.realpath(run_dir):
            return job
    raise UsageError(
        f"{run_dir} was not submitted to Slurm by `mh run` from here.",
        where=jobs_dir,
        fix=["mh hosts RUN, which lists the hosts of any run", "mh agent --join FILE, on the host to add"],
    )


class HelperJob(msgspec.Struct, frozen=True):
    number: str
    """4712_3: the third of an array."""
    state: str
    host: str


def helper_jobs(number: str) -> list[HelperJob]:
    """Jobs that lend hosts to job `number`, or wait for one."""
    listed = _run(["squeue", "-h", "-r", f"--name={HELPER}-{number}", "-o", "%i|%T|%N"]).stdout.splitlines()
    rows = [line.split("|") for line in listed]
    return [HelperJob(*row) for row in rows if len(row) == 3]


def add_hosts(job: SlurmJob, number: int) -> str:
    """Submit helper jobs for so many more hosts; returns the number of their array."""
    state = look(job.number)
    if state is None or state.has_ended:
        raise UsageError(f"Job {job.number} has ended.", fix=["mh run ..., which resumes the run"])
    if job.cluster.count.most == job.cluster.count.least:
        raise UsageError(
            f"The run has a fixed number of hosts, {job.cluster.count.least}.",
            fix=[f"mh run --on slurm -N {job.cluster.count.least}:{job.cluster.count.least + number} ..."],
        )
    command = helpers(job.cluster, job.run, number)
    return _submit_helpers(job, command.argv, command.stdin)


def drop_host(job: SlurmJob, host: str) -> str:
    """Cancel the helper job on a host, which leaves with notice. Returns the helper job's number."""
    helping = helper_jobs(job.number)
    found = next((one for one in helping if host in (one.host, one.number)), None)
    if found is None:
        names = [one.host or one.number for one in helping]
        raise UsageError(
            f"No helper job of {job.number} is on {host}; the hosts of the job itself stay to its end.",
            fix=[f"mh hosts RUN drop {name}" for name in names] or [f"scancel {job.number}, which ends the run"],
        )
    _run(["scancel", "--quiet", found.number])
    return found.number
