"""The log of a server's updates, as bytes: the inputs of each update, which updates count, and what is torn.

A segment is a file of frames. Its first says what had been applied when it began, and so which updates of earlier
segments count; every other frame is one update. A frame has its length and a checksum, and says how much of the segment
was on disk when it was written: broken data beyond that was never confirmed, and is cut off; broken data before it is
an error. Pure; files are in `write_ahead_log`. Start reading at `frames`, then `surviving`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from mmap import mmap
from typing import Any, NamedTuple, TypeVar

import msgspec

from manyhands.parameter_server.protocol.messages import RowGradients
from manyhands.parameter_server.protocol.shard import SliceGradient

__all__ = [
    "Begin",
    "Broken",
    "Frame",
    "Terms",
    "UpdateRecord",
    "body",
    "check_torn",
    "frames",
    "is_sound",
    "obsolete",
    "pack",
    "surviving",
    "whole",
]

MAGIC = b"mhul"
_HEADER = struct.Struct("<4sIQQQ")
_LENGTH = struct.Struct("<I")

Data = bytes | mmap
Bytes = bytes | memoryview
T = TypeVar("T")


class Broken(Exception):
    """Updates that were confirmed to workers cannot be read; the message says which."""


class Terms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an update depends on. With other terms it would be a different one."""

    servers: int
    part: str
    """A digest of the model's layout and of this server's chunks of it."""
    batch_size: int
    slices: int


class Begin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first frame of a segment: of earlier ones, updates of steps up to `low` count, and those in `seen`."""

    terms: Terms
    low: int
    seen: list[int]
    unsynced: bool = False
    """It is in the memory of one host, and what it continues may have been lost with another host."""

    def counts(self, step: int) -> bool:
        return step <= self.low or step in self.seen


class UpdateRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One update; after it in its frame is the sum of the gradients, for the parameters that have one."""

    contributions: list[SliceGradient]
    groups: list[dict[str, Any]]
    """The optimizer settings of the update, by parameter group."""
    statistics: list[bytes] = []
    """The batch statistics after each slice; in the first server's log."""
    pieces: list[RowGradients] = []


class Frame(NamedTuple):
    """Where a frame begins and ends, and what its header says."""

    start: int
    end: int
    step: int
    """Of an update; 0: the first frame of a segment."""
    synced: int
    """How many bytes of the segment were on disk when it was written."""
    crc: int


def pack(value: Begin | UpdateRecord, step: int, synced: int, payload: Sequence[Bytes] = ()) -> list[Bytes]:
    """A frame, in pieces to be written in this order."""
    encoded = msgspec.msgpack.encode(value)
    parts: list[Bytes] = [_LENGTH.pack(len(encoded)), encoded, *payload]
    length = sum(len(part) for part in parts)
    crc = zlib.crc32(_numbers(length, step, synced))
    for part in parts:
        crc = zlib.crc32(part, crc)
    return [_HEADER.pack(MAGIC, crc, length, step, synced), *parts]


def _numbers(length: int, step: int, synced: int) -> bytes:
    return struct.pack("<QQQ", length, step, synced)


def frames(data: Data) -> tuple[list[Frame], int]:
    """The frames of a segment, by their headers alone, and where the first invalid one would begin.

    A length is compared with the size of the data before anything is read.
    """
    found, start = list[Frame](), 0
    while (frame := _at(data, start)) is not None:
        found.append(frame)
        start = frame.end
    return found, start


def _at(data: Data, start: int) -> Frame | None:
    if start + _HEADER.size > len(data):
        return None
    magic, crc, length, step, synced = _HEADER.unpack_from(data, start)
    end = start + _HEADER.size + length
    if magic != MAGIC or length < _LENGTH.size or end > len(data) or synced > start:
        return None
    return Frame(start, end, step, synced, crc)


def is_sound(data: Data, frame: Frame) -> bool:
    start = frame.start + _HEADER.size
    crc = zlib.crc32(_numbers(frame.end - start, frame.step, frame.synced))
    return zlib.crc32(memoryview(data)[start : frame.end], crc) == frame.crc


def body(data: Data, frame: Frame, kind: type[T]) -> tuple[T, memoryview]:
    """The content of a sound frame, and the data after it; `Broken` if it was not written by `pack`."""
    view = memoryview(data)[frame.start + _HEADER.size : frame.end]
    (length,) = _LENGTH.unpack_from(view)
    if length > len(view) - _LENGTH.size:
        raise Broken(f"the frame at byte {frame.start} is shorter than it says")
    encoded, rest = view[_LENGTH.size : _LENGTH.size + length], view[_LENGTH.size + length :]
    try:
        return msgspec.msgpack.decode(encoded, type=kind), rest
    except msgspec.MsgspecError as error:
        raise Broken(f"the frame at byte {frame.start} is no {kind.__name__}: {error}") from error


def check_torn(data: Data, start: int) -> None:
    """No valid frame begins at `start`; `Broken` if there was one that may have been confirmed to workers."""
    for frame in _later(data, start):
        if frame.synced > start and is_sound(data, frame):
            raise Broken(f"what was on disk at byte {start} has changed")


def _later(data: Data, start: int) -> Iterator[Frame]:
    at = data.find(MAGIC, start + 1)
    while at >= 0:
        if (frame := _at(data, at)) is not None:
            yield frame
        at = data.find(MAGIC, at + 1)


def whole(data: Data, found: Sequence[Frame]) -> list[Frame]:
    """Of a segment's frames, those before the first torn one; `Broken` in the cases of `check_torn`.

    What is known to have been on disk is not checked here.
    """
    known_on_disk = max((frame.synced for frame in found), default=0)
    kept = list[Frame]()
    for frame in found:
        if frame.end > known_on_disk and not is_sound(data, frame):
            check_torn(data, frame.start)
            break
        kept.append(frame)
    return kept


def surviving(segments: Sequence[tuple[Begin, Sequence[int]]], version: int) -> list[tuple[int, int]]:
    """Which updates of a log count, in order, as (segment, index in it); `segments` have the steps of their updates.

    `version` is that of the state they will be applied to, which has all steps up to it; some of these may be in the
    result. `Broken` if a segment continues updates that are neither in the log nor in that state; a segment whose
    predecessors were never promised to be on disk is left out instead.
    """
    kept: dict[int, tuple[int, int]] = {}
    for number, (begin, steps) in enumerate(segments):
        missing = [step for step in (*range(version + 1, begin.low + 1), *begin.seen) if version < step not in kept]
        if missing and begin.unsynced:
            continue
        if missing:
            raise Broken(f"step {missing[0]} is missing, and the state that it continues is that after step {version}")
        kept = {step: index for step, index in kept.items() if begin.counts(step)}
        kept |= {step: (number, index) for index, step in enumerate(steps)}
    return list(kept.values())


def obsolete(begins: Sequence[Begin | None], saved: int) -> int:
    """How many segments, from the first on, are no longer needed once the state after step `saved` is on disk.

    The last of `begins` is what the next segment would begin with. None: it could not be read.
    """
    needless = [number for number, one in enumerate(begins) if one is not None and one.low <= saved and not one.seen]
    return max(needless, default=0)
