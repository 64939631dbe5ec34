"""Agents with a template of their own, as users have them: what workers are, and what is left when all are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from manyhands.control.processes.orphan_guard import members
from manyhands.control.processes.private_directory import remove_abandoned
from tests.control.conftest import HERE, alive, until

pytestmark = pytest.mark.faults

# Facts of a worker from inside, after all that a training imports; then two processes that try to get away.
FACTS = """
import sys
begins_with = {"path": list(sys.path), "orig_argv": sys.orig_argv, "main": sys.modules["__main__"].__name__}
import torch, numpy, manyhands
import ctypes, faulthandler, gc, json, locale, logging, multiprocessing, os, random, resource, signal, subprocess
import threading, time, warnings
from pathlib import Path
HERE = Path(__file__).parent
OF_STATUS = (
    "Umask", "Uid", "Gid", "Groups", "Threads", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt", "CapInh", "CapPrm",
    "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Cpus_allowed", "THP_enabled",
)
SHOWN_BY_CHILD = "import json; print(json.dumps(open('/proc/self/status').read()))"

def status(text):
    lines = dict(line.partition(":")[::2] for line in text.splitlines())
    return {name: lines[name].strip() for name in OF_STATUS if name in lines}

def asked_of_kernel(number):
    found = ctypes.c_int()
    ctypes.CDLL(None).prctl(number, ctypes.byref(found), 0, 0, 0)
    return found.value

def openblas():
    [path] = {line.split()[-1] for line in open("/proc/self/maps") if "openblas" in line}
    return ctypes.CDLL(path).scipy_openblas_get_num_threads64_()

child = json.loads(subprocess.check_output([sys.executable, "-S", "-c", SHOWN_BY_CHILD]))
facts = {
    **begins_with,
    "status": status(Path("/proc/self/status").read_text()),
    "status of a child": status(child),
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name[:7] == "RLIMIT_"},
    "niceness": os.getpriority(os.PRIO_PROCESS, 0),
    **{name: Path("/proc/self", name).read_text() for name in ("oom_score_adj", "comm", "timerslack_ns")},
    "exe": os.readlink("/proc/self/exe"),
    "argv": sys.argv,
    "cmdline": Path("/proc/self/cmdline").read_text().rstrip(chr(0)).split(chr(0)),
    "environ": {one for one in Path("/proc/self/environ").read_text().split(chr(0)) if one[:16] == "MANYHANDS_AGENT="},
    "is forked": "MANYHANDS_ROOM=" in Path("/proc/self/environ").read_text(),
    "directory": os.getcwd(),
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "parent": Path(f"/proc/{os.getppid()}/cmdline").read_text().split(chr(0))[1],
    "dies with its parent, is a subreaper": [asked_of_kernel(2), asked_of_kernel(37)],
    "files": sorted(os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in (1, 2, *os.listdir("/proc/self/fd"))
                    if os.path.exists(f"/proc/self/fd/{fd}")),
    "handlers": {one.name: str(signal.getsignal(one)).split(" at ")[0] for one in signal.Signals},
    "warnings": sorted(map(str, warnings.filters)),
    "logging": [logging.root.level, *(str(type(one)) for one in logging.root.handlers)],
    "locale": locale.setlocale(locale.LC_ALL),
    "faulthandler": faulthandler.is_enabled(),
    "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), openblas(), threading.active_count()],
    "main thread": [threading.main_thread().native_id == os.getpid(), threading.main_thread().ident],
    "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0],
    "flags": [str(sys.flags), sys.getrecursionlimit(), sys.getswitchinterval(), str(sys.excepthook)],
    "streams": [
        [one.name, one.mode, one.encoding, one.errors, one.line_buffering, one.write_through, one.seekable()]
        for one in (sys.stdin, sys.stdout, sys.stderr)
    ],
    "multiprocessing": [multiprocessing.get_start_method(allow_none=True), multiprocessing.current_process().name],
    "torch": [str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.get_deterministic_debug_mode()],
    "environment": dict(os.environ),
    "random": [
        torch.initial_seed(), torch.rand(1).item(), random.random(), numpy.random.random(),
        multiprocessing.current_process().authkey.hex(),
    ],
}
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        (HERE / "away.part").write_text(str(os.getpid()))
        (HERE / "away.part").rename(HERE / "away")
        time.sleep(300)
    os._exit(0)
