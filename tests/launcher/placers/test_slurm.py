"""`mh run` inside steps of a real Slurm: three nodes, each a namespace of this machine."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands.events import StepDone
from manyhands.launcher.placers.node_list import expand_names
from manyhands.observe.recorder import read_events
from tests.launcher.placers.hosts import finish
from tests.launcher.placers.real_slurm import CGROUPS, CORES, SlurmCluster, slurm_cluster, why_not

REASON = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

MH = str(Path(sys.executable).with_name("mh"))
SCRIPT = str(Path(__file__).parents[2] / "end_to_end" / "small_training.py")
ONE_EACH = ("srun", "-N2", "--ntasks-per-node=1", "--exclusive")


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    with slurm_cluster() as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _idle(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "slurm" in request.fixturenames:
        request.getfixturevalue("slurm").make_idle()


def mh_run(run_dir: str, *words: str, steps: int = 12, pause: float = 0.0) -> tuple[str, ...]:
    script = (SCRIPT, "--strategy", "", "--steps", str(steps), "--pause", str(pause))
    return (MH, "run", "--ui", "plain", "--run-dir", run_dir, *words, *script)


def until(condition: Callable[[], Any], what: str | Callable[[], str], timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, what if isinstance(what, str) else what()
        time.sleep(0.05)
    return found


def all_steps(run_dir: Path) -> list[StepDone]:
    files = (run_dir / "events").glob("*.jsonl")
    return [event for file in files for event in read_events(file) if isinstance(event, StepDone)]


def steps_of(run_dir: Path) -> list[int]:
    return [event.step for event in all_steps(run_dir)]


def digest(output: str) -> str:
    return re.findall(r"weights ([0-9a-f]{64})", output)[-1]


def test_srun_on_two_nodes_is_one_training_that_a_notice_to_every_process_ends_with_75(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Under proctrack/linuxproc Slurm signals workers, too. The run's key is in no argument and no environment."""
    late = 'test $SLURM_NODEID = 0 || while ! test -e go; do sleep 0.05; done; exec "$@"'
    words = ("sh", "-c", late, "sh", *mh_run("r", steps=5000, pause=0.02))
    step = slurm.start(*ONE_EACH, "--time=30", *words, cwd=tmp_path)
    (ticket,) = until(lambda: list((slurm.home / ".manyhands/jobs").glob("*.join")), "a join file")
    assert (oct(ticket.stat().st_mode)[-3:], oct(ticket.parent.stat().st_mode)[-3:]) == ("600", "700")
    key = re.search(rb'"key":"([0-9a-f]{64})"', ticket.read_bytes())
    assert key is not None
    (tmp_path / "go").touch()
    until(lambda: len(steps_of(tmp_path / "r")) > 5, "steps")
    assert not list(ticket.parent.iterdir())
    pids = {name: slurm.hosts.processes(name) for name in ("login", "n1", "n2")}
    for pid in itertools.chain(*pids.values()):
        for file in ("cmdline", "environ"):
            assert key[1] not in shown(pid, file)
    status = subprocess.run([MH, "status", str(tmp_path / "r")], capture_output=True, text=True, check=True).stdout
    left = r"\(slurm \d+, (29m|30m) left\), 1 worker\n"
    assert re.search(rf"host +n1 {left}.*host +n2 {left}", status), status
    slurm.says("scancel", "-s", "TERM", "--user=root")
    code, output = finish(step)
    assert code == 75, output
    assert "2 workers train together (mirrored), 5000 steps" in output
    assert re.search(r"slurm \d+ kills 10 s after its notice: workers get 5 s to commit a checkpoint", output)
    assert_all_saved(tmp_path / "r", output)
    assert {path.name for path in tmp_path.iterdir()} == {"go", "r"}


def test_two_tasks_on_a_node_are_refused(slurm: SlurmCluster, tmp_path: Path) -> None:
    code, output = slurm.run("srun", "-N2", "--ntasks-per-node=2", *mh_run("r"), cwd=tmp_path)
    assert code == 2, output
    assert re.search(r"2 tasks of this srun are on n[12]", output)
    assert "srun -N2 --ntasks-per-node=1 --exclusive mh run -n 2 ..." in output
    assert not (tmp_path / "r").exists()


