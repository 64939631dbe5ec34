"""Slurm from outside: the batch script of a run, those of its helper jobs, and what Slurm's commands print.

A run of a fixed number of hosts is one job: `srun` starts `mh run` once per host, and the tasks find each other. Hosts
above the least number are helper jobs of one host each, which join the run and leave it again. A run that commits its
checkpoint in time for a limit or a preemption ends with 75; its script then queues it again. Pure. Start reading at
`plan`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import NamedTuple

from manyhands.errors import SpecError
from manyhands.launcher.placers.spec import LaunchPlan, PlacedRun, PlanCommand
from manyhands.spec.cluster_section import ClusterSection

__all__ = [
    "HELPER",
    "JobState",
    "helper_script",
    "in_allocation",
    "in_step",
    "job_script",
    "parse_state",
    "plan",
    "plan_in_allocation",
    "step_words",
]

HELPER = "mh-more"
"""Helper jobs of job 4711 are named mh-more-4711: that is how they are found, in the queue and by `scancel`."""
STOP = ".stop"
"""A file beside the job's output: the user asked for the end, so that a stopped run is not queued again."""
TASKS = "srun --ntasks-per-node=1"
# Slurm takes a job that was queued again away within seconds; until then it must not end, or it would count as failed.
TAKEN_AWAY_S = 60
EARLY_NOTICES = 5
LOOKS = 120
WAIT_S = 20
"""How long a helper job keeps its host while the job that it helps waits in the queue again."""


def plan(cluster: ClusterSection, run: PlacedRun) -> LaunchPlan:
    """The job, and for hosts above the least number an array of helper jobs that begin with it."""
    least, most = cluster.count
    commands = [PlanCommand(argv=("sbatch", "--parsable"), stdin=job_script(cluster, run), first=True)]
    if most > least:
        commands.append(helpers(cluster, run, most - least))
    return LaunchPlan(placer="slurm", commands=tuple(commands), notes=tuple(_notes(cluster)))


def helpers(cluster: ClusterSection, run: PlacedRun, number: int) -> PlanCommand:
    """Submits so many helper jobs of job "{job}". None starts before it."""
    argv = ("sbatch", "--parsable", "--dependency=after:{job}", f"--array=1-{number}")
    return PlanCommand(argv=argv, stdin=helper_script(cluster, run))


def _notes(cluster: ClusterSection) -> list[str]:
    useless = {"image": None, "namespace": None, "manifest": "jobset"}
    return [
        f"{name} has no meaning for Slurm." for name, default in useless.items() if getattr(cluster, name) != default
    ]


