"""Flags on the wrong side of the script, strategies by other names, flags that cannot go together."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from manyhands.cli.common.misplaced_flags import behind_the_script, notes_on_arguments
from manyhands.cli.common.setting_options import settings_options
from manyhands.cli.main import cli
from manyhands.cli.start.run import EXAMPLES, GROUPS, flags_of, run
from manyhands.errors import SpecError, UsageError
from manyhands.spec.flag_conflicts import check_flags
from manyhands.spec.load import resolve
from manyhands.spec.placement import Placement
from manyhands.strategies.choices import Mirrored, ParameterServer, Sharded
from manyhands.strategies.model_parallel import PipelineParallel, TensorParallel
from manyhands.training.worker.strategy_lookup import as_strategy

FLAGS = flags_of(run)


def asked(*words: str) -> UsageError:
    with pytest.raises(UsageError) as refused:
        cli.main(args=list(words), prog_name="mh", standalone_mode=False)
    return refused.value


def test_flags_of_the_script_before_it_are_suggested_behind_it(tmp_path: Path) -> None:
    error = asked("run", "--epochs", "3", "-n", "2", "--lr=0.1", "train.py", "data/")
    assert "mh run has no flag --epochs" in error.what
    assert list(error.fix) == ["mh run -n 2 train.py data/ --epochs 3 --lr=0.1"]
    assert asked("run", "--worker", "2", "train.py").fix[0] == "--workers, if that was meant"
    assert behind_the_script(["--epochs", "3"], FLAGS) is None, "no script, nothing to suggest"


@pytest.mark.parametrize("words", [["-n", "2", "train.py"], ["train.py", "-n", "2"]])
def test_without_a_command_the_whole_line_is_suggested_with_one(words: list[str]) -> None:
    assert list(asked(*words).fix) == [f"mh run {' '.join(words)}"]


def test_a_flag_of_ours_behind_a_script_that_does_not_mention_it_gets_a_note_and_is_passed_on() -> None:
    (note,) = notes_on_arguments(["train.py"], ["-n", "2", "x", "--elastic=1:2"], "import torch", FLAGS)
    assert note.startswith("note: -n 2 --elastic=1:2 is after train.py, so the script gets it")
    assert note.endswith("mh run -n 2 --elastic=1:2 train.py x")
    (note,) = notes_on_arguments(["-m", "pkg.train"], ["--workers", "2"], "", FLAGS)
    assert note.endswith("mh run --workers 2 -m pkg.train")


@pytest.mark.parametrize(
    ("arguments", "source"),
    [
        (["-n", "2"], 'parser.add_argument("-n")'),
        (["--seed", "1"], 'parser.add_argument("--seed", type=int)'),
        (["--run-dir", "a"], "class Arguments:\n    run_dir: str"),
        (["--run_dir", "a"], "parser.add_argument('--run-dir')"),
        (["--", "-n", "2"], ""),
        (["--epochs", "2"], ""),
    ],
)
def test_what_a_script_may_own_gets_no_note(arguments: list[str], source: str) -> None:
    assert notes_on_arguments(["train.py"], arguments, source, FLAGS) == []


def test_other_names_of_the_same_strategy_are_taken_everywhere() -> None:
    kinds = {
        "ddp": Mirrored,
        "DP": Mirrored,
        "fsdp": Sharded,
        "zero3": Sharded,
        "tp": TensorParallel,
        "pp": PipelineParallel,
    }
    assert all(type(as_strategy(name)) is kind for name, kind in (kinds | {"ps": ParameterServer}).items())
    assert [as_strategy(name).level for name in ("zero1", "zero2", "fsdp")] == ["optimizer", "gradients", "parameters"]
    assert resolve(arguments={"strategy": "DDP"}, environ={}).spec.train.strategy == "mirrored"
    assert resolve(environ={"MANYHANDS_STRATEGY": "fsdp"}).spec.train.strategy == "sharded"

    @click.command()
    @settings_options
    def command(**options: object) -> object:
        return options["strategy"]

    assert command.main(args=["--strategy", "tp"], standalone_mode=False) == "tensor"
    with pytest.raises(UsageError, match=r"sharded"):
        command.main(args=["--strategy", "zero1"], standalone_mode=False)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"strategy": "single", "workers": 2}, "this run has 2"),
        ({"strategy": "mirrored", "servers": 1}, "does not use any"),
        ({"strategy": "central_storage", "workers": 2, "plane": "gloo"}, "they share none"),
        ({"elastic": "1:2", "reducer": "int8"}, "lost with the worker"),
    ],
)
def test_flags_that_cannot_go_together_are_refused_before_anything_starts(flags: dict[str, object], words: str) -> None:
    placement = Placement(workers=2)
    with pytest.raises(SpecError, match=words):
        check_flags(resolve(flags=flags, environ={}), placement)
    # What is not a flag may still be changed by the script.
    check_flags(resolve(arguments=flags, environ={}), placement)


def test_every_flag_of_run_has_its_place_in_the_help_and_there_are_seven_examples() -> None:
    names = {option.name for option in run.params}
    assert {name for group in GROUPS.values() for name in group} <= names
    assert len(EXAMPLES) == 7
    context = click.Context(run, info_name="mh run")
    text = run.get_help(context)
    assert all(example in text for example in EXAMPLES)
    assert all(f"\n{heading}:\n" in text for heading in ("Examples", *GROUPS, "torchrun's flags, and help"))
    missing = [flag for flag in FLAGS if flag not in text]
    assert not missing


def test_the_examples_of_the_help_are_commands_that_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    for example in EXAMPLES:
        words = example.removeprefix("mh ").replace("run", "run --dry-run", 1).split()
        assert cli.main(args=words, prog_name="mh", standalone_mode=False) == 0
    assert "train.strategy = sharded" in capsys.readouterr().out
