"""Derives the CURVE keys of a run from one shared 32-byte key, and reads and writes the join file that holds it.

Exactly the hosts that have the key may join. Both ends derive the same server and client pair from it, so there is
nothing to register. The key is passed on in a file of mode 0600 or on standard input, never in an argument, environment
or log.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import select
import stat
import tempfile
import time
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from manyhands.comm.transport import Curve
from manyhands.control.messages.launch_request import JoinTicket
from manyhands.errors import ClusterError, EnvironmentProblem

__all__ = [
    "client_curve",
    "local_key",
    "new_key",
    "read_join_file",
    "read_join_input",
    "read_secret_line",
    "server_curve",
    "weights_client_curve",
    "weights_server_curve",
    "why_not_private",
    "write_join_file",
]

KEY_BYTES = 32
MAX_SECRET_BYTES = 65536
INPUT_TIMEOUT_S = 60.0
STANDARD_INPUT = 0


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def server_curve(key: bytes) -> Curve:
    public, secret = _pair(key, b"server")
    return Curve(public=public, secret=secret)


def client_curve(key: bytes) -> Curve:
    public, secret = _pair(key, b"client")
    return Curve(public=public, secret=secret, server_key=_pair(key, b"server")[0])


def weights_server_curve(key: bytes) -> Curve:
    """Keys of parameter servers for other hosts. Workers and servers get these, never the key itself."""
    public, secret = _pair(key, b"weights server")
    return Curve(public=public, secret=secret)


def weights_client_curve(key: bytes) -> Curve:
    public, secret = _pair(key, b"weights client")
    return Curve(public=public, secret=secret, server_key=_pair(key, b"weights server")[0])


def _pair(key: bytes, role: bytes) -> tuple[bytes, bytes]:
    # BLAKE2b with a key is a pseudorandom function: one derived pair reveals nothing about the other.
    secret = z85.encode(hashlib.blake2b(role, key=key, digest_size=32, person=b"manyhands.curve1").digest())
    return zmq.curve_public(secret), secret


def write_join_file(path: Path, ticket: JoinTicket) -> None:
    """Write the ticket with mode 0600; an older file at this path is replaced."""
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(ticket) + b"\n")
    os.replace(temporary, path)


def read_join_file(path: str | Path) -> JoinTicket:
    where = str(path)
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            content = file.read(MAX_SECRET_BYTES)
    except OSError as error:
        raise ClusterError(f"The join file cannot be read: {error.strerror}.", where=where) from error
    if (why := why_not_private(found)) is not None:
        raise ClusterError(
            f"The join file {why}, so its key is no secret.",
            where=where,
            fix=[f"chmod 600 {where}, or start the run again for a new key"]
            if found.st_uid == os.geteuid()
            else [f"make a private copy, if you trust its source: install -m 600 {where} run.join"],
        )
    return _ticket_in(content, where)


def read_join_input() -> JoinTicket:
    """The ticket that standard input begins with, as one line; the rest of the input is left unread."""
    return _ticket_in(read_secret_line(), "standard input")


def read_secret_line(fd: int = STANDARD_INPUT, timeout_s: float = INPUT_TIMEOUT_S) -> bytes:
    """One line of a pipe that may stay open after it; no byte after the line is taken."""
    line, deadline = b"", time.monotonic() + timeout_s
    while not line.endswith(b"\n") and len(line) < MAX_SECRET_BYTES:
        if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            what = f"Nothing arrived on standard input within {timeout_s:g} s."
            raise ClusterError(what, fix=["mh agent --join - < run.join", "MANYHANDS_KEY_FILE=FILE"])
        if not (byte := os.read(fd, 1)):
            break
        line += byte
    return line.strip()


def _ticket_in(content: bytes, where: str) -> JoinTicket:
    try:
        ticket = msgspec.json.decode(content, type=JoinTicket)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ClusterError(
            f"This is not a join file: {error}.",
            where=where,
            fix=["pass the file that `mh run --hosts-wanted 2 --listen ADDR` wrote"],
        ) from error
    key_of(ticket, where)
    return ticket


def why_not_private(found: os.stat_result, *, group_may_read: bool = False) -> str | None:
    """Why a file's content is no secret of this user: others can read it, or another user wrote it; None if it is one.

    Root could read it anyway, and is trusted. `group_may_read` is for key files that an administrator or Kubernetes
    makes: kubelet gives the files of a Secret to a pod's group, with mode 0440. A join file is only ever written by us,
    with 0600: any other mode means that something has changed it.
    """
    others = 0o037 if group_may_read else 0o077
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user (uid {found.st_uid}; you are {os.geteuid()})"
    if stat.S_IMODE(found.st_mode) & others:
        return f"can be read by others (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def key_of(ticket: JoinTicket, where: str = "the join ticket") -> bytes:
    try:
        key = bytes.fromhex(ticket.key)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ClusterError(f"The key is not {KEY_BYTES} bytes in hexadecimal.", where=where)
    return key


def local_key() -> bytes:
    """The key that agents of one user on one machine share, for runs that stay on loopback.

    Kept in a directory that only this user can enter; another user's directory with that name is refused.
    """
    folder = Path(tempfile.gettempdir()) / f"manyhands-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise EnvironmentProblem(f"{folder} is not a private directory of this user.", fix=[f"remove {folder}"])
    path = folder / "loopback.key"
    try:
        fd = os.open(folder / f"new-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(new_key().hex(), file)
        os.link(folder / f"new-{os.getpid()}", path)  # fails if another process linked its key first
    except FileExistsError:
        pass
    finally:
        (folder / f"new-{os.getpid()}").unlink(missing_ok=True)
    return bytes.fromhex(json.loads(path.read_text()))
