"""Nothing listens on TCP unless a script wants torch's store; and a script that wants it finds it."""

from __future__ import annotations

import os
import socket
import textwrap
import time
from pathlib import Path

import pytest

from manyhands.control.agent.preflight import imports_manyhands
from manyhands.control.messages.launch_request import WorkerCommand
from tests.control.conftest import until
from tests.listeners import family_of, listeners_of


def listeners(run) -> set[str]:
    return listeners_of(family_of(run.process.pid))


def listeners_until_the_end(run, wait_s: float = 60.0) -> set[str]:
    """Every listener that the run's processes have from now on."""
    found, deadline = set(), time.monotonic() + wait_s
    while run.process.poll() is None:
        assert time.monotonic() < deadline
        found |= listeners(run)
        time.sleep(0.03)
    return found


def plain(launcher, script: str, **request):
    """Run a script that knows nothing of manyhands."""
    (launcher.folder / "plain.py").write_text(textwrap.dedent(script))
    return launcher(command={"kind": "script", "target": "plain.py", "args": []}, **request)


def test_the_tests_distinguish_a_listener_from_a_socket_that_is_only_bound():
    own = family_of(os.getpid())
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{server.getsockname()[1]}"
        assert place not in listeners_of(own)
        server.listen()
        assert place in listeners_of(own)
    assert place not in listeners_of(own)


@pytest.mark.slow
def test_nothing_listens_while_workers_join_and_speak_through_the_session(launcher):
    run = launcher(
        """
        mark(f"here-{RANK}")
        time.sleep(0.5)
        session = join()
        session.set(f"from/{RANK}", b"x")
        session.get(f"from/{1 - RANK}", 60)
        mark(f"joined-{RANK}")
        wait_for("go")
        session.close()
    """,
        workers=2,
        store_after_s=0.2,
    )
    run.wait_for("here-0")
    found = listeners(run)
    run.wait_for("joined-0"), run.wait_for("joined-1")
    found |= listeners(run)
    (run.folder / "go").touch()
    assert found | listeners_until_the_end(run) == set()
    assert run.wait() == 0, run.err


@pytest.mark.slow
def test_nothing_listens_while_a_plain_script_runs_that_connects_to_nothing(launcher):
    run = plain(launcher, "import time, torch.distributed\ntime.sleep(1)", workers=2, store_after_s=60.0)
    assert listeners_until_the_end(run) == set()
    assert run.wait() == 0, run.err


@pytest.mark.long
@pytest.mark.slow
def test_a_script_that_asks_for_the_store_gets_it_at_once_on_loopback_and_the_next_attempt_starts_closed(launcher):
    run = plain(
        launcher,
        """
        import json, os, time
        from pathlib import Path
        import torch.distributed as dist
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if attempt == 0:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(address, port, 2, is_master=False, wait_for_workers=False)
            store.set(os.environ["RANK"], "here")
            store.wait(["0", "1"])
            Path("place").write_text(f"{address}:{port}")
            while not Path("seen").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), 9)
        Path(f"again-{os.environ['RANK']}").touch()
        while not Path("go").exists():
            time.sleep(0.01)
    """,
        workers=2,
        store_after_s=60.0,
    )
    place = run.wait_for("place")
    assert listeners(run) == {place}
    assert place.startswith("127.0.0.1:")
    (run.folder / "seen").touch()
    run.wait_for("again-0"), run.wait_for("again-1")
    assert listeners(run) == set()
    (run.folder / "go").touch()
    assert run.wait() == 0, run.err


@pytest.mark.long
@pytest.mark.slow
def test_a_store_asked_for_stays_when_the_script_joins_the_run_as_well(launcher):
    run = launcher(
        """
        import torch.distributed as dist
        session = join()
        store = dist.TCPStore(os.environ["MASTER_ADDR"], port=int(os.environ["MASTER_PORT"]), is_master=False)
        store.set("word", "kept")
        session.report(1, "train")
        print(store.get("word").decode(), flush=True)
        session.close()
    """
    )
    assert run.wait() == 0, run.err
    assert run.out == "kept\n"


@pytest.mark.long
@pytest.mark.slow
def test_a_process_that_cannot_ask_finds_the_store_after_a_while(launcher):
    child = """
import os, torch.distributed as dist
from datetime import timedelta
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
store.set("word", "found")
print(store.get("word").decode(), flush=True)
"""
    started = time.monotonic()
    run = plain(
        launcher,
        f"""
        import subprocess, sys
        from pathlib import Path
        subprocess.run([sys.executable, "-c", {child!r}], check=True)
    """,
        store_after_s=4.0,
    )
    (place,) = until(lambda: listeners(run), what="a listener")
    assert time.monotonic() - started > 4
    assert run.wait() == 0, run.err
    assert run.out == "found\n"
    assert place.startswith("127.0.0.1:")


@pytest.mark.slow
def test_what_listens_unasked_is_closed_when_a_worker_joins_after_all(launcher):
    run = plain(
        launcher,
        """
        import importlib, time
        from pathlib import Path
        while not Path("go").exists():
            time.sleep(0.01)
        session_module = importlib.import_module("manyhands.control.session.session")
        session = session_module.Session(importlib.import_module("manyhands.spec.load").own_identity())
        session.join(session_module.RunFacts())
        Path("joined").touch()
        while not Path("end").exists():
            time.sleep(0.01)
    """,
        store_after_s=0.1,
    )
    assert until(lambda: listeners(run), what="a listener")
    (run.folder / "go").touch()
    run.wait_for("joined")
    until(lambda: not listeners(run), what="the end of the listener")
    (run.folder / "end").touch()
    assert run.wait() == 0, run.err


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("import torch, manyhands as mh", True),
        ("def f():\n    from manyhands import Trainer", True),
        ("from manyhands.training import own_loop", True),
        ("import torch  # not manyhands", False),
        ("print('import manyhands')\nimport manyhandsome", False),
    ],
)
def test_a_program_whose_first_file_imports_manyhands_is_expected_to_join(tmp_path: Path, monkeypatch, text, ours):
    package = tmp_path / "mine"
    package.mkdir()
    for file in (tmp_path / "train.py", package / "part.py", package / "__main__.py"):
        file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert imports_manyhands(WorkerCommand("script", str(tmp_path / "train.py"))) == ours
    assert imports_manyhands(WorkerCommand("module", "mine.part")) == ours
    assert imports_manyhands(WorkerCommand("module", "mine")) == ours
