"""Slurm's scripts as text, what its commands print, and what is refused before a job waits in a queue. All pure."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import SpecError
from manyhands.launcher.placers.slurm import (
    cannot_requeue,
    in_allocation,
    in_step,
    job_number,
    parse_state,
    plan,
    plan_in_allocation,
    refused,
)
from manyhands.launcher.placers.spec import PlacedRun
from manyhands.spec.cluster_section import ClusterSection

RUN = PlacedRun(
    name="train",
    settings=("--insecure-data-plane", "--seed=3"),
    script=("train.py", "--lr", "0.1", "it's"),
    folder="/home/ada/my work",
    run_dir="/home/ada/my work/runs/a",
    jobs_dir="/home/ada/.manyhands/jobs",
    program=("mh",),
    environment={"MANYHANDS_RESUME": "mh run --on slurm train.py"},
)

FIXED = """\
#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --output=/home/ada/.manyhands/jobs/slurm-%j.out
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=4
#SBATCH --mem=64G
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --time=8:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --chdir="/home/ada/my work"
#SBATCH --constraint=a100
module load cuda/13
export MANYHANDS_RUN_DIR='/home/ada/my work/runs/a'
export MANYHANDS_RESUME='mh run --on slurm train.py'
jobs=/home/ada/.manyhands/jobs
srun --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" --kill-on-bad-exit=0 mh run --on=here \
--insecure-data-plane --seed=3 --workers=4 train.py --lr 0.1 'it'"'"'s'
code=$?
early="$jobs/slurm-$SLURM_JOB_ID.early"
if [ -e "$jobs/slurm-$SLURM_JOB_ID.stop" ]; then
    :
