"""Logs that a backup on another host keeps: a real process, killed and started again, and servers that lose it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from manyhands.comm.transport import Curve, Port, open_port
from manyhands.control.security.keys import weights_client_curve
from manyhands.control.servers.backup_process import BackupProcess
from manyhands.control.servers.backup_server import BackupStorage
from manyhands.parameter_server.log.log_format import Begin, Terms, UpdateRecord
from manyhands.parameter_server.log.log_storage import LOST_AFTER_S, AppendBytes, Backups, FromBackup
from manyhands.parameter_server.log.write_ahead_log import WriteAheadLog

TERMS = Terms(servers=1, part="abc", batch_size=16, slices=4)
KEY = b"k" * 32
UPDATE = UpdateRecord(contributions=[], groups=[])


class Host:
    """A server's: its log, the addresses that it knows, and what it has said."""

    def __init__(self, root: Path, context: zmq.Context[Any]) -> None:
        self._context, self._hurried = context, 0.0
        self.in_a_hurry = False
        """A quarter of its patience passes whenever it looks at the clock."""
        self.addresses: list[str] = []
        self.said: list[str] = []
        self.saved = 0
        backups = Backups(0, lambda: self.addresses, self._connect, self._clock)
        self.log = WriteAheadLog(root / "updates" / "server-0", lambda: self.saved, backups, self.said.append)

    def _clock(self) -> float:
        self._hurried += LOST_AFTER_S / 4 * self.in_a_hurry
        return time.monotonic() / 10 + self._hurried  # a busy machine is no loss

    def _connect(self, address: str) -> Port[FromBackup]:
        return open_port(self._context, zmq.DEALER, address, FromBackup, curve=self.curve)

    curve: Curve | None = weights_client_curve(KEY)

    def write(self, *steps: int, low: int = 0, payload: bytes = b"gradient") -> None:
        for step in steps:
            self.log.write(step, UPDATE, [payload], lambda: Begin(terms=TERMS, low=low, seen=[]))
            assert self.log.settle(more=False)


def steps_in(root: Path, version: int = 0) -> list[int]:
    log = WriteAheadLog(root / "updates" / "server-0", lambda: 0)
    return [one.step for one in log.reader.past(version, lambda step: step <= version)]


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def backup(tmp_path: Path) -> Iterator[BackupProcess]:
    process = BackupProcess(str(tmp_path), "127.0.0.1", KEY)
    yield process
    process.close()


def test_a_backup_that_is_killed_loses_nothing_and_the_next_resumes_where_it_was(
    tmp_path: Path, context: zmq.Context[Any], backup: BackupProcess
) -> None:
    host = Host(tmp_path, context)
    host.addresses = [backup.endpoint]
    host.write(1, 2, payload=b"x" * 3_000_000)
    os.kill(backup.pid, signal.SIGKILL)
    assert steps_in(tmp_path) == [1, 2]
    host.log.write(3, UPDATE, [b"y" * 3_000_000], lambda: Begin(terms=TERMS, low=2, seen=[]))  # no process receives it
    while backup.tend() is None:
        pass
    assert host.log.settle(more=False)
    host.write(4)
    assert steps_in(tmp_path) == [1, 2, 3, 4]
    assert len(list(tmp_path.glob("updates/server-0/*.log"))) == 1
    assert host.said == [f"updates after step 0 are kept on another host, by the backup at {backup.endpoint}"]


def test_without_its_backup_a_server_continues_says_so_and_wants_a_checkpoint(
    tmp_path: Path, context: zmq.Context[Any], backup: BackupProcess
) -> None:
    host = Host(tmp_path, context)
    host.addresses = [backup.endpoint]
    host.write(1, 2)
    assert not host.log.wants_checkpoint
    backup.close()
    host.in_a_hurry = True
    host.write(3, low=2)
    assert host.log.wants_checkpoint
    host.write(4, 5, low=3)
    assert [one.split(": ")[0] for one in host.said[1:]] == [
        f"the backup at {backup.endpoint} is lost",
        "updates after step 3 are kept on this host alone",
    ]
    assert host.log.wants_checkpoint
    assert steps_in(tmp_path) == [1, 2], "what depends on an update that no backup has is not to be used"
    host.saved = 3
    assert not host.log.wants_checkpoint
    assert steps_in(tmp_path, version=3) == [4, 5]


def test_a_backup_that_comes_later_is_used_from_the_next_checkpoint_on(
    tmp_path: Path, context: zmq.Context[Any], backup: BackupProcess
) -> None:
    host = Host(tmp_path, context)
    host.write(1, 2)
    assert not host.log.wants_checkpoint
    host.addresses = [backup.endpoint]
    assert host.log.wants_checkpoint
    host.saved = 2
    host.log.end_segment()
    host.write(3, low=2)
    assert not host.log.wants_checkpoint
    assert "kept on another host" in host.said[-1]
    assert steps_in(tmp_path, version=2) == [3]


def test_a_backup_with_another_run_directory_is_not_believed(tmp_path: Path, context: zmq.Context[Any]) -> None:
    elsewhere = BackupProcess(str(tmp_path / "other"), "127.0.0.1", KEY)
    try:
        host = Host(tmp_path, context)
        host.addresses = [elsewhere.endpoint]
        host.write(1)
        assert "No such file or directory" in host.said[-1]
    finally:
        elsewhere.close()


def test_who_has_no_key_writes_nothing(tmp_path: Path, context: zmq.Context[Any], backup: BackupProcess) -> None:
    host = Host(tmp_path, context)
    host.in_a_hurry = True
    host.curve = weights_client_curve(b"?" * 32)
    host.addresses = [backup.endpoint]
    host.write(1)
    assert host.said == []
    assert steps_in(tmp_path) == [1], "on its own host"


def test_a_segment_that_begins_again_is_another_file(tmp_path: Path) -> None:
    path = tmp_path / "updates" / "server-0" / "00000001.log"
    path.parent.mkdir(parents=True)
    shelf = BackupStorage(tmp_path)
    for content in (b"first", b"second"):
        path.unlink(missing_ok=True)
        path.touch()
        assert shelf.keep(AppendBytes(training=1, server=0, segment=1, at=0, data=content)).num_bytes == len(content)
        assert path.read_bytes() == content
    assert shelf.keep(AppendBytes(training=1, server=0, segment=1, at=0, data=b"second")).num_bytes == 6, (
        "it was sent again"
    )
    assert shelf.keep(AppendBytes(training=1, server=0, segment=1, at=9, data=b"?")).num_bytes == 6, (
        "something before it is missing"
    )
    shelf.keep(AppendBytes(training=1, server=0, segment=1, at=3, data=b"ond half"))
    assert path.read_bytes() == b"second half", "some of it was there"
    shelf.close()


def test_each_training_of_a_script_has_its_own_log_at_a_backup(tmp_path: Path) -> None:
    """A server goes from one training to the next and back: segments of one number, in the homes of both."""
    homes = {1: tmp_path, 2: tmp_path / "trainings" / "2"}
    paths = {training: home / "updates/server-0/00000001.log" for training, home in homes.items()}
    for path in paths.values():
        path.parent.mkdir(parents=True)
        path.touch()
    shelf = BackupStorage(tmp_path)
    for training, at, data in ((1, 0, b"first"), (2, 0, b"second"), (1, 5, b" again"), (2, 6, b" again")):
        end = shelf.keep(AppendBytes(training=training, server=0, segment=1, at=at, data=data)).num_bytes
        assert end == at + len(data)
    shelf.close()
    assert {training: path.read_bytes() for training, path in paths.items()} == {1: b"first again", 2: b"second again"}
