"""`mh run --on slurm` on a real Slurm of three nodes: submitted, followed, stopped, queued again, elastic."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launcher.placers.hosts import finish
from tests.launcher.placers.real_slurm import SlurmCluster, slurm_cluster, why_not

pytestmark = [pytest.mark.long, pytest.mark.faults]
MH = [sys.executable, "-m", "manyhands.cli.main"]
TRAIN = """
import os, time, torch, manyhands as mh
class Pause:
    def after_step(self, trainer, step, stats):
        time.sleep(float(os.environ.get("PAUSE", "0.02")))
        if trainer.is_chief:
            with open("steps", "a") as file:
                file.write(f"{step} {time.time()} {trainer._run.worker.world_size}\\n")
if __name__ == "__main__":
    rows = torch.arange(64.0).reshape(16, 4) / 64
    data = torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True))
    torch.manual_seed(1)
    loss = lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.01)
    trainer = mh.Trainer(torch.nn.Linear(4, 1), loss, optimizer, hooks=[Pause()], exact=True, slices=12)
    trainer.fit(data, epochs=int(os.environ.get("STEPS", "40")), batch_size=16)
    print("weights", [value.hex() for value in trainer.model.weight.flatten().tolist()], flush=True)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    if (why := why_not()) is not None:
        pytest.skip(why)
    with slurm_cluster() as found:
        yield found


@pytest.fixture
def slurm(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Submitter]:
    cluster.make_idle()
    yield Submitter(cluster, tmp_path)
    cluster.make_idle()


