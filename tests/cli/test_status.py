"""`mh status` on run directories as runs leave them: live, finished, dead, and half written."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import types
import uuid
from datetime import UTC, datetime

import pytest
from click.testing import CliRunner

from manyhands.cli.main import report
from manyhands.cli.runs.status import status
from manyhands.control.messages.status_messages import MemberStatus, ServerStatus, Status
from manyhands.control.run_directory import RunDirectory
from manyhands.errors import UsageError
from manyhands.events import (
    CheckpointSaved,
    Evaluated,
    ResourcesUsed,
    RunEnded,
    RunStarted,
    StepDone,
    Straggler,
    Warned,
    WorkerLost,
    encode,
)
from manyhands.observe import run_status
from manyhands.observe.run_status import find_run, look_at

pytestmark = pytest.mark.forged_record
NOW = time.time()


def step(number, **changes):
    fields = {
        "epoch": 2,
        "loss": 0.25,
        "rows": 8,
        "samples_per_s": 312.0,
        "phases": {},
        "total_steps": 500,
        "eta_s": 90,
    }
    return StepDone(time_s=NOW - 3, step=number, **(fields | changes))


def started(attempt=1):
    return RunStarted(
        time_s=NOW - 60, run="r", strategy="mirrored", workers=2, slices=4, precision="fp32", threads=1, attempt=attempt
    )


def saved(number, age_s=120.0):
    return CheckpointSaved(
        time_s=NOW - age_s, step=number, path=f"checkpoints/{number}", num_bytes=1, seconds=0.1, blocked_s=0
    )


def moment(seconds):
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def make_run(path, *, state="finished", events=(), agent_events=(), created=None, exit_code=None, **changes):
    """A run directory as `control.run_directory` makes it, with events; then changed into what we want to look at."""
    directory = RunDirectory.adopt(path, False, command=["mh", "run", "train.py"])
    if state != "running":
        directory.mark(state, exit_code)
    directory.release()
    if created is not None:
        changes["created"] = moment(created)
    record = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(record | changes))
    directory.events.mkdir()
    for name, lines in (("chief", events), ("agent-0", agent_events)):
        (directory.events / f"{name}.jsonl").write_bytes(b"".join(encode(event) + b"\n" for event in lines))
    return path


def pid_of_the_dead():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def show(*args):
    done = CliRunner().invoke(status, list(map(str, args)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_live_run_shows_where_it_is_and_how_safe_it_is(tmp_path):
    run = make_run(tmp_path / "a", state="running", events=[started(), saved(80), step(99), step(100)])
    lines = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in show(run).splitlines())
    assert lines["state"].startswith(f"running, pid {os.getpid()} on ")
    assert lines["workers"] == "2, mirrored, V=4, fp32"
    assert re.fullmatch(r"100/500, epoch 3, \S+ ago", lines["step"])
    assert lines["loss"] == "0.25"
    assert lines["speed"] == "312 samples/s, eta 1m30s"
    assert re.fullmatch(r"step 80, \S+ ago, checkpoints/80", lines["checkpoint"])
    assert lines["command"] == "mh run train.py"


def test_a_finished_run_shows_its_end_its_results_and_what_was_not_recorded(tmp_path):
    events = [started(), step(500), Evaluated(step=500, rows=9, results={"accuracy": 0.97})]
    run = make_run(
        tmp_path / "a", events=[*events, RunEnded(exit_code=0, step=500, reason="", dropped=12)], exit_code=0
    )
    text = show(run)
    assert re.search(r"^state +finished, exit code 0$", text, re.M)
    assert re.search(r"^evaluated +accuracy 0.97$", text, re.M)
    assert "12 events could not be recorded" in text
    assert "samples/s" not in text, "a run that has ended has no speed"


def test_a_run_whose_process_is_gone_is_said_to_have_died(tmp_path):
    run = make_run(tmp_path / "a", state="running", pid=pid_of_the_dead(), events=[started(), step(7)])
    assert "the same command resumes it" in show(run)
    assert look_at(run).state == "died"


def test_a_process_that_only_has_the_same_number_is_not_the_run(tmp_path):
    run = make_run(tmp_path / "a", state="running", created=1000.0)
    assert look_at(run).state == "died"


def test_restarts_and_the_worker_lost_last_are_shown_and_collateral_is_not(tmp_path):
    lost = [
        WorkerLost(rank=3, host="b", pid=41, reason="SIGKILL"),
        WorkerLost(rank=0, host="a", pid=40, reason="connection reset", collateral=True),
    ]
    run = make_run(tmp_path / "a", events=[started(), step(5), started(attempt=3), step(9)], agent_events=lost)
    assert re.search(r"^restarts +2; last lost: rank 3 on b \(pid 41\): SIGKILL$", show(run), re.M)


def test_variables_are_refused_where_no_server_keeps_any(tmp_path, monkeypatch):
    run = make_run(tmp_path / "a", state="running")
    monkeypatch.setattr("manyhands.parameter_server.loop.variable_file.query", lambda path: live([]))
    for words, why in (
        (["--variables"], "has no parameter servers here"),
        (["--variables", "--live"], "cannot refresh with --live"),
    ):
        with pytest.raises(UsageError, match=why):
            status.main([str(run), *words], standalone_mode=False)
    kept = ServerStatus(server=0, pid=1, status="live", phase="", age_s=0.0)
    monkeypatch.setattr("manyhands.parameter_server.loop.variable_file.query", lambda path: live([], servers=[kept]))
    with pytest.raises(UsageError, match="have no variables yet"):
        status.main([str(run), "--variables"], standalone_mode=False)


def answering(monkeypatch, query):
    client = types.ModuleType("manyhands.control.session.run_client")
    client.query = query
    monkeypatch.setitem(sys.modules, "manyhands.control.session.run_client", client)


def live(members: list[MemberStatus], **more) -> Status:
    known = {"run": "a", "run_dir": None, "generation": "7.3", "attempt": 1, "hosts": 1, "host": "here", "stop": None}
    return Status(**known, coordinator_pid=1, members=members, **more)


def test_an_elastic_run_shows_its_slots_and_who_joins(tmp_path, monkeypatch):
    common = {"phase": "training", "age_s": 0.1, "call": 2}
    members = [
        MemberStatus(rank=0, slot=3, pid=40, status="live", step=99, **common),
        MemberStatus(rank=-1, slot=1, pid=41, status="leaving", step=98, **common),
        MemberStatus(rank=-1, slot=0, pid=42, status="joining", step=None, phase="", age_s=2.0),
    ]
    answering(monkeypatch, lambda path: live(members, elastic=(2, 8), workers_wanted=2))
    run = make_run(tmp_path / "a", state="running", events=[step(99)])
    shown = show(run)
    assert re.search(r"^elastic +1 workers on this host, 2 to 8 in all, 2 wanted; generation 7\.3$", shown, re.M)
    assert re.search(r"^worker 3 +rank 0, step 99, training, call 2, 0s ago, pid 40$", shown, re.M)
    assert re.search(r"^worker 1 +leaving, step 98, training, call 2, 0s ago, pid 41$", shown, re.M)
    assert re.search(r"^worker 0 +joining, 2s ago, pid 42$", shown, re.M)
    assert json.loads(show(run, "--json"))["elastic"] == [2, 8]


def test_a_live_run_that_answers_shows_where_each_worker_is(tmp_path, monkeypatch):
    members = [
        MemberStatus(rank=0, pid=40, status="running", step=99, phase="backward", age_s=0.1),
        MemberStatus(rank=1, pid=41, status="starting", step=None, phase="", age_s=2.0),
    ]
    answering(monkeypatch, lambda path: live(members))
    run = make_run(tmp_path / "a", state="running", events=[step(99)])
    assert re.search(r"^rank 0 +step 99, backward, 0s ago, pid 40\nrank 1 +starting, 2s ago, pid 41$", show(run), re.M)
    assert [place["phase"] for place in json.loads(show(run, "--json"))["ranks"]] == ["backward", ""]


def test_a_live_run_that_does_not_answer_is_shown_from_its_files(tmp_path, monkeypatch):
    def no_run(path):
        raise TimeoutError("no answer")

    answering(monkeypatch, no_run)
    run = make_run(tmp_path / "a", state="running", events=[step(99)])
    assert "99/500" in show(run)


def straggler(number, rank=1, **changes):
    fields = {"host": "b", "phase": "forward", "factor": 1.94, "waiting": 0.41, "generation": "1.1"}
    return Straggler(rank=rank, step=number, **(fields | changes))


def test_slow_workers_are_shown_by_what_was_said_of_them_last(tmp_path, monkeypatch):
    events = [
        started(),
        straggler(20, rank=3, generation="0.9"),
        straggler(51),
        straggler(51, rank=2, phase="load"),
        straggler(101, phase="backward", factor=3.0),
        straggler(151, rank=2, is_over=True),
    ]
    run = make_run(tmp_path / "r", events=[*events, step(200)])
    lines = [line for line in show(run).splitlines() if line.startswith("slow")]
    assert lines == [
        "slow        rank 1 on b is 3.0 times as slow as the others, in backward; they wait 41% of a step (step 101)"
    ]
    answering(monkeypatch, lambda path: live([]))
    run = make_run(tmp_path / "s", state="running", events=events)
    assert look_at(run).slow == [], "in the generation of now ranks are others'"


def test_a_warning_cannot_repaint_the_terminal(tmp_path):
    run = make_run(tmp_path / "a", events=[Warned(text="\x1b[2Jgone")])
    assert "\x1b" not in show(run)


def test_as_json_everything_is_there_and_a_diverged_loss_is_named(tmp_path):
    run = make_run(tmp_path / "a", events=[started(), step(100, loss=float("nan"))])
    document = json.loads(show(run, "--json"))
    assert document["loss"] == "nan"
    assert (document["step"], document["workers"], document["state"]) == (100, 2, "finished")
    assert document["ranks"] == []


def test_the_last_checkpoint_is_found_behind_a_long_run_and_quickly(tmp_path):
    run = make_run(tmp_path / "a", events=[started(), saved(1), *[step(n) for n in range(30_000)]])
    began = time.process_time()
    seen = look_at(run)
    assert time.process_time() - began < 2.0
    assert (seen.checkpoint.step, seen.workers, seen.step) == (1, 2, 29_999)


def test_beyond_what_is_scanned_the_start_is_still_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(run_status, "MAX_SCAN_BYTES", 10_000)
    monkeypatch.setattr(run_status, "CHUNK_BYTES", 1_000)
    run = make_run(tmp_path / "a", events=[started(), *[step(n) for n in range(1000)]])
    seen = look_at(run)
    assert (seen.workers, seen.step) == (2, 999)


@pytest.mark.parametrize("chunk_bytes", [7, 64, 1000, 10_000])
def test_lines_are_the_same_read_backwards_in_chunks_of_any_size(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(run_status, "CHUNK_BYTES", chunk_bytes)
    lines = [b"x" * (n % 90) for n in range(100)]
    (tmp_path / "f").write_bytes(b"\n".join(lines))
    assert list(run_status._lines_backwards(tmp_path / "f")) == lines[::-1]


def test_half_written_and_foreign_files_are_no_error(tmp_path):
    run = make_run(tmp_path / "a", events=[step(4)])
    with (run / "events" / "chief.jsonl").open("ab") as file:
        file.write(b'{"event":"Levitated"}\n\xff\n{"event":"StepDone","st')
    assert look_at(run).step == 4
    (run / "run.json").write_text("{")
    seen = look_at(run)
    assert (seen.state, seen.step) == ("unknown", 4)


def test_without_a_name_all_runs_are_listed_the_newest_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert show() == "No runs in runs/.\n"
    make_run(tmp_path / "runs" / "zz-older", created=NOW - 100, events=[step(3)])
    make_run(tmp_path / "runs" / "newer", created=NOW - 5, state="running", events=[step(7)], host="another-host")
    first, second = show().splitlines()
    assert re.fullmatch(r"newer +running +step 7/500  loss 0.25  312 samples/s, eta 1m30s", first)
    assert re.fullmatch(r"zz-older +finished +step 3/500  loss 0.25", second)
    assert [each["run"] for each in json.loads(show("--json"))] == ["newer", "zz-older"]


def test_a_run_is_found_by_path_by_name_or_as_the_newest(tmp_path):
    root = tmp_path / "runs"
    old, new = make_run(root / "old", created=NOW - 9), make_run(root / "new", created=NOW)
    assert find_run(str(old), root) == find_run("old", root) == old
    assert find_run(None, root) == new


def test_a_mistyped_run_is_answered_with_the_nearest_name(tmp_path):
    make_run(tmp_path / "runs" / "digits-1")
    with pytest.raises(UsageError) as raised:
        find_run("digit-1", tmp_path / "runs")
    assert "digits-1" in str(raised.value)
    assert report(raised.value, sys.stderr) == 2


def test_live_in_a_pipe_is_a_line_a_second_until_the_run_ends(tmp_path, monkeypatch):
    run = make_run(tmp_path / "a", state="running", events=[step(4)])
    looks = iter(range(10))

    def look_and_end(path):
        if next(looks) == 2:
            record = json.loads((run / "run.json").read_text())
            (run / "run.json").write_text(json.dumps(record | {"status": "finished"}))
        return look_at(path)

    monkeypatch.setattr("manyhands.cli.runs.status.look_at", look_and_end)
    monkeypatch.setattr("manyhands.cli.runs.status.REFRESH_S", 0.01)
    assert [line.split()[0] for line in show(run, "--live").splitlines()] == ["running", "running", "finished"]


@pytest.mark.skipif(shutil.which("tmux") is None, reason="NOT SHOWN HERE: the live view needs tmux to look at it")
def test_live_on_a_terminal_is_redrawn_in_place(tmp_path):
    run = make_run(tmp_path / "a", state="running", events=[started(), step(4)])
    tmux = ["tmux", "-L", f"manyhands-{uuid.uuid4().hex[:8]}", "-f", os.devnull]
    command = f"exec {sys.executable} -m manyhands.cli.main status --live {run}"

    def screen_with(text):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            shown = subprocess.run([*tmux, "capture-pane", "-p"], capture_output=True, text=True, timeout=60).stdout
            if text in shown:
                return shown.rstrip().splitlines()
            time.sleep(0.05)
        raise AssertionError(f"never saw {text!r}, but\n{shown}")

    try:
        subprocess.run([*tmux, "new-session", "-d", "-x", "90", "-y", "20", command], check=True, timeout=60)
        before = screen_with("4/500")
        with (run / "events" / "chief.jsonl").open("ab") as file:
            file.write(encode(step(55)) + b"\n")
        after = screen_with("55/500")
        assert len(after) == len(before)
        assert [line.split()[0] for line in after].count("step") == 1
    finally:
        subprocess.run([*tmux, "kill-server"], capture_output=True, timeout=60)


def used(rank, number):
    return ResourcesUsed(
        time_s=NOW, rank=rank, step=number, steps=number, seconds=2.0, cpu_s=number / 10, peak_rss_bytes=3_000_000
    )


def test_what_each_worker_used_by_its_last_word(tmp_path):
    agent_events = [used(1, 10), used(2, 10), used(2, 20), used(1, 20)]
    path = make_run(tmp_path / "r", events=[started(), used(0, 10), step(15), used(0, 20)], agent_events=agent_events)
    assert [(one.rank, one.step) for one in look_at(path).used] == [(0, 20), (1, 20), (2, 20)]
    shown = show(path)
    assert re.findall(r"^used +rank (\d): 1\.00 cores, 3 MB at most$", shown, re.M) == ["0", "1", "2"]
    assert [one["rank"] for one in json.loads(show(path, "--json"))["used"]] == [0, 1, 2]
