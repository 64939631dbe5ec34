"""Figures of a code base, this one or another: `python -m tools.house_figures [--words WORD...] [FOLDER]`.

Files per folder, lines per file and function, constructor parameters, class names used twice, words of a private
vocabulary per 1,000 lines; of this one also the walks of docs/architecture.md, and the seconds of the last whole suite
that ran here. It reads the sources and runs nothing. `--measure` also starts runs, for the seconds of a worker's start
and of a replacement. For a package of another project, give its folder. Of a folder of Markdown pages without Python,
such as `docs`, or of one page: the words alone, page by page.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tools import start_times
from tools.architecture_links import PAGE, ROOT, counts, files_in, walks

OURS = ROOT / "manyhands"
SUITE = ROOT / ".pytest_cache" / "v" / "manyhands" / "suite"
"""Written by tests/conftest.py at the end of a whole suite, which is what `make test` runs."""

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
# Words that a reader who knows PyTorch has to learn here, counted in docstrings, comments and messages.
PRIVATE_WORDS = (
    *("told", "tell", "tells", "telling", "hear", "hears", "heard", "meet", "meets", "meeting", "wish", "wishes"),
    *(
        "whoever",
        "whatever",
        "nobody",
        "somebody",
        "everybody",
        "goes on",
        "go on",
        "goes over",
        "went over",
        "go over",
    ),
    *("takes part", "take part", "comes to", "come to", "of its own", "of their own", "apart", "stands", "stand"),
    *("whose turn", "by itself", "by themselves", "comes by", "at the door", "in office", "the others'"),
)


def sources(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*.py") if "__pycache__" not in path.parts)


def spread(values: Iterable[int]) -> str:
    """Median, 90th percentile, largest."""
    row = sorted(values)
    return f"{row[len(row) // 2]}/{row[int(0.9 * (len(row) - 1))]}/{row[-1]}" if row else "-"


def function_lines(node: Any) -> int:
    """The number of lines, without the docstring."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (node.end_lineno - body[0].lineno + 1) if body else 0


def prose(text: str) -> str:
    """Comments and strings, where words are English."""
    parts = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or token.type == tokenize.STRING:
            parts.append(token.string)
    return "\n".join(parts)


def page_prose(text: str) -> str:
    """A Markdown page without its code blocks, which quote programs and their output."""
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)


def private_words(proses: Iterable[str], words: Sequence[str] = PRIVATE_WORDS) -> Counter[str]:
    pattern = re.compile(rf"\b({'|'.join(re.escape(word) for word in words)})\b", re.IGNORECASE)
    joined = (re.sub(r"\s+", " ", text) for text in proses)  # a word of two may be on two lines
    return Counter(found.group().lower() for text in joined for found in pattern.finditer(text))


def page_figures(root: Path, words: Sequence[str] = PRIVATE_WORDS) -> dict[str, Any]:
    texts = {path: path.read_text() for path in ([root] if root.is_file() else sorted(root.rglob("*.md")))}
    found = {path: private_words([page_prose(text)], words) for path, text in texts.items()}
    total = sum(found.values(), Counter[str]())
    lines = sum(len(text.splitlines()) for text in texts.values())
    return {
        "pages": len(texts),
        "lines": lines,
        "words": sum(len(text.split()) for text in texts.values()),
        "private words per 1,000 lines": round(1000 * total.total() / max(lines, 1), 2),
        "private words": dict(total.most_common(12)),
        "private words per page": {str(path): dict(one) for path, one in found.items() if one},
    }


def figures(root: Path, words: Sequence[str] = PRIVATE_WORDS) -> dict[str, Any]:
    paths = sources(root)
    texts = [path.read_text() for path in paths]
    trees = [ast.parse(text) for text in texts]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, FUNCTION)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    makers = {
        node.name: len(one.args.args) + len(one.args.kwonlyargs) - 1
        for node in classes
        for one in node.body
        if isinstance(one, FUNCTION) and one.name == "__init__"
    }
    folders = Counter(path.parent.relative_to(root).as_posix() for path in paths if path.name != "__init__.py")
    names = Counter(node.name for node in classes)
    lines = sum(len(text.splitlines()) for text in texts)
    found = private_words(map(prose, texts), words)
    return {
        "files": len(paths),
        "lines": lines,
        "folders": len(folders),
        "files per folder (median/p90/largest)": spread(folders.values()),
        "largest folders": dict(folders.most_common(5)),
        "lines per file": spread(len(text.splitlines()) for text in texts),
        "lines per function": spread(function_lines(node) for node in functions),
        "functions above 30 lines": sum(function_lines(node) > 30 for node in functions),
        "constructor parameters above 12": {name: n for name, n in sorted(makers.items()) if n > 12},
        "classes": len(names),
        "class names used twice": {name: n for name, n in sorted(names.items()) if n > 1},
        "modules without a docstring": sum(ast.get_docstring(tree) is None for tree in trees),
        "private words per 1,000 lines": round(1000 * sum(found.values()) / max(lines, 1), 2),
        "private words": dict(found.most_common(12)),
    }


def walk_figures(text: str) -> dict[str, str]:
    """Files and changes of folder of each walk, by what the page names; and the files that a trace of a step enters."""
    found = {name.removeprefix("### Walk: "): str(counts(files_in(links))) for name, links in walks(text).items()}
    for number in re.findall(r"enters (\d+) Python files", text):
        found["a batch, traced"] = f"{number} Python files"
    return found


def suite_figures(record: Path = SUITE) -> dict[str, Any] | str:
    return json.loads(record.read_text()) if record.exists() else "no whole suite has run here: make test"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=OURS)
    parser.add_argument("--words", nargs="*", default=PRIVATE_WORDS, help="count these words instead")
    parser.add_argument("--measure", action="store_true", help="start runs, and time workers and replacements")
    asked = parser.parse_args()
    measure = figures if sources(asked.folder) else page_figures
    found = measure(asked.folder, asked.words)
    if asked.folder == OURS:
        found |= {"walks": walk_figures(PAGE.read_text()), "suite": suite_figures()}
    if asked.measure:
        found["seconds, medians"] = start_times.measure()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
