"""Logs of servers that another host keeps: the first host is lost, or the other one, and every gradient counts once."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from manyhands.native import why_not
from manyhands.parameter_server.log.write_ahead_log import saved_step
from tests.parameter_server.conftest import steps_of
from tests.parameter_server.runs.test_served_runs import faults
from tests.parameter_server.runs.two_hosts import TwoHosts, two_hosts_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.faults,
    pytest.mark.long,
    pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}"),
]

ONE_AND_TWO = ("-n", "1", "--servers", "2")
SLOWLY = {"slow_s": {"worker 0": 0.1, "worker 1": 0.1}, "waits": {"hold": 20, "most_s": 2.0}}
REPLICA = {"rows": True, "epochs": 4, "settings": {"durability": "replica"}}


def num_steps(run: TwoHosts) -> int:
    return len(steps_of(run)) if (run.folder / "steps.jsonl").exists() else 0


def until_another_host_has(run: TwoHosts, more: int) -> None:
    """Updates of both servers: so many more than when it began to keep them."""
    said = re.compile(r"server (\d): updates after step \d+ are kept on another host")
    run.until(lambda: len(set(said.findall(run.output()))) == 2, "a backup of both servers")
    enough = num_steps(run) + more
    run.until(lambda: num_steps(run) >= enough, f"{more} steps more")


def backup_of(run: TwoHosts, other_than: int = 0) -> psutil.Process:
    def found() -> list[psutil.Process]:
        return [child for child in psutil.Process(run.second.pid).children() if _is_backup(child, other_than)]

    [backup] = run.until(found, "a backup")
    return backup


def _is_backup(process: psutil.Process, other_than: int) -> bool:
    try:
        return process.pid != other_than and "manyhands.control.servers.backup_server" in process.cmdline()
    except psutil.Error:  # it has just ended
        return False


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_nothing_is_lost_with_the_servers_host(tmp_path: Path, mirrored: Any, mode: str) -> None:
    places = faults(("server 1", 20, "before commit"))
    asked = {"mode": mode, "exact": mode == "sync", "save_every": 30, "faults": places, **REPLICA}
    with two_hosts_run(tmp_path, {**asked, **SLOWLY}, *ONE_AND_TWO) as run:
        until_another_host_has(run, more=5)
        first = backup_of(run).pid
        os.kill(first, signal.SIGKILL)  # which costs nothing
        enough = num_steps(run) + 5
        run.until(lambda: num_steps(run) >= enough, "steps after the backup was killed")
        backup = backup_of(run, other_than=first)
        run.process.kill()
        run.process.wait(60)
        before = steps_of(run)
        run.second.kill()  # there is nothing left for it to do
        run.second.wait(60)
        psutil.wait_procs([backup], timeout=60)
        assert not backup.is_running(), "it has outlived the run"
    (tmp_path / "run.join").unlink()
    with two_hosts_run(tmp_path, asked, *ONE_AND_TWO) as again:
        result = again.wait(200)
        since = steps_of(again)[len(before) :]
    first = since[0]["step"]
    assert first <= len(before), "it had a checkpoint of its end"
    assert since[: len(before) - first + 1] == before[first - 1 :], "it was computed again"
    assert (result["counter"], result["reached"]) == ([4.0], 64)
    if mode == "sync":
        assert result == mirrored(rows=True, exact=True, epochs=4)
    assert not (again.directory / "updates").exists()
    assert len(list(tmp_path.glob("fault-*"))) == len(places)


def test_without_the_host_that_keeps_the_backups_training_continues_and_asks_for_a_checkpoint(tmp_path: Path) -> None:
    with two_hosts_run(tmp_path, {"mode": "async", **REPLICA, **SLOWLY}, *ONE_AND_TWO) as run:
        until_another_host_has(run, more=3)
        backup, lost_at = backup_of(run), num_steps(run)
        run.second.kill()
        psutil.wait_procs([backup], timeout=60)
        run.until(lambda: run.output().count("kept on this host alone") == 2, "that both servers say so")
        run.until(lambda: (saved_step(run.directory) or 0) >= lost_at, "a checkpoint that only the servers asked for")
        (tmp_path / "continue").touch()
        result = run.wait(200)
    assert (result["counter"], result["reached"]) == ([4.0], 64)


def test_a_later_training_may_be_the_first_to_ask_for_it(tmp_path: Path, mirrored: Any) -> None:
    asked = {"mode": "sync", "exact": True, "save_every": 30, "others": [{"mode": "sync"}], **REPLICA}
    home = tmp_path / "run" / "trainings" / "2"
    with two_hosts_run(tmp_path, {**asked, **SLOWLY}, *ONE_AND_TWO) as run:
        until_another_host_has(run, more=5)
        run.process.kill()
        run.process.wait(60)
        before = steps_of(run)
    assert (home / "updates").exists() and not (run.directory / "updates").exists()
    (tmp_path / "run.join").unlink()
    with two_hosts_run(tmp_path, asked, *ONE_AND_TWO) as again:
        result = again.wait(200)
        since = steps_of(again)[len(before) :]
    first = since[0]["step"]
    assert since[: len(before) - first + 1] == before[first - 1 :], "it was computed again"
    assert result.pop("others") == [[1.0]]
    assert result == mirrored(rows=True, exact=True, epochs=4)
    assert not (home / "updates").exists()
