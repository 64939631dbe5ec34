"""Workers that are forked from a process that has imported torch are what spawned ones are, and fall back to those."""

from __future__ import annotations

import calendar  # noqa: F401 - one of the modules that are imported here
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import manyhands
from manyhands.control.agent.preflight import may_import_torch
from manyhands.control.messages.launch_request import WorkerCommand
from manyhands.control.processes import template_process
from manyhands.control.processes.fence import kill_session
from manyhands.control.processes.template_process import (
    ForkedProcess,
    ForkRequest,
    Lent,
    Template,
    lend,
    request_fork,
    shared_template,
)
from manyhands.launcher import launch
from manyhands.launcher.launch import forks_workers
from manyhands.launcher.machine import may_listen, this_machine
from manyhands.launcher.worker_process.template import (
    _shadows,
    blas_threads,
    modules_from_elsewhere,
    num_threads,
    variables_set_too_late,
)
from manyhands.spec.load import resolve
from manyhands.spec.placement import Machine
from tests.control.conftest import alive, until

# OpenBLAS would start a second thread in the template, which then would fork nothing.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "2"}


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    one = ready(Template(ENVIRONMENT, {}))
    yield one
    one.close()


def ready(one: Template) -> Template:
    until(lambda: not one.is_awaited(), what="the import of torch")
    return one


class Started:
    def __init__(self, template: Template, folder: Path, code: str, **environment: str) -> None:
        script = folder / f"{len(list(folder.iterdir()))}.py"
        script.write_text(textwrap.dedent(code))
        self.lifeline, write_end = os.pipe()
        arguments = ["--parent", str(os.getpid()), "--lifeline", str(write_end), "--kind", "script"]
        arguments += ["--target", str(script), "--", "one", "two words"]
        shown = [sys.executable, "-u", "-m", "manyhands.launcher.worker_process.bootstrap", *arguments]
        self.forked = template.fork(shown, arguments, {**ENVIRONMENT, **environment}, [write_end])
        os.close(write_end)

    @property
    def process(self) -> ForkedProcess:
        assert self.forked is not None
        return self.forked

    def ends(self) -> tuple[int, str, str]:
        code = self.process.wait()
        kill_session(self.process.pid)
        assert self.process.stdout is not None and self.process.stderr is not None
        with self.process.stdout as out, self.process.stderr as err:
            said = out.read() or b"", err.read() or b""
        os.close(self.lifeline)
        return code, said[0].decode(), said[1].decode()


SHOW = """
    import json, os, signal, sys
    print(json.dumps({
        "argv": sys.argv, "main": __name__, "parent": os.getppid(), "session": os.getsid(0), "pid": os.getpid(),
        "variable": os.environ.get("OF_THIS_WORKER"), "directory": os.getcwd(), "stdin": sys.stdin.read(),
        "files": sorted(int(name) for name in os.listdir("/proc/self/fd")), "torch": "torch" in sys.modules,
        "blocked": [int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "path": sys.path[0], "command": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0)),
    }))
    print("on stderr", file=sys.stderr)
    sys.exit(7)
"""


def test_a_forked_worker_is_what_a_spawned_one_is(template: Template, tmp_path: Path) -> None:
    started = Started(template, tmp_path, SHOW, OF_THIS_WORKER="5")
    pid = started.process.pid
    code, out, err = started.ends()
    shown: dict[str, Any] = json.loads(out)
    script = str(tmp_path / "0.py")
    assert (code, err) == (7, "on stderr\n")
    assert shown["argv"] == [script, "one", "two words"] and shown["main"] == "__main__"
    assert shown["parent"] == os.getpid() and shown["session"] == shown["pid"] == pid
    assert shown["variable"] == "5" and shown["directory"] == os.getcwd() and shown["stdin"] == ""
    assert shown["path"] == str(tmp_path) and shown["torch"]
    assert len(shown["files"]) == 6, "its streams, the lifeline, where stacks go, and the directory that it lists"
    assert shown["blocked"] == [], "the template itself is started with the signals that ask a run to stop held back"
    assert shown["command"][3] == "manyhands.launcher.worker_process.bootstrap"
    assert shown["command"][-4:] == [script, "--", "one", "two words"]


