"""The checks of tests/conftest.py find leftover processes, and a pool of ranks isolates tests from each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from manyhands.testing import RankPool
from tests.conftest import _children

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=sys.stdin)
print(child.pid, flush=True)
child.wait()
"""


def test_children_and_their_children_are_seen() -> None:
    ours = {child.pid for child in _children()}
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        assert {child.pid for child in _children()} - ours == {parent.pid, grandchild}
        assert os.getpid() not in ours
        parent.communicate()  # closes what both wait for


def test_a_call_of_a_pool_that_was_interrupted_leaves_the_next_one_no_answer() -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: Any) -> None:
        raise Interrupted

    pool, before = RankPool(), signal.signal(signal.SIGUSR1, interrupt)
    try:
        pool.start(1)
        with pytest.raises(Interrupted):  # by the rank itself, which then answers
            pool(1, os.kill, os.getpid(), signal.SIGUSR1)
        assert pool(1, str, "second") == ["second"]
    finally:
        signal.signal(signal.SIGUSR1, before)
        pool.close()