elif [ "$code" = 143 ] && [ "$(cat "$early" 2>/dev/null | wc -l)" -lt 5 ]; then
    echo early >> "$early"
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
elif [ "$code" = 75 ]; then
    rm -f "$early"
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit "$code"
"""


def script_of(number: int = 0, **settings: object) -> str:
    return plan(ClusterSection(on="slurm", **settings), RUN).commands[number].stdin


def test_the_script_of_a_job_is_what_a_user_would_write_by_hand():
    script = script_of(
        hosts=4, gpus=4, memory="64G", queue="gpu", account="lab", time="8:00:00", notice=120,
        setup=("module load cuda/13",), extra=("--constraint=a100",),
    )  # fmt: skip
    assert script == FIXED


def test_hosts_above_the_least_number_are_helper_jobs_that_begin_with_the_job():
    job, helpers = plan(ClusterSection(on="slurm", hosts=(2, 8), queue="gpu", more_queue="spare"), RUN).commands
    assert "--nodes=2\n" in job.stdin and "--no-kill\n" in job.stdin
    assert "--workers=1 --elastic=1:8 train.py" in job.stdin
    assert 'scancel --quiet --name="mh-more-$SLURM_JOB_ID"' in job.stdin
    assert helpers.argv == ("sbatch", "--parsable", "--dependency=after:{job}", "--array=1-6")
    assert "--partition=spare\n" in helpers.stdin and "--job-name=mh-more-{job}\n" in helpers.stdin
    assert "mh agent --workers=1 --ui=none" in helpers.stdin


def test_a_job_of_one_host_that_others_may_join_names_its_address_and_its_join_file():
    assert '--listen="$SLURMD_NODENAME" --join-file="$jobs/slurm-one-' in script_of(hosts=(1, 3))
    assert "--listen" not in script_of(hosts=(2, 3))
    assert "--listen" not in script_of(hosts=1)


def test_each_run_of_an_array_has_its_own_directory_and_is_queued_again_by_itself():
    script = script_of(array="0-3%2")
    assert 'export MANYHANDS_RUN_DIR="/home/ada/my work/runs/a-$SLURM_ARRAY_TASK_ID"' in script
    assert 'scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' in script
    assert "slurm-%A_%a.out" in script


def test_without_requeue_nothing_queues_the_job_again():
    script = script_of(requeue=False)
    assert "--no-requeue\n" in script and "scontrol" not in script


@pytest.mark.parametrize("hosts", [1, 2, (1, 3), (2, 8)])
def test_the_shell_accepts_every_script(hosts):
    for command in plan(ClusterSection(on="slurm", hosts=hosts, setup=("export A=1",)), RUN).commands:
        checked = subprocess.run(["bash", "-n"], input=command.stdin, text=True, capture_output=True, timeout=20)
        assert checked.returncode == 0, checked.stderr


def test_a_name_that_slurm_cannot_read_in_a_script_is_refused():
    with pytest.raises(SpecError, match="a quote, a backslash or a line break"):
        plan(ClusterSection(on="slurm", extra=('--comment=say "hi"',)), RUN)


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20))
def test_arguments_of_the_script_arrive_as_they_were_typed(word):
    run = PlacedRun(
        name="t", settings=(), script=("train.py", word), folder="/x", run_dir="/x/r", jobs_dir="/j", program=("mh",)
    )
    script = plan(ClusterSection(on="slurm"), run).commands[0].stdin
    import shlex

    step = script[script.index("mh run") : script.index("\ncode=$?")]
    assert shlex.split(step, comments=False)[-1] == word


def test_inside_an_allocation_one_step_covers_all_of_its_hosts():
    inside = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_CPUS_ON_NODE": "8"}
    assert in_allocation(inside) and not in_step(inside)
    assert in_step({**inside, "SLURM_STEP_ID": "0"}) and not in_allocation({**inside, "SLURM_STEP_ID": "0"})
    (command,) = plan_in_allocation(ClusterSection(on="slurm"), RUN, inside).commands
    assert command.argv[:5] == (
        *("srun", "--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=8", "--kill-on-bad-exit=0"),
    )


RUNNING = "JobId=12 JobName=t UserId=root(0) JobState=RUNNING Reason=None ExitCode=0:0 NodeList=n[1-2] BatchHost=n1\n"


@pytest.mark.parametrize(
    ("printed", "text", "ended", "code"),
    [
        (RUNNING, "RUNNING on n[1-2]", False, 0),
        (RUNNING.replace("RUNNING", "COMPLETED"), "COMPLETED", True, 0),
        (RUNNING.replace("RUNNING", "FAILED").replace("0:0", "75:0"), "FAILED", True, 75),
        (RUNNING.replace("RUNNING", "CANCELLED").replace("0:0", "0:15"), "CANCELLED", True, 143),
        (
            "JobId=1 JobState=PENDING Reason=PartitionNodeLimit ExitCode=0:0 NodeList=(null)",
            "PENDING (PartitionNodeLimit: more hosts than the partition allows; it would wait for ever)",
            False,
            0,
        ),
    ],
)
def test_what_slurm_says_of_a_job_is_read(printed, text, ended, code):
    state = parse_state(printed)
    assert state is not None
    assert (state.text, state.has_ended, state.code) == (text, ended, code)


def test_what_is_no_job_is_none():
    assert parse_state("slurm_load_jobs error: Invalid job id specified") is None
    assert parse_state("") is None
    assert job_number("") is None and job_number("sbatch: warning\n4711;scratch\n") == "4711"


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ("invalid partition specified: gpuu", "--queue gpu"),
        ("Batch job submission failed: Node count specification invalid", "fewer hosts than 4"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "a shorter --time"),
    ],
)
def test_what_sbatch_refuses_comes_with_what_to_type(said, fix):
    assert refused(said, ClusterSection(on="slurm", hosts=4), ["gpu"])[0] == fix


def test_the_configuration_says_whether_jobs_are_queued_again():
    assert cannot_requeue("JobCompLoc = x\nJobRequeue              = 0\n")
    assert not cannot_requeue("JobRequeue              = 1\n")