def job_script(cluster: ClusterSection, run: PlacedRun) -> str:
    least, most = cluster.count
    elastic = most > least
    task = "%A_%a" if cluster.array else "%j"
    options = [
        f"--job-name={run.name}",
        f"--nodes={least}",
        f"--output={run.jobs_dir}/slurm-{task}.out",
        *_resources(cluster),
        *([f"--partition={cluster.queue}"] if cluster.queue else []),
        *([f"--array={cluster.array}"] if cluster.array else []),
        # A host that is lost must not take the others with it: they continue without it.
        *(["--no-kill"] if elastic else []),
        *_common(cluster, run),
    ]
    run_dir = f"{run.run_dir}-$SLURM_ARRAY_TASK_ID" if cluster.array else run.run_dir
    lines = [
        *_head(options, cluster),
        f"export MANYHANDS_RUN_DIR={_quoted(run_dir)}",
        *(f"export {name}={shlex.quote(text)}" for name, text in run.environment.items()),
        f"jobs={shlex.quote(run.jobs_dir)}",
        _step(cluster, [*run.program, "run"], step_words(cluster, run), elastic, alone=elastic and least == 1),
        "code=$?",
        *(_again(cluster) if cluster.requeue else []),
        *([f'scancel --quiet --name="{HELPER}-$SLURM_JOB_ID"'] if elastic else []),
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def step_words(cluster: ClusterSection, run: PlacedRun) -> list[str]:
    """The arguments of `mh run` in each task."""
    least, most = cluster.count
    workers = run.workers or cluster.gpus
    words = ["--on=here", *run.settings]
    if workers is not None or most > least:
        words.append(f"--workers={workers or 1}")
    if most > least:
        # Hosts of the job itself are not replaced: a higher bound would make the others wait for ever.
        words.append(f"--elastic={workers or 1}:{most * (workers or 1)}")
    return [*words, *run.script]


def helper_script(cluster: ClusterSection, run: PlacedRun) -> str:
    """One more host: joins the run, and is queued again for as long as the run is, if it had to leave."""
    options = [
        f"--job-name={HELPER}-{{job}}",
        "--nodes=1",
        f"--output={run.jobs_dir}/slurm-%A_%a.out",
        *_resources(cluster),
        *([f"--partition={name}"] if (name := cluster.more_queue or cluster.queue) else []),
        *_common(cluster, run),
    ]
    workers = run.workers or cluster.gpus or 1
    agent = [*run.program, "agent", f"--workers={workers}", "--ui=none"]
    lines = [
        *_head(options, cluster),
        f"jobs={shlex.quote(run.jobs_dir)}",
        "ticket=",
        f"for look in $(seq {LOOKS}); do",
        f"    {_job_is('RUNNING')} || break",
        '    ticket=$(ls -t "$jobs"/slurm-*-{job}.0-start*.join 2>/dev/null | head -1)',
        '    [ -n "$ticket" ] && break',
        "    sleep 1",
        "done",
        'if [ -n "$ticket" ]; then',
        f"    {_step(cluster, agent, [], elastic=False, joins=True)}",
        "    code=$?",
        "    sleep 5",  # by then the queue shows the job's own end, if it was that which ended the agent
        "else",
        "    code=0",
        f"    sleep {WAIT_S}",
        "fi",
        # It left on a notice. One that failed would fail again.
        'if [ "$code" != 0 ] && [ "$code" != 75 ]; then exit "$code"; fi',
        f"if {_job_is('RUNNING,PENDING')}; then",
        f"    {_requeue(in_array=True)} && sleep {TAKEN_AWAY_S}",
        "fi",
    ]
    return "\n".join(lines) + "\n"


def _job_is(states: str) -> str:
    return f'[ -n "$(squeue -h -j {{job}} -t {states} 2>/dev/null)" ]'


def _head(options: list[str], cluster: ClusterSection) -> list[str]:
    return ["#!/bin/bash", *(f"#SBATCH {_directive(one)}" for one in options), *cluster.setup]


def _directive(option: str) -> str:
    """An option as a line of the script, which is no line of the shell: there are quotes, and nothing else."""
    if not re.search(r"[\s'\"\\#]", option):
        return option
    name, _, value = option.partition("=")
    if re.search(r"[\"\\\n]", value):
        raise SpecError(f"Slurm cannot read {value!r} in a job's script: it has a quote, a backslash or a line break.")
    return f'{name}="{value}"'


def _resources(cluster: ClusterSection) -> list[str]:
    return [
        "--ntasks-per-node=1",
        f"--cpus-per-task={cluster.cpus}" if cluster.cpus else "--exclusive",
        *([f"--gpus-per-node={cluster.gpus}"] if cluster.gpus else []),
        *([f"--mem={cluster.memory}"] if cluster.memory else []),
    ]


def _common(cluster: ClusterSection, run: PlacedRun) -> list[str]:
    return [
        *([f"--account={cluster.account}"] if cluster.account else []),
        *([f"--time={cluster.time}"] if cluster.time else []),
        # To the tasks, not to the script, which stays to queue the job again.
        f"--signal=USR1@{cluster.notice}",
        "--requeue" if cluster.requeue else "--no-requeue",
        "--open-mode=append",
        f"--chdir={run.folder}",
        *cluster.extra,
    ]


def _step(
    cluster: ClusterSection,
    program: list[str],
    words: list[str],
    elastic: bool,
    *,
    alone: bool = False,
    joins: bool = False,
) -> str:
    """`alone`: it has no other task to write a ticket for, but helper jobs. `joins`: it is one of those."""
    # Without a number of cores a task may get a single one, in a job that has whole hosts.
    cores = str(cluster.cpus) if cluster.cpus else '"${SLURM_CPUS_ON_NODE:-1}"'
    lost = " --no-kill" if elastic else ""
    start = f"{TASKS} --cpus-per-task={cores}{lost} --kill-on-bad-exit=0 {shlex.join(program)}"
    if alone:
        start += (
            ' --listen="$SLURMD_NODENAME" --join-file="$jobs/slurm-one-$SLURM_JOB_ID.0-start$SLURM_RESTART_COUNT.join"'
        )
    return " ".join([start, *(['--join="$ticket"'] if joins else []), *([shlex.join(words)] if words else [])])


def _again(cluster: ClusterSection) -> list[str]:
    again = f"{_requeue(bool(cluster.array))} && sleep {TAKEN_AWAY_S}"
    return [
        'early="$jobs/slurm-$SLURM_JOB_ID.early"',
        f'if [ -e "$jobs/slurm-$SLURM_JOB_ID{STOP}" ]; then',
        "    :",
        # 143: the notice was there before the first checkpoint. A few times in a row, as the limit may be too short.
        f'elif [ "$code" = 143 ] && [ "$(cat "$early" 2>/dev/null | wc -l)" -lt {EARLY_NOTICES} ]; then',
        '    echo early >> "$early"',
        f"    {again}",
        'elif [ "$code" = 75 ]; then',
        '    rm -f "$early"',
        f"    {again}",
        "fi",
    ]


def _requeue(in_array: bool) -> str:
    job = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' if in_array else '"$SLURM_JOB_ID"'
    return f"scontrol requeue {job}"


def _quoted(text: str) -> str:
    """For the shell, with the task's number of an array filled in by it."""
    return '"' + re.sub(r'(["\\`])', r"\\\1", text) + '"' if "$SLURM_ARRAY_TASK_ID" in text else shlex.quote(text)


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Whether this process is in a job, but in none of its steps: a batch script, or a shell of `salloc`."""
    return "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ


def in_step(environ: Mapping[str, str]) -> bool:
    return "SLURM_STEP_ID" in environ


def plan_in_allocation(cluster: ClusterSection, run: PlacedRun, environ: Mapping[str, str]) -> LaunchPlan:
    """One step on all hosts of the job that this process is in."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", "1")
    cores = cluster.cpus or environ.get("SLURM_CPUS_ON_NODE", "1")
    words = ["--on=here", *run.settings]
    words += [f"--workers={run.workers or cluster.gpus}"] if run.workers or cluster.gpus else []
    argv = ("srun", f"--nodes={nodes}", "--ntasks-per-node=1", f"--cpus-per-task={cores}", "--kill-on-bad-exit=0")
    command = PlanCommand(argv=(*argv, *run.program, "run", *words, *run.script), first=True)
    return LaunchPlan(placer="slurm", commands=(command,), notes=tuple(_notes(cluster)))


