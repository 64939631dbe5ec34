"""Every file in changes/ is where towncrier finds it: it silently ignores files elsewhere."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

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
