"""The join file by which the tasks of one job find each other: who may see it, and which one is taken."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from manyhands.comm.transport import open_port
from manyhands.control.messages.agent_messages import HostReport
from manyhands.control.messages.launch_request import JoinTicket
from manyhands.control.security.keys import client_curve, new_key, server_curve, write_join_file
from manyhands.control.security.rejected_peers import PeerGate
from manyhands.errors import EnvironmentProblem
from manyhands.launcher.placers import meeting
from manyhands.launcher.placers.meeting import await_ticket, first_address, hint_for_first, meeting_file
from manyhands.spec.seat import Seat

SEAT = Seat(
    placer="slurm", command="srun", variable="", num_tasks=2, task=1, job="7", meeting="slurm-7.0", num_hosts=2,
    host_rank=1, node="n2", nodes=["n1", "n2"],
)  # fmt: skip


class Run:
    """What listens for a run's hosts: a socket with the run's key."""

    def __init__(self, key: bytes) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._gate = PeerGate(self._context, client_curve(key).public)
        self._port = open_port(
            self._context, zmq.ROUTER, "tcp://127.0.0.1:0", HostReport, bind=True, curve=server_curve(key)
        )
        self.address = self._port.socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ends.wait(0.01):
            self._gate.attend()

    def close(self) -> None:
        self._ends.set()
        self._thread.join()
        self._gate.close()
        self._port.close()
        self._context.term()


@pytest.fixture
def run():
    started = []

    def start(key: bytes) -> Run:
        started.append(Run(key))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_a_ticket_is_taken_once_its_run_answers_and_none_of_an_earlier_start_is(run, tmp_path, monkeypatch):
    monkeypatch.setattr(meeting, "ANSWER_WITHIN_S", 0.5)
    key, path = new_key(), tmp_path / "slurm-7.0.join"
    live = run(key)
    other = run(new_key())  # a run of somebody else, at the port of one that is over
    for stale in ("127.0.0.1:1", other.address):
        write_join_file(path, JoinTicket(stale, "r", key.hex()))
        with pytest.raises(EnvironmentProblem, match=f"No run of n1 answers n2 at {stale}"):
            await_ticket(path, SEAT, lambda line: None, give_up_after_s=0.3)
    fresh = JoinTicket(live.address, "r", key.hex())
    threading.Timer(0.3, write_join_file, (path, fresh)).start()
    assert await_ticket(path, SEAT, lambda line: None, give_up_after_s=60) == fresh


def test_a_host_that_does_not_see_the_file_says_where_it_looks_once_and_then_ends_with_3(tmp_path):
    said, started = [], time.monotonic()
    with pytest.raises(EnvironmentProblem, match="It waited for") as caught:
        await_ticket(tmp_path / "x.join", SEAT, said.append, say_after_s=0.1, give_up_after_s=0.5)
    assert caught.value.exit_code == 3
    assert said == [f"waiting: n2 does not see {tmp_path}/x.join, which n1 writes."]
    assert 0.4 < time.monotonic() - started < 10
    assert "n2 should find" in hint_for_first(tmp_path / "x.join", SEAT)


def test_the_directory_of_join_files_belongs_to_one_user_alone(tmp_path):
    path = meeting_file(SEAT, {"HOME": str(tmp_path)})
    assert path == tmp_path / ".manyhands" / "jobs" / "slurm-7.0.join"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.parent.chmod(0o750)
    with pytest.raises(EnvironmentProblem, match=r"not a directory of this user alone \(mode 0750\)"):
        meeting_file(SEAT, {"HOME": str(tmp_path)})
    linked = tmp_path / "link"
    linked.symlink_to(tmp_path)
    with pytest.raises(EnvironmentProblem, match="not a directory"):
        meeting_file(SEAT, {"MANYHANDS_STATE_DIR": str(linked)})
    with pytest.raises(EnvironmentProblem, match="cannot be used"):
        meeting_file(SEAT, {"MANYHANDS_STATE_DIR": str(Path(__file__))})


def test_a_name_that_no_other_host_can_use_is_refused_with_where_it_comes_from():
    seat = Seat(placer="mpi", command="mpirun", variable="", num_tasks=2, task=0, node="localhost")
    with pytest.raises(EnvironmentProblem, match=r"localhost resolves to 127\.0\.0\.1") as caught:
        first_address(seat)
    assert caught.value.where is not None and caught.value.where.startswith("/etc/hosts: ")
