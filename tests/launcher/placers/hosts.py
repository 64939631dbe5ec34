"""Hosts for tests of placers: namespaces with a name, joined by a bridge that is in none of the machine's own.

Everything is inside of namespaces, so runs of these tests at the same time do not see each other, and the end of the
namespaces is the end of it all: processes, addresses, the bridge. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

NETWORK = "10.231.8"
LOGIN = f"{NETWORK}.1"
_NUMBERS = itertools.count()


def why_not(*programs: str, packages: str) -> str | None:
    """What is missing here for a test with hosts that have these programs, or None."""
    if os.geteuid() != 0:
        return "NOT SHOWN HERE: hosts in network namespaces need root"
    if missing := [program for program in ("ip", "nsenter", "unshare", *programs) if shutil.which(program) is None]:
        return f"NOT SHOWN HERE: {', '.join(missing)} missing; Debian packages iproute2 {packages}"
    return None


def sweep() -> None:
    """Remove what a test process that was killed has left: its namespaces, all that runs in them, its folders."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for space in re.findall(r"^(mhp([0-9]+)-\w+)", listed, re.MULTILINE):
        if not Path(f"/proc/{space[1]}").exists():
            _remove(space[0])
    for folder in Path("/tmp").glob("mh-hosts-*"):
        if not Path(f"/proc/{folder.name.split('-')[2]}").exists():
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A folder for sockets, whose names must not be long; removed also if this process is killed, by the next one."""
    with tempfile.TemporaryDirectory(prefix=f"mh-hosts-{os.getpid()}-", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield Path(name)


class Hosts:
    """`login`, `n1`, `n2`, ...: each a network namespace, entered with its own host name and /etc/hosts."""

    def __init__(self, folder: Path, number: int) -> None:
        self._number = next(_NUMBERS)
        self.folder, self.names = folder, [f"n{one}" for one in range(1, number + 1)]
        self.addresses = {"login": LOGIN} | {
            name: f"{NETWORK}.{10 + place + 1}" for place, name in enumerate(self.names)
        }
        lines = [f"{address} {name}" for name, address in self.addresses.items()]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def space(self, name: str) -> str:
        return f"mhp{os.getpid()}-{self._number}{name}"

    def inside(self, name: str, *, etc_hosts: Path | None = None) -> list[str]:
        """An argument prefix: what follows runs on that host. Not `ip netns exec`, which hides /sys/fs/cgroup."""
        script = f'hostname {name}; mount --bind {etc_hosts or self.folder / "hosts"} /etc/hosts; exec "$@"'
        return ["nsenter", f"--net=/run/netns/{self.space(name)}", "unshare", "-u", "-m", "sh", "-c", script, "host"]

    def processes(self, name: str) -> list[int]:
        return _processes(self.space(name))

    def kill(self, name: str) -> None:
        """The host loses power: nothing on it runs any more."""
        _kill(self.space(name))

    def up(self) -> None:
        login = self.space("login")
        for name in self.addresses:
            _ip("netns", "add", self.space(name))
            _ip("-n", self.space(name), "link", "set", "lo", "up")
        _ip("-n", login, "link", "add", "bridge", "type", "bridge")
        _ip("-n", login, "addr", "add", f"{LOGIN}/24", "dev", "bridge")
        _ip("-n", login, "link", "set", "bridge", "up")
        for name in self.names:
            space, end = self.space(name), f"to-{name}"
            _ip("-n", login, "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", login, "link", "set", end, "master", "bridge", "up")
            _ip("-n", space, "addr", "add", f"{self.addresses[name]}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")

    def down(self) -> None:
        for name in self.addresses:
            _remove(self.space(name))


@contextlib.contextmanager
def some_hosts(folder: Path, number: int) -> Iterator[Hosts]:
    sweep()
    hosts = Hosts(folder, number)
    try:
        hosts.up()
        yield hosts
    finally:
        hosts.down()


def _processes(space: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
    return [int(pid) for pid in listed.stdout.split()]


def _kill(space: str) -> None:
    for pid in _processes(space):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _remove(space: str) -> None:
    deadline = time.monotonic() + 10
    while _processes(space) and time.monotonic() < deadline:
        _kill(space)
        time.sleep(0.02)
    subprocess.run(["ip", "netns", "delete", space], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def finish(process: subprocess.Popen[str], timeout_s: float = 100.0) -> tuple[int, str]:
    """Its exit code and everything that it printed; it is killed if it takes too long."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"no end within {timeout_s:g} s:\n{output}") from None
    return process.returncode, output


def start(words: Sequence[str], cwd: Path, environ: dict[str, str], **more: Any) -> subprocess.Popen[str]:
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(words, cwd=cwd, env=environ, text=True, **(streams | more))
