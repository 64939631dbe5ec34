"""`mh` commands that tests start are forked from a process that has imported torch, and so are their workers.

Tests that start processes spent most of their time on the import of torch. Here `subprocess.Popen` of
`python -m manyhands.cli.main ...` forks this file's template instead, and the agent in that process gets a forked
template as well (`template_process.lend`). Everything else is as for users: the worker is the agent's child, and so on.
A command whose environment differs in variables that are read at exec is spawned; with FORK_COMMANDS=0, all are.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.control.processes.fence import die_with_parent
from manyhands.control.processes.template_process import (
    ROOM,
    ForkedProcess,
    ForkRequest,
    Lent,
    lend,
    read_at_exec,
    request_fork,
    set_subreaper,
    template_environment,
)
from manyhands.launcher.launch import worker_environment
from manyhands.launcher.worker_process import bootstrap, template
from manyhands.spec.load import resolve

PROGRAM = [sys.executable, "-m", "manyhands.cli.main"]
ROOT = Path(__file__).parents[1]


def at_exec(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are read at exec, except Python's search path, which a fork can still change."""
    return {name: text for name, text in read_at_exec(environment).items() if name != "PYTHONPATH"}


class CommandTemplate:
    def __init__(self) -> None:
        self.base = dict(os.environ)
        worker = worker_environment(resolve(flags={}, environ=self.base), self.base)
        self.channel, theirs = socket.socketpair()
        set_subreaper(True)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "tests.forked_commands", str(os.getpid()), str(theirs.fileno()), ROOM],
                stdin=subprocess.DEVNULL, env=template_environment(worker), cwd=ROOT,
                pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        self.is_ready = False

    def start(self, words: list[str], environment: Mapping[str, str], directory: str, fds: list[int]) -> int | None:
        """The pid of a child that runs `mh` with these words, or None."""
        if at_exec(environment) != at_exec(self.base) or self.process.poll() is not None:
            return None
        if not self.is_ready:
            self.channel.settimeout(60)
            self.is_ready = self.channel.recv(1) == b"r"
        request = ForkRequest([*PROGRAM, *words], words, dict(environment), directory, [0, 1, 2])
        return request_fork(self.channel, request, fds, 30.0).pid


class ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]
    template: CommandTemplate | None = None

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *rest: Any) -> None:
        (pass_fds, cwd, env, _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_) = rest
        plain = not shell and executable is None and preexec_fn is None and not pass_fds
        pid = None
        if self.template is not None and plain and list(args[:3]) == PROGRAM:
            fds = [fd if fd != -1 else usual for usual, fd in enumerate((p2cread, c2pwrite, errwrite))]
            environment = dict(os.environ if env is None else env)
            pid = self.template.start([str(w) for w in args[3:]], environment, os.fspath(cwd or os.getcwd()), fds)
        if pid is None:
            super()._execute_child(args, executable, preexec_fn, close_fds, *rest)  # type: ignore[misc]
            return
        self._child_created, self.pid = True, pid
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def fork_commands() -> None:
    """Fork commands from now on, in this process."""
    ForkingPopen.template = CommandTemplate()
    subprocess.Popen = ForkingPopen  # type: ignore[misc]


def run_command(words: list[str]) -> None:
    """In the forked process: fork a template for its workers while it has one thread, then run the command."""
    given = dict(os.environ)
    sys.path[0] = os.getcwd()
    sys.path[1:1] = [part for part in given.get("PYTHONPATH", "").split(os.pathsep) if part]
    ours, theirs = socket.socketpair()
    agent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _serve_workers(theirs, agent)
    theirs.close()
    lend(Lent(ForkedProcess(pid), ours, worker_environment(resolve(flags={}, environ=given), given)))
    from manyhands.cli.main import main

    sys.argv = ["mh", *words]
    try:
        main(words)
    except SystemExit as end:
        bootstrap.leave(end.code if isinstance(end.code, int) else 0 if end.code is None else 1)


def _serve_workers(channel: socket.socket, agent: int) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    die_with_parent(agent)
    del sys.path[0]  # a worker gets its own
    for name in [one for one in sys.modules if one.partition(".")[0] == "tests"]:
        del sys.modules[name]  # a worker's script must import only from its search path
    template.serve(channel, agent, bootstrap.main)


if __name__ == "__main__":
    parent, fd = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    template.show_command_line([sys.executable, "-m", "tests.forked_commands"])
    template.preload()
    import manyhands.cli.start.run  # noqa: F401

    template.serve(socket.socket(fileno=fd), parent, run_command)
