"""A cluster that stays warm between the tests of a file, and a place where calls wait until a test lets them go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from meetings import Meeting

import manyhands as mh


@pytest.fixture(scope="module")
def warm() -> Iterator[mh.Cluster]:
    """Two workers and a server, which listens on loopback as well."""
    with mh.Cluster(workers=2, servers=1, steps="dispatch_steps", seed=7, listen="127.0.0.1", most_waiting=500) as one:
        yield one


@pytest.fixture
def coordinator(warm: mh.Cluster) -> mh.Coordinator:
    return mh.Coordinator(warm)


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[Meeting]:
    found = Meeting(tmp_path / "meeting")
    yield found
    found.close()
