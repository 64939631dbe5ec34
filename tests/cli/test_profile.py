"""`mh profile` as a user calls it: on scripts that are built to have one bottleneck, on bad ones, and on a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from manyhands.cli.explore.profile import profile
from manyhands.errors import EnvironmentProblem, UsageError
from manyhands.events import RunStarted, StepDone, encode_lines

HEAD = """
import sys, time
import torch, manyhands as mh
from torch import nn

torch.manual_seed(0)  # every worker makes the same data

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def train(model, data, batch_size):
    trainer = mh.Trainer(model, loss, lambda p: torch.optim.SGD(p, lr=0.01), strategy=mh.Mirrored(workers=2))
    trainer.fit(data, epochs=1000, batch_size=batch_size)
    open("went on", "w")
"""
# A row takes 10 ms to read, and the model nothing: loader processes read at the same time.
SLOW_DATA = f"""{HEAD}
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.randn(16), index % 4

if __name__ == "__main__":
    train(lambda: nn.Linear(16, 4), Rows(), 32)
"""
# Two rows, and 400 gradients of 1 kB that are sent one by one: the exchange waits for sockets 400 times in each step.
SLOW_EXCHANGE = f"""{HEAD}
if __name__ == "__main__":
    data = torch.randn(64, 16), torch.arange(64) % 4
    train(lambda: nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(400))), data, 2)
"""
# Nothing to read and 2 kB to exchange, but a loss that computes for long.
SLOW_COMPUTATION = f"""{HEAD}
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.out = nn.Linear(16, 16), nn.Linear(16, 4)
    def forward(self, x):
        for _ in range(400):
            x = torch.tanh(self.one(x))
        return self.out(x)

if __name__ == "__main__":
    train(Deep, (torch.randn(4096, 16), torch.arange(4096) % 4), 256)
"""


def mh(folder: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    (folder / "temporary").mkdir(exist_ok=True)
    environ = {**os.environ, "PYTHONPATH": str(Path.cwd()), "TMPDIR": str(folder / "temporary")}
    return subprocess.run(
        [sys.executable, "-m", "manyhands.cli.main", "profile", *words],
        cwd=folder, capture_output=True, text=True, timeout=850, env=environ,
    )  # fmt: skip


def report_of(folder: Path, script: str, *words: str, rounds: int = 1) -> Any:
    done = mh(folder, script, "--rounds", str(rounds), "--steps", "6", "--wait", "300", "--json", *words, "train.py")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.iterdir()} <= {"train.py", "temporary", "__pycache__", "trace.json"}
    assert not list((folder / "temporary").glob("manyhands-*")), "a trial left something behind"
    return json.loads(done.stdout)


def saved(report: Any, name: str) -> float:
    return next(float(one["saves"]) for one in report["verdict"]["findings"] if one["way"]["name"] == name)


@pytest.mark.long
def test_slow_data_is_found_and_a_loader_process_gets_part_of_it(tmp_path: Path) -> None:
    report = report_of(tmp_path, SLOW_DATA, "--trace", "trace.json")
    assert report["facts"]["workers"] == 2, "as many as the script asks for"
    assert report["verdict"]["holds_back"] == "data" and report["verdict"]["shares"]["data"] > 0.5
    assert saved(report, "data for free") > 0.5 > saved(report, "no exchange")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = {one["args"]["name"]: one["pid"] for one in trace if one["name"] == "process_name"}
    assert set(named) == {"worker 0", "worker 1"}
    spans = [
        [(one["ts"], one["ts"] + one["dur"]) for one in trace if one["name"] == "reduce" and one["pid"] == pid]
        for pid in named.values()
    ]
    # On one clock: no worker ends its exchange before the other has begun it.
    assert len(spans[0]) == len(spans[1]) == 3
    for (begun, ended), (other_begun, other_ended) in zip(*spans, strict=True):
        assert begun < other_ended and other_begun < ended


@pytest.mark.long
def test_slow_exchange_is_found(tmp_path: Path) -> None:
    report = report_of(tmp_path, SLOW_EXCHANGE, "--plane", "gloo", "--bucket-bytes", "1024")
    assert report["verdict"]["holds_back"] == "exchange", report["verdict"]
    assert saved(report, "no exchange") > 0.3


@pytest.mark.long
def test_slow_computation_is_found_with_the_layer_that_takes_long(tmp_path: Path) -> None:
    report = report_of(tmp_path, SLOW_COMPUTATION, rounds=3)  # what other programs compute disturbs it most
    assert report["verdict"]["holds_back"] == "computation" and report["verdict"]["shares"]["computation"] > 0.6
    assert report["layers"][0]["name"] in ("one", "Deep") and report["layers"][0]["calls"] in (1, 400)
    assert "one more loader process" in report["verdict"]["untried"], "the data is in memory"


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("raise RuntimeError('no such data')", "RuntimeError: no such data"),
        ("print('nothing to train')", "no step of mh.Trainer, mh.join, or Keras under a scope()"),
        (f"{HEAD}\ntrain(lambda: nn.Linear(16, 4), (torch.randn(4, 16), torch.arange(4)), 4)", ""),
    ],
)
def test_a_script_that_fails_or_never_steps_is_an_error(tmp_path: Path, script: str, said: str) -> None:
    if not said:
        script, said = script.replace("epochs=1000", "epochs=3"), "ended after 3 steps, and at least 7 are needed"
    done = mh(tmp_path, script, "--wait", "300", "train.py")
    assert done.returncode == 1 and said in done.stderr, done.stderr
    assert "try: " in done.stderr or "RuntimeError" in done.stderr


def recorded(folder: Path) -> Path:
    run = folder / "runs" / "a"
    (run / "events").mkdir(parents=True)
    (run / "run.json").write_text('{"run": "a", "created": "2026-01-01T00:00:00+00:00", "status": "finished"}')
    phases = {"load": 0.004, "forward": 0.05, "backward": 0.03, "reduce": 0.006, "update": 0.002}
    start = RunStarted(run="a", strategy="mirrored", workers=2, slices=2, precision="fp32", threads=1)
    steps = [
        StepDone(step=n, epoch=0, loss=1.0, rows=8, samples_per_s=1.0, phases=phases, took_s=0.1, start=(0, 8 * n - 8))
        for n in range(1, 20)
    ]
    (run / "events" / "worker-0.jsonl").write_bytes(encode_lines([start, *steps]))
    return run


SLOW_WORKER = """
import time, torch, manyhands as mh

