"""`mh ckpt`, and every example of docs/checkpoints.md."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

from manyhands.cli.runs.ckpt import ckpt
from manyhands.errors import UsageError
from tests.checkpoint.checkpoint_cases import must_save

DOCS = Path(__file__).parents[2] / "docs" / "checkpoints.md"


@pytest.fixture
def run(tmp_path):
    """A run directory with steps 1 and 2."""
    for step in (1, 2):
        must_save(tmp_path / "run" / "checkpoints", step, results={"loss": 0.5})
    return tmp_path / "run"


def call(*arguments, code=0):
    done = CliRunner().invoke(ckpt, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    return done.stdout


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_ls_shows_the_newest_first(run, below):
    lines = call("ls", run / below).splitlines()
    assert lines[0].split()[:3] == ["step", "epoch", "state"]
    assert [line.split()[0] for line in lines[1:]] == ["2", "1"]
    assert "loss=0.5" in lines[1]


def test_ls_json_says_everything(run):
    newest, _ = json.loads(call("ls", run, "--json"))["checkpoints"]
    assert newest["step"] == 2
    assert newest["state"] == "ok"
    assert newest["generation"] == "1.1"
    assert newest["results"] == {"loss": 0.5}
    assert newest["num_bytes"] > 0


def test_verify_ends_with_3_and_names_the_damaged_file(run):
    assert "damaged" not in call("verify", run)
    shard = run / "checkpoints" / "step-00000002" / "shard-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    assert str(shard) in call("verify", run, code=3)
    assert [row["state"] for row in json.loads(call("verify", run, "--json", code=3))["checkpoints"]] == [
        "damaged",
        "ok",
    ]
    call("verify", f"{run}@1")
    call("verify", run / "checkpoints" / "step-00000001")
    assert "damaged" not in call("ls", run), "ls does not read the data"


def test_export_takes_the_newest_that_verifies_or_the_step_asked_for(run, tmp_path):
    def exported(*arguments):
        call("export", *arguments, "-o", tmp_path / "m.safetensors", "--force")
        return safetensors.torch.load_file(tmp_path / "m.safetensors")["layer/weight"][0, 0].item()

    assert exported(run) == 2.0
    assert exported(f"{run}@1") == 1.0
    os.truncate(run / "checkpoints" / "step-00000002" / "state.json", 0)
    assert exported(run) == 1.0
    assert json.loads(call("export", run, "-o", tmp_path / "m.pt", "--json"))["format"] == "pt"
    assert torch.load(tmp_path / "m.pt", weights_only=True).keys() == {"layer/weight"}


def test_wrong_places_are_usage_errors_that_say_what_to_type(run, tmp_path):
    def error(*arguments):
        done = CliRunner().invoke(ckpt, [str(argument) for argument in arguments])
        assert isinstance(done.exception, UsageError), done.output
        return str(done.exception)

    assert "There is no directory" in error("ls", tmp_path / "nowhere")
    assert "no checkpoint of step 9" in error("verify", f"{run}@9")
    assert "'x' is not a step" in error("verify", f"{run}@x")
    (tmp_path / "m.safetensors").write_text("mine")
    assert "--force" in error("export", run, "-o", tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").read_text() == "mine"


def test_every_example_of_the_docs_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = DOCS.read_text()
    programs = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    commands = re.findall(r"^\$ mh ckpt (.*)$", text, re.MULTILINE)
    assert programs
    assert commands
    for program in programs:
        exec(compile(program, str(DOCS), "exec"), {})
    for command in commands:
        call(*command.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "model.safetensors", "runs"]