def test_forked_workers_train_with_threads_and_draw_different_numbers(template: Template, tmp_path: Path) -> None:
    code = """
        import os, random, numpy, torch
        torch.set_num_threads(2)
        model = torch.nn.Linear(300, 300)
        x = torch.randn(400, 300)
        model(x).square().mean().backward()
        numpy.ones((500, 500)) @ numpy.ones((500, 500))
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=100, num_workers=1)
        print(len(list(loader)), torch.get_num_threads(), random.random(), numpy.random.random(), torch.rand(1).item())
        import ctypes
        [path] = {line.split()[-1] for line in open("/proc/self/maps") if "openblas" in line}
        print(ctypes.CDLL(path).scipy_openblas_get_num_threads64_())
    """
    drawn = []
    for started in [Started(template, tmp_path, code) for _ in range(2)]:
        ended, out, err = started.ends()
        assert ended == 0, err
        drawn.append(out.split())
    assert drawn[0][:2] == drawn[1][:2] == ["4", "2"]
    assert drawn[0][2] != drawn[1][2] and drawn[0][3] != drawn[1][3] and drawn[0][4] != drawn[1][4]
    cores = len(os.sched_getaffinity(0))
    assert drawn[0][5] == drawn[1][5] == str(min(2, cores)), "OpenBLAS, which the template limits to one thread"


def test_what_is_read_at_exec_must_be_the_same(template: Template, tmp_path: Path) -> None:
    for name in ("OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "LD_PRELOAD", "PYTHONHASHSEED"):
        started = Started(template, tmp_path, SHOW, **{name: "3"})
        assert started.forked is None
        os.close(started.lifeline)
    assert Started(template, tmp_path, SHOW).ends()[0] == 7


def test_orphans_of_a_worker_are_collected(template: Template, tmp_path: Path) -> None:
    code = """
        import os, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"])
        print(child.pid, flush=True)
        os.kill(os.getpid(), 9)
    """
    started = Started(template, tmp_path, code)
    ended, out, _ = started.ends()
    assert ended == -signal.SIGKILL
    assert not psutil.pid_exists(int(out))


def test_a_late_fork_is_abandoned_and_neither_the_template_lost_nor_a_process_left(
    template: Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "FORKED_WITHIN_S", 0.1)
    pid, children = template.pid, psutil.Process().children()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        assert not_forked(Started(template, tmp_path, "open('ran', 'w')"))
        began = time.monotonic()
        assert not_forked(Started(template, tmp_path, SHOW)) and time.monotonic() - began < 0.1, "it is not asked again"
        assert template.pid == pid and not template.is_awaited()
    finally:
        os.kill(pid, signal.SIGCONT)
    template_answers = select.poll()
    template_answers.register(template.descriptors()[-1], select.POLLIN)
    assert template_answers.poll(60_000)
    monkeypatch.undo()
    until(lambda: not template.attend() and len(template.descriptors()) == 1, what="its late answer")
    assert Started(template, tmp_path, SHOW).ends()[0] == 7
    until(lambda: not template.attend() and psutil.Process().children() == children, what="the end of the late one")
    assert template.pid == pid and not (tmp_path / "ran").exists()


def not_forked(started: Started) -> bool:
    os.close(started.lifeline)
    return started.forked is None


@pytest.mark.long
def test_a_stopped_template_is_replaced_and_given_up_after_several_that_no_worker_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "MOST_USELESS", 2)
    monkeypatch.setattr(template_process, "STUCK_AFTER_S", 2.0)
    one = ready(Template(ENVIRONMENT, {}))
    pids = []
    try:
        for _ in range(2):  # each gave a worker
            assert Started(one, tmp_path, SHOW).ends()[0] == 7
            pids.append(one.pid)
            os.kill(one.pid or 0, signal.SIGKILL)
            until(one.attend, what="another template")
            assert one.take_news() and not one.take_news()
            ready(one)
        assert Started(one, tmp_path, SHOW).ends()[0] == 7
        for _ in range(3):
            pids.append(one.pid)
            os.kill(one.pid or 0, signal.SIGSTOP)
            assert not_forked(Started(one, tmp_path, "open('ran', 'w')"))
            until(one.attend, what="its end")
            ready(one)
            if one.pid is None:
                break
        assert one.pid is None and not one.is_awaited() and one.descriptors() == []
        assert "spawned from now on" in (one.take_news() or "")
        assert not_forked(Started(one, tmp_path, SHOW))
        assert len(set(pids)) == len(pids) == 4 and not any(alive(pid or 0) for pid in pids)
    finally:
        one.close()
    assert not (tmp_path / "ran").exists()


