"""An agent's template process: has torch imported, and gives the agent a new worker in milliseconds.

`Template.fork` returns the worker, a child of this process, or None: then the caller spawns it. It does so where the
template is not ready, does not answer in time, has died, refuses, or was started with other values of variables that
only count when a program begins. A template that has died is replaced. The other end, which says what is done there, is
`launcher.worker_process.template`.
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
    "ROOM", "ROOM_VARIABLE", "ForkAnswer", "ForkRequest", "ForkedProcess", "Lent", "Template", "is_possible", "lend",
    "read_at_exec", "request_fork", "set_subreaper", "shared_template", "template_environment",
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
# A fork takes milliseconds. The agent waits for one at most so long, as other hosts wait for the agent.
FORKED_WITHIN_S = 1.0
# A template that has not answered for so long is killed, and replaced.
STUCK_AFTER_S = 30.0
LAST_WORD_S = 1.0
# After this many in a row that were of no use, none is started.
MOST_USELESS, QUICK_S = 3, 3.0
# Room for the command line of a worker, which the template overwrites its own with.
ROOM = "." * 4000
# Room for the variable by which the guard recognises a worker; what is set later is not visible to other processes.
ROOM_VARIABLE, ROOM_BYTES = "MANYHANDS_ROOM", 300


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
    first_in_path: str = ""
    """The directory where it looks for modules first: nothing is forked if that has one that the template has, too."""
    blocked: Sequence[int] = ()
    """The signals that are blocked in it: those that are blocked here, as in a process that is spawned."""


class ForkAnswer(NamedTuple):
    pid: int | None
    """The forked process, now a child of this one; None: there is none, or none yet."""
    late: socket.socket | None = None
    """The template has not answered in time: its end of the handshake becomes readable when it does, or dies."""
    sent: bool = True
    """Whether the template has the whole request; if not, it would take the next one for the rest of this one."""


def request_fork(channel: socket.socket, request: ForkRequest, files: Sequence[int], within_s: float) -> ForkAnswer:
    """Have the template at the other end of `channel` fork a process with these open files.

    The process runs nothing before this side has confirmed its pid: one that is forked too late finds the handshake
    closed, and exits.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        body = msgspec.json.encode(request)
        channel.settimeout(within_s)
        try:
            socket.send_fds(channel, [len(body).to_bytes(4, "big")], [*files, theirs.fileno()])
            channel.sendall(body)
        except OSError:
            ours.close()
            return ForkAnswer(None, sent=False)
    ours.settimeout(within_s)
    try:
        pid = _receive_pid(ours)
    except TimeoutError:
        return ForkAnswer(None, late=ours)
    with ours, contextlib.suppress(OSError):  # it may have died since: the caller finds its exit code
        ours.sendall(b"g")
    return ForkAnswer(pid)


def _receive_pid(handshake: socket.socket) -> int | None:
    """None at its end: nothing was forked. Raises `TimeoutError`, or `BlockingIOError`, while there is no answer."""
    try:
        pid = handshake.recv(4)
    except ConnectionError:
        return None
    return int.from_bytes(pid, "big") if len(pid) == 4 else None


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


