"""Renews the line numbers in docs/architecture.md and its Chinese twin: `python -m tools.architecture_links`.

A link to a function, class or constant is written as [`Class.method`](../manyhands/folder/file.py#L0); this tool puts
in the line on which the name is defined, in Python or in C. `--check` only compares. `--counts` prints how many files
each walk on the page has, and how often it changes folder and package. Start reading at `renewed`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
CHINESE_PAGE = ROOT / "docs" / "zh" / "architecture.md"
LINK = re.compile(r"\[`(?P<name>[\w.]+)`\]\((?P<path>(?:\.\./)+[\w/]+\.(?:py|c|h))#L(?P<line>\d+)\)")
WALK = "(?:Walk: |路线：)"


class Counts(NamedTuple):
    files: int
    folders: int
    """How often the walk changes folder, from one link to the next."""
    packages: int
    """The same for the folders directly below manyhands/."""

    def __str__(self) -> str:
        return f"{self.files} files, {self.folders} changes of folder, {self.packages} of package"


def _named(body: Sequence[ast.stmt], prefix: str = "") -> Iterator[tuple[str, int]]:
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield prefix + node.name, node.lineno
                yield from _named(node.body, f"{prefix}{node.name}.")
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name, node.lineno


@functools.cache
def definitions(path: Path) -> dict[str, int]:
    """Every name that a file defines, with methods as `Class.method`, and its line."""
    text = path.read_text()
    if path.suffix == ".py":
        return dict(reversed(list(_named(ast.parse(text).body))))  # the first of several
    functions = re.finditer(r"^\w[^;{}()=\n]*?\b(\w+)\([^;]*?\{$", text, re.M)
    return {found[1]: text.count("\n", 0, found.start()) + 1 for found in functions}


def line_of(path: str, name: str) -> int | None:
    """The line of a name in a file that a page links to, as seen from that page."""
    file = ROOT / _from_root(path)
    return definitions(file).get(name) if file.is_file() else None


def _from_root(path: str) -> str:
    return path.replace("../", "")


def unresolved(text: str) -> list[str]:
    """Links to names that are not defined where they point."""
    return [found[0] for found in LINK.finditer(text) if line_of(found["path"], found["name"]) is None]


def renewed(text: str) -> str:
    def link(found: re.Match[str]) -> str:
        line = line_of(found["path"], found["name"])
        return f"[`{found['name']}`]({found['path']}#L{line or found['line']})"

    return LINK.sub(link, text)


def section(text: str, heading: str) -> str:
    """What is below a heading, up to the next one."""
    return re.split(r"^#+ ", text.partition(f"\n{heading}\n")[2], maxsplit=1, flags=re.M)[0]


def files_in(text: str) -> list[str]:
    """The files that a text links to, below manyhands/, in order."""
    return [_from_root(found["path"]).removeprefix("manyhands/") for found in LINK.finditer(text)]


def counts(files: Sequence[str]) -> Counts:
    def changes(names: Sequence[str]) -> int:
        return sum(one != other for one, other in itertools.pairwise(names))

    folders, packages = [one.rpartition("/")[0] for one in files], [one.split("/")[0] for one in files]
    return Counts(len(set(files)), changes(folders), changes(packages))


def walks(text: str) -> dict[str, str]:
    """The walks of the page by heading: numbered lists, without what follows them."""
    headings = re.findall(rf"^### {WALK}.*$", text, re.M)
    return {heading: "\n".join(re.findall(r"^(?:\d+\.|   ).*$", section(text, heading), re.M)) for heading in headings}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if a line number is not current")
    parser.add_argument("--counts", action="store_true", help="print the files and changes of folder of each walk")
    asked = parser.parse_args()
    if asked.counts:
        for heading, text in walks(PAGE.read_text()).items():
            print(f"{heading.removeprefix('### Walk: ')}: {counts(files_in(text))}")
        return 0
    return max([_renew(page, only_check=asked.check) for page in (PAGE, CHINESE_PAGE)])


def _renew(page: Path, *, only_check: bool) -> int:
    before = page.read_text()
    after = renewed(before)
    for link in unresolved(before):
        print(f"{page.relative_to(ROOT)}: no such name: {link}", file=sys.stderr)
    if only_check:
        state = "current" if after == before else "python -m tools.architecture_links renews the line numbers"
        print(f"{page.relative_to(ROOT)}: {state}")
    else:
        page.write_text(after)
    return int(bool(unresolved(before)) or (only_check and after != before))


if __name__ == "__main__":
    sys.exit(main())