@pytest.mark.long
def test_one_that_is_killed_while_it_waits_is_always_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MOST_USELESS", 1)
    monkeypatch.setattr(template_process, "QUICK_S", 0.0)
    one = ready(Template(ENVIRONMENT, {}))
    try:
        for _ in range(2):
            os.kill(one.pid or 0, signal.SIGKILL)
            until(one.attend, what="another template")
            ready(one)
            assert one.pid is not None
    finally:
        one.close()


def lent(code: str) -> Template:
    """A template whose process runs this code, with its channel's file descriptor as the argument."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
    lend(Lent(process, ours, ENVIRONMENT))
    return ready(Template(ENVIRONMENT, {}))


def test_a_process_with_a_second_thread_forks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hang for ever in a lock that the other thread holds."""
    monkeypatch.setattr(template_process, "MOST_USELESS", 1)
    one = lent("""
        import os, socket, sys, threading, time
        from manyhands.launcher.worker_process import template
        threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
        template.serve(socket.socket(fileno=int(sys.argv[1])), os.getppid(), print)
    """)
    assert not_forked(Started(one, tmp_path, SHOW))
    until(lambda: one.attend() or one.pid is None, what="its end")
    assert one.pid is None and not one.is_awaited()
    one.close()


def test_where_no_process_can_be_forked_workers_are_spawned_and_the_template_stays(tmp_path: Path) -> None:
    """As out of memory: it may be able to later."""
    one = lent("""
        import os, resource, socket, sys
        from manyhands.launcher.worker_process import template
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        if os.getuid() == 0:
            os.setuid(65534)  # the limit is not for root
        try:
            os.fork()
        except OSError:
            template.serve(socket.socket(fileno=int(sys.argv[1])), os.getppid(), print)
    """)
    pid = one.pid
    for _ in range(template_process.MOST_USELESS + 1):
        began = time.monotonic()
        assert not_forked(Started(one, tmp_path, SHOW))
        assert time.monotonic() - began < template_process.FORKED_WITHIN_S, "it answers at once"
        assert one.pid == pid and alive(pid or 0)
    one.close()


def test_open_files_get_the_numbers_that_the_agent_has(template: Template, tmp_path: Path) -> None:
    """Also where another file of the template has this number."""
    for number in (3, 503):
        script = tmp_path / "reads.py"
        script.write_text(f"import os\nprint(os.read({number}, 9).decode(), len(os.listdir('/proc/self/fd')))")
        reading, writing = os.pipe()
        os.write(writing, b"the file")
        lifeline, write_end = os.pipe()
        arguments = ["--parent", str(os.getpid()), "--lifeline", "704", "--kind", "script", "--target", str(script)]
        request = ForkRequest(arguments, arguments, ENVIRONMENT, str(tmp_path), [0, 1, 2, number, 704], str(tmp_path))
        out, out_end = os.pipe()
        pid = request_fork(template._channel, request, [0, out_end, out_end, reading, write_end], 60.0).pid
        for fd in (reading, writing, write_end, out_end):
            os.close(fd)
        assert pid is not None
        with ForkedProcess(pid, out).stdout as shown, open(lifeline, "rb") as records:  # type: ignore[union-attr]
            assert (shown.readall(), os.waitpid(pid, 0)[1]) == (b"the file 7\n", 0)
            assert b"Began" in records.read()


def test_a_script_beside_which_is_a_module_that_the_template_has_from_elsewhere_is_spawned(
    template: Template, tmp_path: Path
) -> None:
    """It would get that of the template: `calendar` of Python in place of its own calendar.py."""
    for name in ("calendar.py", "time.py", "mine.py"):
        (tmp_path / name).touch()
    for name in ("json", "psutil"):
        (tmp_path / name).mkdir()
    (tmp_path / "psutil" / "__init__.py").touch()
    assert {path.name for path in tmp_path.iterdir() if _shadows(str(path))} == {"calendar.py", "psutil"}
    assert not_forked(Started(template, tmp_path, SHOW))
    root = Path(manyhands.__file__).parents[1]
    assert not _shadows(str(root / "manyhands")), "imported from there"


