"""Facts about this machine, without torch: cores, accelerators, its addresses; and its key files.

A launcher needs these before any worker exists, and must start quickly.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from manyhands.errors import EnvironmentProblem
from manyhands.spec.load import KEY_FILE_VARIABLE
from manyhands.spec.placement import Machine

__all__ = ["may_listen", "num_cores", "read_key", "this_machine", "write_key"]

KEY_BYTES = 32
STANDARD_INPUT = ("-", "/dev/stdin", "/dev/fd/0")


def this_machine(environ: Mapping[str, str]) -> Machine:
    return Machine(num_cores(), _num_accelerators(environ), may_listen)


def num_cores() -> int:
    """Cores this process may use: its affinity, or less if its cgroup has a quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def _num_accelerators(environ: Mapping[str, str]) -> int:
    # The device nodes are enough; loading CUDA to count would take seconds and memory in a process that needs neither.
    try:
        present = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in os.listdir("/dev"))
    except OSError:
        return 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    chosen = [name.strip() for name in visible.split(",")]
    until_invalid = chosen.index("-1") if "-1" in chosen else len(chosen)
    return min(present, len([name for name in chosen[:until_invalid] if name]))


def may_listen(host: str, port: int) -> bool:
    """Whether an address belongs to this machine and its port is free. Leaves nothing bound."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError:
        return False
    return True


def read_key(path: str) -> bytes:
    """The key that all hosts of a run share: in a file, or the first line of standard input.

    Refuses a file that others than its group may read, and one without a valid key.
    """
    from manyhands.control.security.keys import read_secret_line, why_not_private

    if path in STANDARD_INPUT:
        return _as_key(read_secret_line(), "standard input", fix=["mh run ... < run.key"])
    fix = [f"mh keygen {path}", "copy it to every host with mode 0600"]
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            text = file.read(4096).strip()
    except OSError as error:
        what = f"Cannot read the key file {path}: {error.strerror}."
        raise EnvironmentProblem(what, where=KEY_FILE_VARIABLE, fix=fix) from error
    if (why := why_not_private(found, group_may_read=True)) is not None:
        private = f"chmod 600 {path}" if found.st_uid == os.geteuid() else f"install -m 600 {path} run.key"
        raise EnvironmentProblem(f"The key file {path} {why}.", where=KEY_FILE_VARIABLE, fix=[private])
    return _as_key(text, f"the key file {path}", fix)


def _as_key(text: bytes, source: str, fix: list[str]) -> bytes:
    if not re.fullmatch(rb"[0-9a-fA-F]{%d}" % (2 * KEY_BYTES), text):
        what = f"{source[0].upper()}{source[1:]} does not contain a key ({2 * KEY_BYTES} hexadecimal digits)."
        raise EnvironmentProblem(what, where=KEY_FILE_VARIABLE, fix=fix)
    return bytes.fromhex(text.decode())


def write_key(path: Path) -> None:
    """Make a new key file, readable by its owner only. Never replaces a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(KEY_BYTES) + "\n")
