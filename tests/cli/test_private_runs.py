"""What a run writes is its owner's alone, and errors for other users name the owner."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from manyhands.control.processes.worker_output import WorkerLog
from manyhands.events import Warned
from manyhands.observe.recorder import Recorder
from manyhands.private_files import open_private, write_private
from manyhands.training.loop.recorded_calls import RecordedCalls


def test_files_are_private_with_any_umask_and_any_file_that_was_there_before(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        (tmp_path / "events").mkdir()
        (tmp_path / "events" / "chief.jsonl").write_text("")
        with Recorder(tmp_path / "events" / "chief.jsonl") as recorder:
            recorder.emit(Warned(text="seen"))
        calls = RecordedCalls(tmp_path / "calls", writes=lambda: True, warn=lambda text: None)
        calls.begin("fit")
        calls.finish([])
        log = WorkerLog("rank-0")
        log.move_to(tmp_path / "logs")
        log.write("stdout", b"text")
        log.close()
        write_private(tmp_path / "placement.txt", b"text")
    finally:
        os.umask(before)
    modes = {str(p.relative_to(tmp_path)): stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*") if p.is_file()}
    assert len(modes) == 5
    assert set(modes.values()) == {0o600}, modes


def test_a_symbolic_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic"):
        open_private(tmp_path / "link", os.O_WRONLY | os.O_CREAT)
    recorder = Recorder(tmp_path / "link")
    recorder.emit(Warned(text="not here"))
    recorder.close()
    assert recorder.dropped == 1
    assert (tmp_path / "target").read_text() == "precious"


AS_NOBODY = """
import importlib, os, sys
from manyhands.cli.main import main
for name in ("cli.runs.status", "cli.runs.logs", "cli.runs.stop", "cli.runs.ckpt", "checkpoint.reader"):
    importlib.import_module(f"manyhands.{name}")  # another user may not be able to read them
os.setgroups([]), os.setgid(65534), os.setuid(65534)
main(sys.argv[1:])
"""


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="NOT SHOWN HERE: becoming another user needs root")
@pytest.mark.parametrize("command", ["status", "logs", "stop", "ckpt ls"])
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_another_users_run_is_named_with_its_owner_and_mode(command: str, mode: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        run = Path(folder) / "theirs"
        (run / "checkpoints").mkdir(parents=True)
        (run / "run.json").write_text('{"run": "theirs", "created": "2026-11-18T00:00:00+0000"}')
        (run / "run.json").chmod(0o600)
        (run / "checkpoints").chmod(0o700)
        run.chmod(mode)
        words = [sys.executable, "-c", AS_NOBODY, *command.split(), str(run)]
        done = subprocess.run(words, capture_output=True, text=True, cwd="/", timeout=100)
    assert done.returncode == 3, done.stderr
    closed = "0700" if mode == 0o700 or "ckpt" in command else "0600"
    assert f"belongs to root and has mode {closed}" in done.stderr
    assert "bug" not in done.stderr
