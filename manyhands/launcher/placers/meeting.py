"""How the tasks of one job find each other: the first one's join file, in a private directory that all of them see.

The first host writes the file once its coordinator listens, and removes it when all hosts have joined. The others take
it when a run with its key answers at its address; a file that an earlier start of the job has left behind has another
name, and no run behind its address. Start reading at `await_ticket`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import zmq

from manyhands.comm.transport import open_port
from manyhands.control.agent.preflight import local_address_to
from manyhands.control.messages.agent_messages import Orders
from manyhands.control.messages.launch_request import JoinTicket
from manyhands.control.security.keys import client_curve, key_of, read_join_file
from manyhands.control.servers.server_ports import tcp_endpoint
from manyhands.errors import ClusterError, EnvironmentProblem
from manyhands.spec.addresses import is_loopback, parse_address
from manyhands.spec.load import STATE_VARIABLE
from manyhands.spec.seat import Seat

__all__ = ["GIVE_UP_AFTER_S", "await_ticket", "first_address", "hint_for_first", "meeting_file"]

SAY_AFTER_S = 20.0
GIVE_UP_AFTER_S = 120.0
LOOK_EVERY_S = 0.1
ANSWER_WITHIN_S = 2.0


def meeting_file(seat: Seat, environ: Mapping[str, str]) -> Path:
    """Where the first host of this start of the job writes its join file. Makes the directory, for this user only."""
    chosen = environ.get(STATE_VARIABLE)
    folder = (
        Path(chosen).absolute() if chosen else Path(environ.get("HOME") or "~").expanduser() / ".manyhands" / "jobs"
    )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        what = f"{folder}, through which the hosts of this job find each other, cannot be used: {error.strerror}."
        raise EnvironmentProblem(what, fix=[f"{STATE_VARIABLE}=a directory that all hosts share"]) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise EnvironmentProblem(
            f"{folder} is not a directory of this user alone (mode {stat.S_IMODE(found.st_mode):04o}), and keys of "
            "runs would be kept in it.",
            where=STATE_VARIABLE if chosen else "the default directory",
            fix=[f"chmod 700 {folder}", f"{STATE_VARIABLE}=another directory that all hosts share"],
        )
    return folder / f"{seat.meeting}.join"


def await_ticket(
    path: Path,
    seat: Seat,
    say: Callable[[str], None],
    *,
    say_after_s: float = SAY_AFTER_S,
    give_up_after_s: float = GIVE_UP_AFTER_S,
) -> JoinTicket:
    """The first host's ticket, once its run accepts connections."""
    started, said, why = time.monotonic(), False, ""
    while (waited := time.monotonic() - started) < give_up_after_s:
        ticket, why = _look(path, seat)
        if ticket is not None:
            return ticket
        if waited > say_after_s and not said:
            said = True
            say(f"waiting: {why}")
        time.sleep(LOOK_EVERY_S)
    raise EnvironmentProblem(
        f"{why} It waited for {give_up_after_s:g} s.",
        where=f"{seat.command}, task {seat.task} of {seat.num_tasks}",
        fix=[f"{STATE_VARIABLE}=a directory that all hosts share", "mh run --on slurm"],
    )


def _look(path: Path, seat: Seat) -> tuple[JoinTicket | None, str]:
    """The ticket, if it is there and its run answers; else why not."""
    first = seat.nodes[0] if seat.nodes else "the first host"
    own = seat.node or socket.gethostname()
    # A directory listing makes NFS ask its server again; a file that was missing once may stay missing in its cache.
    with contextlib.suppress(OSError):
        os.listdir(path.parent)
    if not path.exists():
        return None, f"{own} does not see {path}, which {first} writes."
    try:
        ticket = read_join_file(path)
    except ClusterError as error:
        return None, f"{own} cannot use {path}: {error.what}"
    return (ticket, "") if _answers(ticket) else (None, f"No run of {first} answers {own} at {ticket.address}.")


def _answers(ticket: JoinTicket) -> bool:
    """Whether a run with this key accepts connections there."""
    context: zmq.Context[Any] = zmq.Context()
    port = open_port(
        context, zmq.DEALER, tcp_endpoint(*parse_address(ticket.address)), Orders, curve=client_curve(key_of(ticket))
    )
    monitor = port.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    try:
        return bool(monitor.poll(round(ANSWER_WITHIN_S * 1000)))
    finally:
        port.socket.disable_monitor()
        monitor.close(0)
        port.close()
        context.term()


def hint_for_first(path: Path, seat: Seat) -> str:
    """For the first host, when others have not joined after `SAY_AFTER_S`."""
    others = ", ".join(seat.nodes[1:4]) + (", ..." if len(seat.nodes) > 4 else "")
    return (
        f"{others or 'the other hosts'} should find {path}; if a host does not see it: {STATE_VARIABLE}=a directory "
        "that all hosts share"
    )


def first_address(seat: Seat) -> str:
    """This host's address on the way to the next host; without its name, what this host's own name resolves to."""
    own = seat.node or socket.gethostname()
    name = next((node for node in seat.nodes if node != own), own)
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
        address = str(found) if name == own else local_address_to(name, 1)
    except OSError as error:
        raise EnvironmentProblem(
            f"{name} cannot be resolved: {error}.", where="the names of this job's hosts", fix=["--listen ADDR"]
        ) from error
    if is_loopback(address) or is_loopback(str(found)):
        raise EnvironmentProblem(
            f"{name} resolves to {found}, where no other host can reach this one.",
            where=_line_of(name),
            fix=["--listen ADDR, this host's address on the network that connects the hosts"],
        )
    return address


def _line_of(name: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path("/etc/hosts").read_text(errors="replace").splitlines():
            if name in line.partition("#")[0].split()[1:]:
                return f"/etc/hosts: {line.strip()}"
    return "the names of this job's hosts"
