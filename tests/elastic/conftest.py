"""Elastic runs as subjects of tests: started, watched through what their workers append, and disturbed from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from manyhands.control.session.run_client import query
from manyhands.errors import UsageError
from manyhands.observe.recorder import read_events
from manyhands.testing import RankPool
from tests.elastic.training import train

ENDLESS = {"steps": 100_000, "until": "enough"}
TRAINING = Path(__file__).with_name("training.py")
ROOT = Path(__file__).parents[2]


class Run:
    def __init__(
        self,
        folder: Path,
        asked: dict[str, Any],
        options: list[str],
        script: Path = TRAINING,
        prefix: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.directory = folder, folder / "run"
        command = [sys.executable, "-m", "manyhands.cli.main", "run", "--run-dir", str(self.directory), *options]
        results = os.open(folder / "results.txt", os.O_WRONLY | os.O_CREAT)
        output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # for scripts that import from tests
        self.process = subprocess.Popen(
            [*prefix, *command, str(script), json.dumps(asked)],
            cwd=folder, env=environment, stdout=results, stderr=output,
        )  # fmt: skip
        os.close(results)
        os.close(output)

    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    def wait(self, timeout_s: float = 200.0) -> dict[str, Any]:
        """What the chief printed at the end of a run that ended well."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended after {timeout_s:g} s:\n{self.output()[-6000:]}") from None
        assert code == 0, f"exit code {code}:\n{self.output()[-6000:]}"
        [line] = [line for line in (self.folder / "results.txt").read_text().splitlines() if line.startswith("RESULT ")]
        result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
        return result

    def enough(self) -> dict[str, Any]:
        """The same for one that was asked to train for ENDLESS steps: this ends its first call of `fit`."""
        (self.folder / "enough").touch()
        return self.wait()

    def commits(self) -> list[dict[str, Any]]:
        try:
            *lines, _ = (self.folder / "commits.jsonl").read_text().split("\n")  # the last one may be half written
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

    def step(self) -> int:
        return max((commit["step"] for commit in self.commits()), default=0)

    def members(self) -> list[Any]:
        try:
            return [one for one in query(self.directory).members if one.status == "live" and one.generation]
        except UsageError:
            return []

    def generations(self) -> list[Any]:
        path = self.directory / "events" / "agent-0.jsonl"
        return [event for event in read_events(path) if type(event).__name__ == "GenerationStarted"]

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 100.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if found := condition():
                return found
            assert self.process.poll() is None, f"ended before {what}:\n{self.output()[-4000:]}"
            time.sleep(0.02)
        raise AssertionError(f"not within {timeout_s:g} s: {what}\n{self.output()[-4000:]}")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


Start = Callable[..., Run]


@pytest.fixture
def elastic(tmp_path: Path) -> Iterator[Start]:
    """Starts runs: `elastic({"steps": 60}, "-n", "4", "--elastic", "1:4")`."""
    runs: list[Run] = []

    def start(asked: dict[str, Any], *options: str, script: Path = TRAINING) -> Run:
        runs.append(Run(tmp_path / f"run-{len(runs)}", asked, ["--ui", "plain", *options], script))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.fixture(scope="session")
def undisturbed() -> Iterator[Callable[..., dict[str, Any]]]:
    """The result of one undisturbed process, which stays warm; each training is run once."""
    known: dict[str, dict[str, Any]] = {}
    alone = RankPool()
    alone.start(1)

    def result_of(whole: dict[str, Any]) -> dict[str, Any]:
        same = ("clip", "rows", "tied", "validate_every", "train_metrics", "kind")
        asked = {name: value for name, value in whole.items() if name in same} | {
            "steps": whole["steps"],
            "slow_s": 0,
            "commits": os.devnull,
        }
        if "mesh" in whole:
            asked["mesh"] = None
        key = json.dumps(asked, sort_keys=True)
        if key not in known:
            (result,) = alone(1, train, asked)
            known[key] = json.loads(json.dumps(result))
        return known[key]

    yield result_of
    alone.close()


def check_commits(run: Run) -> None:
    """Every worker committed consecutive steps, all of them the same; and together the run's steps without a gap."""
    steps: dict[int, list[int]] = {}
    losses: dict[int, set[float]] = {}
    for commit in run.commits():
        steps.setdefault(commit["pid"], []).append(commit["step"])
        losses.setdefault(commit["step"], set()).add(commit["loss"])
    for pid, taken in steps.items():
        assert taken == list(range(taken[0], taken[0] + len(taken))), f"{pid} committed {taken}"
    assert sorted(losses) == list(range(1, max(losses) + 1))
    assert all(len(one) == 1 for one in losses.values()), "workers disagree about a step's loss"


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
