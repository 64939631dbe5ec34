"""Performs a plan for ssh: copies code, starts one ssh per host, holds their lifelines, and ends with the first host.

An agent ends with its ssh: if this process is killed, standard input of every agent ends, which each takes for a
notice. Start reading at `run_hosts`.
"""

from __future__ import annotations

import collections
import contextlib
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from manyhands.errors import EnvironmentProblem, ManyhandsError
from manyhands.launcher.placers.shipping import tracked_files, write_tar
from manyhands.launcher.placers.spec import LaunchPlan, PlanCommand
from manyhands.launcher.placers.ssh import failure_of
from manyhands.spec.addresses import Address
from manyhands.spec.cluster_section import NamedHost

__all__ = ["first_address", "run_hosts"]

CONFIG_TIMEOUT_S = 20.0
COPY_TIMEOUT_S = 600.0
END_TIMEOUT_S = 30.0
"""How long the other hosts have to end once the first one has."""
CHUNK_BYTES = 1 << 16
KEPT_LINES = 20
LOOK_EVERY_S = 0.2
LOWEST_PORT, NUM_PORTS = 20000, 12000
"""Below the ports that Linux gives to connections."""

Say = Callable[[str], None]


def first_address(host: NamedHost, extra: Sequence[str], listen: str | None) -> Address:
    """Where the other hosts reach the first: the address that its name, as ssh reads it, has here."""
    port = LOWEST_PORT + secrets.randbelow(NUM_PORTS)
    if listen is not None:
        from manyhands.spec.addresses import parse_address

        address, given = parse_address(listen)
        return address, given or port
    name = _host_name(host.name, extra)
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise EnvironmentProblem(
            f"{host.name} has no address here ({error}), and the other hosts need one to reach it.",
            where="--hosts",
            fix=["--listen ADDR, at which the other hosts reach the first one"],
        ) from error
    return str(found[0][4][0]), port


