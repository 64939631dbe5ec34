"""What a command line most likely meant, where flags stand on the wrong side of the script. Pure: words in, words out.

`mh run` takes what stands before the script, and the script what stands behind it. Both get mixed up, so unknown flags
before it are suggested behind it, and flags of ours behind it, which the script does not seem to know, get a note.
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
    """Where the script stands: the first word that is a Python file's name."""
    return next((at for at, word in enumerate(words) if word.endswith(".py") and not word.startswith("-")), None)


def behind_the_script(words: Sequence[str], known: Collection[str]) -> list[str] | None:
    """The same command with flags that are not known here behind the script; None where there is no script."""
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
    """A line where flags of ours go to the script, whose text does not mention them; it may want them all the same."""
    before = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    stray = [at for at, word in enumerate(before) if name_of(word) in flags and not _is_mentioned(word, source)]
    if not stray:
        return []
    words = [word for at in stray for word in _with_value(before, at)]
    rest = [word for word in arguments if word not in words]
    behind, instead = shlex.join(words), shlex.join(["mh", "run", *words, *start, *rest])
    return [f"note: {behind} stands behind {start[-1]}, so the script gets it, not mh run. If mh run should: {instead}"]


def _with_value(words: Sequence[str], at: int) -> list[str]:
    has_value = "=" not in words[at] and at + 1 < len(words) and not words[at + 1].startswith("-")
    return list(words[at : at + 1 + has_value])


def _is_mentioned(flag: str, source: str) -> bool:
    """Whether a script may read it: `-n` in quotes, or a long flag's name as a word, however it is spelled."""
    name = name_of(flag)
    if not name.startswith("--"):
        return re.search(rf"""["']{re.escape(name)}["']""", source) is not None
    words = name[2:].split("-")
    return re.search(rf"(?<![\w-]){'[-_]'.join(map(re.escape, words))}(?![\w-])", source) is not None or (
        re.search(rf"""["']--{"[-_]".join(map(re.escape, words))}["']""", source) is not None
    )
