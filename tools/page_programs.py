"""The programs of a page and what they print: `python -m tools.page_programs docs/errors.md docs/errata.md`.

On these pages a block that begins with a comment such as `# train.py` is a file of that name, and one that begins with
`# mh run -n 2 train.py` is a file with the command that runs it. A `text` block is what the program or the commands
right above it print: each of its lines, where `...` is any text. Every third-level heading has a folder, which also
gets the files that are above the first heading. This tool runs each as a reader would, and prints what differs; tests
of tests/docs run the same programs on warm processes. Start reading at `examples`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

MH = (sys.executable, "-m", "manyhands.cli.main")
LIMIT_S = 120.0
BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<body>.*?)^```$", re.M | re.S)
NAMED = re.compile(r"# (?P<command>mh [^\n]*?)?(?P<name>[\w.]+\.(?:py|toml))(?P<rest>[^\n]*)\n")


@dataclass(frozen=True)
class Block:
    language: str
    body: str

    @property
    def file(self) -> str | None:
        found = NAMED.match(self.body)
        return found["name"] if found else None

    @property
    def command(self) -> str:
        """What a reader types for it: the commands of a shell block, or how the program is run."""
        found = NAMED.match(self.body)
        if self.language == "sh":
            return self.body
        assert found is not None, f"a program without a name: {self.body[:60]!r}"
        return f"{found['command'] or 'python '}{found['name']}{found['rest']}"


@dataclass(frozen=True)
class Example:
    """One thing that is run: its heading, the files that must be there, the command, and what it prints."""

    heading: str
    files: Mapping[str, str]
    block: Block
    expected: str

    @property
    def num_workers(self) -> int | None:
        """Of a program that is run by `mh run -n N NAME.py` alone, else None."""
        found = re.fullmatch(r"mh run -n (\d+) [\w.]+", self.block.command) if self.block.language == "python" else None
        return int(found[1]) if found else None

    @property
    def is_plain_program(self) -> bool:
        return self.block.command.startswith("python ") and "\n" not in self.block.command


def blocks_of(text: str) -> list[Block]:
    return [Block(found["language"], found["body"]) for found in BLOCK.finditer(text)]


def examples(text: str) -> Iterator[Example]:
    """Everything on a page that has its output below it."""
    head, *entries = re.split(r"^### ", text, flags=re.M)
    common = {block.file: block.body for block in blocks_of(head) if block.file}
    for entry in entries:
        files, blocks = dict(common), blocks_of(entry)
        for block, following in itertools.zip_longest(blocks, blocks[1:]):
            if block.file:
                files[block.file] = block.body
            if following is not None and following.language == "text":
                yield Example(entry.partition("\n")[0], dict(files), block, following.body)


def write_files(example: Example, folder: Path) -> None:
    for name, body in example.files.items():
        (folder / name).write_text(body)


def prints(expected: str, printed: str) -> bool:
    """Whether the lines of a text block are among those printed, one after the other, however far each is indented.

    `...` is any text in a line.
    """
    lines = [" *" + ".*".join(map(re.escape, line.strip().split("..."))) for line in expected.rstrip("\n").split("\n")]
    return re.search("^" + " *\n".join(lines) + " *$", printed, re.M) is not None


def run(example: Example, folder: Path) -> str:
    """What its commands print, run in this folder as a reader would; standard error is among it."""
    write_files(example, folder)
    printed = ""
    for line in example.block.command.strip().split("\n"):
        words = shlex.split(line, comments=True)
        variables = {}
        while words and re.match(r"\w+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        program = {"mh": list(MH), "python": [sys.executable]}[words[0]]
        done = subprocess.run(
            [*program, *words[1:]], cwd=folder, env={**os.environ, "COLUMNS": "200", **variables}, timeout=LIMIT_S,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        printed += done.stdout
    return printed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="examples whose heading has this text")
    asked = parser.parse_args()
    wrong = 0
    for page in asked.pages:
        for example in examples(page.read_text()):
            if asked.only not in example.heading:
                continue
            with tempfile.TemporaryDirectory() as folder:
                printed = run(example, Path(folder))
            right = prints(example.expected, printed)
            wrong += not right
            print(f"{'as printed' if right else 'DIFFERENT'}: {example.heading}", flush=True)
            if not right:
                print(printed)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
