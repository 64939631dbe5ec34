"""A person's side of the agent's control socket: how a live run stands, and the wish that it stop, grow or shrink."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import zmq

from manyhands.comm.transport import Port, open_port
from manyhands.control.messages.status_messages import Ask, Status
from manyhands.control.messages.worker_messages import Refusal
from manyhands.control.run_directory import read_run
from manyhands.errors import EnvironmentProblem, UsageError
from manyhands.private_files import owner_and_mode

__all__ = ["query", "request_scale", "request_stop"]

ANSWER_S = 3.0


def query(run_dir: str | Path) -> Status:
    """Ranks, pids, steps and phases of a live run. Raises `UsageError` when nobody answers for it."""
    return _ask(run_dir, Ask(what="status"))


def request_stop(run_dir: str | Path) -> Status:
    """Ask the run to commit a checkpoint and end; returns at once, with how it stood."""
    return _ask(run_dir, Ask(what="stop"))


def request_scale(run_dir: str | Path, workers: int | None = None, servers: int | None = None) -> Status:
    """Ask an elastic run to go on with so many workers or servers; returns at once, with how it stood.

    Raises `UsageError` where the run is not elastic or has no servers, a number is outside of its bounds, or nobody
    answers.
    """
    return _ask(run_dir, Ask(what="scale", workers=workers, servers=servers))


def _ask(run_dir: str | Path, question: Ask) -> Status:
    record = read_run(run_dir)
    if record.endpoint is None or not _is_there(record.endpoint, Path(run_dir), question):
        raise UsageError(f"{run_dir} is not running here: its record says {record.status}, on {record.host}.")
    context: zmq.Context[Any] = zmq.Context()
    port: Port[Status | Refusal] = open_port(context, zmq.DEALER, record.endpoint, Status | Refusal)
    try:
        port.send(question)
        if port.socket.poll(int(ANSWER_S * 1000)):
            for _, answer in port.receive():
                if isinstance(answer, Refusal):
                    raise UsageError(answer.what, fix=answer.fix)
                return answer
        raise UsageError(f"The agent of {run_dir} (pid {record.pid}) did not answer within {ANSWER_S:g} s.")
    finally:
        port.close()
        context.term()


def _is_there(endpoint: str, run_dir: Path, question: Ask) -> bool:
    """Whether the agent's socket is. It is in a directory of its owner's alone, also where the run is for a group."""
    try:
        os.stat(endpoint.removeprefix("ipc://"))
    except PermissionError:
        owner, mode = owner_and_mode(run_dir)
        raise EnvironmentProblem(
            f"{run_dir} belongs to {owner} and has mode {mode}: others may at most read it, not {question.what} it.",
            fix=[f"as {owner}: mh {question.what} {run_dir}"],
        ) from None
    except OSError:
        return False
    return True
