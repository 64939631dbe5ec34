"""Real runs of tiny scripts without torch: what a user starts, what comes out, what the exit code is."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manyhands.launcher.machine import may_listen

RANK = """
import os, sys
rank = os.environ["RANK"]
open(f"rank-{rank}", "w").write(" ".join([os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], *sys.argv[1:]]))
print("hello from", rank)
"""

BECOMES = """
import os, sys
from manyhands.launcher.launch import become_launcher, needs_launcher
from manyhands.spec.load import resolve
resolved = resolve(arguments={"workers": 2, "ui": "plain"})
if needs_launcher(resolved):
    become_launcher(resolved)
print("worker", os.environ["RANK"], *sys.argv[1:])
sys.exit(5 if "fail" in sys.argv and os.environ["RANK"] == "1" else 0)
"""


@pytest.fixture
def start(tmp_path):
    """Starts a Python command in an empty directory; processes that still run at the end are killed."""
    children = []

    def run(*words: str, **environ: str) -> subprocess.Popen:
        hidden = ("MANYHANDS_", "PET_", "TF_CONFIG")
        clean = {name: text for name, text in os.environ.items() if not name.startswith(hidden)}
        clean["PYTHONPATH"] = str(Path(__file__).parents[2])
        child = subprocess.Popen(
            [sys.executable, *words],
            cwd=tmp_path,
            env={**clean, "TMPDIR": str(tmp_path), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        return child

    yield run
    for child in children:
        if child.poll() is None:
            child.kill()
        child.communicate()


@pytest.fixture
def mh(start):
    def run(*words: str, **environ: str) -> tuple[int, str, str]:
        return ended(start("-m", "manyhands.cli.main", *words, **environ))

    return run


def ended(child: subprocess.Popen) -> tuple[int, str, str]:
    out, err = child.communicate(timeout=100)
    return child.returncode, out, err


def wait_until(ready, child: subprocess.Popen, timeout_s: float = 100.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline
        assert child.poll() is None, ended(child)
        time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def test_each_worker_runs_the_script_and_the_chiefs_output_is_shown(mh, tmp_path):
    (tmp_path / "train.py").write_text(RANK)
    code, out, err = mh("run", "-n", "2", "--ui", "none", "--run-dir", "r", "train.py", "--lr", "--", "0.1")
    assert (code, out) == (0, "hello from 0\n"), err
    assert (tmp_path / "rank-0").read_text() == "2 0 --lr -- 0.1"
    assert (tmp_path / "rank-1").read_text() == "2 1 --lr -- 0.1"
    assert (tmp_path / "r" / "logs" / "attempt-1" / "rank-1.out").read_text() == "hello from 1\n"


def test_a_module_runs_and_json_lines_have_its_output(mh, tmp_path):
    (tmp_path / "train.py").write_text(RANK)
    code, out, err = mh("run", "-n", "1", "--json", "-m", "train")
    said = [json.loads(line) for line in out.splitlines()]
    assert code == 0, err
    assert "".join(one["text"] for one in said if one["event"] == "Output") == "hello from 0\n"
    assert said[-1]["event"] == "RunEnded"


def test_a_failing_worker_ends_the_run_with_1_and_is_named(mh, tmp_path):
    (tmp_path / "train.py").write_text("import os\nassert os.environ['RANK'] == '0', 'not me'\n")
    code, _, err = mh("run", "-n", "2", "--max-restarts", "0", "--ui", "none", "train.py")
    assert code == 1, err
    assert "rank 1" in err
    assert "AssertionError: not me" in err


def test_a_script_becomes_its_own_launcher(start, tmp_path):
    (tmp_path / "train.py").write_text(BECOMES)
    code, out, err = ended(start("train.py", "a"))
    assert (code, out) == (0, "worker 0 a\n"), err
    code, _, err = ended(start("train.py", "fail", MANYHANDS_MAX_RESTARTS="0"))
    assert code == 1, err
    assert "rank 1" in err
    assert re.search(r"resume +MANYHANDS_RUN_DIR=\S+/runs/\S+ python train.py fail\n", err)


CALLS = """
import os
from manyhands.errors import TrainingFailed
from manyhands.launcher.function_launch import launch

def train(start, options):
    if options["fail"]:
        raise ValueError("no data")
    return {"rank": int(os.environ["RANK"]), "world": int(os.environ["WORLD_SIZE"]), "start": start}

if __name__ == "__main__":
    print(launch(train, [1, 2], {"fail": False}, workers=2, ui="none"))
    try:
        launch(train, 0, {"fail": True}, workers=2, max_restarts=0, ui="none")
    except TrainingFailed as error:
        print("ValueError: no data" in str(error), "rank" in str(error))
