"""An evaluator beside a training: which checkpoint is next, what it costs, when it gives up; and a real one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from manyhands.checkpoint.format import Manifest, StepName
from manyhands.checkpoint.reader import Candidate
from manyhands.control.run_directory import RunDirectory
from manyhands.errors import EnvironmentProblem
from manyhands.events import CheckpointEvaluated
from manyhands.launcher.evaluator_session import EvaluatorSession, Patience
from manyhands.observe.recorder import read_events
from manyhands.observe.run_status import look_at
from manyhands.spec.load import resolve
from manyhands.training.loop.following_decisions import SpeedBeside, next_checkpoint, threads_beside
from tests.parameter_server.runs.test_ps_tasks import free_addresses

BRIEF = Patience(start_s=0.0, resume_s=0.0, poll_s=0.01)


def candidate(step: int, attempt: int, sequence: int) -> Candidate:
    facts = {"epoch": 0, "world_size": 1, "slices": 1, "files": [], "tensors": {}, "model": "0" * 64}
    manifest = Manifest(run="r", generation=(attempt, 1), sequence=sequence, step=step, **facts)
    return Candidate(Path(f"step-{step:08d}"), StepName(step), manifest)


def test_checkpoints_are_evaluated_in_the_order_of_their_commits() -> None:
    first, second, again = candidate(10, 1, 1), candidate(20, 1, 2), candidate(15, 2, 3)
    torn = Candidate(Path("step-00000030"), StepName(30), None)
    found = [again, torn, second, first]
    assert next_checkpoint(found, None) is first
    assert next_checkpoint(found, (1, 1, 1)) is second
    assert next_checkpoint([again, second], None) is second  # retention has removed the first
    assert next_checkpoint(found, (1, 1, 2)) is again  # of an earlier step: the run was resumed
    assert next_checkpoint(found, (2, 1, 3)) is None


def test_an_evaluator_leaves_the_training_its_cores() -> None:
    assert [threads_beside(8, used) for used in (2, 7, 8, 16)] == [6, 1, 1, 1]


def test_steps_during_an_evaluation_are_counted_separately() -> None:
    speed = SpeedBeside()
    speed.evaluated(100.0, 110.0)
    for ended_s in (99.0, 100.1, 111.0, 112.0):
        speed.add(ended_s, 1.0)
    for ended_s in (100.9, 103.0, 106.0, 110.1):
        speed.add(ended_s, 1.5)
    speed.add(105.0, 0.0)  # measured by no clock
    assert speed.beside_s is None and speed.alone_s is None  # of four steps each, one could decide
    speed.add(120.0, 12.0)  # in part beside
    speed.add(108.0, 4.0)
    assert (speed.beside_s, speed.alone_s) == (1.5, 1.0)


def session(folder: Path, **flags: Any) -> EvaluatorSession:
    return EvaluatorSession(resolve(flags=flags, environ={}), folder, BRIEF)


def test_a_directory_that_is_not_shared_is_said_in_bounded_time(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"No run began in .*/run within 0 s") as raised:
        session(tmp_path / "run").wait_for_start()
    assert "a directory that this host shares" in raised.value.fix[1]


def test_a_run_that_stopped_is_followed_until_nothing_resumes_it(tmp_path: Path) -> None:
    folder = RunDirectory.adopt(tmp_path, False)
    beside = session(tmp_path)
    assert not beside.is_over()
    folder.mark("stopped", 75)
    assert not beside.is_over()
    folder.mark("running")
    assert not beside.is_over()
    folder.mark("failed", 1)
    assert not beside.is_over()
    with pytest.raises(EnvironmentProblem, match=r"is down \(failed\), and was not resumed within 0 s"):
        beside.is_over()
    folder.mark("finished", 0)
    assert beside.is_over()
    folder.release()


def test_a_finished_run_that_is_to_be_overwritten_has_not_begun(tmp_path: Path) -> None:
    folder = RunDirectory.adopt(tmp_path, False)
    folder.mark("finished", 0)
    os.utime(tmp_path / "run.json", (1, 1))
    session(tmp_path).wait_for_start()
    with pytest.raises(EnvironmentProblem, match="No run began"):
        session(tmp_path, overwrite=True).wait_for_start()
    folder.release()


SCRIPT = """
import json, os, time, torch, manyhands as mh
class Pace:
    def after_step(self, trainer, step, stats):
        deadline = time.monotonic() + 100
        while step == 60 and not os.path.exists("go") and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.02)
def loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
def error(model, batch):
    return (model(batch[0]) - batch[1]).abs().squeeze(1)