class Submitter:
    """The login node, in a directory with a script."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        (folder / "train.py").write_text(TRAIN)

    def start(self, *words: str, **environ: str) -> subprocess.Popen[str]:
        return self.cluster.start(*MH, *words, cwd=self.folder, **environ)

    def run(self, *words: str, **environ: str) -> tuple[int, str]:
        return self.cluster.run(*MH, *words, cwd=self.folder, **environ)

    def steps(self) -> list[tuple[int, float, int]]:
        """Each step that was done: its number, when, and with how many workers."""
        path = self.folder / "steps"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(one), float(two), int(three)) for one, two, three in (line.split() for line in lines)]

    def until(self, what: Callable[[], object], within_s: float = 90.0) -> None:
        deadline = time.monotonic() + within_s
        while not what():
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.cluster.says('squeue')}\n{self.outputs()}")
            time.sleep(0.05)

    def outputs(self) -> str:
        found = sorted((self.cluster.home / ".manyhands/jobs").glob("slurm-*.out"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in found)

    def workers(self) -> int:
        return self.steps()[-1][2] if self.steps() else 0


def weights_in(output: str) -> str:
    found = re.search(r"weights (\[.*\])", output)
    assert found is not None, output
    return found[1]


def alone(folder: Path, **environ: str) -> str:
    """The weights of one undisturbed worker."""
    (folder / "alone").mkdir()
    (folder / "alone/train.py").write_text(TRAIN)
    done = subprocess.run(
        [*MH, "run", "-n", "1", "train.py"], cwd=folder / "alone", env={**os.environ, "PAUSE": "0", **environ},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    return weights_in(done.stdout)


def test_a_submitted_run_trains_on_its_hosts_and_ends_with_its_output_and_exit_code(slurm):
    code, output = slurm.run("run", "--on", "slurm", "-N", "2", "train.py")
    assert code == 0, output
    assert slurm.workers() == 2
    assert weights_in(output) == alone(slurm.folder)
    assert re.search(r"\[mh\] slurm \d+: RUNNING on n\[?1[-,]2\]?", output)
    jobs = slurm.cluster.home / ".manyhands/jobs"
    assert jobs.stat().st_mode & 0o77 == 0 and not list(jobs.glob("*.join"))


def test_ctrl_c_commits_a_checkpoint_and_the_same_command_resumes(slurm):
    words = ("run", "--on", "slurm", "-N", "2", "--run-dir", "runs/a", "train.py")
    first = slurm.start(*words, STEPS="100", PAUSE="0.05")
    slurm.until(lambda: len(slurm.steps()) > 10)
    first.send_signal(signal.SIGINT)
    code, output = finish(first)
    assert code == 75, output
    assert "preempted, with a committed checkpoint" in output
    stopped = slurm.steps()[-1][0]
    assert not slurm.cluster.says("squeue", "-h", "-t", "PENDING,RUNNING")  # not queued again
    code, output = slurm.run(*words, STEPS="100", PAUSE="0")
    assert code == 0, output
    assert f"resumed at step {stopped}" in output
    assert weights_in(output) == alone(slurm.folder, STEPS="100")


def test_a_run_through_time_limits_is_queued_again_and_resumes_where_it_was_stopped(slurm):
    words = ("run", "--on", "slurm", "-N", "2", "--time", "1", "--notice", "30", "--run-dir", "runs/a", "train.py")
    code, output = slurm.cluster.run(*MH, *words, cwd=slurm.folder, timeout_s=280, STEPS="1000", PAUSE="0.04")
    assert code == 0, output
    # Both hosts say it.
    stopped = list(dict.fromkeys(re.findall(r"ended with exit code 75 at step (\d+)", output)))
    assert len(stopped) >= 2
    assert re.findall(r"resumed at step (\d+)", output) == stopped
    numbers = [number for number, _, _ in slurm.steps()]
    assert numbers == list(range(1, 1001))  # each step once, over all of its starts
    assert weights_in(output) == alone(slurm.folder, STEPS="1000")


def test_a_preempted_run_is_queued_again_and_resumes(slurm):
    running = slurm.start("run", "--on", "slurm", "-N", "2", "--queue", "low", "train.py", STEPS="300", PAUSE="0.04")
    slurm.until(lambda: len(slurm.steps()) > 10)
    slurm.cluster.says("sbatch", "-p", "high", "-N3", "--exclusive", "--output=/dev/null", "--wrap", "sleep 3")
    code, output = finish(running, 200.0)
    assert code == 0, output
    (stopped,) = set(re.findall(r"ended with exit code 75 at step (\d+)", output))
    assert f"resumed at step {stopped}" in output
    assert [number for number, _, _ in slurm.steps()] == list(range(1, 301))
    assert weights_in(output) == alone(slurm.folder, STEPS="300")


def test_inside_an_allocation_the_run_has_all_of_its_hosts(slurm):
    code, output = slurm.cluster.run(
        *("salloc", "-N2", "--exclusive", *MH, "run", "--on", "slurm", "train.py"), cwd=slurm.folder
    )
    assert code == 0, output
    assert slurm.workers() == 2
    assert weights_in(output) == alone(slurm.folder)


def test_hosts_join_as_helper_jobs_leave_and_are_killed_and_the_run_continues(tmp_path):
    if (why := why_not()) is not None:
        pytest.skip(why)
    with slurm_cluster() as cluster:  # its own: a node of it dies
        elastic_run(Submitter(cluster, tmp_path))


def elastic_run(slurm: Submitter) -> None:
    following = slurm.start(
        *("run", "--on", "slurm", "-N", "1:3", "--run-dir", "runs/a", "train.py"), STEPS="100000", PAUSE="0.05"
    )
    slurm.until(lambda: slurm.workers() == 3)
    job = json.loads(slurm.run("hosts", "runs/a", "--json")[1])
    assert sorted(one["state"] for one in job["helpers"]) == ["RUNNING", "RUNNING"]
    dropped, killed = (one["host"] for one in job["helpers"])

    code, output = slurm.run("hosts", "runs/a", "drop", dropped)
    assert code == 0, output
    slurm.until(lambda: slurm.workers() == 2)
    code, output = slurm.run("hosts", "runs/a", "add", "1")
    assert code == 0 and "for 1 more host" in output, output
    slurm.until(lambda: slurm.workers() == 3)

    before = time.time()
    slurm.cluster.hosts.kill(killed)
    slurm.until(lambda: slurm.workers() == 2)
    after = next(at for _, at, workers in slurm.steps() if at > before and workers == 2)
    print(f"FIGURE: host of an elastic Slurm run killed, to the next step: {after - before:.1f} s")
    assert after - before < 15.0

    following.send_signal(signal.SIGINT)
    code, output = finish(following)
    assert code == 75, output
    numbers = [number for number, _, _ in slurm.steps()]
    assert numbers == list(range(1, len(numbers) + 1))
    slurm.until(lambda: not slurm.cluster.says("squeue", "-h"))


def test_a_helper_job_joins_a_job_of_several_hosts(slurm):
    following = slurm.start("run", "--on", "slurm", "-N", "2:3", "train.py", STEPS="100000", PAUSE="0.05")
    slurm.until(lambda: slurm.workers() == 3)
    following.send_signal(signal.SIGINT)
    code, output = finish(following)
    assert code == 75, output
    slurm.until(lambda: not slurm.cluster.says("squeue", "-h"))
    assert not list((slurm.cluster.home / ".manyhands/jobs").glob("*.join"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--queue", "gpuu"), "try: --queue high\n  try: --queue low"),
        (("-N", "9"), "try: fewer hosts than 9"),
    ],
)
def test_what_slurm_refuses_is_said_at_once_with_what_to_type(slurm, words, says):
    code, output = slurm.run("run", "--on", "slurm", *words, "train.py")
    assert code == 2 and says in output, output
    assert not slurm.cluster.says("squeue", "-h")


def test_a_detached_run_and_an_array_return_at_once_and_train(slurm):
    code, output = slurm.run("run", "--on", "slurm", "--detach", "--json", "train.py")
    facts = json.loads(output.splitlines()[-1])
    assert code == 0 and facts["job"].isdigit()
    slurm.until(lambda: (Path(facts["run_dir"]) / "run.json").exists())
    slurm.until(lambda: "finished" in slurm.run("status", facts["run_dir"], "--json")[1])
    code, output = slurm.run("run", "--on", "slurm", "--array", "0-1", "--cpus", "1", "--run-dir", "runs/b", "train.py")
    assert code == 0, output
    slurm.until(lambda: not slurm.cluster.says("squeue", "-h"))
    assert sorted(path.name for path in (slurm.folder / "runs").glob("b-*")) == ["b-0", "b-1"]


def test_a_script_that_says_where_it_trains_submits_itself(slurm):
    script = slurm.folder / "train.py"
    script.write_text(TRAIN.replace("exact=True", "exact=True, strategy=mh.Mirrored(on=mh.Slurm(hosts=2))"))
    code, output = slurm.cluster.run(sys.executable, "train.py", cwd=slurm.folder)
    assert code == 0, output
    assert slurm.workers() == 2
    assert weights_in(output) == alone(slurm.folder)


def test_what_is_shipped_is_what_was_there_at_submission(slurm):
    for words in (("init", "-q"), ("add", "train.py")):
        subprocess.run(["git", *words], cwd=slurm.folder, check=True, timeout=20)
    slurm.cluster.says("scontrol", "update", "PartitionName=low", "State=DOWN")
    first = slurm.start("run", "--on", "slurm", "--code", "ship", "--run-dir", "runs/a", "train.py")
    try:
        slurm.until(lambda: slurm.cluster.says("squeue", "-h"))
        (slurm.folder / "train.py").write_text("raise SystemExit('changed while it waited')")
    finally:
        slurm.cluster.says("scontrol", "update", "PartitionName=low", "State=UP")
    code, output = finish(first)
    assert code == 0, output
    weights_in(output)
