"""What type checkers and editors see of `mh.`: the public names, and an error for any other."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import manyhands

PACKAGE = Path(manyhands.__file__).parent


def test_a_misspelt_public_name_is_an_error_to_mypy(tmp_path: Path) -> None:
    """Checks the public package without its implementation: with all of torch, mypy would take a minute."""
    (tmp_path / "manyhands").mkdir()
    for name in (
        "__init__.py",
        "errors.py",
        "images.py",
        "lazy_names.py",
        "nn.py",
        "order.py",
        "supported.py",
        "py.typed",
    ):
        shutil.copy(PACKAGE / name, tmp_path / "manyhands" / name)
    for name in ("dispatch/__init__.py", "distribute/__init__.py", "optim/__init__.py", "optim/rows.py"):
        (tmp_path / "manyhands" / name).parent.mkdir(exist_ok=True)
        shutil.copy(PACKAGE / name, tmp_path / "manyhands" / name)
    names = "\n".join(f"mh.{name}" for name in manyhands.__all__)
    (tmp_path / "right.py").write_text(f"import manyhands as mh\n{names}\n")
    (tmp_path / "wrong.py").write_text("import manyhands as mh\nmh.Trainr\n")
    how = ["--no-site-packages", "--ignore-missing-imports", "--no-incremental", "--config-file", "/dev/null"]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *how, "right.py", "wrong.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    errors = [line for line in checked.stdout.splitlines() if "error:" in line]
    assert len(errors) == 1, checked.stdout + checked.stderr
    assert errors[0].startswith('wrong.py:2: error: Module has no attribute "Trainr"')
