"""Names from outside that are no text: bytes of a path or an argument that the locale cannot decode.

Python carries such bytes as lone surrogates, which neither a message between processes nor a JSON file can hold. So
they are refused where they come in, before anything is written or started.
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
    """The same with `\\xff` in place of every byte that is not UTF-8, for a screen or a JSON document."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def check_name(name: str, what: str) -> None:
    """Refuse a name that cannot be written down; `what` says whose it is, as in "The run directory"."""
    if is_text(name):
        return
    shown = readable(name)
    if "\\x" in shown:
        raise UsageError(f"{what} {shown} is not UTF-8.", fix=["a name in UTF-8; `mv` renames files"])
    raise UsageError(
        f"{what} {shown} is beyond ASCII, which is all that this process's locale can read.",
        fix=["LC_ALL=C.UTF-8 in front of the command"],
    )
