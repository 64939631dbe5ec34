"""An agent's template process: has torch imported, and gives the agent a new worker in milliseconds.

`Template.fork` returns the worker, a child of this process, or None: then the caller spawns it. It does so where the
template is not ready in time, has died, has a second thread, or was started with other values of variables that only
count when a program begins. The other end is `launcher.worker_process.template`, which says what is done there.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from manyhands import signals

__all__ = [
    "ROOM", "ForkRequest", "ForkedProcess", "Lent", "Template", "is_possible", "lend", "read_at_exec", "request_fork",
    "set_subreaper", "shared_template",
]  # fmt: skip

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
# Read by libraries when they are loaded, or by the interpreter when it starts: no use to change them later.
READ_AT_EXEC = (
    *(
        "LD_",
        "MALLOC_",
        "GLIBC_",
        "OMP_",
        "GOMP_",
        "KMP_",
        "OPENBLAS_",
        "MKL_",
        "BLIS_",
        "NUMEXPR_",
        "DNNL_",
        "ONEDNN_",
    ),
    *("ATEN_", "TORCH_", "PYTORCH_", "PYTHON", "LANG", "LC_", "VIRTUAL_ENV"),
)
# Beyond this workers are spawned; the template may get ready in time for the next ones.
READY_WITHIN_S = 30.0
FORKED_WITHIN_S = 2.0
MOST_STARTS = 3
# Room for the command line of a worker, which the template overwrites its own with.
ROOM = "." * 4000


def is_possible() -> bool:
    """Linux only: subreapers, pidfds, /proc."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


def read_at_exec(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environment.items() if name.startswith(READ_AT_EXEC)}


class ForkedProcess:
    """A child that was forked, as `subprocess.Popen` has one that was spawned."""

    def __init__(self, pid: int, stdout: int | None = None, stderr: int | None = None) -> None:
        self.pid = pid
        self.stdout = io.FileIO(stdout) if stdout is not None else None
        self.stderr = io.FileIO(stderr) if stderr is not None else None
        self._code: int | None = None

    def poll(self) -> int | None:
        return self._collect(os.WNOHANG)

    def wait(self) -> int:
        code = self._collect(0)
        assert code is not None
        return code

    def _collect(self, how: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, how)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkRequest(msgspec.Struct):
    """What a template is sent, as JSON, together with the open files."""

    shown: Sequence[str]
    """Its command line as ps shows it."""
    arguments: Sequence[str]
    environment: dict[str, str]
    directory: str
    fds: Sequence[int]
    """The numbers that the open files have in the forked process."""


def request_fork(channel: socket.socket, request: ForkRequest, files: Sequence[int], within_s: float) -> int | None:
    """Have the template at the other end of `channel` fork a process with these open files.

    Returns its pid once this process is its parent; None if it takes too long. A process that is forked too late then
    finds the handshake closed, and exits.
    """
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            body = msgspec.json.encode(request)
            channel.settimeout(within_s)
            try:
                socket.send_fds(channel, [len(body).to_bytes(4, "big")], [*files, theirs.fileno()])
                channel.sendall(body)
            except OSError:
                return None
        ours.settimeout(within_s)
        try:
            pid = ours.recv(4)
            if len(pid) < 4:
                return None
            ours.sendall(b"g")
        except OSError:
            return None
    return int.from_bytes(pid, "big")


class Lent(NamedTuple):
    """A template that this process was given when it was started, in place of one that it would start itself."""

    process: ForkedProcess | subprocess.Popen[bytes]
    channel: socket.socket
    environment: Mapping[str, str]


_lent: list[Lent] = []


def lend(template: Lent) -> None:
    """For programs that start agents by the dozen: the next `Template` of this process is this one, if it fits."""
    _lent[:] = [template]