def _host_name(name: str, extra: Sequence[str]) -> str:
    """`HostName` of the user's ssh config."""
    _require_ssh()
    try:
        done = subprocess.run(
            ["ssh", "-G", *extra, "--", name.strip("[]")], capture_output=True, text=True, timeout=CONFIG_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentProblem(f"ssh -G {name} has not ended for {CONFIG_TIMEOUT_S:g} s.", where="--hosts") from error
    found = (line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("hostname "))
    return next(found, name.rpartition("@")[2].strip("[]"))


def _require_ssh() -> None:
    if shutil.which("ssh") is None:
        what = "ssh is not installed here, and --hosts starts agents by it."
        raise EnvironmentProblem(what, where="--hosts", fix=["apt-get install openssh-client"])


def run_hosts(plan: LaunchPlan, folder: str, say: Say) -> int:
    """Copy what has to be copied, then start all hosts and follow the first. Returns the run's exit code."""
    _require_ssh()
    copies = [command for command in plan.commands if command.code]
    if copies:
        _copy(copies, folder, say)
    hosts = [_Host(command) for command in plan.commands if not command.code]
    try:
        with _stops() as stops:
            return _Watch(hosts, say, stops).run()
    finally:
        for host in hosts:
            host.end()


def _copy(commands: Sequence[PlanCommand], folder: str, say: Say) -> None:
    names = tracked_files(folder)
    with tempfile.TemporaryFile() as packed:
        write_tar(folder, names, packed)
        size = packed.tell()
        for command in commands:
            packed.seek(0)
            say(f"{command.host}: copying {len(names)} files, {size / 1e6:.1f} MB")
            try:
                done = subprocess.run(
                    command.argv, stdin=packed, capture_output=True, text=True, timeout=COPY_TIMEOUT_S
                )
            except subprocess.TimeoutExpired as error:
                what = f"{command.host} has not taken the code within {COPY_TIMEOUT_S:g} s."
                raise EnvironmentProblem(what, where="--code ship") from error
            if done.returncode:
                raise _failure(command.host, done.returncode, done.stderr)


def _failure(host: str, code: int, said: str) -> ManyhandsError:
    lines = said.strip().splitlines()
    what = f"{host} ended with {code}: {lines[-1] if lines else 'without a word'}"
    return failure_of(host, code, said) or EnvironmentProblem(what, where="--hosts")


class _Host:
    """One ssh process. Its own session: Ctrl-C at this terminal must reach the run as a notice, not end ssh."""

    def __init__(self, command: PlanCommand) -> None:
        self.command = command
        self.said: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._partial = {1: b"", 2: b""}
        self.process = subprocess.Popen(
            command.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(command.stdin.encode())
            self.process.stdin.flush()
        if not command.lifeline:
            self.release()

    def release(self) -> None:
        """End its standard input: the agent takes that for a notice."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def take(self, stream: int, data: bytes) -> None:
        """The first host's output is the run's; the last lines of the others are kept, in case one fails by itself."""
        lines = (self._partial[stream] + data).split(b"\n")
        self._partial[stream] = lines.pop()[-CHUNK_BYTES:]
        shown = [line.decode(errors="replace").rstrip("\r") for line in lines]
        if stream == 2 or not self.command.first:
            self.said.extend(shown)
        if self.command.first:
            target = sys.stdout.buffer if stream == 1 else sys.stderr.buffer
            target.write(data)
            target.flush()

    def end(self) -> None:
        """After its notice was given, and time for it: end the ssh process, and with its connection the agent."""
        self.release()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2.0)
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5.0)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@contextlib.contextmanager
def _stops() -> Iterator[IO[bytes]]:
    """A stream with one byte for each signal that asks this process to end."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def note(number: int, frame: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(writing, bytes([number]))

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with open(reading, "rb", buffering=0) as stream:
            yield stream
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writing)


class _Watch:
    def __init__(self, hosts: list[_Host], say: Say, stops: IO[bytes]) -> None:
        self._hosts, self._say, self._stops = hosts, say, stops
        self._running = list(hosts)
        self._first = next(host for host in hosts if host.command.first)
        self._failure: ManyhandsError | None = None
        self._notices = 0
        self._deadline: float | None = None

    def run(self) -> int:
        with selectors.DefaultSelector() as selector:
            selector.register(self._stops, selectors.EVENT_READ, None)
            for host in self._hosts:
                for number, pipe in ((1, host.process.stdout), (2, host.process.stderr)):
                    assert pipe is not None
                    os.set_blocking(pipe.fileno(), False)
                    selector.register(pipe, selectors.EVENT_READ, (host, number))
            left = 2 * len(self._hosts)
            while (left or self._running) and not self._is_over():
                for key, _ in selector.select(LOOK_EVERY_S):
                    left -= self._read(selector, key)
                for host in [host for host in self._running if host.process.poll() is not None]:
                    self._running.remove(host)
                    self._ended(host)
        self._show_others()
        return self._exit_code()

    def _show_others(self) -> None:
        """What a host said that ended otherwise than the run: the run's own failure is shown once, by the first."""
        of_run = (0, 75, self._first.process.poll())
        for host in self._hosts:
            if host is not self._first and host.process.poll() not in of_run:
                for line in host.said:
                    print(f"{host.command.host}: {line}", file=sys.stderr, flush=True)

    def _read(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> int:
        """Take what a host or a signal wrote; 1 at the end of a stream."""
        if key.data is None:
            self._stop(self._stops.read(1)[0])
            return 0
        host, number = key.data
        data = os.read(key.fd, CHUNK_BYTES)
        if data:
            host.take(number, data)
            return 0
        selector.unregister(key.fileobj)
        return 1

    def _stop(self, number: int) -> None:
        self._notices += 1
        if self._notices == 1:
            self._say(f"{signal.Signals(number).name}: the hosts are asked to commit a checkpoint and end")
            self._first.release()
        else:
            self._deadline = time.monotonic()

    def _ended(self, host: _Host) -> None:
        code = host.process.returncode
        if host is self._first:
            self._deadline = self._deadline or time.monotonic() + (END_TIMEOUT_S if code != 255 else 0.0)
        self._failure = self._failure or failure_of(host.command.host, code, "\n".join(host.said))
        if self._failure is not None:  # the others would wait for it
            self._deadline = self._deadline or time.monotonic() + END_TIMEOUT_S
            for one in self._hosts:
                one.release()

    def _is_over(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _exit_code(self) -> int:
        code = self._first.process.poll()
        if self._notices > 1 and code is None:
            return 130
        if self._failure is not None and code not in (0, 75):
            raise self._failure
        return EnvironmentProblem.exit_code if code is None else code
