"""Every file in changes/ is where towncrier finds it: it silently ignores files elsewhere."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import fold_changes

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
SECTIONS = {section["path"]: section["name"] for section in SETTINGS["section"]}
KINDS = {kind["directory"] for kind in SETTINGS["type"]}


def misplaced(changes: Path) -> Iterator[str]:
    """Files that are not `SECTION/TOPIC.KIND.md`."""
    for file in sorted(changes.rglob("*")):
        path = file.relative_to(changes)
        fits = re.fullmatch(r"([a-z]+)/[\w-]+\.([a-z]+)\.md", path.as_posix())
        if file.is_dir() or path.as_posix() in ("README.md", "template.md") or path.name == ".gitkeep":
            continue
        if not fits or fits[1] not in SECTIONS or fits[2] not in KINDS:
            yield path.as_posix()


def test_every_change_is_in_a_section_and_of_a_kind() -> None:
    assert list(misplaced(ROOT / "changes")) == [], "changes/README.md says where a change belongs"


def test_what_is_elsewhere_is_found(tmp_path: Path) -> None:
    for name in ("flat.added.md", "data/right.fixed.md", "data/wrong.bugfix.md", "nowhere/x.added.md", "data/.gitkeep"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert list(misplaced(tmp_path)) == ["data/wrong.bugfix.md", "flat.added.md", "nowhere/x.added.md"]


def test_the_page_on_changes_lists_the_sections() -> None:
    listed = re.findall(r"^\| `(\w+)` \| (.*) \|$", (ROOT / "changes" / "README.md").read_text(), re.M)
    assert dict(listed) == SECTIONS


PAGE = """\
# Changelog

## 0.2.0 (unreleased)

### Elastic runs and fault tolerance

#### Added

- First.

### Speed and memory

#### Fixed

- Old.

## 0.1.0 (2026-01-02)

- Not touched.
"""


def test_entries_are_added_to_a_version_that_is_not_out(tmp_path: Path) -> None:
    known = fold_changes.order((ROOT / "pyproject.toml").read_text())
    for name, text in {
        "elastic/second.added": "The\nsecond.",
        "speed/new.added": "New.",
        "data/one.fixed": "One.",
    }.items():
        (tmp_path / f"{name}.md").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.md").write_text(text)
    entries = [fold_changes.read(path, known) for path in sorted(tmp_path.glob("*/*.md"))]
    page = fold_changes.folded(PAGE, "0.2.0", entries, known)
    added = "### Data and embeddings\n\n#### Fixed\n\n- One.\n\n### Speed and memory\n\n#### Added\n\n- New.\n"
    assert page == PAGE.replace("- First.\n", "- First.\n- The second.\n").replace("### Speed and memory\n", added)
    assert fold_changes.folded(page, "0.2.0", [], known) == page
    with pytest.raises(ValueError, match=r"no '## 0\.1\.0 \(unreleased\)'"):
        fold_changes.folded(PAGE, "0.1.0", entries, known)
