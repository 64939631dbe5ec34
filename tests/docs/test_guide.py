"""Every example in the README and on the pages below runs as it stands, in a directory of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/guide.md",
    "docs/exchange.md",
    "docs/layouts.md",
    "docs/averaging.md",
    "docs/dispatch.md",
    "docs/embeddings.md",
    "docs/parameter-servers.md",
    "docs/pipeline.md",
    "docs/sharding.md",
    "docs/tensor-parallel.md",
)


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_example_of_the_page_runs(page: str, tmp_path: Path) -> None:
    """One process for all blocks of a page, each in a directory and a namespace of its own."""
    program = ["import os, runpy"]
    for number, code in enumerate(blocks(page)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "example.py").write_text(code)
        program += [f"os.chdir({str(tmp_path / str(number))!r})", "runpy.run_path('example.py', run_name='__main__')"]
    command = [sys.executable, "-c", "\n".join(program)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert ended.returncode == 0, ended.stdout + ended.stderr
