"""Refuses paths and arguments with bytes that the locale cannot decode.

Python represents such bytes as lone surrogates, which can be encoded neither in messages between processes nor in JSON
files. So they are refused where they are read, before anything is written or started.
"""

from __future__ import annotations

from manyhands.errors import UsageError

__all__ = ["check_name", "is_text", "readable"]


def is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def readable(name: str) -> str:
    """The name with `\\xff` in place of every byte that is not UTF-8, for a terminal or a JSON document."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def check_name(name: str, what: str) -> None:
    """Refuse a name that cannot be encoded; `what` says what it names, such as "The run directory"."""
    if is_text(name):
        return
    shown = readable(name)
    if "\\x" in shown:
        raise UsageError(f"{what} {shown} is not UTF-8.", fix=["a name in UTF-8; `mv` renames files"])
    raise UsageError(
        f"{what} {shown} has non-ASCII characters, but this process's locale reads only ASCII.",
        fix=["LC_ALL=C.UTF-8 in front of the command"],
    )
