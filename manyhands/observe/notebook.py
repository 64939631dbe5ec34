"""What is different in a notebook: where text shows, what a run is named after, and why a cell's function is no use.

IPython is looked at where it has been imported already, and never imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import PurePath
from typing import TextIO

__all__ = ["how_to_write_a_file", "in_notebook", "notebook_name", "shows_in_cell"]


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process; a prompt of IPython in a terminal does not count."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return getattr(shell, "kernel", None) is not None


def shows_in_cell(stream: TextIO) -> bool:
    """Whether what is written to the stream appears below the cell. What goes to its file, `fileno()`, does not: that
    is the terminal, or the log, of the server that started the kernel.
    """
    return type(stream).__module__.partition(".")[0] == "ipykernel"


def notebook_name(environ: Mapping[str, str]) -> str:
    """What to name a run after: the notebook's file, as far as Jupyter or VS Code says which that is."""
    told = getattr(sys.modules.get("__main__"), "__vsc_ipynb_file__", "") or environ.get("JPY_SESSION_NAME", "")
    name = PurePath(str(told)).name
    return name.removesuffix(".ipynb") if name.endswith(".ipynb") else "notebook"


def how_to_write_a_file(function: str) -> list[str]:
    """What to type so that fresh worker processes find a function that a cell has defined."""
    return [
        f'"%%writefile my_training.py" as the first line of the cell that defines {function}, with its imports below',
        f"then, in the next cell: from my_training import {function}",
    ]