hands = mh.join(strategy=mh.Mirrored(workers=2), run_dir="run", slices=4)
net = torch.nn.Linear(8, 2)
net, optimizer = hands.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
for batch in hands.batches(torch.ones(256, 8), batch_size=32, epochs=2):
    loss = net(batch).pow(2).mean()
    time.sleep(0.001 if hands.rank == 0 else 0.02)
    hands.backward(loss)
    hands.step()
"""


@pytest.mark.slow
def test_the_record_of_two_workers_names_the_one_that_computes_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(SLOW_WORKER)
    environ = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, check=True, capture_output=True, timeout=200, env=environ
    )
    assert len(list((tmp_path / "run" / "events").iterdir())) == 2, "the chief's record, and that of the host's agent"
    monkeypatch.chdir(tmp_path)
    report = json.loads(CliRunner().invoke(profile, ["--json", "run"], catch_exceptions=False).output)
    quick, slow = report["each"]
    assert report["holds_back"] == "computation" and report["shares"]["computation"] > 0.6, report
    assert quick["phases"]["reduce"] > 2 * quick["phases"]["forward"] and slow["phases"]["forward"] > 0.02
    assert quick["slices_per_step"] == slow["slices_per_step"] == 2
    assert quick["bytes_per_step"] >= 4 * (8 * 2 + 2), "gradients are handed over, although no socket is used"


@pytest.mark.forged_record
def test_a_recorded_run_is_judged_without_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded(tmp_path)
    done = CliRunner().invoke(profile, [str(run)], catch_exceptions=False)
    assert "held back by computation, as its steps were timed: data 4 %, exchange 6 %, computation 82 %" in done.output
    monkeypatch.chdir(tmp_path)
    by_name = json.loads(CliRunner().invoke(profile, ["--json", "a"], catch_exceptions=False).output)
    assert by_name["shares"]["other"] == pytest.approx(0.08) and by_name["steps"] == 16


@pytest.mark.forged_record
def test_what_cannot_be_done_is_refused_before_any_trial(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('ran')")
    run = recorded(tmp_path)
    for words, kind, said in (
        (["--steps", "0", str(script)], UsageError, "--steps is 0"),
        (["--rounds", "0", str(script)], UsageError, "--rounds is 0"),
        (["--wait", "0", str(script)], UsageError, "--wait is 0"),
        (["--trace", str(tmp_path / "none" / "t.json"), str(script)], EnvironmentProblem, "not a writable directory"),
        (["--trace", str(tmp_path), str(script)], UsageError, "is a directory"),
        ([str(tmp_path / "trian.py")], UsageError, "There is no script"),
        (["--threads", "2", str(run)], UsageError, "--threads is for trials of a script"),
        ([str(tmp_path)], UsageError, "not a run directory"),
    ):
        with pytest.raises(kind, match=said):
            CliRunner().invoke(profile, words, catch_exceptions=False)