def assert_all_saved(run: Path, output: str) -> None:
    saved = re.findall(r"saved checkpoint of step (\d+)", output)
    assert int(saved[-1]) == steps_of(run)[-1] > 0


@pytest.mark.long
@pytest.mark.parametrize("proctrack", ["pgid", "cgroup"])
@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_a_notice_to_the_launcher_alone_does_the_same(tmp_path: Path, proctrack: str, name: str) -> None:
    if proctrack == "cgroup" and not CGROUPS.is_dir():
        pytest.skip("NOT SHOWN HERE: Slurm 22.05 tracks processes by cgroups of version 1, which this machine lacks")
    with slurm_cluster(proctrack) as cluster:
        notice(cluster, tmp_path, name)


REQUEUE = """#!/bin/sh
{step}
code=$?
echo "ended with $code after start ${{SLURM_RESTART_COUNT:-0}}"
[ $code = 75 ] && scontrol requeue $SLURM_JOB_ID && sleep 60
exit $code
"""


@pytest.mark.long
def test_a_run_through_four_time_limits_ends_with_the_bits_of_an_undisturbed_one(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Slurm's limit is a minute, its notice 25 s before: 1300 steps of 0.1 s need five starts or more."""
    undisturbed = [*mh_run("alone", steps=1300), "--every-steps", "500"]
    alone = subprocess.run(undisturbed, capture_output=True, text=True, check=True, cwd=tmp_path, timeout=300)
    script = tmp_path / "job.sh"
    script.write_text(REQUEUE.format(step=shlex.join([*ONE_EACH, *mh_run("r", steps=1300, pause=0.1)])))
    limits = ("--time=1", "--signal=TERM@25", "--requeue", "--open-mode=append")
    slurm.run("sbatch", "-N2", "--exclusive", *limits, "-o", "out", str(script), cwd=tmp_path)
    out = tmp_path / "out"
    until(lambda: out.exists() and "ended with 0" in out.read_text(), lambda: out.read_text()[-3000:], 800)
    output = out.read_text()
    ends = re.findall(r"ended with (\d+) after start (\d+)", output)
    assert [int(start) for _, start in ends] == list(range(len(ends)))
    assert [code for code, _ in ends] == ["75"] * (len(ends) - 1) + ["0"]
    assert len(ends) > 4
    assert sorted(steps_of(tmp_path / "r")) == list(range(1, 1301)), "each step once: every resume is where it stopped"
    assert digest(output) == digest(alone.stdout)


@pytest.mark.long
def test_an_elastic_run_goes_on_without_a_host_that_is_killed(tmp_path: Path) -> None:
    with slurm_cluster() as cluster:
        step = ("srun", "--no-kill", "--kill-on-bad-exit=0", *ONE_EACH[1:])
        words = shlex.join([*step, *mh_run("r", "--elastic", "1:2", steps=100000, pause=0.02)])
        (tmp_path / "job.sh").write_text(f"#!/bin/sh\n{words}\necho code $?\n")
        cluster.run("sbatch", "-N2", "--exclusive", "--no-kill", "-o", "out", str(tmp_path / "job.sh"), cwd=tmp_path)
        until(lambda: len(steps_of(tmp_path / "r")) > 20, "steps", 100)
        cluster.hosts.kill("n2")
        killed, before = time.time(), max(steps_of(tmp_path / "r"))
        until(lambda: max(steps_of(tmp_path / "r")) > before + 200, lambda: (tmp_path / "out").read_text(), 100)
        after = [event.time_s for event in all_steps(tmp_path / "r") if event.time_s > killed and event.step > before]
        pauses = [later - earlier for earlier, later in itertools.pairwise([killed, *sorted(after)])]
        print(f"host killed: {max(pauses):.1f} s without a step")
        assert max(pauses) < 10
        cluster.says("scancel", "-s", "TERM", "--name=job.sh")
        until(lambda: "code 75" in (tmp_path / "out").read_text(), lambda: (tmp_path / "out").read_text())


@pytest.mark.long
def test_a_directory_that_the_other_host_does_not_see_is_said_by_both(slurm: SlurmCluster, tmp_path: Path) -> None:
    hidden = slurm.home / "state"
    hidden.mkdir(mode=0o700)
    hides = f'test $SLURM_NODEID = 0 || mount -t tmpfs -o mode=700 none {hidden}; exec "$@"'
    words = ("unshare", "-m", "sh", "-c", hides, "sh", *mh_run("r"))
    step = slurm.start(*ONE_EACH, *words, cwd=tmp_path, MANYHANDS_STATE_DIR=str(hidden))
    assert step.stdout is not None
    wanted = [f"waiting: n2 does not see {hidden}/slurm-scratch-", f"waiting: n2 should find {hidden}/slurm-scratch-"]
    begun = time.monotonic()
    while wanted and (line := step.stdout.readline()):
        wanted = [text for text in wanted if text not in line]
    assert not wanted and 20 < time.monotonic() - begun < 60
    step.send_signal(signal.SIGTERM)
    finish(step)


def shown(pid: int, file: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return b""


def notice(slurm: SlurmCluster, folder: Path, name: str) -> None:
    """A batch job of two nodes gets a notice; it ends in time, and all that it has done is in its checkpoint."""
    script, out = folder / "job.sh", folder / "out"
    command = shlex.join([*ONE_EACH, *mh_run("r", steps=5000, pause=0.02)])
    script.write_text(f"#!/bin/sh\n{command}\necho code $?\n")
    slurm.run("sbatch", "-N2", "--exclusive", "-o", "out", str(script), cwd=folder)
    until(lambda: len(steps_of(folder / "r")) > 5, lambda: f"no steps: {out.exists() and out.read_text()}")
    sent = time.monotonic()
    slurm.says("scancel", "-s", name, "--name=job.sh")
    if name != "TERM":  # a user's signal, and then Slurm's own: one notice
        time.sleep(1)
        slurm.says("scancel", "-s", "TERM", "--name=job.sh")
    output = until(lambda: (text := out.read_text()) and "code " in text and text, "the end of the step")
    assert time.monotonic() - sent < 10 + 5  # KillWait
    assert "code 75" in output
    assert_all_saved(folder / "r", output)


def test_srun_says_what_is_wrong_with_a_place(slurm: SlurmCluster, tmp_path: Path) -> None:
    """One after the other on one node, as each takes only the start of a command."""
    one_core = slurm.run("srun", "-N2", *mh_run("a", "--dry-run", "--json"), cwd=tmp_path)[1]
    assert (f"1 of the {CORES} cores" in one_core) == (len(os.sched_getaffinity(0)) == 1)
    nowhere = slurm.folder / "closed"
    nowhere.mkdir(mode=0o755, exist_ok=True)
    code, output = slurm.run(*ONE_EACH, *mh_run("b"), cwd=tmp_path, MANYHANDS_STATE_DIR=str(nowhere))
    assert code == 3, output
    assert f"chmod 700 {nowhere}" in output


def test_node_lists_are_those_of_scontrol(slurm: SlurmCluster) -> None:
    for expression in ("n[1-3]", "a[01-11],b", "r[1-2]n[08-10]", "x[1,3-4],z-[7]"):
        assert expand_names(expression) == slurm.says("scontrol", "show", "hostnames", expression).split()


ASKS = """
import sys, time
from manyhands.launcher.placers.slurm_times import SlurmTimes
times, started = SlurmTimes(sys.argv[1]), time.monotonic()
print([times.poll(now) for now in (0.0, 9.0, 11.0, 12.0)], times.deadline, time.monotonic() - started < 5)
"""


def test_a_controller_that_does_not_answer_is_given_up_and_never_waited_for(slurm: SlurmCluster) -> None:
    (controller,) = [pid for pid in slurm.hosts.processes("login") if b"slurmctld" in shown(pid, "cmdline")]
    os.kill(controller, signal.SIGSTOP)
    try:
        assert slurm.says(sys.executable, "-c", ASKS, "1") == "[False, False, True, False] None True"
    finally:
        os.kill(controller, signal.SIGCONT)