(HERE / "facts.part").write_text(json.dumps(facts, default=sorted))
(HERE / "facts.part").rename(HERE / "facts")
time.sleep(300)
"""
# Not the same in any two workers: numbers of files and processes, the run, what is random.
OF_ONE_WORKER = {"is forked", "orig_argv", "cmdline", "environ", "environment", "main thread", "random"}
OF_ONE_RUN = {
    "MANYHANDS_AGENT", "MANYHANDS_LIFELINE_FD", "MANYHANDS_MEMORY_FD", "MANYHANDS_GENERATION", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
}  # fmt: skip


def facts_of(run: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run.wait_for("facts"))
    return found


@pytest.mark.parametrize("with_guard", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_forked_worker_is_what_a_spawned_one_is_and_leaves_as_little(
    launcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_guard: bool
) -> None:
    """Then the agents are killed, which leave a process in another session that nobody registered."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    runs, facts = [], []
    for forks in (True, False):
        launcher.folder = tmp_path / str(forks)
        launcher.folder.mkdir()
        (launcher.folder / "train.py").write_text(FACTS)
        command = {"kind": "script", "target": "train.py", "args": ["one", "two words"]}
        runs.append(launcher(command=command, forks=forks))
    facts = [facts_of(run) for run in runs]
    forked, spawned = facts
    assert forked["is forked"] and not spawned["is forked"]
    for name in forked.keys() - OF_ONE_WORKER:
        here = [str(tmp_path / how) for how in ("True", "False")]
        assert text(forked[name], *here) == text(spawned[name], *reversed(here)), name
    for name in forked["environment"].keys() | spawned["environment"].keys() - OF_ONE_RUN:
        if name not in OF_ONE_RUN:
            assert forked["environment"].get(name, "").replace("/True", "/False") == spawned["environment"].get(name)
    for one in facts:
        assert one["orig_argv"] == one["cmdline"] and one["main thread"][0]
        assert f"MANYHANDS_AGENT={one['environment']['MANYHANDS_AGENT']}" in one["environ"]
    assert not {*forked["random"]} & {*spawned["random"]}
    kills_leave_nothing(runs, launcher, with_guard=with_guard)


def text(fact: Any, here: str, there: str) -> str:
    return json.dumps(fact).replace(here, there) if here.endswith("True") else json.dumps(fact)


def kills_leave_nothing(runs: list[Any], launcher: Any, *, with_guard: bool) -> None:
    before = [process for run in runs for process in run.descendants()]
    away = [int(run.wait_for("away")) for run in runs]
    assert any("worker_process.template" in " ".join(process.cmdline()) for process in before)
    assert all(alive(pid) for pid in away)
    marker = f"MANYHANDS_AGENT=ipc://{launcher.temp}/".encode()
    for run in runs:
        if with_guard:
            run.process.send_signal(signal.SIGSTOP)  # it would start another
            run.guard().kill()
        run.process.kill()
    gone = [process for process in before if process.pid not in away]
    until(lambda: not any(alive(process.pid) for process in gone), what="the end of the agents' children")
    if with_guard:
        assert {*away} <= {*members(set(), marker)} and len(launcher.sockets_left()) == 2
        remove_abandoned(str(launcher.temp))  # as the next agent does when it starts
        assert not launcher.sockets_left()
    until(lambda: not members(set(), marker), what="the end of all that bears the agents' mark")
    assert not any(alive(pid) for pid in away)


FLOODED = """
    import os, socket, subprocess, sys, time
    from manyhands.control.agent.coordinator_link import CoordinatorLink
    from manyhands.control.processes import template_process
    from tests.control import launcher

    sent, send = [], CoordinatorLink.send
    def counted(link, message):
        sent.append(time.monotonic())
        return send(link, message)
    CoordinatorLink.send = counted
    template_process.READY_WITHIN_S = 0.0      # workers do not wait for it
    ours, theirs = socket.socketpair()
    late = "import socket, time; s = socket.socket(fileno=FD); time.sleep(1); s.send(b'r'); s.recv(1)"
    late = late.replace("FD", str(theirs.fileno()))
    process = subprocess.Popen([sys.executable, "-S", "-c", late], pass_fds=[theirs.fileno()])
    theirs.close()
    template_process.lend(template_process.Lent(process, ours, {**os.environ, "OMP_NUM_THREADS": "1"}))
    code = launcher.main()
    print(len(sent), len(sent) and sent[-1] - sent[0], file=sys.stderr)
    sys.exit(code)
"""


def test_an_agent_whose_template_gets_ready_late_is_as_quiet_as_any(tmp_path: Path) -> None:
    """It took the byte that says so from no one, woke for it all the time, and flooded the coordinator with reports."""
    (tmp_path / "train.py").write_text("import time\nimport msgspec\ntime.sleep(2.5)\n")
    request = {"command": {"kind": "script", "target": "train.py", "args": []}, "forks": True, "threads": 1}
    (tmp_path / "request").write_text(json.dumps(request))
    command = [sys.executable, "-c", textwrap.dedent(FLOODED), str(tmp_path / "request"), str(tmp_path / "notes")]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    number, seconds = map(float, done.stderr.split()[-2:])
    assert seconds > 2.0 and number < 20 * seconds, done.stderr
