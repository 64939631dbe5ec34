"""Client of the agent's control socket: the status of a live run, and requests to stop or scale it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import zmq

from manyhands.comm.transport import Port, open_port
from manyhands.control.messages.status_messages import Status, StatusRequest
from manyhands.control.messages.worker_messages import Refusal
from manyhands.control.run_directory import read_run
from manyhands.errors import EnvironmentProblem, UsageError
from manyhands.private_files import owner_and_mode

__all__ = ["query", "request_scale", "request_stop"]

ANSWER_S = 3.0


def query(run_dir: str | Path) -> Status:
    """Ranks, pids, steps and phases of a live run. Raises `UsageError` when no agent answers."""
    return _ask(run_dir, StatusRequest(what="status"))


def request_stop(run_dir: str | Path) -> Status:
    """Ask the run to commit a checkpoint and end; returns at once, with its status at that moment."""
    return _ask(run_dir, StatusRequest(what="stop"))


def request_scale(run_dir: str | Path, workers: int | None = None, servers: int | None = None) -> Status:
    """Ask an elastic run to change its number of workers or servers; returns at once, with its status at that moment.

    Raises `UsageError` if the run is not elastic or has no servers, a number is out of bounds, or no agent answers.
    """
    return _ask(run_dir, StatusRequest(what="scale", workers=workers, servers=servers))


def _ask(run_dir: str | Path, request: StatusRequest) -> Status:
    record = read_run(run_dir)
    if record.endpoint is None or not _has_socket(record.endpoint, Path(run_dir), request):
        raise UsageError(f"{run_dir} is not running here: its record says {record.status}, on {record.host}.")
    context: zmq.Context[Any] = zmq.Context()
    port: Port[Status | Refusal] = open_port(context, zmq.DEALER, record.endpoint, Status | Refusal)
    try:
        port.send(request)
        if port.socket.poll(int(ANSWER_S * 1000)):
            for _, reply in port.receive():
                if isinstance(reply, Refusal):
                    raise UsageError(reply.what, fix=reply.fix)
                return reply
        raise UsageError(f"The agent of {run_dir} (pid {record.pid}) did not answer within {ANSWER_S:g} s.")
    finally:
        port.close()
        context.term()


def _has_socket(endpoint: str, run_dir: Path, request: StatusRequest) -> bool:
    """Whether the agent's socket exists. Its directory is private to the owner, even if a group may read the run."""
    try:
        os.stat(endpoint.removeprefix("ipc://"))
    except PermissionError:
        owner, mode = owner_and_mode(run_dir)
        raise EnvironmentProblem(
            f"{run_dir} belongs to {owner} and has mode {mode}: others may at most read it, not {request.what} it.",
            fix=[f"as {owner}: mh {request.what} {run_dir}"],
        ) from None
    except OSError:
        return False
    return True
