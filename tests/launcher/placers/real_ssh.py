"""Real sshd on hosts in namespaces, for tests; `login` has the keys, the known hosts and an ssh config of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.launcher.placers.hosts import Hosts, finish, some_hosts, start
from tests.launcher.placers.hosts import why_not as why_no_hosts

SSHD = "/usr/sbin/sshd"
UP_WITHIN_S = 20.0


def why_not() -> str | None:
    if not Path(SSHD).exists():
        return "NOT SHOWN HERE: runs over ssh need the Debian package openssh-server"
    return why_no_hosts("ssh", "ssh-keygen", packages="openssh-server openssh-client")


class SshHosts:
    def __init__(self, folder: Path, hosts: Hosts) -> None:
        self.folder, self.hosts, self.config = folder, hosts, folder / "config"
        self.known, self.home = folder / "known_hosts", folder / "home"
        self.environ = {
            **{name: text for name, text in os.environ.items() if not name.startswith("MANYHANDS_")},
            "HOME": str(self.home),
            "MANYHANDS_INSECURE_DATA_PLANE": "1",
        }
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def flags(self) -> list[str]:
        return [f"--extra=-F{self.config}"]

    def start(self, *words: str, cwd: Path, **environ: str) -> subprocess.Popen[str]:
        return start([*self.hosts.inside("login"), *words], cwd, {**self.environ, **environ})

    def run(self, *words: str, cwd: Path, timeout_s: float = 100.0, **environ: str) -> tuple[int, str]:
        return finish(self.start(*words, cwd=cwd, **environ), timeout_s)

    def up(self) -> None:
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        shutil.copy(self.folder / "user.pub", self.folder / "authorized")
        public = (self.folder / "host.pub").read_text()
        self.known.write_text("".join(f"{name} {public}" for name in self.hosts.names))
        self.config.write_text(
            f"IdentityFile {self.folder}/user\nUserKnownHostsFile {self.known}\nGlobalKnownHostsFile /dev/null\n"
            "IdentitiesOnly yes\nUser root\n"
        )
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd gives up its rights in this directory
        for name in self.hosts.names:
            self.daemons[name] = self._daemon(name)

    def _daemon(self, name: str) -> subprocess.Popen[bytes]:
        path = self.folder / f"sshd-{name}"
        path.write_text(
            f"ListenAddress {self.hosts.addresses[name]}\nHostKey {self.folder}/host\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {self.folder}/authorized\nStrictModes no\nPasswordAuthentication no\n"
            f"SetEnv HOME={self.home}\n"
        )
        words = [*self.hosts.inside(name), SSHD, "-D", "-e", "-f", str(path)]
        with open(self.folder / f"{name}.log", "wb") as output:
            return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + UP_WITHIN_S
        for name in self.hosts.names:
            while b"Server listening" not in (self.folder / f"{name}.log").read_bytes():
                assert time.monotonic() < deadline, (self.folder / f"{name}.log").read_text()
                time.sleep(0.01)

    def agents(self, name: str) -> list[str]:
        """The commands of agents on a host."""
        found = []
        for pid in self.hosts.processes(name):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                if "manyhands.cli.main" in words:
                    found.append(" ".join(words))
        return found


@contextlib.contextmanager
def ssh_hosts(number: int = 2) -> Iterator[SshHosts]:
    folder = Path(tempfile.mkdtemp(prefix="mh-ssh-", dir="/tmp"))
    try:
        (folder / "home").mkdir()
        with some_hosts(folder, number) as hosts:
            found = SshHosts(folder, hosts)
            try:
                found.up()
                found.wait_until_up()
                yield found
            finally:
                for daemon in found.daemons.values():
                    daemon.kill()
                    daemon.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