def test_what_a_script_changes_too_late_is_named(template: Template, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "torch").mkdir(parents=True)
    (tmp_path / "elsewhere" / "torch" / "__init__.py").touch()
    code = f"""
        import os, sys
        from manyhands.launcher.worker_process import template
        print(template.variables_set_too_late(), template.modules_from_elsewhere())
        os.environ["OMP_NUM_THREADS"] = "7"
        os.environ["MINE"] = "7"
        sys.path.insert(0, {str(tmp_path / "elsewhere")!r})
        print(template.variables_set_too_late(), template.modules_from_elsewhere())
    """
    assert Started(template, tmp_path, code).ends()[1] == "[] []\n['OMP_NUM_THREADS'] ['torch']\n"
    assert (variables_set_too_late(), modules_from_elsewhere()) == ([], []), "only a forked worker can be late"


def test_workers_are_spawned_where_there_are_accelerators_and_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forks = [forks_workers(resolve(flags=flags, environ={}), {}) for flags in ({}, {"launch.start": "spawn"})]
    assert forks == [this_machine({}).accelerators == 0, False]
    monkeypatch.setattr(launch, "this_machine", lambda environ: Machine(2, 1, may_listen))
    assert not forks_workers(resolve(flags={}, environ={}), {})


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "2"}, 1),
        ({"GOTO_NUM_THREADS": "1", "OMP_NUM_THREADS": "2"}, 1),
        ({"OPENBLAS_NUM_THREADS": "0", "OMP_NUM_THREADS": "1"}, 1),
        ({"OPENBLAS_NUM_THREADS": "none"}, None),
        ({"OMP_NUM_THREADS": "4096"}, None),
    ],
)
@pytest.mark.long
def test_openblas_gets_the_threads_that_it_would_start_with(variables: dict[str, str], expected: int | None) -> None:
    code = """
        import ctypes, numpy
        [path] = {line.split()[-1] for line in open("/proc/self/maps") if "openblas" in line}
        print(ctypes.CDLL(path).scipy_openblas_get_num_threads64_())
    """
    environment = {name: text for name, text in os.environ.items() if not name.endswith("_NUM_THREADS")} | variables
    found = subprocess.check_output([sys.executable, "-c", textwrap.dedent(code)], env=environment)
    assert blas_threads(variables) == int(found) == (expected or len(os.sched_getaffinity(0)))


def test_threads_are_counted() -> None:
    before, gate = num_threads(), threading.Event()
    thread = threading.Thread(target=gate.wait)
    thread.start()
    assert num_threads() == before + 1
    gate.set()
    thread.join()


@pytest.mark.parametrize(
    ("text", "may"),
    [
        ("import os, sys\nfrom collections.abc import Mapping", False),
        ("import os\nimport mine", True),
        ("def f():\n    from torch import nn", True),
        ("from . import parts", True),
        ("import importlib", True),
        ("print 1", True),
    ],
)
def test_a_script_with_imports_of_python_alone_waits_for_no_template(tmp_path: Path, text: str, may: bool) -> None:
    (tmp_path / "train.py").write_text(text)
    assert may_import_torch(WorkerCommand("script", str(tmp_path / "train.py"))) == may
    assert may_import_torch(WorkerCommand("call", "mine:function"))


def test_agents_one_after_another_share_a_template_and_none_ends_it(tmp_path: Path) -> None:
    with shared_template(ENVIRONMENT):
        pids = []
        for _ in range(2):
            one = ready(Template(ENVIRONMENT, {"MARK": "of an agent"}))
            assert Started(one, tmp_path, "print('here')").ends()[:2] == (0, "here\n")
            pids.append(one.pid)
            one.close()
        assert pids[0] is not None and pids[0] == pids[1] and alive(pids[0])
        other = Template({**ENVIRONMENT, "OMP_NUM_THREADS": "2"}, {})
        assert other.pid != pids[0]  # torch reads it when it is imported
        other.close()
    assert not alive(pids[0])


def test_a_shared_template_that_has_died_is_not_used_again() -> None:
    with shared_template(ENVIRONMENT):
        first = Template(ENVIRONMENT, {})
        pid = first.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        first.close()
        until(lambda: template_process._shared[0].process.poll() is not None, what="its end")
        second = Template(ENVIRONMENT, {})
        assert second.pid not in (None, pid)
        second.close()