def template_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What a template is started with, whose workers have this environment.

    OpenBLAS would start a thread per core, and a process with threads must not be forked: a worker's own number, also
    one that the user asks for, is set once it is forked.
    """
    return {**environment, "OPENBLAS_NUM_THREADS": "1", ROOM_VARIABLE: "." * ROOM_BYTES}


def _start_process(environment: Mapping[str, str]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    channel, theirs = socket.socketpair()
    # Workers write to pipes. Python finds out when it starts that it cannot seek in them. Here nothing is read.
    reading, writing = os.pipe()
    try:
        with signals.held_back():  # in the template they stay so; its workers get the agent's own mask
            process = subprocess.Popen(
                _command(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                env=template_environment(environment),
                pass_fds=[theirs.fileno(), reading],
                start_new_session=True,
            )
    except OSError:
        channel.close()
        raise
    finally:
        theirs.close()
        os.close(reading)
        os.close(writing)
    return channel, process


class Template:
    """Call `attend` whenever one of `descriptors` is readable, and at least every second."""

    def __init__(self, environment: Mapping[str, str], marked: Mapping[str, str]) -> None:
        """`marked` is for the template alone: by it the guard recognises the agent's processes."""
        self._environment, self._marked = dict(environment), dict(marked)
        self._useless = 0
        """Templates in a row that never got ready, died soon after it, or forked nothing when they were last asked."""
        self._process: ForkedProcess | subprocess.Popen[bytes] | None = None
        self._late: _LateFork | None = None
        self._abandoned: list[int] = []
        """Processes that were forked too late, and exit."""
        self._news: str | None = None
        self._was_subreaper = _subreaper()
        set_subreaper(True)
        self._start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def _start(self) -> None:
        self._started_at, self._is_ready, self._ready_at, self._forks = time.monotonic(), False, 0.0, True
        self._shared = _shared_for(self._environment)
        if self._shared is not None:
            self._process, self._channel = self._shared.process, self._shared.channel
            self._is_ready = self._shared.is_ready
            return
        lent = _lent.pop() if _lent else None
        if lent is not None and read_at_exec(lent.environment) == read_at_exec(self._environment):
            self._process, self._channel = lent.process, lent.channel
            return
        with contextlib.suppress(OSError):  # out of memory or processes: workers are spawned, if that works
            self._channel, self._process = _start_process({**self._environment, **self._marked})

    def fork(
        self, shown: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str], fds: Sequence[int]
    ) -> ForkedProcess | None:
        """A worker with these arguments and open files beside its standard streams, or None: spawn it.

        `shown` is its command line as ps shows it, that of a worker which is spawned.
        """
        self.attend()
        if not self._is_ready or self._late is not None:
            return None
        if read_at_exec(self._environment) != read_at_exec(environment):
            return None
        request = ForkRequest(
            shown,
            arguments,
            dict(environment),
            os.getcwd(),
            [0, 1, 2, *fds],
            first_in_path(arguments, os.getcwd()),
            [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        )
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        with open(os.devnull, "rb") as nothing:
            files = [nothing.fileno(), out_end, err_end, *fds]
            answer = request_fork(self._channel, request, files, FORKED_WITHIN_S)
        os.close(out_end)
        os.close(err_end)
        self._forks = answer.pid is not None
        if answer.pid is not None:
            self._useless = 0
            return ForkedProcess(answer.pid, out, err)
        os.close(out)
        os.close(err)
        if answer.late is not None:
            self._late = _LateFork(answer.late, time.monotonic())
        elif not answer.sent:
            self._lose()
        return None

    def descriptors(self) -> list[int]:
        """Readable when there is something to `attend` to."""
        channel = [] if self._process is None else [self._channel.fileno()]
        return channel + ([] if self._late is None else [self._late.handshake.fileno()])

    def attend(self) -> bool:
        """Learn whether it has become ready, answered late, or died, and replace a dead one. Does not wait.

        True if it has become ready, or is another one: workers may wait for that.
        """
        before = self.pid, self._is_ready
        self._take_late_answer()
        self._reap_abandoned()
        if self._process is not None and (self._has_died() or self._is_stuck()):
            self._lose()
        if self._shared is not None:
            self._shared.is_ready = self._is_ready
        return before != (self.pid, self._is_ready)

    def _has_died(self) -> bool:
        """Whether the template has ended; takes the byte with which it says that it is ready."""
        assert self._process is not None
        self._channel.setblocking(False)
        try:
            received = self._channel.recv(1)
        except BlockingIOError:
            return self._process.poll() is not None
        except OSError:
            return True
        if received == b"r":
            self._is_ready, self._ready_at = True, time.monotonic()
        return not received

    def _is_stuck(self) -> bool:
        return self._late is not None and time.monotonic() > self._late.asked_at + STUCK_AFTER_S

    def _take_late_answer(self) -> None:
        """The template answers again, and the process that it has forked is not wanted any more."""
        if self._late is None:
            return
        self._late.handshake.setblocking(False)
        try:
            pid = _receive_pid(self._late.handshake)
        except BlockingIOError:
            return
        self._abandoned += [pid] if pid is not None else []
        self._late.handshake.close()
        self._late = None

    def _reap_abandoned(self) -> None:
        for pid in list(self._abandoned):
            try:
                has_ended = os.waitpid(pid, os.WNOHANG)[0] == pid
            except ChildProcessError:
                has_ended = True
            if has_ended:
                self._abandoned.remove(pid)

    def is_awaited(self) -> bool:
        """Whether workers should wait for it: it is about to be ready."""
        self.attend()
        is_coming = self._process is not None and not self._is_ready
        return is_coming and time.monotonic() < self._started_at + READY_WITHIN_S

    def take_news(self) -> str | None:
        """A warning about its end, once."""
        news, self._news = self._news, None
        return news

    def _lose(self) -> None:
        """It is dead, or does not answer: start another, unless several in a row were of no use."""
        if self._shared is not None:
            _shared.clear()  # its owner ends it
        how = "does not answer" if self._late is not None else "died"
        proved = self._is_ready and self._forks and time.monotonic() > self._ready_at + QUICK_S
        self._useless = 0 if proved else self._useless + 1
        self._end()
        if self._useless < MOST_USELESS:
            self._start()
        then = "workers are spawned from now on" if self._process is None else "it was restarted"
        self._news = f"the template process, which workers are forked from, {how}; {then}"

    def _end(self) -> None:
        is_killed = self._shared is None and self._process is not None
        if self._process is not None and self._shared is None:
            self._channel.close()
            self._process.kill()
            self._process.wait()
        self._process = self._shared = None
        self._is_ready = False
        if self._late is not None:
            # What a killed template has forked sends its pid now, or never.
            self._late.handshake.settimeout(LAST_WORD_S if is_killed else 0.0)
            with contextlib.suppress(OSError):
                if (pid := _receive_pid(self._late.handshake)) is not None:
                    self._abandoned.append(pid)
            self._late.handshake.close()
            self._late = None

    def close(self) -> None:
        self._end()
        deadline = time.monotonic() + LAST_WORD_S
        while self._abandoned and time.monotonic() < deadline:
            self._reap_abandoned()
            time.sleep(0.001)
        set_subreaper(self._was_subreaper)


def first_in_path(arguments: Sequence[str], directory: str) -> str:
    """The directory where a worker with these arguments, started in this one, looks for modules first."""
    kind, target = (arguments[arguments.index(name) + 1] for name in ("--kind", "--target"))
    place = target.rpartition(":")[0] if kind == "call" else target
    is_file = kind == "script" or place.endswith(".py")
    return os.path.dirname(os.path.realpath(os.path.join(directory, place))) if is_file else directory


class _LateFork(NamedTuple):
    handshake: socket.socket
    asked_at: float


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
