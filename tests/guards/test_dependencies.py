"""What `pip install manyhands` pulls in is a list that somebody agreed to."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Everything that the core needs, and what that needs in turn. A new name gets a line in docs/decisions/.
CLOSURE = {
    "click", "filelock", "fsspec", "jinja2", "markdown-it-py", "markupsafe", "mdurl", "mpmath", "msgspec", "networkx",
    "numpy", "psutil", "pygments", "pyzmq", "rich", "safetensors", "setuptools", "sympy", "torch", "typing-extensions",
}  # fmt: skip


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
            names.add(re.sub(r"[-_.]+", "-", name).lower())
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
