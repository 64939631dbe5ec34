"""kill -9 of workers, of servers and of the cluster itself: what counts, what comes back, and what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch

import manyhands as mh
from manyhands.errors import CallCancelled, UsageError
from tests.dispatch.step_gates import StepGate

pytestmark = [pytest.mark.faults, pytest.mark.slow]

CALLS = 200


class Watched(mh.dispatch.Cluster):
    """Records which methods were called, and lets a test wait for a call."""

    def __init__(self, workers: int, servers: int) -> None:
        super().__init__(workers, servers, steps="dispatch_steps")
        self.calls: list[tuple[str, int]] = []
        self._called = threading.Condition()

    def _note(self, what: str, number: int) -> None:
        with self._called:
            self.calls.append((what, number))
            self._called.notify_all()

    def await_call(self, what: str, number: int, times: int) -> None:
        with self._called:
            assert self._called.wait_for(lambda: self.calls.count((what, number)) >= times, 100), self.calls

    def on_worker_started(self, number: int, process: str) -> None:
        self._note("worker started", number)

    def on_worker_lost(self, number: int, why: str) -> None:
        assert why == "signal 9"
        self._note("worker lost", number)

    def on_server_started(self, number: int, process: str) -> None:
        self._note("server started", number)

    def on_server_lost(self, number: int, why: str) -> None:
        assert why == "signal 9"
        self._note("server lost", number)


@pytest.mark.long
def test_every_call_counts_once_under_kills_and_nothing_is_left(tmp_path: Path) -> None:
    with Watched(workers=2, servers=2) as cluster:
        coordinator = mh.dispatch.Dispatcher(cluster)
        cluster.assign("cells", torch.zeros(CALLS, dtype=torch.int64))
        cluster.assign("total", torch.tensor(0))
        assert {info.name: info.server for info in cluster.variables()} == {"cells": 0, "total": 1}
        numbers = iter(coordinator.create_per_worker_dataset("numbers"))
        before = dict(coordinator.fetch([coordinator.schedule("take_next", (numbers,)) for _ in range(4)]))
        values = []
        for cell in range(CALLS):
            step, more = ("count_and_die_once", (str(tmp_path / "died"),)) if cell == 70 else ("count", ())
            values.append(coordinator.schedule(step, (cell, CALLS, *more)))
            if cell == 20:
                values[0].fetch()
                os.kill(cluster.server_pids[0], signal.SIGKILL)
            if cell == 120:
                os.kill(cluster.server_pids[1], signal.SIGKILL)
        coordinator.join()
        assert coordinator.fetch(values) == list(range(CALLS))
        assert torch.equal(cluster.read("cells"), torch.ones(CALLS, dtype=torch.int64))
        assert int(cluster.read("total")) == CALLS
        assert {info.version for info in cluster.variables()} == {CALLS + 1}
        lost = [number for what, number in cluster.calls if what == "worker lost"]
        assert len(lost) == 1
        cluster.await_call("worker started", lost[0], times=2)
        # The replacement makes its iterator anew; the other worker continues where it was.
        after = coordinator.fetch([coordinator.schedule("take_next", (numbers,)) for _ in range(20)])
        fresh = {pid for pid, _ in after} - before.keys()
        assert all(min(number for who, number in after if who == pid) == 0 for pid in fresh)
        assert all(number > before[pid] for pid, number in after if pid in before)
        assert all(("server lost", server) in cluster.calls for server in (0, 1))
        directory = Path(cluster.hub.address.removeprefix("ipc://")).parent
        pids = [*cluster.worker_pids.values(), *cluster.server_pids.values()]
        assert directory.is_dir() and len(pids) == 4
        assert not cluster.join(timeout_s=0)
    assert cluster.join()
    assert not directory.exists()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not [thread for thread in threading.enumerate() if thread.name == "manyhands-cluster"]
    with pytest.raises(UsageError, match="shut down"):
        coordinator.schedule("who")


def test_kill_9_of_the_process_that_has_the_cluster_leaves_no_process_and_no_socket(gate: StepGate) -> None:
    program = """
import signal, manyhands as mh
with mh.dispatch.Cluster(workers=1, servers=1, steps="dispatch_steps") as cluster:
    pids = [*cluster.worker_pids.values(), *cluster.server_pids.values()]
    mh.dispatch.Dispatcher(cluster).schedule("wait_at", (PLACE,))
    print(cluster.hub.address, *pids, flush=True)
    signal.pause()
"""
    code = program.replace("PLACE", repr(gate.place))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        address, *pids = parent.stdout.readline().split()
        gate.await_one()  # it is killed in the middle of a call
        processes = [psutil.Process(int(pid)) for pid in pids]
        directory = Path(address.removeprefix("ipc://")).parent
        guards = [found for found in psutil.Process(parent.pid).children() if str(directory) in found.cmdline()]
        assert directory.is_dir() and len(processes) == 2 and len(guards) == 1
        parent.kill()
    assert psutil.wait_procs([*processes, *guards], timeout=60)[1] == []
    assert not directory.exists()


def test_steps_that_cannot_be_imported_end_the_start_with_the_reason(tmp_path: Path) -> None:
    steps = tmp_path / "unguarded_steps.py"
    steps.write_text(
        "import manyhands as mh\n"
        "from manyhands.dispatch.child_processes import in_child\n"
        "if in_child(): mh.dispatch.Cluster(workers=1).start()\n"
    )
    with pytest.raises(UsageError, match=r"(?s)Worker 0 of the cluster could not start.*inside a worker of a cluster"):
        mh.dispatch.Cluster(workers=1, servers=0, steps=str(steps)).start()


class Careless(mh.dispatch.Cluster):
    """A subclass with a mistake in one of its methods."""

    def on_server_lost(self, number: int, why: str) -> None:
        raise ZeroDivisionError(f"in on_server_lost for server {number}")


def test_servers_can_be_added_and_a_mistake_in_a_subclass_ends_the_cluster_with_it() -> None:
    with Careless(workers=0, servers=0, steps="dispatch_steps", listen="127.0.0.1") as cluster:
        with pytest.raises(UsageError, match="no server to store"):
            cluster.assign("w", torch.ones(2))
        assert cluster.start_server() == [0]
        cluster.assign("w", torch.ones(2))
        assert torch.equal(cluster.read("w"), torch.ones(2))
        value = mh.dispatch.Dispatcher(cluster).schedule("who")
        os.kill(cluster.server_pids[0], signal.SIGKILL)
        with pytest.raises(ZeroDivisionError, match="server 0"):
            mh.dispatch.Dispatcher(cluster).join()
        with pytest.raises(CallCancelled, match="The cluster failed"):
            value.fetch()
