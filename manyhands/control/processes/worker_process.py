"""One worker or server process: how it is started, and all that the agent knows of it.

Three pipes (stdout, stderr, the lifeline) and a pidfd, all non-blocking; the agent's loop decides when to read.
The worker leads its own session. `HostWorkers` decides which worker runs when.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from msgspec.structs import replace

from manyhands.control.membership.generations import is_later
from manyhands.control.membership.hang_detection import Verdict, WorkerActivity, main_stack
from manyhands.control.messages.agent_messages import MemberReport
from manyhands.control.messages.failure import WorkerEnd
from manyhands.control.messages.launch_request import WorkerCommand
from manyhands.control.messages.lifeline_records import (
    MAX_RECORD_BYTES,
    STACK_SIGNAL,
    Began,
    Raised,
    Record,
    Returned,
    WantsServers,
    WantsStore,
    decode,
)
from manyhands.control.processes.fence import Sweep, kill_session
from manyhands.control.processes.template_process import ForkedProcess, Template
from manyhands.control.processes.withheld_output import WithheldOutput
from manyhands.control.processes.worker_output import Stream, WorkerLog
from manyhands.spec.worker_identity import WorkerIdentity, identity_environment

__all__ = ["WorkerProcess", "torchrun_environment"]

READ_BYTES = 65536
# The most to read from a dead worker's pipes: a descendant that outlives it may still write to them.
DRAIN_BYTES = 16 * 2**20
DONE_CODES = (0, 75)
DUMP_BYTES = 128 * 1024
RECENT_STEPS = 100
_PROGRAM = (sys.executable, "-u", "-m", "manyhands.launcher.worker_process.bootstrap")


class WorkerProcess:
    def __init__(
        self,
        identity: WorkerIdentity,
        command: WorkerCommand,
        environment: dict[str, str],
        host: str,
        template: Template | None = None,
    ) -> None:
        self.identity, self.host = identity, host
        self.number = (
            identity.server if identity.is_server else identity.slot if identity.most_workers else identity.rank
        )
        """Its number in reports and logs: its rank, or in an elastic run its slot; for a server, the server number."""
        self.log = WorkerLog(_log_name(identity, self.number))
        self.started_at = time.monotonic()
        self.greeted = False
        self.peer: bytes | None = None
        self.began = False
        """The user's code runs, or has run."""
        self.wants_store = False
        self.wants_servers = 0
        """How many servers it asks for, in a run that has none."""
        self.generation = identity.generation
        """The generation of its last message."""
        self.told: object = None
        """What was last announced to it, and (`told_at`) when."""
        self.told_at = 0.0
        self.dismissed_at: float | None = None
        self.may_end = not identity.is_server
        """Exit code 0 is a normal end. A server must not exit before it is asked to."""
        self.was_spare = False
        """A server that was running before it was assigned its number, which has to be sent to it."""
        self.is_held_back = False
        self.told_servers: tuple[int, float] = (0, 0.0)
        """The wanted number of servers that was last sent to it, and when."""
        self.end_reported = False
        self.call, self.offers, self.stranded = 0, 0, False
        self.first_step: int | None = None
        self.step: int | None = None
        self.phase = ""
        self.heard_at = self.moved_at = self.stepped_at = time.monotonic()
        self.step_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self.verdict: Verdict = "fine"
        """Whether it hangs, as last judged, and (`asked_at`) when its stack was requested."""
        self.asked_at = 0.0
        self.hung = ""
        self._dump: bytes | None = None
        self.raised: Raised | None = None
        self._withheld: WithheldOutput | None = None
        self.returned: Returned | None = None
        self.failed_at: float | None = None
        self.killed_by_us = False
        self.exit_code: int | None = None
        self.end: WorkerEnd | None = None
        self.sweep: Sweep | None = None
        """Set while its descendants may be alive."""
        self._record = b""
        self._start(command, environment, template)

    def _start(self, command: WorkerCommand, environment: dict[str, str], template: Template | None) -> None:
        lifeline, write_end = os.pipe()
        try:
            all_of_it = {**environment, **identity_environment(_with_lifeline(self.identity, write_end))}
            fds = [write_end, *([self.identity.memory_fd] if self.identity.memory_fd is not None else [])]
            arguments = _arguments(command, write_end)
            forked = template.fork([*_PROGRAM, *arguments], arguments, all_of_it, fds) if template is not None else None
            self.process: ForkedProcess | subprocess.Popen[bytes]
            self.process = forked if forked is not None else _spawned(arguments, all_of_it, fds)
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            os.close(write_end)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.pid = self.process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.pipes: dict[int, Stream | None] = {
            self.process.stdout.fileno(): "stdout",
            self.process.stderr.fileno(): "stderr",
            lifeline: None,
        }
        self._lifeline = lifeline
        if self.identity.joining or self.identity.is_server:
            self.log.headline = self._headline()
        for fd in self.pipes:
            os.set_blocking(fd, False)

    def _headline(self) -> bytes:
        return f"--- {self.identity.role} {self.number} again: pid {self.pid} ---\n".encode()

    def appoint(self, number: int, listen: str) -> None:
        """A spare server gets this number; its age and steps count from now on."""
        self.identity, self.number, self.was_spare = replace(self.identity, server=number, listen=listen), number, True
        self.log.close()
        self.log = WorkerLog(_log_name(self.identity, number))
        self.log.headline = self._headline()
        self.started_at = self.moved_at = self.stepped_at = time.monotonic()
        self.first_step, self.step, self.phase, self.told = None, None, "", None

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    @property
    def cleared(self) -> bool:
        """Neither the process nor one that it started is left."""
        return not self.alive and self.sweep is None

    def heard(self, generation: str) -> None:
        """A message from it has arrived, for this generation."""
        if is_later(generation, self.generation):
            self.generation, self.offers, self.stranded = generation, 0, False
        self.heard_at = time.monotonic()

    def moved(self, step: int, phase: str, call: int = 0) -> None:
        """The worker has reported its step, phase and call."""
        now = time.monotonic()
        if self.step is not None and step > self.step and (call, phase) == (self.call, self.phase):
            steps = step - self.step  # quick ones are reported together
            self.step_s.extend([(now - self.stepped_at) / steps] * min(steps, RECENT_STEPS))
        if step != self.step or (call, phase) != (self.call, self.phase):
            self.stepped_at = now
        self.first_step = step if self.first_step is None else self.first_step
        self.step, self.phase, self.call, self.moved_at = step, phase[:100], call, now

    def pulse(self) -> WorkerActivity:
        at_work = self.step is not None and bool(self.generation)
        if self.identity.is_server:
            at_work = self.dismissed_at is None
        joined = self.alive and self.peer is not None
        return WorkerActivity(
            joined=joined,
            judged=joined and at_work,
            training=self.phase == "training" and not self.identity.is_server,
            heard_at=self.heard_at,
            moved_at=self.stepped_at,
            step_s=tuple(self.step_s),
        )

    def ask_for_stack(self, now: float) -> None:
        """Make it write the stacks of its threads to its standard error, if it can."""
        self.asked_at, self._dump = now, b""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, STACK_SIGNAL)

    def stack(self) -> list[str]:
        """Its main thread's stack, as far as it was received since the request."""
        return main_stack((self._dump or b"").decode(errors="replace"))

    def read(self, fd: int, forward: Callable[[Stream, bytes], None], most: int = READ_BYTES) -> None:
        """Read what is in a pipe; close the pipe at its end."""
        while most > 0 and fd in self.pipes:
            try:
                data = os.read(fd, READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._close_pipe(fd)
                return
            most -= len(data)
            stream = self.pipes[fd]
            if stream is None:
                self._take_record(data)
            else:
                if stream == "stderr" and self._dump is not None:
                    self._dump = (self._dump + data)[:DUMP_BYTES]
                self.log.write(stream, data)
                self._forward(stream, data, forward)

    def _forward(self, stream: Stream, data: bytes, forward: Callable[[Stream, bytes], None]) -> None:
        if stream == "stderr":
            if self._lifeline in self.pipes:  # the record of an error is written before the error is printed
                self.read(self._lifeline, forward)
            data = self._withheld.passes(data) if self._withheld else data
        if data:
            forward(stream, data)

    def _take_record(self, data: bytes) -> None:
        self._record = (self._record + data)[: MAX_RECORD_BYTES + 1]
        *lines, self._record = self._record.split(b"\n")
        for line in lines:
            record: Record | None = decode(line)
            if isinstance(record, Raised) and self.raised is None:
                self.raised, self.failed_at = record, time.monotonic()
                self._withheld = WithheldOutput(record.prints)
                self.first_step = record.first_step if self.first_step is None else self.first_step
            elif isinstance(record, Returned):
                self.returned = record
            elif isinstance(record, Began):
                self.began = True
            elif isinstance(record, WantsStore):
                self.wants_store = True
            elif isinstance(record, WantsServers):
                self.wants_servers = max(1, record.number)

    def reap(
        self, forward: Callable[[Stream, bytes], None], memory_hint: Callable[[int], str], *, hurry: bool = False
    ) -> None:
        """The process is dead: kill its descendants, read the rest of its output, and record how it ended.

        With `hurry`, when other workers wait to learn of its death, its descendants are left to `sweep`.
        """
        self.exit_code = self.process.wait()
        if hurry:
            self.sweep = Sweep(self.pid)
        else:
            kill_session(self.pid)
        for fd in list(self.pipes):
            self.read(fd, forward, DRAIN_BYTES)
            if fd in self.pipes:
                self._close_pipe(fd)
        if self._withheld and (rest := self._withheld.rest()):
            forward("stderr", rest)
        os.close(self.pidfd)
        if self.exit_code not in DONE_CODES or not self.may_end:
            self.failed_at = self.failed_at or time.monotonic()
            self.end = self._ending(memory_hint(self.pid) if self.exit_code == -signal.SIGKILL else "")

    def kill(self, number: int = signal.SIGKILL, *, ours: bool = True) -> None:
        if not self.alive:
            return
        self.killed_by_us = self.killed_by_us or ours
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    @property
    def status(self) -> Literal["live", "done", "failed", "left"]:
        if self.dismissed_at is not None:
            return "live" if self.alive else "left"
        return "failed" if self.failed_at is not None else "live" if self.alive else "done"

    def report(self, now: float) -> MemberReport:
        status, self.end_reported = self.status, not self.alive
        end = self.end or (self._ending("") if status == "failed" else None)
        return MemberReport(
            pid=self.pid,
            ended=not self.alive,
            generation=self.generation,
            call=self.call,
            offers=self.offers,
            stranded=self.stranded,
            exit_code=self.exit_code,
            status=status,
            first_step=self.first_step,
            step=self.step,
            phase=self.phase,
            age_s=now - self.moved_at,
            end=replace(end, log=self.log.path) if end and status == "failed" else None,
            ended_s_ago=now - self.failed_at if self.failed_at is not None else 0.0,
        )

    def _ending(self, memory: str) -> WorkerEnd:
        code, raised = self.exit_code or 0, self.raised
        killed = self.killed_by_us and raised is None
        end = WorkerEnd(
            rank=self.number,
            role=self.identity.role,
            host=self.host,
            pid=self.pid,
            greeted=self.greeted,
            kind=self._kind_of_end(code),
            message=self.hung,
            signal=-code if code < 0 else 0,
            exit_code=max(code, 0),
            step=self.step,
            phase=self.phase,
            stderr=self.log.last_lines(),
            clock=time.strftime("%H:%M:%S"),
            memory="" if killed else memory,
            log=self.log.path,
        )
        if raised is None:
            return end
        return replace(
            end,
            error=raised.error,
            message=raised.message,
            bases=raised.bases,
            traceback=raised.traceback,
            exit_code=raised.exit_code,
            step=self.step if raised.step is None else raised.step,
            phase=raised.phase or self.phase,
        )

    def _kind_of_end(self, code: int) -> Literal["signal", "exception", "exit", "stopped", "hung"]:
        if self.raised is not None:
            return "exception"
        if self.hung:
            return "hung"
        return "stopped" if self.killed_by_us else "signal" if code < 0 else "exit"

    def _close_pipe(self, fd: int) -> None:
        self.pipes.pop(fd)
        if fd == self._lifeline:
            os.close(fd)
            return
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None and not pipe.closed and pipe.fileno() == fd:
                pipe.close()


def _log_name(identity: WorkerIdentity, number: int) -> str:
    return "server-spare" if identity.is_spare else f"server-{number}" if identity.is_server else f"rank-{number}"


def _with_lifeline(identity: WorkerIdentity, fd: int) -> WorkerIdentity:
    return replace(identity, lifeline_fd=fd)


def _spawned(arguments: list[str], environment: dict[str, str], fds: list[int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*_PROGRAM, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        pass_fds=fds,
        start_new_session=True,
    )


def _arguments(command: WorkerCommand, lifeline: int) -> list[str]:
    return [
        "--parent",
        str(os.getpid()),
        "--lifeline",
        str(lifeline),
        "--kind",
        command.kind,
        "--target",
        command.target,
        "--",
        *command.args,
    ]


def torchrun_environment(
    identity: WorkerIdentity, run: str, master: tuple[str, int], max_restarts: int
) -> dict[str, str]:
    """Variables that scripts written for torchrun read; RANK and the like are in `identity_environment`."""
    return {
        "GROUP_RANK": str(identity.host),
        "GROUP_WORLD_SIZE": str(identity.num_hosts),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(identity.rank),
        "ROLE_WORLD_SIZE": str(identity.world_size),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "TORCHELASTIC_RESTART_COUNT": str(identity.attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
