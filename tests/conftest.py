"""Fixtures for every test, and checks after every test.

A test that leaves a process, a thread or an environment variable behind fails; so does one with a run whose record
breaks a promise.
"""

from __future__ import annotations

import fcntl
import functools
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling

from manyhands.observe.run_audit import audit_run
from manyhands.testing import RankPool

# If Python is set to write no bytecode, every process that a test starts would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# More tests at a time than cores: threads that spin while they wait take the cores from each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

START = time.monotonic()
# `make test` has six minutes on two quiet cores; installation and lint take the rest.
BUDGET_S = 310.0

# Some run a dozen layouts, which takes ten minutes when thirty other processes compete for two cores.
LONG_TIMEOUT_S = 900

OUT_OF_TIME = "NOT RUN, as its time was over"

_pool = RankPool()


def pytest_configure(config: pytest.Config) -> None:
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if runs_tests and not config.option.collectonly and os.environ.get("FORK_COMMANDS") != "0":
        from tests.forked_commands import fork_commands

        fork_commands()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--within", type=float, metavar="SECONDS", help="begin no test later than this, and say which")
    parser.addoption("--turn", type=int, default=0, help="with --within: which file is first, so that all have turns")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Runs a function on n real ranks; the processes stay warm between tests."""
    _pool.start(3)
    yield _pool
    _pool.close()


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[], str]], str]:
    """`once("name", make)`: the result of `make`, which the first of pytest's processes to ask calls for all of them.

    For reference runs, which whole runs are compared with.
    """
    own = tmp_path_factory.getbasetemp()
    place = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def answer(name: str, make: Callable[[], str]) -> str:
        with open(place / f"once-{name}", "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
            file.seek(0)
            found = file.read()
            if not found:
                file.write(found := make())
            return found

    return answer


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    variables = dict(os.environ)
    threads = {thread.ident for thread in threading.enumerate()}
    children = _children()
    yield
    changed = {name for name in variables.keys() | os.environ.keys() if variables.get(name) != os.environ.get(name)}
    changed -= {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # torch sets it with the first optimizer
    assert not changed, f"environment variables changed: {sorted(changed)}"
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        processes = {child for child in _children() - children if child.pid not in _pool.pids()}
        left = [t.name for t in threading.enumerate() if t.ident not in threads and _is_ours(t)]
        if not processes and not left:
            return
        time.sleep(0.05)
    assert not processes, f"left behind: {[(p.pid, p.cmdline()) for p in processes]}"
    assert not left, f"threads left behind: {left}"


@pytest.fixture(autouse=True)
def _records_hold(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every run in a test's folder applied each step once, and each sample of an epoch once."""
    forged = request.node.get_closest_marker("forged_record")
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames and not forged else None
    yield
    for events in folder.rglob("events") if folder is not None else ():
        if any(events.glob("*.jsonl")):
            problems = audit_run(events.parent).problems
            assert not problems, f"{events.parent}: {problems}"


# The tests of these files parse the whole package once, if they run in one process.
PARSING = ("tests/guards/test_layers.py",)


class OnePool(LoadScopeScheduling):
    """Gives tests to any free worker, but tests that share what is slow to make all to the same worker."""

    def _split_scope(self, nodeid: str) -> str:
        return _shared_by(nodeid.split("::")[0]) or nodeid


@functools.cache
def _shared_by(file: str) -> str | None:
    if file in PARSING:
        return file
    text = Path(file).read_text()
    if "slurm: SlurmCluster" in text:
        return "slurm"
    return "ranks" if "ranks: RankPool" in text else file if "warm: " in text else None


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OnePool:
    return OnePool(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run slow tests first, so that all workers end with short ones. Long tests get a longer timeout."""
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if config.getoption("within") is not None:
        files = list(dict.fromkeys(item.path for item in items))
        turn = {path: (place - config.getoption("turn")) % len(files) for place, path in enumerate(files)}
        items.sort(key=lambda item: turn[item.path])


def pytest_runtest_setup(item: pytest.Item) -> None:
    within = item.config.getoption("within")
    if within is not None and time.monotonic() - START > within:
        pytest.skip(OUT_OF_TIME)


def _children() -> set[psutil.Process]:
    found = set()
    for pid in _below(os.getpid()):
        try:
            child = psutil.Process(pid)
            line = " ".join(child.cmdline())
            helps_multiprocessing = "multiprocessing.resource_tracker" in line or "multiprocessing.forkserver" in line
            if child.status() != psutil.STATUS_ZOMBIE and not helps_multiprocessing:
                found.add(child)
        except psutil.NoSuchProcess:
            continue
    return found


def _below(pid: int) -> list[int]:
    """All descendants of a process. Every test calls it twice, and psutil would scan the whole machine each time."""
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):  # it may end meanwhile
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                found += [int(child), *_below(int(child))]
    return found


def _is_ours(thread: threading.Thread) -> bool:
    return "manyhands" in thread.name


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    spent = time.monotonic() - START
    skipped = [one for one in terminalreporter.stats.get("skipped", []) if OUT_OF_TIME in str(one.longrepr)]
    for file, number in sorted(Counter(one.nodeid.partition("::")[0] for one in skipped).items()):
        terminalreporter.write_line(f"{file}: {number} tests {OUT_OF_TIME}", yellow=True)
    terminalreporter.write_line(f"suite: {spent:.0f} s of a budget of {BUDGET_S:.0f} s")
    if not config.invocation_params.args:  # as `make test` calls it; `python -m tools.house_figures` shows this
        tests = {name: len(terminalreporter.stats.get(name, [])) for name in ("passed", "failed", "error", "skipped")}
        record = {"date": date.today().isoformat(), "seconds": round(spent), "load": os.getloadavg()[1], **tests}
        config.cache.set("manyhands/suite", record)
