"""Which processes listen on TCP, as the system reports it: for tests that nothing listens."""

from __future__ import annotations

import re
import shutil
import subprocess

import psutil

__all__ = ["family_of", "listeners_of"]


def family_of(pid: int) -> set[int]:
    """A process and its live descendants."""
    try:
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    except psutil.NoSuchProcess:
        return set()


def listeners_of(pids: set[int]) -> set[str]:
    """ "ADDRESS:PORT" of every TCP socket on which these processes listen; empty when there is none.

    Read from /proc, and from `ss -ltnp` if that exists; the result has the sockets of both.
    """
    return _by_proc(pids) | _by_ss(pids)


def _by_proc(pids: set[int]) -> set[str]:
    found = set()
    for pid in pids:
        try:
            connections = psutil.Process(pid).net_connections("tcp")
        except psutil.NoSuchProcess:
            continue
        found |= {f"{c.laddr.ip}:{c.laddr.port}" for c in connections if c.status == psutil.CONN_LISTEN}
    return found


def _by_ss(pids: set[int]) -> set[str]:
    if shutil.which("ss") is None:
        return set()
    asked = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True, timeout=60)
    lines = [(line.split()[3], re.findall(r"\bpid=(\d+)", line)) for line in asked.stdout.splitlines()]
    return {address.replace("[", "").replace("]", "") for address, owners in lines if pids & set(map(int, owners))}
