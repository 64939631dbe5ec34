"""Pages in Chinese and their English twins: `python -m tools.chinese_pages` renews the code and says what else differs.

README.zh.md has README.md as its twin, docs/zh/NAME has docs/NAME. A page has the headings, the code and the links of
its twin; comments in code may be translated. Code that differs is replaced by the twin's, if both have as many blocks;
`--check` only compares. Start reading at `differences`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHINESE = ROOT / "docs" / "zh"
FENCE = re.compile(r"^( *)```[^\n]*\n.*?^\1```$", re.M | re.S)


def pages() -> list[Path]:
    return [ROOT / "README.zh.md", *sorted(CHINESE.rglob("*.md"))]


def twin(page: Path) -> Path:
    """The English page of a Chinese one; any other path is its own twin."""
    if page.is_relative_to(CHINESE):
        return ROOT / "docs" / page.relative_to(CHINESE)
    return page.with_name("README.md") if page.name == "README.zh.md" else page


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ .*$", FENCE.sub("", text), re.M)


def levels(text: str) -> list[int]:
    return [len(one.split()[0]) for one in headings(text)]


def blocks(text: str) -> list[str]:
    return [found[0] for found in FENCE.finditer(text)]


def without_comments(block: str) -> str:
    return re.sub(r"\s*(?:#|//) .*$", "", block, flags=re.M)


def code(text: str) -> list[str]:
    """The code blocks without comments, which may be translated."""
    return [without_comments(block) for block in blocks(text)]


def same(ours: str, theirs: str) -> bool:
    """Whether two blocks are the same but for comments; what `mh demo` prints in Chinese only has the same figures."""
    if ours.startswith("```\n") and re.search("[\u4e00-\u9fff]", ours):
        return figures(ours) == figures(theirs)
    return without_comments(ours) == without_comments(theirs)


def figures(block: str) -> list[str]:
    """The numbers of a table's last columns, or of a line of text: a table's words may have some, too."""
    found: list[str] = []
    for line in block.splitlines():
        row = re.search(r"(?: +(?:[\d.,e%+-]+))+$", line)
        found += row[0].split() if row and len(row[0].split()) >= 4 else re.findall(r"\d[\d.]*\d|\d", line)
    return found


def anchors(text: str) -> list[str]:
    """Of the headings, as hosts of Markdown make them."""
    names = [re.sub(r"^#+ ", "", one).lower() for one in headings(text)]
    return [re.sub(r"[^\w\- ]", "", one).strip().replace(" ", "-") for one in names]


def targets(page: Path, text: str) -> Counter[str]:
    """What a page links to, with English pages in place of Chinese ones, and headings by their number."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
        path, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            found.append(link)
            continue
        target = Path(os.path.normpath(page.parent / path)) if path else page
        names = anchors(target.read_text()) if anchor and target.suffix == ".md" else []
        where = str(names.index(anchor)) if anchor in names else anchor
        found.append(f"{twin(target).relative_to(ROOT)}#{where}")
    return Counter(found)


def differences(page: Path) -> Iterator[str]:
    """In what a page is not like its twin."""
    english = twin(page)
    if not english.is_file():
        yield f"{english.relative_to(ROOT)} is not there"
        return
    ours, theirs = page.read_text(), english.read_text()
    if levels(ours) != levels(theirs):
        yield f"headings: {len(levels(ours))}, in English {len(levels(theirs))}, or of other levels"
    if len(blocks(ours)) != len(blocks(theirs)):
        yield f"code blocks: {len(blocks(ours))}, in English {len(blocks(theirs))}"
    for number, (here, there) in enumerate(zip(blocks(ours), blocks(theirs), strict=False), 1):
        if not same(here, there):
            yield f"code block {number}: {here.splitlines()[1:2]}, in English {there.splitlines()[1:2]}"
    here, there = targets(page, ours), targets(english, theirs)
    yield from (f"only here: a link to {link}" for link in here - there)
    yield from (f"only in English: a link to {link}" for link in there - here)


def with_code_of(ours: str, theirs: str) -> str:
    """A page with its twin's code where that differs in more than comments."""
    wanted = blocks(theirs)
    if len(blocks(ours)) != len(wanted):
        return ours
    rest = iter(wanted)

    def block(found: re.Match[str]) -> str:
        there = next(rest)
        return found[0] if same(found[0], there) else there

    return FENCE.sub(block, ours)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    asked = parser.parse_args()
    found = 0
    for page in pages():
        if not asked.check and twin(page).is_file():
            page.write_text(with_code_of(page.read_text(), twin(page).read_text()))
        for difference in differences(page):
            found += 1
            print(f"{page.relative_to(ROOT)}: {difference}")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
