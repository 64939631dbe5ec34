"""Every command on docs/scheduling.md is accepted unchanged, and the trace on it is played."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from manyhands.cli.main import cli
from manyhands.scheduler.local_runs import run_command
from manyhands.scheduler.queue_folder import QueueFolder

TEXT = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text()
COMMANDS = re.findall(r"^(mh [^#\n]+)", "".join(re.findall(r"```sh\n(.*?)```", TEXT, re.S)), re.M)
(TRACE,) = re.findall(r"```json\n(.*?)```", TEXT, re.S)


def test_the_page_shows_every_command_of_the_queue():
    shown = {shlex.split(command)[1] for command in COMMANDS}
    assert shown == {"submit", "cluster", "queue", "cancel"}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_takes_what_the_page_shows(command):
    words, group = shlex.split(command)[1:], cli
    while isinstance(group, click.Group):
        name, *words = words
        found = group.get_command(click.Context(group), name)
        assert found is not None
        group = found
    group.make_context(name, words)


def test_the_trace_on_the_page_is_played_as_text_and_as_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("trace.jsonl").write_text(TRACE)
    for command in [command for command in COMMANDS if "simulate" in command]:
        done = CliRunner().invoke(cli, shlex.split(command)[1:])
        assert done.exit_code == 0, done.output
        if "--json" in command:
            facts = json.loads(done.output)
            assert [job["name"] for job in facts["jobs"]] == ["a", "b", "c"]
            assert facts["mean_completion_s"] > 0
        else:
            assert "mean completion" in done.output.splitlines()[-1]


def test_bad_requests_are_refused_with_words_and_leave_no_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MANYHANDS_QUEUE", str(tmp_path / "queue"))
    Path("train.py").write_text("")
    for words, says in [
        (["submit", "--least", "4", "--most", "2", "train.py"], "--most 2 is below --least 4"),
        (["submit", "--priority", "0", "train.py"], "--priority is 0, but must be above 0"),
        (["submit", "absent.py"], "There is no script absent.py"),
        (["submit", "--after", "3", "train.py"], "There is no job 3"),
        (["queue", "--why", "3"], "There is no job 3"),
        (["cancel", "3"], "There is no job 3"),
        (["cluster", "simulate", "absent.jsonl"], "Cannot read the trace absent.jsonl"),
    ]:
        done = CliRunner().invoke(cli, words)
        assert says in str(done.exception), (words, done.output)
    assert "There is no job in" in CliRunner().invoke(cli, ["queue"]).output


def test_a_queue_that_others_can_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("queue").mkdir()
    Path("queue").chmod(0o755)
    done = CliRunner().invoke(cli, ["submit", "--dir", "queue", "train.py"])
    assert "has mode 0755, but must be private" in str(done.exception)


def test_a_job_submitted_by_a_worker_is_no_part_of_its_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    monkeypatch.setenv("MANYHANDS_AGENT", "ipc:///nowhere/agent")
    monkeypatch.setenv("RANK", "3")
    done = CliRunner().invoke(cli, ["submit", "--dir", "queue", "--exact", "--slices", "8", "train.py", "--lr", "0.1"])
    assert done.exit_code == 0, done.exception
    found = QueueFolder(tmp_path / "queue").submission("1")
    assert "MANYHANDS_AGENT" not in found.environment
    command = run_command(found, tmp_path / "run", 1, 2)
    assert command[command.index("--threads") :] == [
        *("--threads", "2", "--ui", "plain", "--slices", "8", "--exact"),
        *(str(tmp_path / "train.py"), "--lr", "0.1"),
    ]
