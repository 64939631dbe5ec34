"""Every command and program in docs/watching.md, docs/tuning.md and docs/chaos.md is accepted unchanged."""

import re
import shlex
from pathlib import Path

import pytest

from manyhands.cli.main import cli
from manyhands.events import StepDone
from manyhands.observe.recorder import Recorder

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "watching.md").read_text()
TUNING = (DOCS / "tuning.md").read_text()
CHAOS = (DOCS / "chaos.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT + TUNING + CHAOS, re.S)
COMMANDS = re.findall(r"^(mh [^#\n]+)", "".join(BLOCKS), re.M)
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.S)


def test_there_is_something_to_check():
    assert len(COMMANDS) > 15
    assert len(PROGRAMS) == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_takes_what_the_page_shows(command):
    name, *arguments = shlex.split(command)[1:]
    subcommand = cli.get_command(None, name)
    subcommand.make_context(name, arguments)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_programs_on_the_page_run(program, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with Recorder(Path("runs/a/events/chief.jsonl")) as recorder:
        recorder.emit(StepDone(step=1, epoch=1, loss=0.5, rows=8, samples_per_s=1.0, phases={}))
    exec(compile(program, "watching.md", "exec"), {})
    assert capsys.readouterr().out in ("", "1 steps, last loss 0.5\n")