x = torch.linspace(-1, 1, 8 * 96).reshape(96, 8)
y = x.sum(1, keepdim=True)
trainer = mh.Trainer(
    lambda: torch.nn.Linear(8, 1), loss, lambda params: torch.optim.SGD(params, lr=0.01), mh.Mirrored(),
    metrics={"error": error}, hooks=[Pace()], run_dir="run", slices=2,
)
history = trainer.fit(
    (x[:64], y[:64]), epochs=30, batch_size=16, validation=(x[64:], y[64:]),
    checkpoint=mh.Checkpoints(every_steps=8, keep_last=2),
)
trainer.save("model.safetensors")
print(json.dumps([trainer.is_chief, trainer.step, history, trainer.evaluate((x[64:], y[64:]), batch_size=16)]))
"""


def until(holds: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"no {what} in {timeout_s:g} s"
        time.sleep(0.05)


OWN_LOOP = """
import torch, manyhands as mh
hands = mh.join()
"""


def mh(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "manyhands.cli.main", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)


@pytest.mark.long
def test_a_run_is_evaluated_and_exported_beside_its_training_by_hand(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "loop.py").write_text(OWN_LOOP)
    training = [sys.executable, "-m", "manyhands.cli.main", "run", "--ui", "none", "-n", "2", "train.py"]
    with subprocess.Popen(training, cwd=tmp_path, stdout=subprocess.DEVNULL) as run:
        until((tmp_path / "run" / "run.json").exists, "run")
        evaluating = [*training[:3], "evaluate", "--json", "run", "train.py"]
        with subprocess.Popen(evaluating, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as beside:
            assert beside.stdout is not None
            first = beside.stdout.readline()
            assert first.startswith('{"event":"CheckpointEvaluated"') and run.poll() is None
            exported = mh(tmp_path, "ckpt", "export", "run", "-o", "live.safetensors", "--json")
            second = mh(tmp_path, "evaluate", "run", "train.py")
            (tmp_path / "go").touch()
            *lines, history = beside.stdout.read().splitlines()
        assert run.wait(60) == 0
    assert exported.returncode == 0 and (tmp_path / "live.safetensors").exists(), exported.stderr
    assert second.returncode == 2 and "Another process evaluates the checkpoints of" in second.stderr
    assert (beside.returncode, json.loads(history)[:2], json.loads(lines[-1])["step"]) == (0, [False, 120], 120)

    loop = mh(tmp_path, "evaluate", "run", "loop.py")
    assert loop.returncode == 2 and "This script has its own training loop" in loop.stderr

    once_more = mh(tmp_path, "evaluate", "run", "train.py")  # evaluates nothing, and still ends with the last weights
    assert once_more.stdout.splitlines()[-1] == history and "checkpoint of step" not in once_more.stderr

    (tmp_path / "run" / "events" / "evaluator.jsonl").unlink()
    oldest, *_ = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    (oldest / "state.json").write_bytes(b"torn")
    again = mh(tmp_path, "evaluate", "run", "train.py")
    assert again.returncode == 0 and "was not evaluated: " in again.stderr
    assert json.loads(again.stdout)[2][-1] == json.loads(history)[2][-1]


@pytest.mark.long
@pytest.mark.faults
def test_the_evaluator_of_a_cluster_follows_a_run_through_its_own_death_and_that_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    cluster = {"worker": free_addresses(2)}
    started: list[subprocess.Popen[str]] = []

    def start(job: str, index: int, *command: str) -> subprocess.Popen[str]:
        environ = {**os.environ, "MANYHANDS_UI": "plain"}
        environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
        words = [sys.executable, *command, "train.py"]
        with (tmp_path / f"{job}.txt").open("a") as errors:
            process = subprocess.Popen(
                words, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        started.append(process)
        return started[-1]

    def evaluated() -> list[CheckpointEvaluated]:
        events = read_events(tmp_path / "run" / "events" / "evaluator.jsonl")
        return [event for event in events if isinstance(event, CheckpointEvaluated)]

    def said(job: str) -> str:
        return (tmp_path / f"{job}.txt").read_text()

    try:
        killed = start("evaluator", 0, "-m", "manyhands.cli.main", "run", "-n", "1", "--elastic", "1:2")
        workers = [start("worker", 0), start("worker", 1)]
        until(lambda: len(evaluated()) >= 2, "two evaluated checkpoints")
        killed.kill()
        killed.communicate(timeout=60)
        evaluator = start("evaluator", 0)  # by hand, as `python train.py`
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        (tmp_path / "go").touch()
        assert [worker.wait(60) for worker in workers] == [75, 75]
        until(lambda: "the run is down (stopped)" in said("evaluator"), "word of that by the evaluator")
        workers = [start("worker", 0), start("worker", 1)]
        assert [worker.wait(60) for worker in workers] == [0, 0], said("worker")
        output, _ = evaluator.communicate(timeout=60)
    finally:
        for process in started:
            process.kill()
            process.communicate()

    assert evaluator.returncode == 0, said("evaluator")
    is_chief, step, rows, at_the_end = json.loads(output)
    assert (is_chief, step) == (False, 120)
    assert rows == [{"step": e.step, **{f"val_{name}": v for name, v in e.results.items()}} for e in evaluated()]
    assert len({event.commit for event in evaluated()}) == len(rows)  # none twice, whoever was killed
    trained = {
        row["step"]: row for row in msgspec.json.decode((tmp_path / "run/calls/0001-fit.json").read_bytes())["result"]
    }
    both = [row for row in rows if row["step"] in trained]
    assert rows[-1]["step"] == 120 and len(both) >= 2
    assert at_the_end == {name: rows[-1][f"val_{name}"] for name in ("loss", "error")}
    for row in both:
        assert [row["val_loss"], row["val_error"]] == [trained[row["step"]][name] for name in ("val_loss", "val_error")]
    last = look_at(tmp_path / "run", ask=False).evaluator
    assert last is not None and last.step == 120 and last.rows == 32 and last.step_alone_s is not None
    assert (tmp_path / "model.safetensors").exists()
