"""Fixtures for every test, and the police: whoever leaves a process, a thread or a variable behind fails."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from manyhands.testing import RankPool

# Where Python is told to write no bytecode, every process that a test starts would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Two tests at a time on two cores: threads that spin while they wait take the cores from each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

START = time.monotonic()
BUDGET_S = 150.0

_pool = RankPool()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Runs a function on n real ranks; the processes stay warm between tests."""
    yield _pool
    _pool.close()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    variables = dict(os.environ)
    threads = {thread.ident for thread in threading.enumerate()}
    children = _children()
    yield
    changed = {name for name in variables.keys() | os.environ.keys() if variables.get(name) != os.environ.get(name)}
    changed -= {"PYTEST_CURRENT_TEST"}
    assert not changed, f"environment variables changed: {sorted(changed)}"
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        processes = {child for child in _children() - children if child.pid not in _pool.pids()}
        left = [t.name for t in threading.enumerate() if t.ident not in threads and _is_ours(t)]
        if not processes and not left:
            return
        time.sleep(0.05)
    assert not processes, f"left behind: {[(p.pid, p.cmdline()) for p in processes]}"
    assert not left, f"threads left behind: {left}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow ones first, so that the end is short ones; and one pool of ranks for all tests that use it."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def _children() -> set[psutil.Process]:
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            tracker = "multiprocessing.resource_tracker" in " ".join(child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and not tracker:
                found.add(child)
        except psutil.NoSuchProcess:
            continue
    return found


def _is_ours(thread: threading.Thread) -> bool:
    return "manyhands" in thread.name


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    spent = time.monotonic() - START
    terminalreporter.write_line(f"suite: {spent:.0f} s of a budget of {BUDGET_S:.0f} s")
