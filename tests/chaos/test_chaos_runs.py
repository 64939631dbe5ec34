"""`mh chaos` against a real run: faults strike it, and it ends where the undisturbed one does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from manyhands.chaos.chaos_run import _same_bits
from manyhands.events import GenerationStarted
from manyhands.observe.run_audit import read_run_events

pytestmark = [pytest.mark.faults, pytest.mark.slow]

SCRIPT = """
import sys, time, torch, manyhands as mh
from torch import nn
torch.manual_seed(0)
def loss(model, batch):
    time.sleep(0.01)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
trainer = mh.Trainer(
    lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4)), loss,
    lambda params: torch.optim.AdamW(params, lr=1e-2), exact=True, slices=6, seed=1,
    strategy=mh.ParameterServer(mode="sync") if sys.argv[2:] == ["served"] else "mirrored",
)
trainer.fit((torch.randn(300, 8), torch.randint(0, 4, (300,))), steps=int(sys.argv[1]), batch_size=32,
            checkpoint=mh.Checkpoints(every_s=1))
"""


def chaos(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "manyhands.cli.main", "chaos", "-n", "3", "--run-dir", "found", "--json", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)


@pytest.mark.long
def test_a_run_full_of_faults_ends_where_the_undisturbed_one_does(tmp_path: Path) -> None:
    done = chaos(
        tmp_path, "--seed", "238", "--mtbf", "1", "--minutes", "0.08", "--faults", "kill,hang,coordinator",
        "--heartbeat", "1", "train.py", "160",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["passed"] and report["exact"] and report["exit_code"] == 0
    struck = [one for one in report["outcomes"] if not one["skipped"]]
    assert {one["kind"] for one in struck} == {"kill", "hang", "coordinator"}
    assert all(one["recovered_s"] is not None and one["steps_lost"] == 0 for one in struck)
    assert report["ledger"]["last_step"] == 160 and report["ledger"]["problems"] == []
    assert report["weights"]["different"] == [] and report["weights"]["step"] == 160
    assert json.loads((tmp_path / "found" / "report.json").read_text()) == report


@pytest.mark.long
def test_an_agent_is_lost_with_its_workers_and_another_comes(tmp_path: Path) -> None:
    done = chaos(
        tmp_path, "--seed", "13", "--mtbf", "4", "--minutes", "0.1", "--faults", "agent", "--agents", "2", "-n", "1",
        "train.py", "400",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    struck = [one for one in report["outcomes"] if not one["skipped"]]
    assert struck and all(one["kind"] == "agent" and one["recovered_s"] is not None for one in struck)
    assert report["ledger"]["last_step"] == 400 and report["weights"]["different"] == []
    started = [event for event in read_run_events(tmp_path / "found" / "chaos") if isinstance(event, GenerationStarted)]
    hosts = [event.hosts for event in sorted(started, key=lambda event: event.time_s)]
    assert 1 in hosts and hosts[-1] == 2, "the agent was missed, and another came"


@pytest.mark.long
def test_a_run_whose_servers_and_workers_are_struck_ends_where_the_undisturbed_one_does(tmp_path: Path) -> None:
    done = chaos(
        tmp_path, "--seed", "11", "--mtbf", "2", "--minutes", "0.15", "--faults", "kill,kill-server,stop-server",
        "--servers", "2", "--heartbeat", "1", "train.py", "160", "served",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    struck = [one for one in report["outcomes"] if not one["skipped"]]
    assert {one["kind"] for one in struck} == {"kill", "kill-server", "stop-server"}
    assert all(one["detected_s"] is not None and one["recovered_s"] > one["detected_s"] for one in struck)
    assert report["ledger"]["last_step"] == 160 and report["ledger"]["problems"] == []
    assert (report["mode"], report["weights"]["different"]) == ("sync", [])


@pytest.mark.long
def test_a_script_that_fails_without_a_fault_is_named_before_any_fault(tmp_path: Path) -> None:
    done = chaos(tmp_path, "train.py", "many")
    assert done.returncode == 1
    assert "cannot be tested" in done.stderr and "ValueError" in done.stderr


def test_equal_means_the_same_bits() -> None:
    zero, other = torch.tensor([0.0]), torch.tensor([-0.0])
    assert _same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not _same_bits(zero, other)
    assert not _same_bits(zero, zero.double())
    assert not _same_bits(zero, None)
