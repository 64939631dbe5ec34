"""SIGTERM that reaches every process of a job at once: servers, a spare one and backups stay until all is committed."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from manyhands.checkpoint import newest_valid
from manyhands.control.servers.spare_server import READY
from manyhands.control.session.run_client import query
from manyhands.native import why_not
from tests.elastic.conftest import Run
from tests.parameter_server.conftest import Start, steps_of
from tests.parameter_server.runs.test_ps_tasks import free_addresses, result_of, start, wait_for_steps
from tests.parameter_server.runs.test_served_runs import TWO_AND_TWO

pytestmark = [
    pytest.mark.long,
    pytest.mark.faults,
    pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}"),
]

SLOWLY = {"slow_s": {"worker 0": 0.05, "worker 1": 0.05}}


def terminate_all(launchers: Iterable[int], *, backwards: bool = False) -> list[str]:
    """What these processes and all below them are called; each got the signal, launchers before the others or after."""
    first = [psutil.Process(pid) for pid in launchers]
    everyone = first + [child for process in first for child in process.children(recursive=True)]
    names = [" ".join(process.cmdline()) for process in everyone]
    for process in reversed(everyone) if backwards else everyone:
        process.send_signal(signal.SIGTERM)
    return names


def spare_is_ready(run: Run) -> bool:
    spare = query(run.directory).spare
    return spare is not None and spare.status == READY


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_servers_and_a_spare_one_stay_for_the_checkpoint(served: Start, mirrored: Any, mode: str) -> None:
    asked = {"mode": mode, "rows": True, "exact": mode == "sync"}
    run = served({**asked, **SLOWLY, "waits": {"hold": 12}}, *TWO_AND_TWO, folder="run")
    run.until(lambda: (run.folder / "steps.jsonl").exists() and len(steps_of(run)) >= 8, "8 steps")
    run.until(lambda: spare_is_ready(run), "a spare server")
    names = terminate_all([run.process.pid])
    assert len(names) >= 8, f"launcher, guard, coordinator, two workers, three servers: {names}"
    assert run.process.wait(100) == 75, run.output()
    reached = steps_of(run)[-1]["step"]
    saved = newest_valid(run.directory / "checkpoints")
    assert saved is not None and saved.step == reached
    again = served(asked, *TWO_AND_TWO, folder="run")
    result = again.wait()
    assert result == mirrored(rows=True, exact=True) if mode == "sync" else result["counter"] == [2.0]
    assert [one["step"] for one in steps_of(again)] == list(range(1, 33)), "a step was taken again, or left out"


@pytest.mark.parametrize("backwards", [False, True])
def test_servers_on_separate_hosts_and_their_backups_stay_too(tmp_path: Path, mirrored: Any, backwards: bool) -> None:
    chief, *others = free_addresses(5)
    cluster = {"chief": [chief], "worker": others[:2], "ps": others[2:]}
    tasks = [(job, index) for job, addresses in cluster.items() for index in range(len(addresses))]
    asked = {"mode": "sync", "exact": True, "rows": True, "settings": {"durability": "replica"}}

    def start_all(asked: dict[str, Any]) -> list[subprocess.Popen[bytes]]:
        return [start(tmp_path, cluster, job, index, asked) for job, index in tasks]

    steps_file = tmp_path / "steps.jsonl"
    processes = start_all({**asked, **SLOWLY})
    try:
        wait_for_steps(steps_file, 12)
        names = terminate_all((process.pid for process in processes), backwards=backwards)
        assert any("manyhands.control.servers.backup_server" in name for name in names), names
        codes = [process.wait(100) for process in processes]
        outputs = "\n".join((tmp_path / f"{job}-{index}.txt").read_text() for job, index in tasks)
        assert codes == [75] * 5, outputs
        reached = json.loads(steps_file.read_text().splitlines()[-1])["step"]
        saved = newest_valid(tmp_path / "run" / "checkpoints")
        assert saved is not None and saved.step == reached < 32, outputs
        processes = start_all(asked)
        codes = [process.wait(150) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert result_of(tmp_path, tasks, codes) == mirrored(exact=True, rows=True)
    assert [json.loads(line)["step"] for line in steps_file.read_text().splitlines()] == list(range(1, 33))
