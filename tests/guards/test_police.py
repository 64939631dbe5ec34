"""The police of tests/conftest.py see what they are there to see."""

from __future__ import annotations

import os
import subprocess
import sys

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
