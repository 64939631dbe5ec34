"""`mh tune` with real launches of a script that needs no torch: it reports steps whose speed the test decides."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manyhands.cli.main import cli
from manyhands.errors import SpecError, UsageError
from manyhands.spec.config_file import with_settings, write_settings
from manyhands.spec.load import resolve

# Two workers are as fast as one and a half, the system's allocator costs a fifth.
SCRIPT = """
import pathlib, sys, time
from manyhands.control.session.session import RunFacts, Session
from manyhands.events import RunStarted, StepDone
from manyhands.spec.load import in_trial, own_identity

place = own_identity()
session = Session(place)
session.join(RunFacts(script="train.py", run_dir="given by the script"))
assert in_trial()
assert place.flags["run.run_dir"] == str(session.run_dir) and "manyhands-trial-" in str(session.run_dir)
if "fail" in sys.argv:
    raise RuntimeError("no such data")
if "hang" in sys.argv:
    time.sleep(300)
if "quit" in sys.argv:
    sys.exit(print("nothing to train", file=sys.stderr))
if "fail-at-2" in sys.argv and place.world_size == 2:
    raise RuntimeError("two are too many")
if place.rank == 0:
    session.publish(
        RunStarted(
            run="r", strategy="mirrored", workers=place.world_size, slices=place.world_size, precision="fp32",
            threads=place.flags["launch.threads"], origins={"launch.threads": "constructor"},
        )
    )
took_s = 0.03 / (1.5 if place.world_size == 2 else 1) * (1.2 if place.flags.get("launch.allocator") == "system" else 1)
for step in range(1, 5 if "short" in sys.argv else 1_000_000):
    time.sleep(0 if "flood" in sys.argv else 0.002)
    if place.rank == 0:
        event = StepDone(step=step, epoch=0, loss=0.1, rows=60, samples_per_s=1.0, phases={}, took_s=took_s)
        session.publish(event)
session.close()
if "short" not in sys.argv:
    pathlib.Path("the script went on").touch()
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "temporary").mkdir()
    yield tmp_path
    assert not list((tmp_path / "temporary").glob("manyhands-trial-*")), "a trial's directory stayed"
    assert {path.name for path in tmp_path.iterdir()} <= {"train.py", "temporary", "run.toml"}


# A launcher that would have to be killed takes longer than the tests wait.
TUNE = """
from manyhands.cli.main import main
from manyhands.trials import trial_runner
trial_runner.GONE_AFTER_S = 300.0
main()
"""


