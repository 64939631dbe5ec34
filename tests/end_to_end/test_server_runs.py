"""Scripts that ask for parameter servers: started by hand, they launch them; a launcher that has none is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.errors import SpecError
from manyhands.events import ServerStarted, WorkerStarted
from manyhands.observe.recorder import read_events
from manyhands.spec import load
from manyhands.spec.worker_identity import WorkerIdentity, identity_environment
from manyhands.training.enter_run import enter
from manyhands.training.worker.strategy_lookup import as_strategy, check_strategy

SCRIPT = """
import os, pathlib, time
import torch
import manyhands as mh

if __name__ == "__main__":
    role = os.environ.get("MANYHANDS_ROLE", "launcher")
    print("runs as", role, flush=True)
    if role == "server":
        pathlib.Path("served").touch()
    while role == "worker" and not pathlib.Path("served").exists():
        time.sleep(0.01)
    trainer = mh.Trainer(
        torch.nn.Linear(2, 1),
        lambda model, batch: model(batch).square().mean(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        strategy=mh.ParameterServer(servers=1),
        run_dir="run",
    )
    trainer.fit(torch.ones(4, 2), steps=1, batch_size=4)
    print("trains as", role)
"""


def ended(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(SCRIPT)
    environ = {name: text for name, text in os.environ.items() if not name.startswith("MANYHANDS_")}
    return subprocess.run(
        [sys.executable, *command, "train.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100
    )


@pytest.mark.slow
def test_a_mistake_in_a_script_is_reported_with_its_own_lines_only(tmp_path):
    (tmp_path / "served").touch()
    done = ended(tmp_path, "-m", "manyhands.cli.main", "run", "-n", "1", "--servers", "1", "--precision", "fp16")
    assert done.returncode == 2
    traceback = done.stderr[done.stderr.index("traceback") :]
    assert "train.py" in traceback and "trainer.fit(" in traceback and 'try: precision="bf16"' in traceback
    assert "manyhands/" not in traceback


@pytest.mark.long
@pytest.mark.slow
def test_a_script_that_asks_for_a_server_starts_one_which_does_not_run_past_the_trainer(tmp_path):
    done = ended(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "runs as launcher\nruns as worker\ntrains as worker\n"
    events = [event for file in (tmp_path / "run" / "events").iterdir() for event in read_events(file)]
    assert [event.server for event in events if isinstance(event, ServerStarted)] == [0]
    assert [event.slot for event in events if isinstance(event, WorkerStarted)] == [0]
    log = tmp_path / "run" / "logs" / "attempt-1" / "server-0.out"
    assert log.read_text() == "runs as server\n"


def identity(monkeypatch: pytest.MonkeyPatch, **more: int) -> None:
    mine = WorkerIdentity(
        agent="ipc://unused", rank=0, world_size=4, local_rank=0, local_world_size=4, generation="1.1", incarnation=1,
        **more,
    )  # fmt: skip
    for name, text in identity_environment(mine).items():
        monkeypatch.setenv(name, text)


def test_a_launcher_that_was_not_asked_for_servers_says_what_to_type(monkeypatch):
    identity(monkeypatch)
    with pytest.raises(SpecError, match="asks for 3 parameter servers") as caught:
        enter(mh.ParameterServer(servers=3), {})
    assert caught.value.fix == ("mh run --servers 3 -n 4 ...",)
    with pytest.raises(SpecError) as caught:
        enter(mh.ParameterServer(servers=3, workers=2), {})
    assert caught.value.fix == ("mh run --servers 3 -n 2 ...",)


def test_servers_that_the_script_has_no_use_for_are_refused(monkeypatch):
    identity(monkeypatch, num_servers=2)
    with pytest.raises(SpecError, match="This run has 2 parameter servers, but strategy=") as caught:
        enter("mirrored", {})
    assert "mh run without --servers" in caught.value.fix


@pytest.mark.parametrize("by_name", [None, "mirrored", "multi_worker", "MultiWorker", mh.Mirrored(), mh.MultiWorker()])
def test_replicas_are_one_strategy_on_one_host_and_on_many(monkeypatch, by_name):
    identity(monkeypatch, num_hosts=2)
    resolved = load.resolve(flags={}, arguments={})
    check_strategy(chosen := as_strategy(by_name), load.own_identity(), resolved.spec)
    assert chosen == mh.Mirrored()
