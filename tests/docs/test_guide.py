"""Every example in the README and the guide runs as it stands, in a process and a directory of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/guide.md")


def blocks() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for number, code in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)):
            found.append((f"{page} block {number + 1}", code))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), blocks(), ids=lambda value: value if len(value) < 40 else "")
def test_the_example_runs(name: str, code: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(code)
    ended = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_page_that_the_readme_names_is_there() -> None:
    pages = re.findall(r"\]\((docs/[^)]+)\)", (ROOT / "README.md").read_text())
    missing = [page for page in pages if not (ROOT / page).exists()]
    assert not missing
