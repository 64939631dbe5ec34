"""Runs over two hosts: servers and some workers on the first, other workers on the second."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.elastic.conftest import Run
from tests.parameter_server.conftest import TRAINING

Prefixes = tuple[Sequence[str], Sequence[str]]


class TwoHosts(Run):
    """The agent of the chief's host prints the result, of the worker that was chief at the end."""

    def wait(self, timeout_s: float = 200.0) -> dict[str, Any]:
        code = self.process.wait(timeout_s)
        assert code == 0, f"exit code {code}:\n{self.output()[-6000:]}"
        _end(self.second)
        printed = [(self.folder / name).read_text() for name in ("results.txt", "second.txt")]
        [line] = [line for text in printed for line in text.splitlines() if line.startswith("RESULT ")]
        found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
        return found

    second: subprocess.Popen[bytes]


@contextmanager
def two_hosts_run(
    folder: Path,
    asked: dict[str, Any],
    *options: str,
    address: str = "127.0.0.1",
    prefixes: Prefixes = ((), ()),
) -> Iterator[TwoHosts]:
    """`options` are the first host's; the second has one worker. `prefixes` put each into a separate network."""
    together = ["--hosts-wanted", "2", "--listen", address, "--join-file", str(folder / "run.join")]
    run = TwoHosts(folder, asked, ["--ui", "plain", *together, *options], TRAINING, prefixes[0])
    second = None
    try:
        run.until((folder / "run.join").exists, "the join file")
        agent = [sys.executable, "-m", "manyhands.cli.main", "agent", "--join", "run.join", "-n", "1"]
        with open(folder / "second.txt", "w") as output:
            run.second = second = subprocess.Popen([*prefixes[1], *agent], cwd=folder, stdout=output, stderr=output)
        yield run
    finally:
        run.close()
        if second is not None:
            _end(second)


def _end(agent: subprocess.Popen[bytes]) -> None:
    """It ends since the run has ended; else it is killed."""
    deadline = time.monotonic() + 60
    while agent.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    if agent.poll() is None:
        agent.kill()
        agent.wait()
