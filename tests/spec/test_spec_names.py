"""Paths and arguments that are no text are refused in words, before anything is written."""

from __future__ import annotations

import json
import os
import sys

import pytest

from manyhands.cli.main import cli, report
from manyhands.control.agent.preflight import check_command
from manyhands.control.messages.launch_request import WorkerCommand
from manyhands.control.run_directory import RunDirectory
from manyhands.errors import UsageError
from manyhands.spec.load import resolve
from manyhands.spec.undecodable_names import check_name, readable

NOT_UTF8 = os.fsdecode(b"run\xff")
IN_ASCII = "run\udcc3\udca9"  # "run\xe9", as a process has it whose locale knows ASCII alone


def test_bytes_that_are_no_text_are_named_and_can_be_printed():
    with pytest.raises(UsageError, match=r"The file run\\xff is not UTF-8") as caught:
        check_name(NOT_UTF8, "The file")
    str(caught.value).encode()
    with pytest.raises(UsageError, match="run\xe9 has non-ASCII characters") as caught:
        check_name(IN_ASCII, "The file")
    assert caught.value.fix == ("LC_ALL=C.UTF-8 in front of the command",)
    check_name("run\xe9", "The file")
    assert readable("run\xe9") == "run\xe9"


def test_a_run_directory_with_such_a_name_is_refused_and_not_made(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"The run directory .*is not UTF-8"):
        RunDirectory.adopt(tmp_path / NOT_UTF8, False)
    assert not list(tmp_path.iterdir())
    (tmp_path / NOT_UTF8).mkdir()
    monkeypatch.chdir(tmp_path / NOT_UTF8)
    with pytest.raises(UsageError, match=r"The run directory .*is not UTF-8"):
        RunDirectory.adopt("runs/a", False)


def test_a_run_alone_keeps_its_arguments_though_one_is_no_text(tmp_path):
    directory = RunDirectory.adopt(tmp_path / "run", False, command=["train.py", NOT_UTF8])
    directory.release()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["command"] == ["train.py", "run\\xff"]


@pytest.mark.parametrize("source", ["environ", "arguments", "flags"])
def test_a_setting_that_is_no_text_is_refused_wherever_it_comes_from(source):
    name = "MANYHANDS_RUN_DIR" if source == "environ" else "run_dir"
    with pytest.raises(UsageError, match=r"run_dir, set by .*is not UTF-8"):
        resolve(**{"environ": {}, source: {name: NOT_UTF8}})


def test_a_script_or_an_argument_of_it_that_is_no_text_is_refused(tmp_path):
    script = tmp_path / NOT_UTF8
    script.touch()
    with pytest.raises(UsageError, match=r"The path of the script, .*is not UTF-8"):
        check_command(WorkerCommand("script", str(script), []))
    with pytest.raises(UsageError, match=r"argument 2, .*is not UTF-8"):
        check_command(WorkerCommand("script", __file__, ["fine", NOT_UTF8]))


@pytest.mark.parametrize("command", ["run", "status", "logs", "stop", "ckpt"])
def test_every_command_refuses_a_word_that_is_no_text_with_exit_2(command, capsys):
    with pytest.raises(UsageError) as caught:
        cli.main([command, NOT_UTF8], standalone_mode=False)
    assert report(caught.value, sys.stderr) == 2
    assert "run\\xff is not UTF-8" in capsys.readouterr().err


def test_all_runs_are_listed_as_json_though_one_has_such_a_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    RunDirectory.adopt("runs/a", False).release()
    os.rename("runs/a", f"runs/{NOT_UTF8}")
    cli.main(["status", "--json"], standalone_mode=False)
    (found,) = json.loads(capsys.readouterr().out)
    assert found["path"] == "runs/run\\xff"