class JobState(NamedTuple):
    state: str
    """PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, NODE_FAIL, TIMEOUT, ..."""
    code: int
    """The exit code; 128 and the signal, if a signal ended the script."""
    reason: str
    hosts: str

    @property
    def has_ended(self) -> bool:
        return self.state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "STOPPED")

    @property
    def text(self) -> str:
        """ "PENDING (Resources)", "RUNNING on n[1-2]"."""
        if self.state == "PENDING" and self.reason not in ("", "None"):
            why = REASONS.get(self.reason)
            return f"PENDING ({self.reason}{': ' + why if why else ''})"
        return f"{self.state} on {self.hosts}" if self.hosts and self.state == "RUNNING" else self.state


REASONS = {
    "PartitionNodeLimit": "more hosts than the partition allows; it would wait for ever",
    "Resources": "it waits for hosts",
    "Priority": "other jobs are before it",
    "BeginTime": "Slurm waits before it starts a job again",
    "ReqNodeNotAvail": "hosts that it needs are down or reserved",
    "QOSMaxJobsPerUserLimit": "you have as many jobs as you may",
}


def parse_state(text: str) -> JobState | None:
    """The line of `scontrol --oneliner show job`; None if it describes no job."""
    found = dict(re.findall(r"(?:^|\s)(JobState|ExitCode|Reason|NodeList)=(\S*)", text.splitlines()[0] if text else ""))
    if "JobState" not in found:
        return None
    code, _, signal = found.get("ExitCode", "0:0").partition(":")
    number = int(code or 0) or (128 + int(signal) if signal.isdigit() and int(signal) else 0)
    hosts = found.get("NodeList", "")
    return JobState(found["JobState"], number, found.get("Reason", ""), "" if hosts == "(null)" else hosts)


def job_number(printed: str) -> str | None:
    """The job's number in what `sbatch --parsable` printed: "4711" or "4711;cluster"."""
    words = printed.split()
    found = re.fullmatch(r"(\d{1,10})(?:;.*)?", words[-1]) if words else None
    return found[1] if found else None


def refused(printed: str, cluster: ClusterSection, partitions: list[str]) -> list[str]:
    """What to type instead, after an error of sbatch."""
    if "artition" in printed and "invalid" in printed:
        return [f"--queue {name}" for name in partitions] or ["sinfo, for the partitions"]
    if "ode count" in printed or "More processors" in printed:
        return [f"fewer hosts than {cluster.count.least}", "sinfo, for how many each partition has"]
    if "ime limit" in printed:
        return ["a shorter --time", "sinfo, for the limit of each partition"]
    if "ccount" in printed:
        return ["--account NAME"]
    return ["mh run --on slurm --print ..., and sbatch with the script that it prints"]


def cannot_requeue(config: str) -> bool:
    """Whether `scontrol show config` forbids jobs to be queued again."""
    return re.search(r"^JobRequeue\s*=\s*0\b", config, re.MULTILINE) is not None
