"""`mh run` under a real mpirun, over a real sshd on each of two hosts."""

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

from tests.launcher.placers.hosts import Hosts, finish, short_folder, some_hosts, start, why_not

REASON = why_not("mpirun", "sshd", "ssh-keygen", packages="openmpi-bin openssh-server")
pytestmark = [pytest.mark.long, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

MH = str(Path(sys.executable).with_name("mh"))
SCRIPT = str(Path(__file__).parents[2] / "end_to_end" / "small_training.py")
SSHD = """
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile {folder}/sshd.pid
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
AcceptEnv *
"""


@contextlib.contextmanager
def hosts_with_sshd() -> Iterator[tuple[Hosts, list[str]]]:
    """Two hosts, and the arguments of an mpirun that reaches them."""
    with short_folder() as folder, _sshd_in(folder) as found:
        yield found


@contextlib.contextmanager
def _sshd_in(folder: Path) -> Iterator[tuple[Hosts, list[str]]]:
    daemons: list[subprocess.Popen[bytes]] = []
    Path("/run/sshd").mkdir(exist_ok=True)
    try:
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        (folder / "sshd.conf").write_text(SSHD.format(folder=folder))
        (folder / "slots").write_text("n1 slots=1\nn2 slots=1\n")
        agent = folder / "reach"
        options = f"-i {folder}/user_key -F /dev/null -o BatchMode=yes -o UserKnownHostsFile={folder}/known"
        agent.write_text(f'#!/bin/sh\nexec ssh {options} -o StrictHostKeyChecking=accept-new "$@"\n')
        agent.chmod(0o700)
        with some_hosts(folder, 2) as hosts:
            for name in hosts.names:
                words = [*hosts.inside(name), "/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd.conf")]
                daemons.append(subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            yield (
                hosts,
                [
                    *("mpirun", "--hostfile", str(folder / "slots"), "--mca", "plm_rsh_agent", str(agent)),
                    *("--mca", "oob_tcp_if_include", "10.231.8.0/24", "--mca", "btl_tcp_if_include", "10.231.8.0/24"),
                    *("--prefix", "/usr", "-x", "MANYHANDS_INSECURE_DATA_PLANE=1", "-x", "HOME"),
                ],
            )
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()


def environ(home: Path) -> dict[str, str]:
    mine = {name: text for name, text in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "MANYHANDS_"))}
    return mine | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "HOME": str(home)}


def test_mpirun_on_two_hosts_is_one_training_that_usr1_ends_with_75(tmp_path: Path) -> None:
    with hosts_with_sshd() as (hosts, mpirun):
        words = [
            *hosts.inside("n1"),
            *mpirun,
            "-np",
            "2",
            "--map-by",
            "node",
            "--bind-to",
            "none",
            "--wdir",
            str(tmp_path),
        ]
        words += [
            MH,
            "run",
            "--ui",
            "plain",
            "--run-dir",
            "r",
            SCRIPT,
            "--strategy",
            "",
            "--steps",
            "5000",
            "--pause",
            "0.02",
        ]
        output = tmp_path / "out"
        with output.open("w") as file:
            run = start(words, tmp_path, environ(tmp_path), stdout=file)
        deadline = time.monotonic() + 90
        while "step 1/5000" not in output.read_text():
            assert time.monotonic() < deadline and run.poll() is None, output.read_text()
            time.sleep(0.1)
        assert "2 workers train together" in output.read_text()
        run.send_signal(signal.SIGUSR1)
        assert run.wait(60) == 75, output.read_text()
        assert re.search(r"saved checkpoint of step [1-9]", output.read_text())


def test_mpirun_binds_to_one_core_and_two_tasks_on_a_host_are_refused(tmp_path: Path) -> None:
    with hosts_with_sshd() as (hosts, mpirun):
        words = [*hosts.inside("n1"), *mpirun, "--wdir", str(tmp_path)]
        bound = [*words, "-np", "2", "--map-by", "node", "--bind-to", "core", MH, "run", "--dry-run", "--json", SCRIPT]
        code, output = finish(start(bound, tmp_path, environ(tmp_path)))
        assert code == 0, output
        if len(os.sched_getaffinity(0)) == 2:
            assert (
                "this mpirun task has 1 of the 2 cores of its host. try: mpirun --map-by node --bind-to none" in output
            )
        crowded = [*words, "--oversubscribe", "-np", "4", MH, "run", SCRIPT]
        code, output = finish(start(crowded, tmp_path, environ(tmp_path)))
        assert code == 2, output
        assert "tasks of this mpirun are on n" in output
        assert "mpirun -np 2 --map-by node --bind-to none mh run -n 2 ..." in output