class _SharedTemplate:
    """A template that one agent after the other uses, and that none of them ends."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self.channel, self.process = _start_process(environment)
        self.is_ready = False


_shared: list[_SharedTemplate] = []


@contextlib.contextmanager
def shared_template(environment: Mapping[str, str]) -> Iterator[None]:
    """For programs that run one agent after another: within this context they fork their workers from one template.

    torch is imported once instead of once per agent. `environment` is that of the workers; an agent whose workers have
    other values of variables that are read at exec starts a template of its own.
    """
    if not is_possible():
        yield
        return
    was_subreaper = _subreaper()
    set_subreaper(True)
    shared = _SharedTemplate(environment)
    _shared.append(shared)
    try:
        yield
    finally:
        _shared.clear()
        shared.channel.close()
        shared.process.kill()
        shared.process.wait()
        set_subreaper(was_subreaper)


def _start_process(environment: Mapping[str, str]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    channel, theirs = socket.socketpair()
    with theirs, signals.held_back():
        process = subprocess.Popen(
            _command(theirs.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"OPENBLAS_NUM_THREADS": "1", **environment},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return channel, process


class Template:
    def __init__(self, environment: Mapping[str, str], marked: Mapping[str, str]) -> None:
        self._environment, self._marked = dict(environment), dict(marked)
        self._starts = 0
        self._process: ForkedProcess | subprocess.Popen[bytes] | None = None
        self._was_subreaper = _subreaper()
        set_subreaper(True)
        self._start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def _start(self) -> None:
        self._starts, self._started_at, self._is_ready = self._starts + 1, time.monotonic(), False
        self._shared = _shared_for(self._environment)
        if self._shared is not None:
            self._process, self._channel = self._shared.process, self._shared.channel
            self._is_ready = self._shared.is_ready
            return
        lent = _lent.pop() if _lent else None
        if lent is not None and read_at_exec(lent.environment) == read_at_exec(self._environment):
            self._process, self._channel = lent.process, lent.channel
            return
        self._channel, self._process = _start_process({**self._environment, **self._marked})

    def fork(
        self, shown: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str], fds: Sequence[int]
    ) -> ForkedProcess | None:
        """A worker with these arguments and open files beside its standard streams, or None: spawn it.

        `shown` is its command line as ps shows it, that of a worker which is spawned.
        """
        if read_at_exec(self._environment) != read_at_exec(environment) or not self._ready():
            return None
        request = ForkRequest(shown, arguments, dict(environment), os.getcwd(), [0, 1, 2, *fds])
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        with open(os.devnull, "rb") as nothing:
            files = [nothing.fileno(), out_end, err_end, *fds]
            pid = request_fork(self._channel, request, files, FORKED_WITHIN_S)
        os.close(out_end)
        os.close(err_end)
        if pid is None:
            os.close(out)
            os.close(err)
            self._lose()
            return None
        return ForkedProcess(pid, out, err)

    @property
    def descriptor(self) -> int | None:
        """Readable when it gets ready, or dies before; None when there is nothing to wait for."""
        return None if self._process is None or self._is_ready else self._channel.fileno()

    def is_awaited(self) -> bool:
        """Whether workers should wait for it: it is about to be ready."""
        is_ready = self._ready()  # first: one that is dead is replaced here, or given up
        return not is_ready and self._process is not None and time.monotonic() < self._started_at + READY_WITHIN_S

    def _ready(self) -> bool:
        """Whether it has imported what it has to. Does not wait."""
        if self._process is None:
            return False
        if self._process.poll() is not None:
            self._lose()
            return False
        if not self._is_ready:
            self._channel.setblocking(False)
            with contextlib.suppress(OSError):
                self._is_ready = self._channel.recv(1) == b"r"
        if self._shared is not None:
            self._shared.is_ready = self._is_ready
        return self._is_ready

    def _lose(self) -> None:
        """It is dead, or of no use: the next worker comes from a new one, unless that has happened too often."""
        if self._shared is not None:
            _shared.clear()  # its owner ends it
        self._end()
        if self._starts < MOST_STARTS:
            self._start()

    def _end(self) -> None:
        if self._shared is not None:
            self._process = self._shared = None
        elif self._process is not None:
            self._channel.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self._end()
        set_subreaper(self._was_subreaper)


def _shared_for(environment: Mapping[str, str]) -> _SharedTemplate | None:
    """The shared template, if there is one and it fits; one that has died is of no use to any agent."""
    if _shared and _shared[0].process.poll() is not None:
        _shared.clear()
    fits = _shared and read_at_exec(_shared[0].environment) == read_at_exec(environment)
    return _shared[0] if fits else None


def _command(channel: int) -> list[str]:
    module = "manyhands.launcher.worker_process.template"
    return [sys.executable, "-u", "-m", module, "--parent", str(os.getpid()), "--channel", str(channel), ROOM]


def _subreaper() -> bool:
    found = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(found), 0, 0, 0)
    return bool(found.value)


def set_subreaper(on: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)
