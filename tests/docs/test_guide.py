"""Every example in the README and on the pages below runs as it stands, in a directory of its own.

On pages with outputs, each program of one worker prints what the page says; test_page_programs.py has the others.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tools.page_programs import Example, blocks_of, examples, prints, write_files

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/guide.md",
    "docs/exchange.md",
    "docs/layouts.md",
    "docs/migration.md",
    "docs/averaging.md",
    "docs/data.md",
    "docs/data-flow-graph.md",
    "docs/datasets.md",
    "docs/dispatch.md",
    "docs/embeddings.md",
    "docs/parameter-servers.md",
    "docs/pipeline.md",
    "docs/profiling.md",
    "docs/sharding.md",
    "docs/tensor-parallel.md",
    "docs/tensorflow.md",
)
WITH_OUTPUTS = ("docs/errors.md", "docs/errata.md")
# Blocks that are no examples: files that others on the page import, or that `mh run` starts.
FILES = {"docs/migration.md": ("ddp.py", "mywork.py")}
SLOW_IMPORTS = re.compile(r"^(import|from) (keras|transformers|datasets)\b", re.M)


def blocks(page: str) -> list[str]:
    """The examples of a page, with what a diff leaves; the others are in `files`."""
    found = blocks_of((ROOT / page).read_text())
    examples = [one.body for one in found if one.language == "python" and one.file not in FILES.get(page, ())]
    return examples + [after(one.body) for one in found if one.language == "diff"]


def after(diff: str) -> str:
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line.startswith("-"))


def files(page: str) -> dict[str, str]:
    found = blocks_of((ROOT / page).read_text())
    return {one.file: one.body for one in found if one.file is not None and one.file in FILES.get(page, ())}


# Loads torch once. For each page, whose programs come in a line, it forks; the parent reports how the child ended.
WARM = """
import os, runpy, sys
import torch, torch._dynamo, torch.distributed, manyhands
import manyhands.observe.progress_display
from manyhands.control.processes.fence import die_with_parent
from manyhands.launcher.worker_process.bootstrap import leave
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
output, *programs = line.split()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
os.dup2(1, 2)
code = 0
try:
    for program in programs:
        os.chdir(os.path.dirname(program))
        runpy.run_path(program, run_name="__main__")  # its whole path: loader processes import it
except SystemExit as end:
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
except BaseException:
    sys.excepthook(*sys.exc_info())
    code = 1
leave(code)  # destructors would take longer than most programs
"""
Pages = Callable[[list[Path], Path], int]


@pytest.fixture(scope="module")
def warm() -> Iterator[Pages]:
    """Runs these programs, each in its folder, in one forked process; its exit code."""
    command = [sys.executable, "-c", WARM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def run(programs: list[Path], output: Path) -> int:
            print(output, *programs, file=requests, flush=True)
            return int(answers.readline())

        yield run
        process.kill()  # and a page that did not end in time


def run_examples(page: str, programs: list[str], folder: Path, warm: Pages) -> None:
    """One process for all of them, each in a directory and a namespace of its own."""
    paths = []
    for number, code in enumerate(programs):
        place = folder / str(number)
        place.mkdir()
        for name, body in (files(page) | {"example.py": code}).items():
            (place / name).write_text(body)
        paths.append(place / "example.py")
    code = warm(paths, folder / "output")
    assert code == 0, (folder / "output").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_example_of_the_page_runs(page: str, tmp_path: Path, warm: Pages) -> None:
    run_examples(page, [one for one in blocks(page) if not SLOW_IMPORTS.search(one)], tmp_path, warm)


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if any(map(SLOW_IMPORTS.search, blocks(page)))])
def test_every_example_with_another_library_runs(page: str, tmp_path: Path, warm: Pages) -> None:
    run_examples(page, [one for one in blocks(page) if SLOW_IMPORTS.search(one)], tmp_path, warm)


def holds_here(example: Example) -> bool:
    """Whether what the page says of processors without fp16 arithmetic is about this one."""
    has_fp16 = re.search(r"\b(avx512_fp16|amx_fp16|asimdhp)\b", Path("/proc/cpuinfo").read_text())
    return not (has_fp16 and "fp16" in example.heading)


def printed_by(example: Example, folder: Path, warm: Pages) -> str:
    folder.mkdir()
    write_files(example, folder)
    assert example.block.file is not None
    warm([folder / example.block.file], folder / "output")
    return (folder / "output").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_OUTPUTS)
def test_every_program_of_one_worker_prints_what_the_page_says(page: str, tmp_path: Path, warm: Pages) -> None:
    """Each in a process of its own, since most of them end with an error."""
    programs = [one for one in examples((ROOT / page).read_text()) if one.is_plain_program and holds_here(one)]
    printed = [printed_by(one, tmp_path / str(number), warm) for number, one in enumerate(programs)]
    wrong = [
        (one.heading, found) for one, found in zip(programs, printed, strict=True) if not prints(one.expected, found)
    ]
    assert len(programs) > 10
    assert not wrong, "\n\n".join(f"### {heading}\n{found}" for heading, found in wrong)
