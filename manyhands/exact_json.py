"""JSON that every reader accepts and that loses no number: nan and infinities are the strings "nan", "inf" and "-inf".

JSON has no such numbers. Python's encoder writes bare words that strict readers refuse; msgspec's writes null, which
decodes as None. All our JSON with floats is encoded here: events, records of calls, and the output of --json.
(A checkpoint's `state.json` is read only by manyhands, and uses Python's encoder.)
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import msgspec

__all__ = ["decode", "encode", "numbers_from_text", "numbers_to_text"]

T = TypeVar("T")

_FROM_TEXT = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(value: Any, *, indent: int | None = None) -> bytes:
    """Encode Structs, dicts, lists, text and numbers as strict JSON."""
    raw = msgspec.json.encode(numbers_to_text(value))
    return raw if indent is None else msgspec.json.format(raw, indent=indent)


def decode(raw: bytes, type: type[T]) -> T:
    """Decode what `encode` wrote; `type` says which fields are numbers. "nan" in a text field stays text."""
    try:
        return msgspec.json.decode(raw, type=type)
    except msgspec.ValidationError:
        return msgspec.json.decode(raw, type=type, strict=False)


def numbers_to_text(value: Any) -> Any:
    """`value`, or a copy of it in plain containers if it contains a non-finite number."""
    return _to_text(msgspec.to_builtins(value)) if _has_non_finite(value) else value


def _has_non_finite(value: Any) -> bool:
    kind = type(value)
    if kind is float:
        return not math.isfinite(value)
    if kind is str or kind is int or value is None:
        return False
    if isinstance(value, dict):
        return any(map(_has_non_finite, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_has_non_finite, value))
    if isinstance(value, msgspec.Struct):
        return any(map(_has_non_finite, msgspec.structs.astuple(value)))
    return isinstance(value, float) and not math.isfinite(value)


def _to_text(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {key: _to_text(one) for key, one in value.items()}
    return [_to_text(one) for one in value] if isinstance(value, list | tuple) else value


def numbers_from_text(value: Any) -> Any:
    """The inverse of `numbers_to_text` for plain containers in which no text is "nan", "inf" or "-inf"."""
    if isinstance(value, str):
        return _FROM_TEXT.get(value, value)
    if isinstance(value, dict):
        return {key: numbers_from_text(one) for key, one in value.items()}
    return [numbers_from_text(one) for one in value] if isinstance(value, list) else value
