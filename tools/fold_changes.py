"""Moves what is in changes/ into a version of CHANGELOG.md that is not out yet: `python -m tools.fold_changes 0.1.0`.

towncrier writes a version once, and refuses it afterwards; `make changelog` calls this for a version whose heading says
"unreleased". Sections and kinds are those of towncrier's settings in pyproject.toml, in their order; a new entry is the
last of its section and kind. Start reading at `folded`.
"""

from __future__ import annotations

import re
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Entry(NamedTuple):
    section: str
    kind: str
    text: str


class Order(NamedTuple):
    """Titles by name of folder, and by ending, in the order of the page."""

    sections: dict[str, str]
    kinds: dict[str, str]


def order(settings: str) -> Order:
    towncrier = tomllib.loads(settings)["tool"]["towncrier"]
    sections = {one["path"]: one["name"] for one in towncrier["section"]}
    return Order(sections, {one["directory"]: one["name"] for one in towncrier["type"]})


def read(path: Path, known: Order) -> Entry:
    section, kind = known.sections.get(path.parent.name), known.kinds.get(path.name.split(".")[-2])
    if section is None or kind is None:
        raise ValueError(f"{path} is not changes/SECTION/TOPIC.KIND.md; changes/README.md has the sections and kinds.")
    return Entry(section, kind, path.read_text())


def folded(page: str, version: str, entries: Iterable[Entry], known: Order) -> str:
    """The page with these entries in `version`, which it has as unreleased."""
    heading = f"## {version} (unreleased)\n"
    before, found, rest = page.partition(heading)
    if not found:
        raise ValueError(f"CHANGELOG.md has no {heading.strip()!r}.")
    body, *later = re.split(r"(?m)^(?=## )", rest, maxsplit=1)
    lists: dict[tuple[str, str], list[str]] = {}
    for title, section in _parts(body, "### "):
        for kind, items in _parts(section, "#### "):
            lists[title, kind] = [items.strip()]
    for entry in entries:
        lists.setdefault((entry.section, entry.kind), []).append(_item(entry.text))
    return before + heading + _written(lists, known) + ("\n" + later[0] if later else "")


def _parts(text: str, mark: str) -> list[tuple[str, str]]:
    """Titles and what is below them."""
    found = re.split(rf"(?m)^{mark}(.*)\n", text)[1:]
    return list(zip(found[::2], found[1::2], strict=True))


def _item(text: str) -> str:
    lines = textwrap.wrap(" ".join(text.split()), 110, break_long_words=False, break_on_hyphens=False)
    return "- " + "\n  ".join(lines)


def _written(lists: dict[tuple[str, str], list[str]], known: Order) -> str:
    text = ""
    for title in known.sections.values():
        kinds = [kind for kind in known.kinds.values() if (title, kind) in lists]
        text += f"\n### {title}\n" if kinds else ""
        for kind in kinds:
            text += f"\n#### {kind}\n\n" + "\n".join(lists[title, kind]) + "\n"
    return text


def main(words: Sequence[str]) -> None:
    (version,) = words
    known, page = order((ROOT / "pyproject.toml").read_text()), ROOT / "CHANGELOG.md"
    paths = sorted(path for path in (ROOT / "changes").glob("*/*.md"))
    page.write_text(folded(page.read_text(), version, [read(path, known) for path in paths], known))
    for path in paths:
        path.unlink()
    print(f"{len(paths)} entries are in {page.name} now")


if __name__ == "__main__":
    main(sys.argv[1:])
