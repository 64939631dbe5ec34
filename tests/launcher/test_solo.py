"""How a script that is its own only worker ends: what it says, where, and what it leaves in the run directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.control.run_directory import read_run

pytestmark = pytest.mark.slow

SCRIPT = """
import sys, torch, manyhands as mh
what = sys.argv[1]
def loss(model, batch):
    return model(batch).mean() * (float("nan") if what == "nan" and trainer.step >= 2 else 1)
trainer = mh.Trainer(torch.nn.Linear(4, 1), loss, lambda params: torch.optim.SGD(params, lr=0.1), slices=2)
trainer.fit(torch.randn(16, 4), epochs=1, batch_size=1 if what == "small" else 4)
sys.exit(3)
"""


def run(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    argv = ["sh", "-c", command]  # what people paste goes through a shell; the command holds names of ours only
    return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)


def test_what_cannot_work_names_the_line_of_the_script(tmp_path: Path) -> None:
    done = run(tmp_path, "python train.py small")
    assert done.returncode == 2
    assert "batch_size is 1, but every batch is cut into 2 slices" in done.stderr
    assert "  asked for in: train.py line 7\n  try: batch_size=2\n" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_the_command_that_resumes_can_be_pasted(tmp_path: Path) -> None:
    folder = tmp_path / "a name with spaces"
    folder.mkdir()
    failed = run(folder, "python train.py nan")
    assert failed.returncode == 1
    assert 'Traceback (most recent call last):\n  File "' in failed.stderr
    found = re.search(r"  resume: (.*)\n$", failed.stderr)
    assert found, "what to type comes last" + failed.stderr
    assert failed.stderr.count("NonFinite: ") == 1, "and the error once"
    assert "resumed at step" in run(folder, found[1]).stderr


def test_a_script_that_exits_with_a_code_has_not_finished_its_run(tmp_path: Path) -> None:
    done = run(tmp_path, "MANYHANDS_RUN_DIR=run python train.py exit")
    assert done.returncode == 3
    assert "ended with exit code 3 at step 4" in done.stderr
    record = read_run(tmp_path / "run")
    assert (record.status, record.exit_code) == ("failed", 3)


def run_line(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    (folder / "ask.py").write_text(f"import sys, manyhands as mh\n{line}\n")
    return subprocess.run([sys.executable, "ask.py"], cwd=folder, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("mh.launch(print, object(), workers=2)", "argument 0 is a"),
        ("mh.dispatch.Cluster(workers=0)", "cannot run steps"),
        ("mh.launch(print, workers=0)", "workers is 0, but must be at least 1"),
    ],
)
def test_what_is_asked_wrongly_of_processes_ends_with_2_and_the_line(tmp_path: Path, call: str, said: str) -> None:
    done = run_line(tmp_path, call)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert said in done.stderr and "  asked for in: ask.py line 2" in done.stderr


def test_settings_that_cannot_work_end_with_2_and_name_line_and_setting(tmp_path: Path) -> None:
    done = run_line(tmp_path, 'mh.ParameterServer(mode="asynch")')
    assert done.returncode == 2
    assert done.stderr.startswith("SpecError: mode is 'asynch'.\n  asked for in: ask.py line 2, mh.ParameterServer\n")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("mh.Single(); 1 / 0", 1, "line 2, in <module>\n    mh.Single(); 1 / 0\n"),
        ("sys.excepthook = lambda *of: print('theirs'); mh.Single(); 1 / 0", 1, ""),
        ("mh.Single(); sys.exit(7)", 7, ""),
    ],
)
def test_endings_that_are_not_ours_stay_as_they_are(tmp_path: Path, line: str, code: int, said: str) -> None:
    done = run_line(tmp_path, line)
    assert done.returncode == code and said in done.stderr
    assert done.stdout == ("theirs\n" if "theirs" in line else "")
