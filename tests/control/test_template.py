"""Workers that are forked from a process that has imported torch are what spawned ones are, and fall back to those."""

from __future__ import annotations

import json
import os
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

from manyhands.control.agent.preflight import may_import_torch
from manyhands.control.messages.launch_request import WorkerCommand
from manyhands.control.processes import template_process
from manyhands.control.processes.fence import kill_session
from manyhands.control.processes.template_process import ForkedProcess, Lent, Template, lend, shared_template
from manyhands.launcher.worker_process.template import num_threads
from tests.control.conftest import alive, until

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


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
    import json, os, sys
    print(json.dumps({
        "argv": sys.argv, "main": __name__, "parent": os.getppid(), "session": os.getsid(0), "pid": os.getpid(),
        "variable": os.environ.get("OF_THIS_WORKER"), "directory": os.getcwd(), "stdin": sys.stdin.read(),
        "files": sorted(int(name) for name in os.listdir("/proc/self/fd")), "torch": "torch" in sys.modules,
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
    """
    drawn = []
    for started in [Started(template, tmp_path, code) for _ in range(2)]:
        ended, out, err = started.ends()
        assert ended == 0, err
        drawn.append(out.split())
    assert drawn[0][:2] == drawn[1][:2] == ["4", "2"]
    assert drawn[0][2] != drawn[1][2] and drawn[0][3] != drawn[1][3]
    assert drawn[0][4] == drawn[1][4], "torch begins with the same seed in every process"


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


@pytest.mark.long
def test_a_killed_template_is_replaced_and_then_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MOST_STARTS", 2)
    one = ready(Template(ENVIRONMENT, {}))
    try:
        first = one.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        started = Started(one, tmp_path, SHOW)
        assert started.forked is None
        os.close(started.lifeline)
        assert one.pid not in (None, first)
        ready(one)
        assert Started(one, tmp_path, SHOW).ends()[0] == 7
        second = one.pid
        assert second is not None
        os.kill(second, signal.SIGSTOP)  # it answers no more
        began = time.monotonic()
        started = Started(one, tmp_path, "open('ran', 'w')")
        assert started.forked is None and time.monotonic() - began < 60
        os.close(started.lifeline)
        assert one.pid is None and not alive(second) and not one.is_awaited()
        started = Started(one, tmp_path, SHOW)
        assert started.forked is None
        os.close(started.lifeline)
    finally:
        one.close()
    assert not (tmp_path / "ran").exists()


def test_a_process_with_a_second_thread_forks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hang for ever in a lock that the other thread holds."""
    code = """
        import os, socket, sys, threading, time
        from manyhands.launcher.worker_process import template
        threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
        template.serve(socket.socket(fileno=int(sys.argv[1])), os.getppid(), print)
    """
    monkeypatch.setattr(template_process, "MOST_STARTS", 1)
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
    lend(Lent(process, ours, ENVIRONMENT))
    one = ready(Template(ENVIRONMENT, {}))
    started = Started(one, tmp_path, SHOW)
    os.close(started.lifeline)
    assert started.forked is None and process.poll() is not None
    one.close()


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
