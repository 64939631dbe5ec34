"""`mh graph` as a user calls it, and what it refuses before anything runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from manyhands.cli.explore.graph import graph
from manyhands.errors import EnvironmentProblem, UsageError

SCRIPT = """
import sys
import torch, manyhands as mh
from torch import nn

def model():
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(4)))

def loss(model, batch):
    if "parts" in sys.argv:
        return model[0](batch).mean()
    return ((model(batch) - batch) ** 2).mean()

if "fail" in sys.argv:
    raise RuntimeError("no such data")
if "quit" not in sys.argv:
    mh.Trainer(model, loss, lambda p: torch.optim.SGD(p, lr=0.1)).fit(torch.randn(64, 16), epochs=1, batch_size=16)
open("went on", "w")
"""
OWN_LOOP = """
import torch, manyhands as mh
hands = mh.join(run_dir="my-run")
net, optimizer = hands.setup(net := torch.nn.Linear(4, 2), torch.optim.SGD(net.parameters(), lr=0.1))
for x in hands.batches(torch.randn(64, 4), batch_size=8, epochs=2):
    hands.backward(net(x).pow(2).mean())
    hands.step()
"""


def mh(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "own.py").write_text(OWN_LOOP)
    return subprocess.run(
        [sys.executable, "-m", "manyhands.cli.main", "graph", *words],
        cwd=folder, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"train.py", "own.py", "__pycache__"}


@pytest.mark.long
def test_a_pipeline_is_coloured_by_stage_and_nothing_else_is_written(tmp_path: Path) -> None:
    done = mh(tmp_path, "train.py", "--strategy", "pipeline", "-n", "2", "-o", "p.svg", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["places"] == ["stage 0", "stage 1"] and facts["strategy"] == "pipeline"
    linear = [one for one in facts["operations"] if one["kind"] == "linear"]
    assert len(linear) == 8 and all(one["flops"] == 2 * 16 * 16 * 32 for one in linear), "16 rows: one slice of V=1"
    stages = [one["place"] for one in linear]
    assert stages == sorted(stages) and set(stages) == {"stage 0", "stage 1"}
    assert "stage 1" in (tmp_path / "p.svg").read_text()
    assert files(tmp_path) == {"p.svg"}


@pytest.mark.long
def test_a_loop_of_your_own_shows_its_graph_and_is_not_run(tmp_path: Path) -> None:
    done = mh(tmp_path, "own.py", "-o", "own.html")
    assert done.returncode == 0, done.stderr
    assert "Linear, one forward pass of a slice, by torch.export" in done.stdout
    assert files(tmp_path) == {"own.html"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("fail", "RuntimeError: no such data"),
        ("quit", "The script did not call its model in a way that manyhands sees."),
        ("parts", "The loss does not call the model itself"),
    ],
)
def test_a_script_without_a_call_of_its_model_is_an_error(tmp_path: Path, word: str, said: str) -> None:
    done = mh(tmp_path, "train.py", "-o", "p.svg", word)
    assert done.returncode == 1 and said in done.stderr, done.stderr
    assert files(tmp_path) <= {"went on"}


def test_what_cannot_be_written_is_refused_before_the_script_runs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('ran')")
    for words, kind, said in (
        ([], UsageError, "Nothing says where"),
        (["-o", "graph.png"], UsageError, r"does not end with \.svg, \.html, \.dot"),
        (["-o", str(tmp_path / "none" / "graph.svg")], EnvironmentProblem, "cannot be written"),
        (["-o", "graph.svg", "--depth", "-1"], UsageError, "--depth is -1"),
        (["-o", "graph.svg", "-n", "-2"], UsageError, "-n is -2"),
    ):
        with pytest.raises(kind, match=said):
            CliRunner().invoke(graph, [*words, str(script)], catch_exceptions=False)
    with pytest.raises(UsageError, match="There is no script"):
        CliRunner().invoke(graph, ["-o", "graph.svg", str(tmp_path / "trian.py")], catch_exceptions=False)
