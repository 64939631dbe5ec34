"""Every command that launching.md, clusters.md and embeddings.md show is accepted by the command line unchanged."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from manyhands.cli.main import cli
from manyhands.spec.cluster import from_tf_config

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "launching.md").read_text()


def lines_of(text):
    return [line for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.splitlines() if line]


LINES = lines_of(TEXT)
CLUSTERS = lines_of((DOCS / "clusters.md").read_text())
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "0",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMIX_NAMESPACE": "1",
}
RUNS = (
    [line for line in LINES if re.search(r"\bmh run\b", line)]
    + [line for line in CLUSTERS if re.search(r"\bmh run\b", line)]
    + lines_of((DOCS / "embeddings.md").read_text())
)


@pytest.fixture
def in_a_project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in [name for name in os.environ if name.startswith(("MANYHANDS_", "PET_", "TF_CONFIG"))]:
        monkeypatch.delenv(name)
    (tmp_path / "train.py").touch()
    (tmp_path / "run.toml").touch()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").touch()
    cli.main(["keygen", "run.key"], standalone_mode=False)


@pytest.mark.parametrize("line", RUNS)
def test_a_documented_run_gets_as_far_as_its_plan(in_a_project, line, monkeypatch, capsys):
    words = shlex.split(line.partition(" > ")[0], comments=True)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    if words[0] in ("srun", "mpirun"):
        for name, text in (STEP if words[0] == "srun" else MPI).items():
            monkeypatch.setenv(name, text)
        del words[: words.index("mh")]
    assert words[:2] == ["mh", "run"]
    capsys.readouterr()
    cli.main(["run", "--dry-run", "--json", *words[2:]], standalone_mode=False)
    plan = json.loads(capsys.readouterr().out)
    assert plan["commands"] if "placer" in plan else plan["workers"] >= 1


def test_the_documented_tf_config_is_right():
    (text,) = re.findall(r"export TF_CONFIG='(.*)'", TEXT)
    task = from_tf_config(text)
    assert (task.job, task.chief_address) == ("worker", ("10.0.0.1", 2222))


def test_the_other_documented_commands_run(in_a_project, capsys):
    shown = [shlex.split(line, comments=True) for line in LINES if line.startswith("mh config")]
    assert len(shown) == 2
    for words in shown:
        cli.main(words[1 : words.index(">") if ">" in words else None], standalone_mode=False)
        assert "precision" in capsys.readouterr().out
