"""Runs of the command line whose workers share memory: nothing listens and no worker hangs, also without memory."""

from __future__ import annotations

import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

from manyhands.events import StepDone
from manyhands.native import why_not
from tests.end_to_end.test_runs import MH, Job
from tests.listeners import family_of, listeners_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")]


def test_a_run_on_one_host_opens_no_tcp_listener(tmp_path: Path) -> None:
    job = Job(tmp_path, "run", 2, flags=("-v",), hold=8)
    seen: set[str] = set()
    deadline = time.monotonic() + 100
    while not job.events(StepDone):
        assert time.monotonic() < deadline
        seen |= listeners_of(family_of(job.pid))
    job.wait_for_step(7)
    family = family_of(job.pid)
    assert len(family) >= 4, "launcher, coordinator and two workers"
    assert seen | listeners_of(family) == set()
    job.let_go()
    code, _, err = job.end()
    assert code == 0, err
    assert "workers talk through shared memory" in err


@pytest.mark.long
def test_over_gloo_only_loopback_listens_and_the_first_line_says_why(tmp_path: Path) -> None:
    job = Job(tmp_path, "run", 2, flags=("--plane", "gloo"), hold=8)
    job.wait_for_step(3)
    found = listeners_of(family_of(job.pid))
    assert found and all(address.startswith("127.0.0.1:") for address in found)
    job.let_go()
    code, _, err = job.end()
    assert code == 0, err
    assert 'workers talk over Gloo ([comm] plane = "gloo")' in err


@pytest.mark.faults
def test_a_worker_that_hangs_is_named_with_its_step_and_operation(tmp_path: Path) -> None:
    job = Job(tmp_path, "run", 2, "--pause", "0.05", flags=("--timeout", "5", "--max-restarts", "0"), hold=12)
    job.wait_for_step(5)
    stopped = job.workers()[1]
    stopped.send_signal(signal.SIGSTOP)
    job.let_go()
    code, _, err = job.end()
    assert code != 0
    assert "waited 5 s for rank 1 in 'gradients of step " in err or "waited 5 s for rank 1 in 'new weights" in err, err
    assert not stopped.is_running() or stopped.status() == "zombie"


LARGE = """
import torch, manyhands as mh
model = torch.nn.Linear(2000, 500)
trainer = mh.Trainer(lambda: model, lambda m, x: m(x).square().mean(), lambda p: torch.optim.SGD(p, lr=0.1), seed=1)
trainer.fit(torch.ones(16, 2000), epochs=2, batch_size=8)
print("ended at step", trainer.step)
"""


def test_without_room_for_shared_memory_a_run_says_so_and_uses_gloo(tmp_path: Path) -> None:
    """A real limit, on the size of files, which a memfd is: enough for barriers, not for gradients."""
    (tmp_path / "train.py").write_text(LARGE)
    limit = 7 * 2**20
    done = subprocess.run(
        [*MH, "run", "-n", "2", "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ended at step 4" in done.stdout
    assert "Cannot allocate 4.0 MB of memory to share between workers: File too large" in done.stderr
