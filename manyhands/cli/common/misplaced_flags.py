"""Suggests the intended command line where flags are on the wrong side of the script. Pure: words in, words out.

`mh run` takes the flags before the script, and the script takes those after it. Users mix them up: for unknown flags
before the script, the suggestion moves them after it; `mh run` flags after a script that does not mention them get a
note.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence

__all__ = ["behind_the_script", "name_of", "notes_on_arguments", "script_in"]


def name_of(word: str) -> str:
    """ "--run_dir=a" is "--run-dir"."""
    return word.partition("=")[0].replace("_", "-") if word.startswith("-") else ""


def script_in(words: Sequence[str]) -> int | None:
    """Index of the script: the first word that is the name of a Python file."""
    return next((at for at, word in enumerate(words) if word.endswith(".py") and not word.startswith("-")), None)


def behind_the_script(words: Sequence[str], known: Collection[str]) -> list[str] | None:
    """The same command with unknown flags moved after the script; None if there is no script."""
    script = script_in(words)
    if script is None:
        return None
    ours: list[str] = []
    theirs: list[str] = []
    into = ours
    for word in words[:script]:
        if name := name_of(word):
            into = ours if name in known else theirs
        into.append(word)
    return [*ours, words[script], *words[script + 1 :], *theirs]


def notes_on_arguments(
    start: Sequence[str], arguments: Sequence[str], source: str, flags: Collection[str]
) -> list[str]:
    """A note if `mh run` flags go to a script whose text does not mention them; it may still accept them."""
    before = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    stray = [at for at, word in enumerate(before) if name_of(word) in flags and not _is_mentioned(word, source)]
    if not stray:
        return []
    words = [word for at in stray for word in _with_value(before, at)]
    rest = [word for word in arguments if word not in words]
    behind, instead = shlex.join(words), shlex.join(["mh", "run", *words, *start, *rest])
    return [f"note: {behind} is after {start[-1]}, so the script gets it, not mh run. To give it to mh run: {instead}"]


def _with_value(words: Sequence[str], at: int) -> list[str]:
    has_value = "=" not in words[at] and at + 1 < len(words) and not words[at + 1].startswith("-")
    return list(words[at : at + 1 + has_value])


def _is_mentioned(flag: str, source: str) -> bool:
    """Whether a script may read the flag: `-n` in quotes, or a long flag's name as a word, with `-` or `_`."""
    name = name_of(flag)
    if not name.startswith("--"):
        return re.search(rf"""["']{re.escape(name)}["']""", source) is not None
    words = name[2:].split("-")
    return re.search(rf"(?<![\w-]){'[-_]'.join(map(re.escape, words))}(?![\w-])", source) is not None or (
        re.search(rf"""["']--{"[-_]".join(map(re.escape, words))}["']""", source) is not None
    )
