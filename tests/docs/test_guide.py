"""Every example in the README and on the pages below runs as it stands, in a directory of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/guide.md",
    "docs/exchange.md",
    "docs/layouts.md",
    "docs/averaging.md",
    "docs/data.md",
    "docs/dispatch.md",
    "docs/embeddings.md",
    "docs/parameter-servers.md",
    "docs/pipeline.md",
    "docs/sharding.md",
    "docs/tensor-parallel.md",
)


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)


# Loads torch once. For each page, whose folders come in a line, it forks: the parent goes on and tells how that ended.
WARM = """
import os, runpy, sys
import torch, manyhands
from manyhands.control.processes.fence import die_with_parent
manyhands.Trainer
warm = os.getpid()
for line in sys.stdin:
    page = os.fork()
    if page == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(page, 0)[1]), flush=True)
else:
    sys.exit()
die_with_parent(warm)
output, *folders = line.split()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
os.dup2(1, 2)
for folder in folders:
    os.chdir(folder)
    runpy.run_path("example.py", run_name="__main__")
"""
Pages = Callable[[list[Path], Path], int]


@pytest.fixture(scope="module")
def warm() -> Iterator[Pages]:
    """Runs the examples of these folders in one process that is their own; its exit code."""
    command = [sys.executable, "-c", WARM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        told, answers = process.stdin, process.stdout

        def run(folders: list[Path], output: Path) -> int:
            print(output, *folders, file=told, flush=True)
            return int(answers.readline())

        yield run
        process.kill()  # and a page that did not end in time


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_example_of_the_page_runs(page: str, tmp_path: Path, warm: Pages) -> None:
    """One process for all blocks of a page, each in a directory and a namespace of its own."""
    folders = []
    for number, code in enumerate(blocks(page)):
        folders.append(tmp_path / str(number))
        folders[-1].mkdir()
        (folders[-1] / "example.py").write_text(code)
    code = warm(folders, tmp_path / "output")
    assert code == 0, (tmp_path / "output").read_text()
