"""On a system other than Linux a user gets one sentence, not a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Standard modules that Windows lacks: importing one of them before that sentence is printed would fail there.
LACKING = ["fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog"]


def on(system: str, code: str) -> subprocess.CompletedProcess[str]:
    """A process in which Python reports the platform `system`, and lacks the modules that are missing there."""
    # Other packages choose their imports by platform, so they are imported before the platform is changed.
    program = "import sys, os, subprocess, tempfile, click, msgspec, importlib.metadata, concurrent.futures\n"
    program += f"sys.modules.update(dict.fromkeys({LACKING if system == 'win32' else []}))\n"
    program += f"sys.platform = {system!r}\n{code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("system", "name"), [("darwin", "macOS"), ("win32", "Windows")])
def test_a_script_on_another_system_ends_with_one_sentence_and_what_works(system: str, name: str) -> None:
    ended = on(system, "import manyhands as mh\nmh.Trainer")
    assert ended.returncode == 3
    lines = ended.stderr.splitlines()
    assert lines[0] == f"EnvironmentProblem: manyhands trains on Linux only, but this is {name}."
    assert lines[1:] and all(line.startswith("  try: ") for line in lines[1:])


def test_so_does_every_command_but_help_and_version_answer() -> None:
    code = "from manyhands.cli.main import main\nmain(['{}'])"
    ended = on("darwin", code.format("doctor"))
    assert ended.returncode == 3
    assert ended.stderr.startswith("EnvironmentProblem: manyhands trains on Linux only")
    assert "Traceback" not in ended.stderr
    answered = on("win32", code.format("--help"))
    assert answered.returncode == 0, answered.stderr
