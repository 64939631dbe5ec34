"""`mh run` as the first process of a pod: a PID namespace, Kubeflow's variables, a key from a Secret's file.

No Kubernetes is here: scheduling, its DNS and eviction are not shown.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from manyhands.control.security.keys import new_key
from tests.launcher.placers.hosts import Hosts, short_folder, some_hosts, start, why_not

REASON = why_not(packages="")
pytestmark = [pytest.mark.long, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

MH = str(Path(sys.executable).with_name("mh"))
SCRIPT = str(Path(__file__).parents[2] / "end_to_end" / "small_training.py")
AS_FIRST_PROCESS = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with short_folder() as folder, some_hosts(folder, 2) as made:
        yield made


@contextlib.contextmanager
def pods(hosts: Hosts, folder: Path, nodes: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two pods of a TrainJob, as Kubeflow's torch plugin sets them up; their output is in `out-0` and `out-1`."""
    secret = folder / "run.key"
    secret.write_text(new_key().hex())
    secret.chmod(0o440)  # as kubelet makes it where a pod has an fsGroup
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("MANYHANDS_", "PET_"))}
    started = []
    try:
        for rank, name in enumerate(hosts.names):
            variables = {
                "PET_NNODES": nodes,
                "PET_NPROC_PER_NODE": "1",
                "PET_NODE_RANK": str(rank),
                "PET_MASTER_ADDR": "n1",
                "PET_MASTER_PORT": "29500",
                "MANYHANDS_KEY_FILE": str(secret),
                "MANYHANDS_INSECURE_DATA_PLANE": "1",
            }
            words = [*hosts.inside(name), *AS_FIRST_PROCESS, MH, "run", "--ui", "plain", "--run-dir", "r", SCRIPT]
            words += ["--strategy", "", "--steps", "5000", "--pause", "0.02"]
            with (folder / f"out-{rank}").open("w") as file:
                started.append(start(words, folder, kept | variables, stdout=file))
        yield started
    finally:
        for pod in started:
            pod.kill()
            pod.wait()


def first_process(hosts: Hosts, name: str) -> int:
    """The agent: it has number 1 in its pod."""
    for pid in hosts.processes(name):
        with contextlib.suppress(FileNotFoundError):
            numbers = re.search(r"NSpid:\t([0-9\t]+)", Path(f"/proc/{pid}/status").read_text())
            if numbers is not None and numbers[1].split("\t")[1:] == ["1"]:
                return pid
    raise AssertionError(f"no first process in {name}")


def wait_for(file: Path, text: str) -> None:
    deadline = time.monotonic() + 90
    while text not in file.read_text():
        assert time.monotonic() < deadline, file.read_text()
        time.sleep(0.1)


def test_two_pods_train_together_and_sigterm_to_the_first_processes_ends_them_with_75(
    hosts: Hosts, tmp_path: Path
) -> None:
    with pods(hosts, tmp_path, "2") as (first, second):
        wait_for(tmp_path / "out-0", "step 1/5000")
        assert "2 workers train together" in (tmp_path / "out-0").read_text()
        for name in hosts.names:
            os.kill(first_process(hosts, name), signal.SIGTERM)
        assert (first.wait(60), second.wait(60)) == (75, 75), (tmp_path / "out-0").read_text()
        assert re.search(r"saved checkpoint of step [1-9]", (tmp_path / "out-0").read_text())


def test_a_range_of_nodes_trains_on_when_a_pod_is_deleted(hosts: Hosts, tmp_path: Path) -> None:
    with pods(hosts, tmp_path, "1:2") as (first, second):
        wait_for(tmp_path / "out-0", "step 1/5000")
        hosts.kill("n2")
        second.wait(10)
        wait_for(tmp_path / "out-0", "continuing with 1 worker on 1 host")
        os.kill(first_process(hosts, "n1"), signal.SIGTERM)
        assert first.wait(60) == 75, (tmp_path / "out-0").read_text()
