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
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from typing import Any, NoReturn

from manyhands.control.processes.fence import die_with_parent
from manyhands.control.processes.template_process import ROOM_BYTES, ROOM_VARIABLE, read_at_exec
from manyhands.launcher.worker_process import bootstrap
from manyhands.launcher.worker_process.import_hooks import import_to_stay
from manyhands.launcher.worker_process.lazy_compiler import load_compiler_late
from manyhands.signals import STOP_SIGNALS
from manyhands.spec.load import environment, replace_environment

__all__ = ["main", "modules_from_elsewhere", "num_threads", "preload", "serve", "variables_set_too_late"]

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
LARGE = ("torch", "numpy")
OPENBLAS_CALLS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")
PARENT_WITHIN_S = 10.0
MOST_FDS = 8


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("room", help="memory for the command lines of workers, which ps then shows")
    asked = parser.parse_args(argv)
    die_with_parent(asked.parent)
    show_command_line([sys.executable, "-u", "-m", "manyhands.launcher.worker_process.template"])
    preload()
    serve(socket.socket(fileno=asked.channel), asked.parent, bootstrap.main)


def preload() -> None:
    """For a program that was run by `-m`."""
    if not sys.flags.safe_path:  # the current directory, where a worker may not look for modules
        del sys.path[0]
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


def modules_from_elsewhere() -> list[str]:
    """Modules for which the script's search path now leads to another place than they were imported from before it."""
    if not _began_with:
        return []
    specs = {name: (sys.modules[name].__spec__, PathFinder.find_spec(name)) for name in LARGE if name in sys.modules}
    return [name for name, (ours, theirs) in specs.items() if ours and theirs and ours.origin != theirs.origin]


def serve(channel: socket.socket, agent: int, run: Run) -> NoReturn:
    """Fork a process for every request, which calls `run` with its arguments, until the agent closes its end.

    Signals that ask a run to stop stay blocked here: the agent acts on them.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    with contextlib.suppress(OSError):
        channel.sendall(b"r")
        while num_threads() == 1 and (request := _receive(channel)) is not None:
            asked, fds = request
            if num_threads() == 1 and not _shadowed(asked["first_in_path"]):
                _fork(channel, asked, fds, agent, run)
            for fd in fds:  # if no worker has them, the agent sees its end of the handshake closed, and spawns it
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


def _shadowed(folder: str) -> bool:
    """Whether the worker would import a module from this folder that was imported from elsewhere here."""
    if not os.path.isdir(folder):
        return False
    return any(_shadows(os.path.join(folder, entry)) for entry in os.listdir(folder))


def _shadows(path: str) -> bool:
    """Built-in and frozen modules come before all files, and a folder without `__init__.py` after all modules."""
    name, _, ending = os.path.basename(path).partition(".")
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if spec is None or not spec.has_location or spec.origin == "frozen":
        return False
    if ending != "py" and not ending.endswith("so") and not os.path.exists(os.path.join(path, "__init__.py")):
        return False
    origin = os.path.realpath(spec.origin or "")
    return origin not in (os.path.realpath(path), os.path.join(os.path.realpath(path), "__init__.py"))


def _fork(channel: socket.socket, asked: dict[str, Any], fds: list[int], agent: int, run: Run) -> None:
    try:
        between = os.fork()
    except OSError:  # out of memory or processes: the agent spawns this worker
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
        replace_environment(asked["environment"])
        _began_with.update(asked["environment"])
        os.chdir(asked["directory"])
        if not sys.flags.safe_path:
            sys.path.insert(0, asked["directory"])
        show_command_line(asked["shown"])
        show_variable("MANYHANDS_AGENT", asked["environment"].get("MANYHANDS_AGENT", ""))
        _forget_state_of_template(asked)
        _await_parent(agent)
        os.write(confirm, os.getpid().to_bytes(4, "big"))
        if os.read(confirm, 1) != b"g":  # the agent has abandoned this worker
            os._exit(0)
        os.close(confirm)
        run(asked["arguments"])
    finally:
        os._exit(70)


def _place_files(received: list[int], wanted: list[int]) -> int:
    """Give open files the numbers that the agent named, and close all others; the last one is for the handshake."""
    free = max([2, *received, *wanted]) + 1
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, free) for fd in received]
    for source, target in zip(high[:-1], wanted, strict=True):
        os.dup2(source, target)
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd not in wanted and fd != high[-1]:
            with contextlib.suppress(OSError):  # the listed directory itself
                os.close(fd)
    return high[-1]


def _await_parent(agent: int) -> None:
    """Wait until the intermediate process has exited, and the agent is this process's parent."""
    deadline = time.monotonic() + PARENT_WITHIN_S
    while os.getppid() != agent and time.monotonic() < deadline:
        time.sleep(0.0005)


def _forget_state_of_template(asked: Mapping[str, Any]) -> None:
    """Reset what workers must not inherit: what the template set for itself, and what is random in every process."""
    import numpy
    import torch

    numpy.random.seed()
    torch.default_generator.seed()
    multiprocessing.current_process().authkey = os.urandom(32)
    _set_blas_threads(blas_threads(asked["environment"]))
    sys.orig_argv[:] = asked["shown"]
    sys.argv = [bootstrap.__file__, *asked["arguments"]]
    sys.modules["__main__"] = bootstrap
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # Python 3.11 keeps the template's
    signal.pthread_sigmask(signal.SIG_SETMASK, asked["blocked"])


def blas_threads(variables: Mapping[str, str]) -> int:
    """How many threads OpenBLAS would start with, as it reads these variables."""
    for name in ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"):
        wanted = variables.get(name, "").partition(",")[0]
        if wanted.isdigit() and int(wanted) > 0:
            return min(int(wanted), len(os.sched_getaffinity(0)))
    return len(os.sched_getaffinity(0))


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
    begin, end = _memory_of(45)
    text = "\0".join(words).encode()[: max(0, end - begin - 1)]
    if 0 < begin < end:
        ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def show_variable(name: str, value: str) -> None:
    """Make this variable visible in /proc/PID/environ, which has those that the template was started with.

    It is written over the room that the template has there for it, and that nothing refers to any more.
    """
    begin, end = _memory_of(47)
    room = f"{ROOM_VARIABLE}={'.' * ROOM_BYTES}".encode()
    at = ctypes.string_at(begin, end - begin).find(room) if 0 < begin < end else -1
    text = f"{name}={value}\0{ROOM_VARIABLE}=".encode()
    if at >= 0 and len(text) <= len(room):
        ctypes.memmove(begin + at, text.ljust(len(room), b"."), len(room))


def _memory_of(field: int) -> tuple[int, int]:
    """Two addresses from /proc/self/stat, of which `field` is the first, counted from 0 after the name."""
    with open("/proc/self/stat") as file:
        numbers = file.read().rpartition(")")[2].split()
    return int(numbers[field]), int(numbers[field + 1])


if __name__ == "__main__":
    # As a module of its name, so that what it keeps for workers is there for those who import it.
    importlib.import_module("manyhands.launcher.worker_process.template").main()
