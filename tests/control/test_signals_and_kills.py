"""Signals to the launcher, and kill -9 of everything in turn: what ends, what continues, and what is left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from manyhands.control.agent.user_requests import AGAIN
from tests.control.conftest import alive, until

pytestmark = pytest.mark.faults

COMMITS = """
    session = join()
    mark(f"up-{RANK}")
    while session.stop_requested is None:
        time.sleep(0.01)
    assert session.stop_requested == "preempt"
    wait_for("signalled-again")
    session.committed(12, "checkpoints/step-12")
    sys.exit(75)
"""


def send_to_all(run, number: int) -> None:
    """As Slurm and systemd may: workers, coordinator and guard get it too, and before the launcher does."""
    for process in [*run.descendants(), psutil.Process(run.process.pid)]:
        process.send_signal(number)


@pytest.mark.parametrize(
    ("number", "again"), [(signal.SIGTERM, signal.SIGTERM), (signal.SIGUSR1, signal.SIGTERM), (signal.SIGINT, None)]
)
def test_signals_to_every_process_let_workers_commit_and_end_with_75(launcher, number, again):
    run = launcher(COMMITS, workers=2)
    run.wait_for("up-0"), run.wait_for("up-1")
    coordinator = run.coordinator()
    send_to_all(run, number)
    until(run.said)
    if again is not None:
        send_to_all(run, again)
    (run.folder / "signalled-again").touch()
    assert run.wait() == 75
    assert run.said() == [f"{number.name}: workers have 30 s to commit a checkpoint; {AGAIN}"]
    assert not alive(coordinator.pid)


def test_workers_that_do_not_stop_are_killed_after_the_grace_time(launcher):
    run = launcher("join(); mark(f'up-{RANK}'); time.sleep(300)", workers=2, grace_s=0.3)
    run.wait_for("up-0"), run.wait_for("up-1")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130


def test_a_script_that_does_not_speak_our_protocol_gets_the_signal_itself(launcher):
    run = launcher("""
        def stop(*_):
            print("caught", flush=True)
            sys.exit(75)
        signal.signal(signal.SIGTERM, stop)
        mark("up")
        time.sleep(60)
    """)
    run.wait_for("up")
    run.process.terminate()
    assert run.wait() == 75
    assert run.out == "caught\n"


def test_ctrl_c_after_another_signal_ends_everything_at_once(launcher):
    run = launcher("join(); mark('up'); time.sleep(300)", grace_s=300)
    pid = int(run.wait_for("up"))
    run.process.terminate()
    until(run.said)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert not alive(pid)
    last = "SIGINT again: everything here ends at once; the same command resumes from the last checkpoint"
    assert run.said()[-1] == last


def test_kill_9_of_the_launcher_leaves_no_process_socket_or_directory(launcher):
    run = launcher(
        """
        import subprocess
        AWAY = "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(300)"
        session = join()
        # A loader process, and one that tried to get away: its own session, and no child of the worker.
        loader = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        stray = subprocess.Popen([sys.executable, "-c", AWAY])
        stray.wait()
        mark(f"up-{RANK}")
        time.sleep(300)
    """,
        workers=2,
    )
    run.wait_for("up-0"), run.wait_for("up-1")
    before = run.descendants()
    marked = [process for process in psutil.process_iter() if _belongs(process, launcher.temp)]
    assert len(marked) == 6, "two workers with two descendants each"
    assert len(launcher.sockets_left()) == 1
    run.process.kill()
    until(lambda: not any(alive(process.pid) for process in before), what="the end of the launcher's children")
    until(
        lambda: not any(_belongs(process, launcher.temp) for process in psutil.process_iter()), what="the end of strays"
    )
    until(lambda: not launcher.sockets_left(), what="the removal of sockets")


def _belongs(process: psutil.Process, temp) -> bool:
    try:
        return process.environ().get("MANYHANDS_AGENT", "").startswith(f"ipc://{temp}")
    except psutil.Error:
        return False


def test_loader_processes_of_a_killed_worker_die_with_it(launcher):
    run = launcher(
        """
        import subprocess
        join()
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        (HERE / "child").write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    """,
        max_restarts=0,
    )
    assert run.wait() == 4
    assert not alive(int((run.folder / "child").read_text()))


@pytest.mark.parametrize("victim", ["launcher", "worker"])
def test_named_semaphores_of_loader_processes_do_not_outlive_a_kill_9(launcher, victim):
    run = launcher(
        """
        import multiprocessing
        join()
        lock = multiprocessing.get_context("spawn").Lock()      # as a DataLoader's queues have
        (HERE / "name").write_text(lock._semlock.name)
        mark("up")
        time.sleep(300)
    """,
        max_restarts=0,
    )
    worker = int(run.wait_for("up"))
    semaphore = Path("/dev/shm", "sem." + (run.folder / "name").read_text().lstrip("/"))
    assert semaphore.exists()
    run.process.kill() if victim == "launcher" else os.kill(worker, signal.SIGKILL)
    until(lambda: not semaphore.exists(), what="the removal of the semaphore")
    until(lambda: not run.descendants(), what="the end of all processes")


def test_kill_9_of_the_coordinator_and_the_guard_disturbs_no_worker_and_a_later_death_is_still_handled(launcher):
    run = launcher(
        """
        session = join()
        session.set(f"before/{RANK}", b"kept")
        mark(f"up-{IDENTITY.attempt}-{RANK}")
        if IDENTITY.attempt == 1:
            wait_for("coordinator-is-back")
            assert session.get(f"before/{1 - RANK}", 60) == b"kept"
            session.set(f"after/{RANK}", b"new")
            session.get(f"after/{1 - RANK}", 60)
            mark(f"met-{RANK}")
            time.sleep(300)
    """,
        workers=2,
    )
    pids = [int(run.wait_for(f"up-1-{rank}")) for rank in (0, 1)]
    old, guard = run.coordinator(), run.guard()
    old.kill(), guard.kill()
    until(lambda: run.coordinator() != old, what="a new coordinator")
    until(lambda: run.guard() != guard, what="a new guard")
    (run.folder / "coordinator-is-back").touch()
    run.wait_for("met-0"), run.wait_for("met-1")
    assert all(alive(pid) for pid in pids)
    os.kill(pids[0], signal.SIGKILL)
    run.wait_for("up-2-0")
    assert run.wait() == 0
    assert not launcher.sockets_left()
    first, second = [event["generation"] for event in run.events("GenerationStarted")]
    term, counter = (int(part) for part in first.split("."))
    assert second == f"{term + 1}.{counter + 1}"


def test_a_coordinator_may_be_killed_any_number_of_times_as_long_as_each_one_worked(launcher):
    run = launcher("""
        session = join()
        for turn in range(7):
            assert session.add("n", 1) == turn + 1
            mark(f"counted-{turn}")
            wait_for(f"go-{turn}")
    """)
    for turn in range(7):
        run.wait_for(f"counted-{turn}")
        if turn < 6:
            os.kill(run.coordinator().pid, signal.SIGKILL)
        (run.folder / f"go-{turn}").touch()
    assert run.wait() == 0


def test_ctrl_c_while_workers_are_still_starting_ends_with_130_and_without_a_traceback(launcher):
    run = launcher("time.sleep(300)", workers=2)
    until(lambda: run.events("GenerationStarted"), what="a start")
    run.process.send_signal(signal.SIGINT)  # Python and its imports are under way, the script is not
    assert run.wait() == 130
    assert "Traceback" not in run.err and "KeyboardInterrupt" not in run.err, run.err
