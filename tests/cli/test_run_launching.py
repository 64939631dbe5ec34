"""The ways into a run from Python: functions by name, scripts that become launchers, tasks that wait."""

import functools
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from manyhands.errors import ClusterError, EnvironmentProblem, UsageError
from manyhands.launcher.cluster_server import Server
from manyhands.launcher.function_launch import call_target, launch
from manyhands.launcher.launch import become_launcher, needs_launcher, wait_for_end
from manyhands.launcher.machine import may_listen, read_key, this_machine, write_key
from manyhands.spec.load import resolve


def at_the_top():
    pass


def test_a_function_travels_by_its_name():
    assert call_target(at_the_top) == f"{__name__}:at_the_top"
    assert call_target(json.JSONDecoder.decode) == "json.decoder:JSONDecoder.decode"


def test_functions_that_workers_cannot_find_are_refused_with_the_reason():
    def nested():
        pass

    for function, why in [
        (lambda: None, "A lambda has no name"),
        (nested, "inside another function"),
        (functools.partial(at_the_top), "not a function with a name"),
        (functools.wraps(at_the_top)(lambda: None), "is another object now"),
    ]:
        with pytest.raises(UsageError, match=why):
            call_target(function)


def test_a_function_of_a_prompt_is_refused_and_one_of_a_script_is_found_by_path(tmp_path):
    code = "from manyhands.launcher.function_launch import call_target\ndef f(): pass\nprint(call_target(f))\n"
    (tmp_path / "script.py").write_text(code)
    found = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=100)
    assert found.stdout.strip() == f"{tmp_path.resolve()}/script.py:f"
    prompt = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert "is defined in a notebook cell or at a prompt" in prompt.stderr


@pytest.mark.parametrize("value", [object(), {1: "x"}, {"a": [b"bytes"]}, {2, 3}])
def test_arguments_that_are_not_plain_values_are_refused(value):
    with pytest.raises(UsageError, match="cannot be sent to workers"):
        launch(at_the_top, value, workers=2)


def test_a_mistyped_setting_of_launch_is_refused():
    with pytest.raises(UsageError, match="no setting precison"):
        launch(at_the_top, workers=2, precison="bf16")


BECOMES = """
from manyhands.launcher.launch import become_launcher, needs_launcher
from manyhands.spec.load import resolve
resolved = resolve(arguments={"workers": 2})
assert needs_launcher(resolved)
become_launcher(resolved)
"""


def test_a_prompt_cannot_become_a_launcher():
    done = subprocess.run([sys.executable, "-c", BECOMES], capture_output=True, text=True, timeout=100)
    assert "no script for workers to run" in done.stderr


def test_under_torchrun_the_script_says_what_to_type(tmp_path):
    (tmp_path / "train.py").write_text(BECOMES)
    environ = {**os.environ, "TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}
    environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    words = [sys.executable, tmp_path / "train.py"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, env=environ)
    assert "started by torchrun" in done.stderr
    assert "mh run with the same flags" in done.stderr


def test_a_test_cannot_become_a_launcher():
    with pytest.raises(UsageError, match="all of pytest again"):
        become_launcher(resolve(environ={}, arguments={"workers": 2}))


def test_only_more_than_one_worker_or_a_cluster_needs_a_launcher(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert not needs_launcher(resolve(environ={}))
    assert not needs_launcher(resolve(environ={}, arguments={"workers": 1}))
    assert needs_launcher(resolve(environ={}, arguments={"workers": 2}))
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}')
    assert needs_launcher(resolve(environ={}))
    assert not needs_launcher(resolve(environ={}, arguments={"strategy": "single"}))


def test_a_server_is_a_task_and_only_tasks_that_do_not_train_wait():
    cluster = {"worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]}
    assert Server(cluster, "ps", 0).target == "127.0.0.1:2"
    with pytest.raises(UsageError, match="Task worker 0 trains"):
        Server(cluster).join()
    with pytest.raises(ClusterError, match='job "ps" has 0'):
        Server(cluster, "ps", 1)


def test_a_waiting_task_ends_when_the_coordinator_has_gone_for_good():
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Timer(0.7, listener.close).start()
    started = time.monotonic()
    assert wait_for_end(listener.getsockname(), gone_after_s=0.5) == 0
    assert time.monotonic() - started > 0.7


def test_a_waiting_task_gives_up_on_a_run_that_never_starts():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(EnvironmentProblem, match="No coordinator started"):
            wait_for_end(unused.getsockname(), start_timeout_s=0.1)


def test_a_key_file_is_never_replaced(tmp_path):
    write_key(tmp_path / "k")
    key = read_key(str(tmp_path / "k"))
    assert len(key) == 32
    with pytest.raises(FileExistsError):
        write_key(tmp_path / "k")
    assert read_key(str(tmp_path / "k")) == key


def test_the_machine_counts_what_it_may_use():
    machine = this_machine({"CUDA_VISIBLE_DEVICES": ""})
    assert 1 <= machine.cores <= os.cpu_count()
    assert machine.accelerators == 0


def test_a_machine_may_listen_at_its_own_addresses_that_are_free():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not may_listen("127.0.0.1", port)
    assert may_listen("127.0.0.1", port)
    assert not may_listen("192.0.2.1", port)
