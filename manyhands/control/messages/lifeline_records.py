"""What a worker says through its lifeline, the pipe to its agent: one JSON line each, most of them at its end.

A pipe and not the message channel, because it needs no thread, no library and no session: it works for any script.
"""

from __future__ import annotations

import signal

import msgspec

__all__ = [
    "MAX_RECORD_BYTES",
    "STACK_SIGNAL",
    "Began",
    "Raised",
    "Record",
    "Returned",
    "WantsServers",
    "WantsStore",
    "decode",
    "encode",
]

MAX_RECORD_BYTES = 2**20

# What a worker answers with the stacks of all its threads on standard error, also while one holds the interpreter.
STACK_SIGNAL = signal.SIGRTMIN + 7


class Began(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The user's code is about to run: from here on a signal to this process is the code's business."""


class Raised(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The user's code raised; `step` is where the worker last said it was."""

    error: str
    message: str
    bases: list[str]
    traceback: str
    exit_code: int
    step: int | None = None
    first_step: int | None = None
    """Where it began; known here because what it reported may arrive later than this."""
    phase: str = ""
    prints: str = ""
    """What the worker is about to print of it, to the letter; empty where that is too long to say twice."""


class Returned(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """What the function of a "call" returned, as JSON text."""

    value: str


class WantsStore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The user's code is about to connect to a TCPStore at MASTER_PORT; nothing listens there before."""


class WantsServers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The user's code asks for so many parameter servers, and the run has none. The worker waits to be killed."""

    number: int


Record = Began | Raised | Returned | WantsStore | WantsServers


def encode(record: Record) -> bytes:
    return msgspec.json.encode(record) + b"\n"


def decode(line: bytes) -> Record | None:
    """None for anything that is not a record: the worker may have been killed while it wrote."""
    try:
        record: Record = msgspec.json.decode(line, type=Record)
        return record
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
