"""Renews the line numbers in docs/architecture.md: `python -m tools.architecture_links`; `--check` only compares them.

A link to a function, class or constant is written as [`Class.method`](../manyhands/folder/file.py#L0); this tool puts
in the line on which the name is defined, in Python or in C. `--counts` prints how many files each
walk on the page has, and how often it changes folder and package. Start reading at `renewed`.
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
LINK = re.compile(r"\[`(?P<name>[\w.]+)`\]\((?P<path>\.\./[\w/]+\.(?:py|c|h))#L(?P<line>\d+)\)")


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
    file = (PAGE.parent / path).resolve()
    return definitions(file).get(name) if file.is_file() else None


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
    return [found["path"].removeprefix("../manyhands/") for found in LINK.finditer(text)]


def counts(files: Sequence[str]) -> Counts:
    def changes(names: Sequence[str]) -> int:
        return sum(one != other for one, other in itertools.pairwise(names))

    folders, packages = [one.rpartition("/")[0] for one in files], [one.split("/")[0] for one in files]
    return Counts(len(set(files)), changes(folders), changes(packages))


def walks(text: str) -> dict[str, str]:
    """The walks of the page by heading: numbered lists, without what follows them."""
    headings = re.findall(r"^### Walk: .*$", text, re.M)
    return {heading: "\n".join(re.findall(r"^(?:\d+\.|   ).*$", section(text, heading), re.M)) for heading in headings}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if a line number is not current")
    parser.add_argument("--counts", action="store_true", help="print the files and changes of folder of each walk")
    asked = parser.parse_args()
    before = PAGE.read_text()
    after = renewed(before)
    for link in unresolved(before):
        print(f"no such name: {link}", file=sys.stderr)
    if asked.counts:
        for heading, text in walks(before).items():
            print(f"{heading.removeprefix('### Walk: ')}: {counts(files_in(text))}")
    elif asked.check:
        print("current" if after == before else "python -m tools.architecture_links renews the line numbers")
    else:
        PAGE.write_text(after)
    return int(bool(unresolved(before)) or (asked.check and after != before))


if __name__ == "__main__":
    sys.exit(main())
