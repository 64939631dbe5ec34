"""Programs of several workers, and commands, print what docs/errors.md and docs/errata.md say."""

from __future__ import annotations

import io
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from manyhands.testing import RankPool
from tools.page_programs import Example, examples, prints, run, write_files

ROOT = Path(__file__).parents[2]
PAGES = ("docs/errors.md", "docs/errata.md", "docs/migration.md")
EXAMPLES = {f"{page} {one.heading}": one for page in PAGES for one in examples((ROOT / page).read_text())}
OF_WORKERS = {name: one for name, one in EXAMPLES.items() if one.num_workers}
WITH_COMMANDS = {name: one for name, one in EXAMPLES.items() if not one.is_plain_program}


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """A rank is reused, so what a program changes in it is undone."""
    before, modules = Path.cwd(), set(sys.modules)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        os.chdir(before)
        sys.path.remove(str(folder))
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                del sys.modules[name]


def run_program(folder: Path, name: str) -> str:
    """What a program prints in this rank, with the error that ends it as `mh run` shows it."""
    printed = io.StringIO()
    with working_in(folder), redirect_stdout(printed), redirect_stderr(printed):
        try:
            runpy.run_path(str(folder / name), run_name="__main__")
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
    return printed.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_WORKERS)
def test_the_chief_prints_what_the_page_says(ranks: RankPool, tmp_path: Path, name: str) -> None:
    example = EXAMPLES[name]
    write_files(example, tmp_path)
    assert example.block.file is not None and example.num_workers is not None
    printed = ranks(example.num_workers, run_program, tmp_path, example.block.file)[0]
    assert prints(example.expected, printed), printed


@pytest.mark.long
@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_the_command_prints_what_the_page_says(tmp_path: Path, name: str) -> None:
    printed = run(EXAMPLES[name], tmp_path)
    assert prints(EXAMPLES[name].expected, printed), printed


def test_a_text_block_is_compared_line_by_line() -> None:
    assert prints("b ... 2\nc\n", "a\nb is 2\nc\nd\n")
    assert not prints("b\n", "a bc\n")
    assert not prints("a\nc\n", "a\nb\nc\n")


def test_a_file_above_the_first_entry_belongs_to_all() -> None:
    page = "```python\n# a.py\n1\n```\n### One\n```python\n# mh run -n 2 b.py\n2\n```\n```text\nx\n```\n"
    [one] = examples(page)
    assert one == Example("One", {"a.py": "# a.py\n1\n", "b.py": "# mh run -n 2 b.py\n2\n"}, one.block, "x\n")
    assert one.num_workers == 2 and not one.is_plain_program