def start(folder: Path, *words: str) -> subprocess.Popen:
    hidden = ("MANYHANDS_", "PET_", "TF_CONFIG")
    environ = {name: text for name, text in os.environ.items() if not name.startswith(hidden)}
    paths = {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(folder / "temporary")}
    return subprocess.Popen(
        [sys.executable, "-c", TUNE, "tune", *words],
        cwd=folder, env={**environ, **paths}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def tune(folder: Path, *words: str) -> tuple[int, str, str]:
    child = start(folder, *words)
    try:
        out, err = child.communicate(timeout=100)
    finally:
        child.kill()
        child.communicate()
    return child.returncode, out, err


QUICK = ("--seconds", "0.3", "--threads", "1", "--memory-format", "contiguous")


@pytest.mark.long
def test_the_fastest_split_is_chosen_and_written_and_the_rest_of_the_config_stays(folder):
    (folder / "run.toml").write_text("# mine\n[launch]\nworkers = 7  # once\n\n[train]\nclip_norm = 1.0\n")
    code, out, err = tune(folder, "-n", "2", *QUICK, "--write", "run.toml", "train.py", "--lr", "0.1")
    assert code == 0, err
    lines = [line.split() for line in out.splitlines()]
    assert lines[1] == ["1", "1", "1", "contiguous", "keep", "fp32", "2000", "0.0%", "1.00", "default"]
    assert lines[2] == ["2", "1", "2", "contiguous", "keep", "fp32", "3000", "0.0%", "1.50", "chosen"]
    assert lines[3] == ["2", "1", "2", "contiguous", "system", "fp32", "2500", "0.0%", "1.25"]
    assert lines[4] == lines[1], "the default once more"
    assert "chosen: 2 workers x 1 thread, contiguous, keep, fp32: 1.50 times the rows per second" in out
    assert "bf16 was not tried" in out
    assert "The script sets threads: flags override that, a config file does not." in out
    assert "use it: mh run --config run.toml --threads 1 --memory-format contiguous train.py --lr 0.1" in out
    assert (folder / "run.toml").read_text().startswith("# mine\n[launch]\nworkers = 2  # once\n")
    spec = resolve(environ={}, config_file=str(folder / "run.toml")).spec
    assert (spec.launch.workers, spec.launch.threads, spec.launch.allocator) == (2, 1, "keep")
    assert spec.train.clip_norm == 1.0
    assert err.count(" rows/s") == 4


def test_json_has_the_trials_the_choice_and_the_command(folder):
    pins = (*QUICK, "--allocator", "keep")
    code, out, err = tune(folder, "-n", "2", *pins, "--json", "train.py", "fail-at-2")
    assert code == 0, err
    printed = json.loads(out)
    assert [one["failed"] for one in printed["results"]] == ["", "RuntimeError: two are too many"]
    assert printed["choice"]["trial"]["workers"] == 1
    assert printed["flags"] == {}
    assert printed["command"].startswith("mh run --threads 1") and printed["command"].endswith(" train.py fail-at-2")


@pytest.mark.long
def test_a_training_shorter_than_a_trial_is_measured_by_the_steps_it_has(folder):
    code, out, err = tune(folder, "-n", "1", *QUICK, "--allocator", "keep", "train.py", "short")
    assert code == 0, err
    assert out.splitlines()[1].split()[6] == "2000"


@pytest.mark.long
def test_a_trial_with_more_output_than_is_read_ends_at_once(folder):
    code, _, err = tune(folder, "-n", "1", *QUICK, "--allocator", "keep", "train.py", "flood")
    assert code == 0, err


def test_a_script_that_fails_is_reported_with_its_error(folder):
    code, out, err = tune(folder, *QUICK, "train.py", "fail")
    assert (code, out) == (1, "")
    assert "TrainingFailed: The script fails, so there is nothing to tune." in err
    assert "RuntimeError: no such data" in err and "Traceback" in err


def test_a_script_that_never_steps_is_given_up(folder):
    code, _, err = tune(folder, *QUICK, "--wait", "1", "train.py", "hang")
    assert code == 1
    assert "The script cannot be measured: no step within 1 s." in err
    assert "  try: --wait 2" in err


@pytest.mark.long
def test_a_script_that_ends_without_a_step_is_reported_with_its_last_words(folder):
    code, _, err = tune(folder, *QUICK, "train.py", "quit")
    assert code == 1
    assert "the training ended without a step of mh.Trainer or mh.join. Its last output:\n  nothing to train\n" in err


def test_a_signal_ends_the_trial_and_leaves_nothing(folder):
    child = start(folder, *QUICK, "--wait", "200", "train.py", "hang")
    try:
        deadline = time.monotonic() + 100
        while not list((folder / "temporary").glob("manyhands-trial-*/run/run.json")):
            assert time.monotonic() < deadline and child.poll() is None
            time.sleep(0.05)
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=100)
    finally:
        child.kill()
        child.communicate()
    assert child.returncode == 143


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["-n", "0", "train.py"], "-n is 0, but must be at least 1."),
        (["--seconds", "0", "train.py"], "--seconds is 0, but must be above 0"),
        (["--seconds", "nan", "train.py"], "--seconds is nan, but must be above 0"),
        (["--wait", "-1", "train.py"], "--wait is -1, but must be above 0"),
        (["trian.py"], "There is no script trian.py."),
        (["--write", "nowhere/run.toml", "train.py"], "is not a writable directory."),
        (["--write", "broken.toml", "train.py"], "Not valid TOML"),
        (["--config", "none.toml", "train.py"], "Cannot read the config file none.toml"),
    ],
)
def test_what_cannot_work_is_refused_before_any_trial(words, problem, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "broken.toml").write_text("[launch\n")
    with pytest.raises(UsageError, match=problem.replace(".", r"\.")):
        cli.main(["tune", *words], standalone_mode=False)
    assert "rows/s" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "[launch]\nworkers = 2\n"),
        ("[launch]\n", "[launch]\nworkers = 2\n"),
        ("[launch]\nworkers=1# one\n", "[launch]\nworkers=2# one\n"),
        ('[launch]\n"workers" = 1\n', '[launch]\n"workers" = 2\n'),
        ("launch.workers = 1\n", "launch.workers = 2\n"),
        ("[launch]\nui = 'none'\n\n[run]\nseed = 1\n", "[launch]\nui = 'none'\nworkers = 2\n\n[run]\nseed = 1\n"),
        ("[run]\nseed = 1", "[run]\nseed = 1\n\n[launch]\nworkers = 2\n"),
    ],
)
def test_a_setting_finds_its_place_in_a_config_file(before, after):
    assert with_settings(before, {"launch": {"workers": 2}}) == after


@pytest.mark.parametrize("text", ["launch = {workers = 1}\n", '[run]\nrun_dir = """\n[launch]\nworkers = 1\n"""\n'])
def test_a_config_that_cannot_be_changed_by_lines_is_left_alone(text, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match="cannot be added to this file") as caught:
        write_settings(str(path), {"launch": {"workers": 2}})
    assert caught.value.fix == ("[launch] workers = 2",)
    assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_a_written_config_keeps_its_mode_and_the_link_to_it(tmp_path):
    (tmp_path / "real.toml").write_text("[run]\nseed = 3\n")
    (tmp_path / "real.toml").chmod(0o600)
    (tmp_path / "run.toml").symlink_to("real.toml")
    write_settings(str(tmp_path / "run.toml"), {"launch": {"allocator": "system"}})
    assert (tmp_path / "run.toml").is_symlink()
    assert (tmp_path / "real.toml").stat().st_mode & 0o777 == 0o600
    spec = resolve(environ={}, config_file=str(tmp_path / "run.toml")).spec
    assert (spec.run.seed, spec.launch.allocator) == (3, "system")
