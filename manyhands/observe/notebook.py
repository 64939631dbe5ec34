"""Notebooks: where output appears, how a run is named, and why a function defined in a cell cannot be launched.

Uses IPython only if it is already imported; never imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import PurePath
from typing import TextIO

__all__ = ["how_to_write_a_file", "in_notebook", "notebook_name", "shows_in_cell"]


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process; an IPython prompt in a terminal does not count."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return getattr(shell, "kernel", None) is not None


def shows_in_cell(stream: TextIO) -> bool:
    """Whether writes to the stream appear below the cell. Writes to its file, `fileno()`, do not: they go to the
    terminal, or the log, of the server that started the kernel.
    """
    return type(stream).__module__.partition(".")[0] == "ipykernel"


def notebook_name(environ: Mapping[str, str]) -> str:
    """The name for a run: the notebook's file, if Jupyter or VS Code provides it."""
    file = getattr(sys.modules.get("__main__"), "__vsc_ipynb_file__", "") or environ.get("JPY_SESSION_NAME", "")
    name = PurePath(str(file)).name
    return name.removesuffix(".ipynb") if name.endswith(".ipynb") else "notebook"


def how_to_write_a_file(function: str) -> list[str]:
    """What to type so that new worker processes can import a function that a cell has defined."""
    return [
        f'"%%writefile my_training.py" as the first line of the cell that defines {function}, with its imports below',
        f"then, in the next cell: from my_training import {function}",
    ]
