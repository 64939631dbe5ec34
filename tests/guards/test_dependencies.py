"""`pip install manyhands` installs exactly the agreed list of packages."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# The core's dependencies, direct and indirect. A new name gets a line in docs/decisions/.
CLOSURE = {
    "click", "filelock", "fsspec", "jinja2", "markdown-it-py", "markupsafe", "mdurl", "mpmath", "msgspec", "networkx",
    "numpy", "psutil", "pygments", "pyzmq", "rich", "safetensors", "setuptools", "sympy", "torch", "typing-extensions",
}  # fmt: skip


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed_by(package: str) -> set[str]:
    try:
        lines = requires(package) or []
    except PackageNotFoundError:
        return set()
    names = set()
    for line in lines:
        name, marker = re.match(r"([A-Za-z0-9._-]+)[^;]*(?:;(.*))?", line).groups()  # type: ignore[union-attr]
        foreign = marker and re.search(r"extra|platform_system|sys_platform|implementation|platform_python", marker)
        if not foreign:
            names.add(normal(name))
    return names


def test_the_core_pulls_in_what_was_agreed_and_nothing_else() -> None:
    found, todo = set(), ["manyhands"]
    while todo:
        fresh = needed_by(todo.pop()) - found
        found |= fresh
        todo += fresh
    assert found - CLOSURE == set()


def test_what_is_installed_is_what_the_constraints_pin() -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    wrong = []
    for name, wanted in pinned.items():
        try:
            if version(name).split("+")[0] != wanted:
                wrong.append(f"{name} {version(name)} instead of {wanted}")
        except PackageNotFoundError:
            continue
    assert not wrong


def locked() -> dict[str, str]:
    """Each requirement of the lock, with its hashes, by name==version."""
    entries = re.split(r"(?<!\\)\n", (ROOT / "requirements.lock").read_text().strip())
    return {entry.split()[0]: entry for entry in entries if not entry.startswith("#")}


def test_the_lock_has_hashes_for_what_the_constraints_pin() -> None:
    assert list(locked()) == (ROOT / "constraints.txt").read_text().split()
    assert all("--hash=sha256:" in entry for entry in locked().values())


def dry_run(requirements: Path, entries: list[str]) -> subprocess.CompletedProcess[str]:
    requirements.write_text("\n".join(entries))
    how = ["--quiet", "--dry-run", "--ignore-installed", "--require-hashes", "-r", str(requirements)]
    return subprocess.run([sys.executable, "-m", "pip", "install", *how], capture_output=True, text=True, timeout=300)


@pytest.mark.long
def test_pip_takes_the_core_with_required_hashes_and_refuses_another_file(tmp_path: Path) -> None:
    core = {pin: entry for pin, entry in locked().items() if normal(pin.split("==")[0]) in CLOSURE}
    whole = dry_run(tmp_path / "whole.txt", list(core.values()))  # fails if a dependency is not in it
    assert whole.returncode == 0, whole.stderr
    [mdurl] = [entry for pin, entry in core.items() if pin.startswith("mdurl==")]
    forged = dry_run(tmp_path / "forged.txt", [re.sub(r"[0-9a-f]{64}", "0" * 64, mdurl)])
    assert "DO NOT MATCH THE HASHES" in forged.stderr
