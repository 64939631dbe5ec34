"""`mh config` and the shell around every command: origins, errors, exit codes."""

import json
import os
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path

import click
import pytest

from manyhands.cli.common.setting_options import HELP
from manyhands.cli.main import COMMANDS, cli, report
from manyhands.cli.reference import reference
from manyhands.errors import GaveUp, ManyhandsError, SpecError
from manyhands.spec.load import KEYS, resolve

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def mh(tmp_path):
    """Runs `mh` in an empty directory; returns code, stdout and stderr."""

    def run(*words: str, **environ: str) -> tuple[int, str, str]:
        clean = {name: text for name, text in os.environ.items() if not name.startswith(("MANYHANDS_", "PET_", "TF_"))}
        done = subprocess.run(
            [sys.executable, "-m", "manyhands.cli.main", *words],
            cwd=tmp_path,
            env={**clean, "PYTHONPATH": str(files("manyhands").joinpath("..")), **environ},
            capture_output=True,
            text=True,
            timeout=100,
        )
        return done.returncode, done.stdout, done.stderr

    return run


def test_show_gives_every_value_with_its_origin(mh, tmp_path):
    (tmp_path / "run.toml").write_text('[train]\nprecision = "bf16"\n')
    words = ("config", "show", "--config", "run.toml", "--run_dir", "x", "--json")
    code, out, _ = mh(*words, MANYHANDS_SEED="4")
    shown = json.loads(out)
    assert code == 0
    assert set(shown) == {key.dotted for key in KEYS.values()}
    assert shown["train.precision"] == {"value": "bf16", "origin": "run.toml line 2"}
    assert shown["run.seed"] == {"value": 4, "origin": "MANYHANDS_SEED"}
    assert shown["run.run_dir"] == {"value": "x", "origin": "--run-dir"}
    assert shown["train.slices"] == {"value": None, "origin": "default"}


def test_the_shown_toml_is_a_config_that_gives_the_same(mh, tmp_path):
    _, text, _ = mh("config", "show", "--slices", "8", "--toml")
    (tmp_path / "again.toml").write_text(text)
    assert tomllib.loads(text)["train"]["slices"] == 8
    assert resolve(environ={}, config_file=str(tmp_path / "again.toml")).spec.train.slices == 8


def test_the_schema_knows_every_section_and_refuses_other_keys(mh):
    schema = json.loads(mh("config", "schema")[1])
    assert schema["$defs"]["TrainSection"]["additionalProperties"] is False
    assert set(schema["$defs"]["RunSpec"]["properties"]) == {key.section for key in KEYS.values()}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rnu"], "Did you mean run?"),
        (["config", "show", "--presision", "bf16"], "Did you mean '--precision'?"),
        (["config", "show", "--precision", "fp8"], "'fp8' is not one of 'fp32', 'bf16', 'fp16', 'fp64'"),
        (["config", "show", "--slices", "0"], "try: --slices 1"),
        (["config", "show", "--config", "none.toml"], "Cannot read the config file none.toml"),
    ],
)
def test_a_mistake_on_the_command_line_exits_with_2_without_a_traceback(mh, words, says):
    code, out, err = mh(*words)
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


def test_an_error_says_what_where_and_what_to_type(capsys):
    code = report(SpecError("Too many.", where="run.toml line 2", fix=["fewer"]), sys.stderr)
    assert code == 2
    assert capsys.readouterr().err == "SpecError: Too many.\n  asked for in: run.toml line 2\n  try: fewer\n"


def test_each_kind_of_end_has_its_exit_code(capsys):
    assert report(GaveUp("no more"), sys.stderr) == 4
    assert report(KeyboardInterrupt(), sys.stderr) == 130
    assert report(SystemExit(75), sys.stderr) == 75
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("bug", [ZeroDivisionError("x"), ManyhandsError("impossible")])
def test_a_bug_of_ours_ends_with_70_its_traceback_and_how_to_report_it(capsys, bug):
    assert report(bug, sys.stderr) == 70
    assert "Please report it" in capsys.readouterr().err


def test_color_follows_the_usual_variables(mh):
    assert "\x1b[" not in mh("rnu")[2]
    assert "\x1b[" in mh("rnu", FORCE_COLOR="1")[2]
    assert "\x1b[" not in mh("rnu", FORCE_COLOR="1", NO_COLOR="1")[2]


def test_help_loads_no_torch_and_no_command():
    code = "import sys; from manyhands.cli.main import cli\n"
    code += "cli.main(['--help'], standalone_mode=False)\n"
    code += (
        "bad = {'torch', 'zmq', 'manyhands.cli.start.run', 'manyhands.control'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=100)


def commands():
    def walk(path, command):
        yield path, command
        if isinstance(command, click.Group):
            context = click.Context(command, info_name=path[-1])
            for name in command.list_commands(context):
                yield from walk((*path, name), command.get_command(context, name))

    yield from walk(("mh",), cli)


def test_every_command_and_every_option_has_help():
    for path, command in commands():
        assert command.help, path
        assert all(option.help for option in command.params if isinstance(option, click.Option)), path


def test_every_command_is_in_the_docs_as_it_is():
    text = (DOCS / "cli.md").read_text()
    assert all(f"## {' '.join(path)}\n" in text for path, _ in commands() if len(path) > 1)
    assert text == reference(), "python -m manyhands.cli.reference > docs/cli.md"


def test_every_command_that_does_something_speaks_json():
    for path, command in commands():
        if not isinstance(command, click.Group):
            assert any("--json" in option.opts for option in command.params), path


def test_every_setting_has_a_flag_with_help():
    assert set(HELP) == set(KEYS)
    assert set(COMMANDS) >= {"run", "agent", "stop", "config", "status", "logs", "ckpt", "doctor"}
