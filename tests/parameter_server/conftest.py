"""Runs with parameter servers as subjects of tests."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.elastic.conftest import Run

TRAINING = Path(__file__).parent / "runs" / "training.py"
Start = Callable[..., Run]


@pytest.fixture(autouse=True)
def _gives_memory_back() -> Iterator[None]:
    """Servers that die in the test's own process close nothing, and hold a file for each region that they mapped.

    What was there before the test is none of it, and is left out: the collector would look through all of torch.
    """
    gc.freeze()
    yield
    gc.collect()
    gc.unfreeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As each worker and server has, where all of them are in the test's own process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Start]:
    """Starts runs: `served({"mode": "async"}, "-n", "2", "--servers", "2")`."""
    runs: list[Run] = []

    def start(asked: dict[str, Any], *options: str, folder: str = "", script: Path = TRAINING) -> Run:
        where = tmp_path / (folder or f"run-{len(runs)}")
        runs.append(Run(where, asked, ["--ui", "plain", *options], script))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def steps_of(run: Run) -> list[dict[str, Any]]:
    """What the chief received of every update, in order."""
    *lines, _ = (run.folder / "steps.jsonl").read_text().split("\n")
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="session")
def mirrored(tmp_path_factory: pytest.TempPathFactory, once: Any) -> Callable[..., dict[str, Any]]:
    """The result of one process without servers; each training is run once."""

    def train(asked: dict[str, Any]) -> str:
        run = Run(tmp_path_factory.mktemp("mirrored"), asked, ["-n", "1", "--ui", "none"], TRAINING)
        try:
            return json.dumps(run.wait())
        finally:
            run.close()

    def result_of(**asked: Any) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(once(f"mirrored-{sorted(asked.items())}", lambda: train(asked)))
        return result

    return result_of