"""


def test_launch_returns_the_chiefs_result_and_raises_the_first_failure(start, tmp_path):
    (tmp_path / "calls.py").write_text(CALLS)
    code, out, err = ended(start("calls.py"))
    assert code == 0, err
    assert out.splitlines() == ["{'rank': 0, 'world': 2, 'start': [1, 2]}", "True True"]


@pytest.mark.slow
def test_two_nodes_by_torchruns_flags_connect_on_loopback(start, tmp_path):
    (tmp_path / "train.py").write_text(RANK)
    (port,) = free_ports(1)
    words = ("-m", "manyhands.cli.main", "run", "--nnodes=2", "--nproc_per_node=1", f"--master_port={port}")
    nodes = [start(*words, f"--node_rank={rank}", "--ui=none", "train.py") for rank in (0, 1)]
    for code, _, err in map(ended, nodes):
        assert code == 0, err
    assert (tmp_path / "rank-0").read_text() == "2 0"
    assert (tmp_path / "rank-1").read_text() == "2 0"


@pytest.mark.slow
def test_tasks_of_a_tf_config_train_together_and_the_ps_task_waits(start, tmp_path):
    (tmp_path / "train.py").write_text(RANK)
    chief, worker, ps = (f"127.0.0.1:{port}" for port in free_ports(3))
    cluster = {"chief": [chief], "worker": [worker], "ps": [ps]}

    def task(kind: str) -> subprocess.Popen:
        text = json.dumps({"cluster": cluster, "task": {"type": kind, "index": 0}})
        return start("-m", "manyhands.cli.main", "run", "-n", "1", "--ui=none", "train.py", TF_CONFIG=text)

    waiting, *training = task("ps"), task("worker"), task("chief")
    for code, _, err in map(ended, training):
        assert code == 0, err
    assert sorted(path.name for path in tmp_path.glob("rank-*")) == ["rank-0", "rank-1"]
    assert waiting.poll() is None or waiting.returncode == 0


@pytest.mark.slow
def test_nodes_without_numbers_get_them_when_they_join(start, tmp_path):
    (tmp_path / "train.py").write_text(RANK)
    (port,) = free_ports(1)
    words = ("-m", "manyhands.cli.main", "run", "--nnodes=2", "--rdzv-backend=c10d", "--ui=none")
    words += (f"--rdzv-endpoint=127.0.0.1:{port}", "train.py")
    nodes = [start(*words)]
    wait_until(lambda: not may_listen("127.0.0.1", port), nodes[0])
    nodes.append(start(*words))
    for code, _, err in map(ended, nodes):
        assert code == 0, err
    assert sorted(path.name for path in tmp_path.glob("rank-*")) == ["rank-0", "rank-1"]


@pytest.mark.slow
def test_another_host_joins_by_the_join_file(start, tmp_path):
    (tmp_path / "train.py").write_text(RANK)
    (tmp_path / "elsewhere").mkdir()
    mh = ("-m", "manyhands.cli.main")
    words = ("--hosts-wanted", "2", "--listen", "127.0.0.1", "--join-file", "run.join", "-n", "1", "--ui=none")
    first = start(*mh, "run", *words, "train.py")
    wait_until((tmp_path / "run.join").exists, first)
    assert (tmp_path / "run.join").stat().st_mode & 0o077 == 0
    second = start(*mh, "agent", "--join", "run.join", "--workers", "2", "--dir", "elsewhere", "--ui=none")
    for code, _, err in map(ended, (first, second)):
        assert code == 0, err
    assert [path.name for path in tmp_path.glob("rank-*")] == ["rank-0"]
    assert sorted(path.name for path in (tmp_path / "elsewhere").glob("rank-*")) == ["rank-1", "rank-2"]


@pytest.mark.slow
def test_a_ps_task_ends_with_the_only_worker(start, tmp_path):
    (tmp_path / "train.py").write_text(RANK + "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)")
    worker, ps = (f"127.0.0.1:{port}" for port in free_ports(2))

    def task(kind: str, code: str) -> subprocess.Popen:
        config = {"cluster": {"worker": [worker], "ps": [ps]}, "task": {"type": kind, "index": 0}}
        return start("-c", code, "run", "-n", "1", "--ui=none", "train.py", TF_CONFIG=json.dumps(config))

    quick = """
from manyhands.launcher import launch
launch.wait_for_end.__kwdefaults__["gone_after_s"] = 1.0
answers = launch._answers
launch._answers = lambda address: answers(address) and not open("seen", "w").close()
"""
    plain = "from manyhands.cli.main import main; main()"
    waiting = task("ps", quick + plain)
    training = task("worker", plain)
    wait_until((tmp_path / "seen").exists, waiting)
    (tmp_path / "go").touch()
    code, out, err = ended(training)
    assert (code, out) == (0, "hello from 0\n"), err
    assert ended(waiting)[0] == 0


def test_a_join_file_that_is_none_is_refused(mh, tmp_path):
    (tmp_path / "broken.join").write_text("{}")
    (tmp_path / "broken.join").chmod(0o600)
    for file in ("broken.join", "none.join"):
        code, _, err = mh("agent", "--join", file)
        assert (code, "Traceback" in err) == (2, False), err
        assert file in err


def test_stop_ends_a_live_run_and_refuses_one_that_is_over(mh, start, tmp_path):
    (tmp_path / "train.py").write_text("import time\nopen('up', 'w')\ntime.sleep(300)\n")
    words = ("-m", "manyhands.cli.main", "run", "-n", "1", "--grace", "1", "--ui=none", "--run-dir", "r", "train.py")
    run = start(*words)
    wait_until((tmp_path / "up").exists, run)
    code, out, err = mh("stop", "r", "--json")
    assert code == 0, err
    assert json.loads(out)["run_dir"].endswith("r")
    code, _, err = ended(run)
    assert code in (75, 143), err
    code, _, err = mh("stop", "r")
    assert code == 2, err
    assert "not running here" in err
