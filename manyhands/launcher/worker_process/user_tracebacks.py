"""Tracebacks that show the lines of the user's code.

Frames between `trainer.fit` and the user's loss or dataset help no user, unless the bug is ours: then every line is
shown. Frames inside torch do not help either if the user's code called it: the line with that call is shown above.
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

__all__ = ["OURS", "format_error", "involves_manyhands"]

OURS = str(Path(__file__).parents[2]) + os.sep
STARTERS = (runpy.__file__, "<frozen runpy>")
IMPORTERS = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")


def format_error(error: BaseException, *, whole: bool = False) -> str:
    """As Python prints it, with the chain of causes, and what to type instead if that is known.

    `whole`: with every frame, also those of manyhands and torch.
    """
    shown = traceback.TracebackException.from_exception(error)
    for one in _chain(shown) if not whole else ():
        from_theirs = list(itertools.dropwhile(_is_ours, one.stack))  # how the script was started does not help either
        if from_theirs and (_is_about_their_code(one.exc_type) or not _is_ours(one.stack[-1])):
            from_theirs = [frame for frame in _without_torch(from_theirs) if not _is_ours(frame)]
        one.stack = traceback.StackSummary.from_list(from_theirs or list(one.stack))
    hint = hint_for(error)
    return "".join(shown.format()) + (f"  try: {hint}\n" if hint else "")


def involves_manyhands(error: BaseException) -> bool:
    """Whether a frame of manyhands is in the traceback."""
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
    """Without torch's frames below a line of the user's; below a line of ours they may be all there is to see."""
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
    """Errors that say what to change; the root class is for bugs of ours."""
    return kind is not None and issubclass(kind, ManyhandsError) and kind.exit_code != ManyhandsError.exit_code
