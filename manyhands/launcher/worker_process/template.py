"""The template process, from which workers are forked: it has imported torch and manyhands, and has computed nothing.

An agent runs it as `python -u -m manyhands.launcher.worker_process.template --parent PID --channel FD ROOM`. A forked
worker has its modules at once: in milliseconds instead of seconds, and all workers of a host share the pages of the
imports. Every request of the agent (`control.processes.template_process`) has a worker's arguments, environment and
open files. The fork is double: the intermediate process exits at once, and the agent, a subreaper, becomes the worker's
parent, so that the worker is fenced and reaped like a spawned one. Start reading at `main`.

A process with several threads must not be forked: a lock that another thread holds would stay locked for ever. torch
starts its threads with the first parallel operation and the first backward pass, OpenBLAS when it is loaded, unless it
is limited to one. The template therefore computes nothing, and refuses to fork when it has a second thread.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from manyhands.control.processes.fence import die_with_parent
from manyhands.control.processes.template_process import read_at_exec
from manyhands.launcher.worker_process import bootstrap
from manyhands.launcher.worker_process.import_hooks import import_to_stay
from manyhands.launcher.worker_process.lazy_compiler import load_compiler_late
from manyhands.spec.load import environment, replace_environment

__all__ = ["main", "num_threads", "preload", "serve", "variables_set_too_late"]

Run = Callable[[list[str]], Any]
_began_with: dict[str, str] = {}
"""In a forked worker: the environment that the agent sent for it."""

# What a training imports, except for the modules whose import means that a script uses manyhands (`foreign_scripts`).
MODULES = (
    "torch",
    "torch.distributed",
    "numpy",
    "zmq",
    "manyhands.comm.shared_memory_axis",
    "manyhands.checkpoint.writer",
    "manyhands.data.batches",
    "manyhands.data.sources.as_source",
    "manyhands.control.session.session",
    "manyhands.strategies.replicated",
    "manyhands.strategies.model_parallel",
    "manyhands.parameter_server.engine.leased_engine",
)
OPENBLAS_CALLS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")
PARENT_WITHIN_S = 10.0
MOST_FDS = 8
HIGH_FD = 500


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("room", help="memory for the command lines of workers, which ps then shows")
    asked = parser.parse_args(argv)
    die_with_parent(asked.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    show_command_line([sys.executable, "-u", "-m", "manyhands.launcher.worker_process.template"])
    preload()
    serve(socket.socket(fileno=asked.channel), asked.parent, bootstrap.main)


def preload() -> None:
    import_to_stay("torch")
    load_compiler_late()
    for name in MODULES:
        importlib.import_module(name)


def variables_set_too_late() -> list[str]:
    """Variables that a script has changed, though torch reads them on import, which was before the script ran."""
    if not _began_with:
        return []
    before, now = read_at_exec(_began_with), read_at_exec(environment())
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def serve(channel: socket.socket, agent: int, run: Run) -> NoReturn:
    """Fork a process for every request, which calls `run` with its arguments, until the agent closes its end."""
    with contextlib.suppress(OSError):
        channel.sendall(b"r")
        while (request := _receive(channel)) is not None:
            asked, fds = request
            _fork(channel, asked, fds, agent, run)
            for fd in fds:  # if no worker has them, the agent sees its channel to the worker closed
                os.close(fd)
    os._exit(0)


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    head, fds, _, _ = socket.recv_fds(channel, 4, MOST_FDS)
    if len(head) < 4:
        return None
    body = b""
    while len(body) < (length := int.from_bytes(head, "big")):
        part = channel.recv(length - len(body))
        if not part:
            return None
        body += part
    return json.loads(body), list(fds)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _fork(channel: socket.socket, asked: dict[str, Any], fds: list[int], agent: int, run: Run) -> None:
    if num_threads() > 1:
        return
    try:
        between = os.fork()
    except OSError:  # no memory: the agent spawns this worker instead
        return
    if between == 0:
        try:
            if os.fork() == 0:
                channel.detach()
                _become_worker(asked, fds, agent, run)
        finally:
            os._exit(0)
    os.waitpid(between, 0)


def _become_worker(asked: dict[str, Any], fds: list[int], agent: int, run: Run) -> NoReturn:
    """Do what `exec` would have done for a new process, then what every worker does."""
    try:
        os.setsid()
        confirm = _place_files(fds, asked["fds"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        replace_environment(asked["environment"])
        _began_with.update(asked["environment"])
        os.chdir(asked["directory"])
        show_command_line(asked["shown"])
        _forget_state_of_template(asked["environment"])
        _await_parent(agent)
        os.write(confirm, os.getpid().to_bytes(4, "big"))
        if os.read(confirm, 1) != b"g":  # the agent has abandoned this worker
            os._exit(0)
        os.close(confirm)
        sys.argv = [bootstrap.__file__, *asked["arguments"]]
        run(asked["arguments"])
    finally:
        os._exit(70)


def _place_files(received: list[int], wanted: list[int]) -> int:
    """Give open files the numbers that the agent named, and close all others; the last one is for the handshake."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH_FD) for fd in received]
    os.closerange(3, HIGH_FD)
    for source, target in zip(high[:-1], wanted, strict=True):
        os.dup2(source, target)
        os.close(source)
    return high[-1]


def _await_parent(agent: int) -> None:
    """Wait until the intermediate process has exited, and the agent is this process's parent."""
    deadline = time.monotonic() + PARENT_WITHIN_S
    while os.getppid() != agent and time.monotonic() < deadline:
        time.sleep(0.0005)


def _forget_state_of_template(environment: dict[str, str]) -> None:
    """Reset what workers must not inherit: the template's random state, and its limit to one thread."""
    import numpy

    numpy.random.seed()
    wanted = environment.get("OPENBLAS_NUM_THREADS") or environment.get("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0))
    _set_blas_threads(int(wanted) if wanted and wanted.isdigit() else cores)


def _set_blas_threads(count: int) -> None:
    with open("/proc/self/maps") as maps:
        found = {line.split()[-1] for line in maps if "openblas" in line}
    for path in found:
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(path)
            for name in OPENBLAS_CALLS:
                if hasattr(library, name):
                    getattr(library, name)(count)


def show_command_line(words: list[str]) -> None:
    """Set what ps and /proc/PID/cmdline show; it is written over the memory of this program's original arguments."""
    with open("/proc/self/stat") as file:
        numbers = file.read().rpartition(")")[2].split()
    begin, end = int(numbers[45]), int(numbers[46])
    text = "\0".join(words).encode()[: max(0, end - begin - 1)]
    if 0 < begin < end:
        ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    main()
