"""Records that a worker writes to its lifeline, the pipe to its agent: one JSON line each, most of them when it ends.

A pipe rather than the message channel, because it needs no thread, no library and no session: it works for any script.
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

# On this signal a worker writes the stacks of all its threads to standard error, even while one holds the GIL.
STACK_SIGNAL = signal.SIGRTMIN + 7


class Began(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The user's code is about to run: from here on that code handles signals to this process."""


class Raised(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The user's code raised an exception; `step` is the last one that the worker reported."""

    error: str
    message: str
    bases: list[str]
    traceback: str
    exit_code: int
    step: int | None = None
    first_step: int | None = None
    """The step at which it began; included because its reports may arrive later than this record."""
    phase: str = ""
    prints: str = ""
    """The exact text that the worker is about to print about it; empty if that is too long to send as well."""


class Returned(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """What the function of a "call" returned, as JSON text."""

    value: str


class WantsStore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The user's code is about to connect to a TCPStore at MASTER_PORT, where nothing listens before this record."""


class WantsServers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The user's code needs this many parameter servers, and the run has none. The worker waits to be killed."""

    number: int


Record = Began | Raised | Returned | WantsStore | WantsServers


def encode(record: Record) -> bytes:
    return msgspec.json.encode(record) + b"\n"


def decode(line: bytes) -> Record | None:
    """None if the line is not a record: the worker may have been killed while writing it."""
    try:
        record: Record = msgspec.json.decode(line, type=Record)
        return record
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
