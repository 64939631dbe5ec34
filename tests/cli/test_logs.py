"""`mh logs`: one worker byte for byte, several with their rank in front, and on across restarts."""

import itertools
import json
import os
import subprocess
import sys
import threading

import pytest
from click.testing import CliRunner

from manyhands.cli.runs import logs as logs_module
from manyhands.cli.runs.logs import logs
from manyhands.control.run_directory import RunDirectory
from manyhands.errors import UsageError


@pytest.fixture
def run(tmp_path):
    class Run:
        path = tmp_path / "runs" / "a"
        directory = RunDirectory.adopt(path, False)

        def write(self, attempt, rank, stream, data):
            folder = self.path / "logs" / f"attempt-{attempt}"
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"rank-{rank}.{stream}").open("ab") as file:
                file.write(data)

        def mark(self, state):
            self.directory.mark(state)

    made = Run()
    made.mark("finished")
    yield made
    made.directory.release()


def show(*args):
    done = CliRunner().invoke(logs, list(map(str, args)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout_bytes


def test_several_workers_are_merged_with_their_rank_in_front(run):
    run.write(1, 0, "out", b"hello\nagain\n")
    run.write(1, 1, "out", b"me too\n")
    run.write(1, 10, "err", b"no newline at the end")
    assert show(run.path) == b"[rank 0] hello\n[rank 0] again\n[rank 1] me too\n[rank 10 err] no newline at the end\n"


def test_one_worker_comes_byte_for_byte(run):
    data = bytes(range(256)) * 1000
    run.write(1, 0, "out", b"other\n")
    run.write(1, 1, "out", data)
    assert show(run.path, "--rank", "1") == data
    assert show(run.path, "--rank", "1", "--out") == data


def test_err_and_out_choose_the_stream(run):
    run.write(1, 0, "out", b"out\n")
    run.write(1, 0, "err", b"err\n")
    assert show(run.path, "--err") == b"[rank 0 err] err\n"
    assert show(run.path, "--out") == b"[rank 0] out\n"
    assert show(run.path, "--rank", "0", "--err") == b"err\n"


def test_without_a_number_the_last_attempt_is_shown(run):
    for attempt in (1, 2, 10):
        run.write(attempt, 0, "out", b"attempt %d\n" % attempt)
    assert show(run.path) == b"[rank 0] attempt 10\n"
    assert show(run.path, "--attempt", "2") == b"[rank 0] attempt 2\n"


def test_as_json_each_line_is_an_object(run):
    run.write(1, 1, "err", b"\xff\x1b[31m\n")
    assert json.loads(show(run.path, "--json")) == {
        "attempt": 1,
        "rank": 1,
        "stream": "err",
        "line": "\ufffd\x1b[31m",
    }


def test_the_newest_run_is_the_default(run, monkeypatch):
    run.write(1, 0, "out", b"hello\n")
    monkeypatch.chdir(run.path.parent.parent)
    assert show() == b"[rank 0] hello\n"


def test_on_a_terminal_no_worker_can_move_the_cursor_of_the_merged_view(run):
    run.write(1, 0, "out", b"\r 3%|###\x1b[2J\x1b]0;title\x07\tend\r\n")
    read_end, terminal = os.openpty()
    command = [sys.executable, "-m", "manyhands.cli.main", "logs", str(run.path)]
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=terminal, check=True, timeout=100)
    os.close(terminal)
    seen = os.read(read_end, 4096)
    os.close(read_end)
    assert seen == b"[rank 0] \\r 3%|###\\x1b[2J\\x1b]0;title\\x07   end\r\n"


def test_following_continues_across_restarts_until_the_run_ends(run):
    run.mark("running")
    run.write(1, 0, "out", b"one\nhalf")
    command = [sys.executable, "-m", "manyhands.cli.main", "logs", "-f", str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
        watchdog = threading.Timer(20, follower.kill)
        watchdog.start()
        seen = [follower.stdout.readline()]
        run.write(1, 0, "out", b" a line\nunfinished when it died")
        seen.append(follower.stdout.readline())
        run.write(2, 0, "out", b"started again\n")
        seen += [follower.stdout.readline() for _ in range(2)]
        run.write(2, 1, "err", b"the end\n")
        run.mark("finished")
        seen += follower.stdout.readlines()
        watchdog.cancel()
    assert follower.returncode == 0
    assert seen == [
        "[rank 0] one\n",
        "[rank 0] half a line\n",
        "[rank 0] unfinished when it died\n",
        "[rank 0] started again\n",
        "[rank 1 err] the end\n",
    ]


def test_following_before_anything_was_printed_waits_for_it(run, monkeypatch):
    run.mark("running")
    looks, look_at = itertools.count(), logs_module.look_at

    def print_and_end_at_the_fourth_look(path, *, ask):
        seen, number = look_at(path, ask=ask), next(looks)
        if number == 3:
            run.write(1, 1, "out", b"at last")
            run.mark("failed")
        return seen

    monkeypatch.setattr(logs_module, "look_at", print_and_end_at_the_fourth_look)
    monkeypatch.setattr(logs_module, "POLL_S", 0.01)
    assert show(run.path, "-f", "--rank", "1") == b"at last"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rank", "7"], ["Rank 7 has no output in attempt 2", "--rank 0"]),
        (["--attempt", "5"], ["no attempt 5", "--attempt 1", "--attempt 2"]),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(run, arguments, words):
    run.write(1, 0, "out", b"x\n")
    run.write(2, 0, "out", b"x\n")
    with pytest.raises(UsageError) as raised:
        show(run.path, *arguments)
    assert all(word in str(raised.value) for word in words), raised.value


def test_a_run_of_one_process_says_why_it_has_no_logs(run):
    with pytest.raises(UsageError, match="prints where it was started"):
        show(run.path)
