"""How an error came about, told by the lines of the user's own code.

What lies between `trainer.fit` and the user's loss or dataset is of no use to anybody, unless the bug is ours: then
every line is shown. Nor do lines inside torch help where a line of the user's own called it: that one stands above.
"""

from __future__ import annotations

import itertools
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from manyhands.errors import ManyhandsError
from manyhands.launcher.worker_process.error_hints import hint_for

__all__ = ["OURS", "came_by_here", "told"]

OURS = str(Path(__file__).parents[2]) + os.sep
STARTERS = (runpy.__file__, "<frozen runpy>")
IMPORTERS = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")


def told(error: BaseException, *, whole: bool = False) -> str:
    """As Python prints it, what it came from included, and what to type instead where that is known.

    `whole`: with every frame, ours and torch's as well.
    """
    shown = traceback.TracebackException.from_exception(error)
    for one in _chain(shown) if not whole else ():
        from_theirs = list(itertools.dropwhile(_is_ours, one.stack))  # how it was started is of no use either
        if from_theirs and (_is_about_their_code(one.exc_type) or not _is_ours(one.stack[-1])):
            from_theirs = [frame for frame in _without_torch(from_theirs) if not _is_ours(frame)]
        one.stack = traceback.StackSummary.from_list(from_theirs or list(one.stack))
    hint = hint_for(error)
    return "".join(shown.format()) + (f"  try: {hint}\n" if hint else "")


def came_by_here(error: BaseException) -> bool:
    """Whether any of our lines had a part in it."""
    whole = traceback.TracebackException.from_exception(error)
    return any(_is_ours(frame) for one in _chain(whole) for frame in one.stack)


def _chain(last: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    one: traceback.TracebackException | None = last
    while one is not None:
        yield one
        one = one.__cause__ or one.__context__


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(OURS) or frame.filename in STARTERS


def _without_torch(frames: list[traceback.FrameSummary]) -> Iterator[traceback.FrameSummary]:
    """Without what torch did for a line of the user's; what it did for a line of ours may be all there is to see."""
    called_by_us = False
    for frame in frames:
        if not _is_torch(frame):
            called_by_us = _is_ours(frame)
            yield frame
        elif called_by_us:
            yield frame


def _is_torch(frame: traceback.FrameSummary) -> bool:
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    inside = torch is not None and frame.filename.startswith(os.path.dirname(torch) + os.sep)
    return inside or frame.filename in IMPORTERS


def _is_about_their_code(kind: type[BaseException] | None) -> bool:
    """Errors that say what to change; the root is for bugs of ours."""
    return kind is not None and issubclass(kind, ManyhandsError) and kind.exit_code != ManyhandsError.exit_code
