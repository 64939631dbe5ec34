"""One host, end to end: launcher, coordinator and workers are real processes, and so is what kills them."""

from __future__ import annotations

import json
import os
import signal

import pytest

from manyhands.control.run_directory import read_run
from manyhands.control.session.run_client import query, request_scale, request_stop
from manyhands.errors import UsageError
from tests.control.conftest import alive, until

pytestmark = pytest.mark.faults

EXCHANGE = """
    session = join(script="train.py")
    session.set(f"from/{RANK}", f"hello from {RANK}".encode())
    print("received:", session.get(f"from/{1 - RANK}", 60).decode(), flush=True)
    print(f"rank {RANK} on stderr", file=sys.stderr, flush=True)
    assert session.add("n", 2) in (2, 4) and not session.check(["absent"])
    session.close()
"""


def test_two_workers_exchange_through_the_store_and_only_the_chiefs_output_is_shown(launcher):
    run = launcher(EXCHANGE, workers=2)
    assert run.wait() == 0
    assert run.out == "received: hello from 1\n"
    assert run.err == "rank 0 on stderr\n"
    logs = run.run_dir() / "logs" / "attempt-1"
    assert (logs / "rank-1.out").read_text() == "received: hello from 0\n"
    assert (logs / "rank-0.out").read_text() == run.out
    assert (run.run_dir().stat().st_mode & 0o777, (logs / "rank-1.out").stat().st_mode & 0o777) == (0o700, 0o600)
    record = read_run(run.run_dir())
    assert (record.status, record.exit_code, record.endpoint) == ("finished", 0, None)
    events = [json.loads(line) for line in (run.run_dir() / "events" / "agent-0.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["GenerationStarted", "RunEnded"]
    assert launcher.sockets_left() == []


def test_a_missing_key_is_a_timeout_that_names_it(launcher):
    run = launcher("""
        session = join()
        try:
            session.get("never", 0.2)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
    """)
    assert run.wait() == 0
    assert run.out.startswith("PeerTimeout The run's store: timeout: never not set within 0.2 s")


KILLABLE = """
    session = join()
    session.report(0, "load")
    session.committed(1800, "checkpoints/step-1800")
    mark(f"up-{IDENTITY.attempt}-{RANK}")
    if IDENTITY.attempt > 1:
        wait_for("go")
        sys.exit(0)
    time.sleep(300)
"""


def test_a_killed_worker_stops_the_others_and_the_run_restarts_as_a_new_generation(launcher):
    run = launcher(KILLABLE, workers=2)
    pids = [int(run.wait_for(f"up-1-{rank}")) for rank in (0, 1)]
    os.kill(pids[1], signal.SIGKILL)
    until(lambda: not any(alive(pid) for pid in pids), what="the end of the other worker")
    run.wait_for("up-2-0"), run.wait_for("up-2-1")
    (run.folder / "go").touch()
    assert run.wait() == 0
    (line,) = run.said()
    assert line.endswith("died: SIGKILL; restarting from step 1800, attempt 2 of 4")
    assert f"rank 1 on {os.uname().nodename} (pid {pids[1]})" in line
    first, second = [event["generation"] for event in run.events("GenerationStarted")]
    assert first.split(".")[1] == "1"
    assert second.split(".")[1] == "2"
    assert (run.run_dir() / "logs" / "attempt-2" / "rank-1.out").exists()


def test_a_spent_budget_ends_with_4_and_one_failure_block(launcher):
    run = launcher(
        """
        session = join()
        session.committed(7, "checkpoints/step-7")
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(300)
    """,
        workers=2,
        max_restarts=1,
        resume="mh run --run-dir {run_dir} train.py",
    )
    assert run.wait() == 4
    text = run.failure()["text"]
    assert "(attempt 2 of 2): the restart budget of 1 is spent" in text
    assert "signal 9 (SIGKILL)" in text
    assert "rank 0 (stopped by its agent)" in text
    assert f"mh run --run-dir {run.run_dir()} train.py" in text
    assert "logs/attempt-2/rank-1.err" in text
    assert read_run(run.run_dir()).status == "failed"


def test_an_exception_on_one_rank_is_named_with_its_traceback_and_the_others_are_collateral(launcher):
    run = launcher(
        """
        session = join()
        session.report(0, "load")
        if RANK == 1:
            session.get("rank 0 waits", 60)
            mark("raising")
            raise ValueError("row 17 is not a number")
        session.set("rank 0 waits", b"")
        from manyhands.errors import PeerLost
        wait_for("raising")
        raise PeerLost("rank 1 is gone")
    """,
        workers=2,
    )
    assert run.wait() == 1
    note = run.failure()
    assert note["block"]["first"]["rank"] == 1
    assert "ValueError: row 17 is not a number" in note["text"]
    assert 'raise ValueError("row 17 is not a number")' in note["text"]
    assert [end["rank"] for end in note["block"]["followers"]] == [0]
    assert len(run.said()) == 0, "an exception before the first step is not retried"


def test_the_same_exception_at_the_same_step_ends_the_run_the_third_time(launcher):
    run = launcher(
        """
        session = join()
        session.report(0, "load")
        session.report(5, "forward")
        raise ValueError("always here")
    """,
        max_restarts=9,
    )
    assert run.wait() == 1
    assert "the same failure at the same step, 3 times" in run.failure()["text"]
    assert len(run.events("GenerationStarted")) == 3


def test_a_segmentation_fault_is_called_one_and_shows_the_native_stack(launcher):
    run = launcher("import faulthandler; faulthandler._sigsegv()", max_restarts=0)
    assert run.wait() == 4
    text = run.failure()["text"]
    assert "signal 11 (SIGSEGV)" in text
    assert "Fatal Python error: Segmentation fault" in text


def test_an_environment_exit_passes_through(launcher):
    run = launcher("sys.exit(3)")
    assert run.wait() == 3
    assert len(run.events("GenerationStarted")) == 1


def test_a_manyhands_error_in_a_worker_ends_the_run_with_its_own_code(launcher):
    run = launcher("""
        from manyhands.errors import SpecError
        raise SpecError("batch_size is 0.", fix=["batch_size=8"])
    """)
    assert run.wait() == 2
    assert "SpecError: batch_size is 0.\n                    try: batch_size=8\n" in run.failure()["text"]
    assert run.err == "", "the failure block has it; to print it twice would only bury it"
    log = run.run_dir() / "logs" / "attempt-1" / "rank-0.err"
    assert log.read_text() == "SpecError: batch_size is 0.\n  try: batch_size=8\n"


def test_a_script_that_does_not_exist_is_refused_before_anything_starts(launcher):
    run = launcher(command={"kind": "script", "target": "nope.py", "args": []})
    assert run.wait() == 2
    assert "nope.py does not exist" in run.err
    assert not (run.folder / "runs").exists()


def test_a_module_that_does_not_exist_is_refused_before_anything_starts(launcher):
    run = launcher(command={"kind": "module", "target": "no_such.module", "args": []})
    assert run.wait() == 2
    assert "no module named 'no_such.module'" in run.err


def test_modules_and_functions_run_too_and_the_chiefs_result_comes_back(launcher):
    (launcher.folder / "jobs.py").write_text("def double(x, *, plus=0):\n    return {'value': 2 * x + plus}\n")
    args = ['{"args": [4], "kwargs": {"plus": 1}}']
    run = launcher(
        command={"kind": "call", "target": "jobs.py:double", "args": args},
        workers=2,
        result_file=str(launcher.folder / "result.json"),
    )
    assert run.wait() == 0
    assert json.loads((launcher.folder / "result.json").read_text()) == {"value": 9}
    run = launcher(command={"kind": "module", "target": "json.tool", "args": ["--help"]})
    assert run.wait() == 0
    assert "usage" in run.out


def test_a_live_run_directory_is_refused_naming_its_pid_and_a_finished_one_needs_overwrite(launcher):
    first = launcher("join(); mark('up'); wait_for('go')", run_dir="here")
    first.wait_for("up")
    second = launcher("join()", name="second.py", run_dir="here")
    assert second.wait() == 2
    assert f"pid {first.process.pid}" in second.err
    third = launcher("join(run_dir='here')", name="third.py", workers=2)
    assert third.wait() == 2, "also when only the script names the directory"
    assert "RunDirectoryInUse" in third.err
    (launcher.folder / "go").touch()
    assert first.wait() == 0
    again = launcher("join()", name="again.py", run_dir="here")
    assert again.wait() == 2
    assert "finished run" in again.err
    over = launcher("join()", name="over.py", run_dir="here", overwrite=True)
    assert over.wait() == 0


def test_a_directory_that_the_script_names_gets_the_early_output_too(launcher):
    run = launcher("print('early', flush=True); print(join(run_dir='mine').run_dir.name, flush=True)")
    assert run.wait() == 0
    assert (run.folder / "mine" / "logs" / "attempt-1" / "rank-0.out").read_text() == "early\nmine\n"
    assert not (run.folder / "runs").exists()


def test_a_resumed_run_has_a_later_generation_and_its_own_logs(launcher):
    for attempt in (1, 2):
        run = launcher("join(); sys.exit(3)", run_dir="here")
        assert run.wait() == 3
        assert (launcher.folder / "here" / "logs" / f"attempt-{attempt}").is_dir()
        if attempt == 1:
            before = read_run(launcher.folder / "here").generation
    after = read_run(launcher.folder / "here").generation
    assert int(after.split(".")[0]) > int(before.split(".")[0])


def test_status_is_answered_and_a_stop_is_passed_on(launcher):
    run = launcher(
        """
        session = join()
        session.report(41, "forward")
        mark(f"up-{RANK}")
        while session.stop_requested is None:
            time.sleep(0.01)
        assert session.stop_requested == "stop"
        sys.exit(75)
    """,
        workers=2,
    )
    run.wait_for("up-0"), run.wait_for("up-1")
    until(lambda: [m.step for m in query(run.run_dir()).members] == [41, 41])
    status = query(run.run_dir())
    assert [(m.rank, m.status, m.phase) for m in status.members] == [(0, "live", "forward"), (1, "live", "forward")]
    with pytest.raises(UsageError, match="is not elastic"):
        request_scale(run.run_dir(), 2)
    request_stop(run.run_dir())
    assert run.wait() == 75
    with pytest.raises(UsageError, match="not running"):
        query(run.run_dir())


def test_positions_of_every_rank_are_known_to_every_worker(launcher):
    run = launcher(
        """
        session = join()
        session.report(10 + RANK, "reduce")
        deadline = time.monotonic() + 60
        while len(session.positions()) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        print({rank: (p.step, p.phase) for rank, p in sorted(session.positions().items())}, flush=True)
        session.set(f"done/{RANK}", b""); session.wait(["done/0", "done/1"], 60)
    """,
        workers=2,
    )
    assert run.wait() == 0
    assert run.out == "{0: (10, 'reduce'), 1: (11, 'reduce')}\n"
