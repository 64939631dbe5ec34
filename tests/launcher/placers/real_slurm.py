"""A real Slurm of three nodes, for tests: its daemons in namespaces of this machine, started in a second or two."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.launcher.placers.hosts import Hosts, finish, short_folder, some_hosts, start
from tests.launcher.placers.hosts import why_not as why_no_hosts

UP_WITHIN_S = 60.0
CGROUPS = Path("/sys/fs/cgroup/freezer")
CGROUP_CONFIG = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\n"
CORES = 2

CONFIG = """
ClusterName=scratch
SlurmctldHost=login(10.231.8.1)
SlurmctldPort=16817
SlurmdPort=16818
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.sock,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
EnforcePartLimits=ALL
JobRequeue=1
ReturnToService=2
SlurmdTimeout=10
MessageTimeout=5
KillWait=10
NodeName=n1 NodeAddr=10.231.8.11 CPUs={cores} RealMemory=1000
NodeName=n2 NodeAddr=10.231.8.12 CPUs={cores} RealMemory=1000
NodeName=n3 NodeAddr=10.231.8.13 CPUs={cores} RealMemory=1000
PartitionName=low Nodes=n[1-3] Default=YES PriorityTier=1 MaxTime=INFINITE State=UP GraceTime=20
PartitionName=high Nodes=n[1-3] PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    return why_no_hosts("slurmctld", "slurmd", "srun", "munged", packages="slurmctld slurmd slurm-client munge")


class SlurmCluster:
    """Commands run on the login node, with a home directory that all nodes share."""

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        self.folder, self.hosts = folder, hosts
        self.home = folder / "home"
        self.environ = {
            **{name: text for name, text in os.environ.items() if not name.startswith(("SLURM_", "MANYHANDS_"))},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "HOME": str(self.home),
            "MANYHANDS_INSECURE_DATA_PLANE": "1",
        }

    def start(self, *words: str, cwd: Path, **environ: str) -> subprocess.Popen[str]:
        return start([*self.hosts.inside("login"), *words], cwd, {**self.environ, **environ})

    def run(self, *words: str, cwd: Path, timeout_s: float = 100.0, **environ: str) -> tuple[int, str]:
        """The exit code, and what was printed to either stream."""
        return finish(self.start(*words, cwd=cwd, **environ), timeout_s)

    def says(self, *words: str) -> str:
        return self.run(*words, cwd=self.folder)[1].strip()

    def make_idle(self) -> None:
        """End what a test has left running, and wait until all nodes are free."""
        self.says("scancel", "--signal=KILL", "--full", "--user=root")
        self.says("scancel", "--user=root")
        deadline = time.monotonic() + UP_WITHIN_S
        while self.says("sinfo", "-h", "-p", "low", "-o", "%D %t") != "3 idle":
            assert time.monotonic() < deadline, f"{self.says('sinfo')}\n{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in (self.folder / "log").glob("*.log"))

    def start_node(self, name: str) -> subprocess.Popen[bytes]:
        words = ["slurmd", "-D", "-f", str(self.folder / "slurm.conf"), "-N", name]
        return self._daemon(self.hosts.inside(name) + words)

    def daemons(self) -> list[subprocess.Popen[bytes]]:
        run = self.folder / "run"
        munge = [
            *self.hosts.inside("login"),
            "munged",
            "-F",
            "--force",
            f"--key-file={self.folder}/munge.key",
            f"--socket={run}/munge.sock",
        ]
        munge += [f"--pid-file={run}/munged.pid", f"--log-file={self.folder}/log/munged.log", f"--seed-file={run}/seed"]
        controller = [*self.hosts.inside("login"), "slurmctld", "-D", "-i", "-f", str(self.folder / "slurm.conf")]
        started = [self._daemon(munge)]
        deadline = time.monotonic() + UP_WITHIN_S
        while not (run / "munge.sock").exists():
            assert time.monotonic() < deadline, "munged did not start"
            time.sleep(0.01)
        return [*started, self._daemon(controller), *(self.start_node(name) for name in self.hosts.names)]

    def _daemon(self, words: list[str]) -> subprocess.Popen[bytes]:
        with open(self.folder / "log" / "output.log", "ab") as output:
            return subprocess.Popen(
                words, env=self.environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=self.folder
            )


@contextlib.contextmanager
def slurm_cluster(proctrack: str = "linuxproc") -> Iterator[SlurmCluster]:
    with short_folder() as folder:
        try:
            with _daemons_in(folder, proctrack) as cluster:
                yield cluster
        finally:
            if proctrack == "cgroup":
                _remove_cgroups()


@contextlib.contextmanager
def _daemons_in(folder: Path, proctrack: str) -> Iterator[SlurmCluster]:
    for name in ("run", "state", "spool", "log", "home"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, proctrack=proctrack, cores=CORES))
    if proctrack == "cgroup":
        (folder / "cgroup.conf").write_text(CGROUP_CONFIG)
    started: list[subprocess.Popen[bytes]] = []
    with some_hosts(folder, 3) as hosts:
        cluster = SlurmCluster(folder, hosts)
        try:
            started += cluster.daemons()
            cluster.make_idle()
            yield cluster
        finally:
            _end(started)


def _remove_cgroups() -> None:
    """Of our nodes; a directory that still has processes stays, as then another cluster uses it."""
    for top in CGROUPS.parent.glob("*/slurm_n[1-3]"):
        for folder in sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True):
            with contextlib.suppress(OSError):
                folder.rmdir()
        with contextlib.suppress(OSError):
            top.rmdir()


def _end(daemons: list[subprocess.Popen[bytes]]) -> None:
    for process in reversed(daemons):
        process.terminate()
    for process in reversed(daemons):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(3)
        process.kill()
        process.wait()
