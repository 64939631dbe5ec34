"""`--dir`: which queue a command is about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from manyhands.spec.load import queue_directory

__all__ = ["queue_option"]

Command = TypeVar("Command", bound=Callable[..., Any])


def queue_option(command: Command) -> Command:
    """The option; the command gets `directory`."""
    return click.option(
        "--dir",
        "directory",
        type=click.Path(path_type=Path, file_okay=False),
        default=queue_directory,
        help="The queue's directory. Default: MANYHANDS_QUEUE, else ~/.local/state/manyhands/queue.",
    )(command)
