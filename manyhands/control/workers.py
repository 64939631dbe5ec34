"""One worker process: how it is started, and everything the agent holds of it.

Three pipes (stdout, stderr, the lifeline) and a pidfd, all non-blocking; the agent's loop says when to read.
The worker leads its own session. Which worker runs when is the crew's business.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from msgspec.structs import replace

from manyhands.control.failure import WorkerEnd
from manyhands.control.fence import kill_session
from manyhands.control.launch_request import WorkerCommand
from manyhands.control.messages import MemberReport
from manyhands.control.output import Stream, WorkerLog
from manyhands.control.records import MAX_RECORD_BYTES, Raised, Record, Returned, WantsStore, decode
from manyhands.spec.seat import Seat, seat_environment

__all__ = ["DONE_CODES", "Worker", "torchrun_environment"]

READ_BYTES = 65536
# What a dead worker's pipes still hold, and what a grandchild that outlives it may have put there.
DRAIN_BYTES = 16 * 2**20
DONE_CODES = (0, 75)


class Worker:
    def __init__(self, seat: Seat, command: WorkerCommand, environment: dict[str, str], host: str) -> None:
        self.seat, self.host = seat, host
        self.log = WorkerLog(seat.rank)
        self.greeted = False
        self.peer: bytes | None = None
        self.wants_store = False
        self.first_step: int | None = None
        self.step: int | None = None
        self.phase = ""
        self.moved_at = time.monotonic()
        self.raised: Raised | None = None
        self.returned: Returned | None = None
        self.failed_at: float | None = None
        self.killed_by_us = False
        self.exit_code: int | None = None
        self.end: WorkerEnd | None = None
        self._record = b""
        self._start(command, environment)

    def _start(self, command: WorkerCommand, environment: dict[str, str]) -> None:
        lifeline, write_end = os.pipe()
        try:
            seated = seat_environment(_with_lifeline(self.seat, write_end))
            self.process = subprocess.Popen(
                _argv(command, write_end),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**environment, **seated},
                pass_fds=[write_end, *([self.seat.memory_fd] if self.seat.memory_fd is not None else [])],
                start_new_session=True,
            )
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
        for fd in self.pipes:
            os.set_blocking(fd, False)

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    def moved(self, step: int, phase: str) -> None:
        """The worker says where it is."""
        self.first_step = step if self.first_step is None else self.first_step
        self.step, self.phase, self.moved_at = step, phase[:100], time.monotonic()

    def read(self, fd: int, forward: Callable[[Stream, bytes], None], most: int = READ_BYTES) -> None:
        """Take what a pipe holds; forget the pipe at its end."""
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
                self.log.write(stream, data)
                forward(stream, data)

    def _take_record(self, data: bytes) -> None:
        self._record = (self._record + data)[: MAX_RECORD_BYTES + 1]
        *lines, self._record = self._record.split(b"\n")
        for line in lines:
            record: Record | None = decode(line)
            if isinstance(record, Raised) and self.raised is None:
                self.raised, self.failed_at = record, time.monotonic()
                self.first_step = record.first_step if self.first_step is None else self.first_step
            elif isinstance(record, Returned):
                self.returned = record
            elif isinstance(record, WantsStore):
                self.wants_store = True

    def reap(self, forward: Callable[[Stream, bytes], None], memory_hint: Callable[[int], str]) -> None:
        """The process is dead: end its descendants, take its last words, and state how it ended."""
        self.exit_code = self.process.wait()
        kill_session(self.pid)
        for fd in list(self.pipes):
            self.read(fd, forward, DRAIN_BYTES)
            if fd in self.pipes:
                self._close_pipe(fd)
        os.close(self.pidfd)
        if self.exit_code not in DONE_CODES:
            self.failed_at = self.failed_at or time.monotonic()
            self.end = self._ending(memory_hint(self.pid) if self.exit_code == -signal.SIGKILL else "")

    def kill(self, number: int = signal.SIGKILL, *, ours: bool = True) -> None:
        if not self.alive:
            return
        self.killed_by_us = self.killed_by_us or ours
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def report(self, now: float) -> MemberReport:
        failed = self.failed_at is not None
        end = self.end or (self._ending("") if failed else None)
        return MemberReport(
            rank=self.seat.rank,
            incarnation=self.seat.incarnation,
            pid=self.pid,
            exit_code=self.exit_code,
            status="failed" if failed else "live" if self.alive else "done",
            first_step=self.first_step,
            step=self.step,
            phase=self.phase,
            age_s=now - self.moved_at,
            greeted=self.greeted,
            end=replace(end, log=self.log.path) if end else None,
            ended_s_ago=now - self.failed_at if self.failed_at is not None else 0.0,
        )

    def _ending(self, memory: str) -> WorkerEnd:
        code, raised = self.exit_code or 0, self.raised
        killed = self.killed_by_us and raised is None
        end = WorkerEnd(
            rank=self.seat.rank,
            host=self.host,
            pid=self.pid,
            greeted=self.greeted,
            kind="stopped" if killed else "exception" if raised else "signal" if code < 0 else "exit",
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

    def _close_pipe(self, fd: int) -> None:
        self.pipes.pop(fd)
        if fd == self._lifeline:
            os.close(fd)
            return
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None and not pipe.closed and pipe.fileno() == fd:
                pipe.close()


def _with_lifeline(seat: Seat, fd: int) -> Seat:
    return replace(seat, lifeline_fd=fd)


def _argv(command: WorkerCommand, lifeline: int) -> list[str]:
    return [
        sys.executable,
        "-u",
        "-m",
        "manyhands.runtime.bootstrap",
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


def torchrun_environment(seat: Seat, run: str, master: tuple[str, int], max_restarts: int) -> dict[str, str]:
    """The contract that scripts written for torchrun read; RANK and its kin are in the seat's variables."""
    return {
        "GROUP_RANK": str(seat.host),
        "GROUP_WORLD_SIZE": str(seat.num_hosts),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(seat.rank),
        "ROLE_WORLD_SIZE": str(seat.world_size),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "TORCHELASTIC_RESTART_COUNT": str(seat.attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
