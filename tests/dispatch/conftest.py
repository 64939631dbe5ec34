"""A cluster that stays warm between the tests of a file, and a gate at which calls wait until a test opens it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import manyhands as mh
from tests.dispatch.step_gates import StepGate


@pytest.fixture(scope="module")
def warm() -> Iterator[mh.dispatch.Cluster]:
    """Two workers and a server, which listens on loopback as well."""
    with mh.dispatch.Cluster(
        workers=2, servers=1, steps="dispatch_steps", seed=7, listen="127.0.0.1", most_waiting=500
    ) as one:
        yield one


@pytest.fixture
def coordinator(warm: mh.dispatch.Cluster) -> mh.dispatch.Dispatcher:
    return mh.dispatch.Dispatcher(warm)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[StepGate]:
    found = StepGate(tmp_path / "gate")
    yield found
    found.close()
