"""Real launchers for the control plane's tests: started, signalled, killed, and their traces read back."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from manyhands.control.processes import orphan_guard as guard

HERE = Path(__file__).parent
# Only what hangs takes so long, on the slowest machine.
HANGS_S = 60.0

PRELUDE = """
import os, sys, time, signal
from pathlib import Path
from manyhands.control.session.session import RunFacts, Session
from manyhands.spec.load import own_identity
HERE = Path(__file__).parent
IDENTITY = own_identity()
RANK = IDENTITY.rank
def mark(name):
    temporary = HERE / f".{name}.{os.getpid()}"
    temporary.write_text(str(os.getpid()))
    temporary.rename(HERE / name)
def wait_for(name):
    while not (HERE / name).exists():
        time.sleep(0.01)
def join(**facts):
    session = Session(IDENTITY)
    session.join(RunFacts(**facts))
    return session
"""


def until(condition: Callable[[], Any], timeout_s: float = HANGS_S, what: str = "it") -> Any:
    """Wait for something to become true; the test fails when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError(f"{what} did not happen within {timeout_s:g} s")


def alive(pid: int) -> bool:
    """Still running; a zombie that its parent has not reaped is not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _runs(process: psutil.Process, module: str) -> bool:
    try:
        return module in process.cmdline()
    except psutil.Error:
        return False


class Launched:
    def __init__(self, folder: Path, number: int, request: dict[str, Any], temp: Path) -> None:
        self.folder, self.temp = folder, temp
        self._notes = folder / f"notes-{number}.jsonl"
        self._notes.touch()
        file = folder / f"request-{number}.json"
        file.write_text(json.dumps(request))
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "launcher.py"), str(file), str(self._notes)],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(temp)},
        )
        self.out, self.err = "", ""

    def wait(self, timeout_s: float = HANGS_S) -> int:
        out, err = self.process.communicate(timeout=timeout_s)
        self.out, self.err = out.decode(), err.decode()
        return self.process.returncode

    def notes(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._notes.read_text().splitlines() if line.endswith("}")]

    def said(self) -> list[str]:
        return [note["line"] for note in self.notes() if note["kind"] == "say"]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [note["event"] for note in self.notes() if note["kind"] == "event" and note["event"]["event"] == name]

    def failure(self) -> dict[str, Any]:
        (note,) = [note for note in self.notes() if note["kind"] == "failure"]
        return note

    def wait_for(self, name: str) -> str:
        """A file that a worker marks; returns its content."""
        path = self.folder / name

        def there() -> bool:
            assert self.process.poll() is None or path.exists(), f"the launcher ended before {name}: {self._dump()}"
            return path.exists()

        until(there, what=name)
        return path.read_text()

    def _dump(self) -> str:
        self.wait()
        return f"{self.process.returncode}\n{self.out}\n{self.err}\n{self.notes()}"

    def descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def coordinator(self) -> psutil.Process:
        return until(
            lambda: next((p for p in self.descendants() if _runs(p, "manyhands.control.coordinator.process")), None)
        )

    def guard(self) -> psutil.Process:
        return until(lambda: next((p for p in self.descendants() if _runs(p, guard.__file__)), None))

    def run_dir(self) -> Path:
        (path,) = (self.folder / "runs").iterdir()
        return path


class Launcher:
    """`launcher(script, workers=2, ...)`: start a run of a script given as text, or of a command given as a dict."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # A directory of our own in a short place: Unix socket paths are limited, and pytest's are long.
        self.temp = Path(f"/tmp/mht{os.getpid()}-{time.monotonic_ns() % 10**9}")
        self.temp.mkdir(mode=0o700)
        self._started: list[Launched] = []

    def __call__(
        self,
        script: str | None = None,
        *,
        command: dict[str, Any] | None = None,
        name: str = "train.py",
        key: bytes | None = None,
        **request: Any,
    ) -> Launched:
        if script is not None:
            (self.folder / name).write_text(PRELUDE + textwrap.dedent(script))
            command = {"kind": "script", "target": name, "args": []}
        if key is not None:
            request["key"] = base64.b64encode(key).decode()
        launched = Launched(self.folder, len(self._started), {"command": command, **request}, self.temp)
        self._started.append(launched)
        return launched

    def sockets_left(self) -> list[str]:
        return [str(path) for path in self.temp.glob("mh-*")]

    def close(self) -> None:
        for launched in self._started:
            if launched.process.poll() is None:
                launched.process.send_signal(signal.SIGKILL)
            launched.process.communicate(timeout=HANGS_S)
        until(lambda: not self.sockets_left(), what="removal of the socket directories")
        for path in sorted(self.temp.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        self.temp.rmdir()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(tmp_path)
    yield made
    made.close()


@pytest.fixture
def elastic(launcher: Launcher) -> Callable[..., Any]:
    """Starts elastic runs: `elastic(body, workers=2)`; see `elastic_run.Elastic`."""
    from tests.control.elastic_run import PLAIN, Elastic  # which imports from here

    return lambda body=PLAIN, **request: Elastic(launcher, body, **request)
