"""For n = 1 to LAST_POINT: fork a writer of step 2 that kills itself at its n-th change. Prints each n that lived."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from checkpoint_cases import KillAt, save

LAST_POINT = 35
"""A few more than a save of two shards, with one old checkpoint to remove, makes changes."""

if __name__ == "__main__":
    for n in range(1, LAST_POINT + 1):
        child = os.fork()
        if child == 0:
            result = save(Path(sys.argv[1]) / f"root-{n}", 2, files=KillAt(n), keep_last=1)
            os._exit(0 if result.error is None else 3)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, f"the writer with point {n} failed instead of dying"
            print(n)
