"""What the pages name is there: other pages and their sections, public names, commands, modules and files."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import manyhands
from manyhands.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "README.zh.md",
    "CONTRIBUTING.md",
    "changes/README.md",
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")),
]
FOLDERS = (ROOT, ROOT / "manyhands")


def sections(page: Path) -> set[str]:
    """The anchors of its headings, as hosts of Markdown make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, section = link.partition("#")
        target = page.parent / path if path else page
        if re.match(r"\w+:", link):
            continue
        if line := re.fullmatch(r"L(\d+)", section):  # of a source; tests/docs/test_architecture.py reads what is there
            is_there = target.is_file() and int(line[1]) <= target.read_text().count("\n")
        else:
            is_there = target.exists() and (not section or section in sections(target))
        if not is_there:
            yield link


def unknown_names(page: Path) -> Iterator[str]:
    for name in re.findall(r"\bmh\.(\w+(?:\.\w+)?)", page.read_text()):
        found = manyhands
        for part in name.split("."):
            if not hasattr(found, part):
                yield f"mh.{name}"
                break
            found = getattr(found, part)


def unknown_commands(page: Path) -> Iterator[str]:
    for command in re.findall(r"`mh ([a-z]+)", page.read_text()):
        if command not in COMMANDS:
            yield f"mh {command}"


def missing_files(page: Path) -> Iterator[str]:
    for path in re.findall(r"`((?:\w+/)+\w+\.(?:py|md|c|h|toml))`", page.read_text()):
        if not any((folder / path).exists() for folder in FOLDERS):
            yield path


def missing_modules(page: Path) -> Iterator[str]:
    for name in re.findall(r"`(manyhands(?:\.[a-z_]+)+)`", page.read_text()):
        if importlib.util.find_spec(name) is None:
            yield name


def missing(page: Path) -> list[str]:
    checks = (dead_links, unknown_names, unknown_commands, missing_files, missing_modules)
    return [reference for check in checks for reference in check(page)]


@pytest.mark.parametrize("page", PAGES)
def test_everything_that_the_page_names_is_there(page: str) -> None:
    assert missing(ROOT / page) == []


def test_what_is_not_there_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One\n[a](#one) [b](#two) [c](gone.md) mh.Trainer mh.Nobody mh.optim.Adam `mh run` `mh runs` `a/b.py`\n"
    )
    assert missing(page) == ["#two", "gone.md", "mh.Nobody", "mh.optim.Adam", "mh runs", "a/b.py"]
