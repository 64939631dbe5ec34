"""Reads a TOML config file as values with their line numbers, and writes one.

Reading is bounded: a huge file, a huge string or absurd nesting is refused in milliseconds. Which keys exist
and what type they have is decided in `spec.load`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from manyhands.errors import SpecError
from manyhands.spec.run import RunSpec

__all__ = ["MAX_BYTES", "ConfigFile", "Setting", "dump_toml", "read_config", "with_settings", "write_settings"]

MAX_BYTES = 2**20
# Time and memory of tomllib grow with the square of the number of parts of one dotted key.
MAX_DOTS_PER_LINE = 64

_HEADER = re.compile(r"^\s*\[\s*[\"']?([\w-]+)[\"']?\s*\]\s*(?:#.*)?$")
_VALUE = re.compile(r"""^([^=]*=\s*)("[^"\\]*"|'[^']*'|[^\s"'#\[{]+)(\s*(?:#.*)?)$""")
_KEY = re.compile(r"^\s*[\"']?([\w-]+)[\"']?\s*(?:\.\s*[\"']?([\w-]+)[\"']?\s*)?=")


class Setting(NamedTuple):
    section: str | None
    """None for a value above the first [section]."""
    name: str
    value: Any
    where: str
    """ "run.toml line 9"; "run.toml" for values whose line is not known."""


class ConfigFile(NamedTuple):
    path: str
    settings: list[Setting]


def read_config(path: str) -> ConfigFile:
    text = _read_text(path)
    for number, line in enumerate(text.splitlines(), start=1):
        if line.count(".") > MAX_DOTS_PER_LINE:
            raise SpecError("A line has more dots than any key or value needs.", where=f"{path} line {number}")
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(
            f"Not valid TOML: {_without_location(error)}.", where=_location(path, error), fix=_fixes(error)
        ) from None
    except RecursionError:
        raise SpecError("Nested too deeply to be a config.", where=path) from None
    lines = _lines_of(text)
    return ConfigFile(path, list(_flatten(path, document, lines)))


def _read_text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SpecError(f"Cannot read the config file {path}: {error.strerror}.", fix=["--config FILE"]) from error
    if len(data) > MAX_BYTES:
        raise SpecError(f"The config file is larger than {MAX_BYTES // 2**20} MiB.", where=path)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise SpecError(f"The config file is not UTF-8 (byte {error.start}).", where=path) from None


def _without_location(error: tomllib.TOMLDecodeError) -> str:
    return re.sub(r" \(at .*\)$", "", str(error))


def _location(path: str, error: tomllib.TOMLDecodeError) -> str:
    found = re.search(r"at line (\d+)", str(error))
    return f"{path} line {found[1]}" if found else path


def _fixes(error: tomllib.TOMLDecodeError) -> list[str]:
    return ['text in quotes: precision = "bf16"'] if "Invalid value" in str(error) else []


def _lines_of(text: str) -> dict[tuple[str | None, str], int]:
    """Line number of each key, found by matching lines: tomllib does not give it."""
    section: str | None = None
    lines: dict[tuple[str | None, str], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            section = header[1]
            lines.setdefault((None, section), number)
        elif key := _KEY.match(line):
            target = (section, key[1]) if key[2] is None else (key[1], key[2])
            lines.setdefault(target, number)
            lines.setdefault((section, key[1]), number)
    return lines


def _flatten(path: str, document: dict[str, Any], lines: dict[tuple[str | None, str], int]) -> list[Setting]:
    sections = [None, *RunSpec.__struct_fields__]

    def setting(section: str | None, name: str, value: Any) -> Setting:
        target = (section, name) if section in sections else (None, str(section))  # unknown section
        line = lines.get(target) or lines.get((None, section or name))
        return Setting(section, name, value, f"{path} line {line}" if line else path)

    settings = []
    for name, value in document.items():
        if isinstance(value, dict) and value:
            settings += [setting(name, inner, inner_value) for inner, inner_value in value.items()]
        else:
            settings.append(setting(None, name, value))
    return settings


def dump_toml(spec: RunSpec) -> str:
    """A config file that resolves to `spec`. Values that are not set appear as comments."""
    blocks = []
    for section in msgspec.structs.fields(spec):
        values = getattr(spec, section.name)
        lines = [f"[{section.name}]"]
        for field in msgspec.structs.fields(values):
            lines.append(_dump_line(field.name, getattr(values, field.name), field.default))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def _dump_line(name: str, value: Any, default: Any) -> str:
    if value is None:
        return f"# {name} is not set" if default is None else f'{name} = "none"'
    if isinstance(value, float):
        return f"{name} = {value!r}"
    # A JSON string, number or boolean is also TOML; but TOML requires DEL to be escaped.
    return f"{name} = {json.dumps(value, ensure_ascii=True)}".replace("\x7f", "\\u007f")


def write_settings(path: str, changes: Mapping[str, Mapping[str, Any]]) -> None:
    """Write settings, by section, into a config file atomically; everything else in it is kept, comments included."""
    target = os.path.realpath(path)
    exists = os.path.exists(target)
    text = with_settings(_read_text(path) if exists else "", changes, path)
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=".manyhands-", dir=os.path.dirname(target))
    except OSError as error:
        raise SpecError(f"Cannot write the config file {path}: {error.strerror}.", fix=["--write FILE"]) from error
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.chmod(temporary, os.stat(target).st_mode if exists else 0o644)
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise SpecError(f"Cannot write the config file {path}: {error.strerror}.", fix=["--write FILE"]) from error
        raise


def with_settings(text: str, changes: Mapping[str, Mapping[str, Any]], path: str = "the config file") -> str:
    """The text of a config file with these settings. Raises `SpecError` where they have to be added by hand."""
    lines = text.splitlines()
    wanted = _parsed(text)
    for section, values in changes.items():
        for name, value in values.items():
            lines = _with_line(lines, section, name, _dump_line(name, value, None))
            if isinstance(within := wanted.setdefault(section, {}), dict):
                within[name] = value
    changed = "\n".join(lines) + "\n"
    # Multi-line values and the like are not understood here. Parsing the result shows whether that broke anything.
    if _parsed(changed) != wanted:
        what = "The settings cannot be added to this file without changing the rest of it."
        pairs = [(section, name, value) for section, found in changes.items() for name, value in found.items()]
        by_hand = [f"[{section}] {_dump_line(name, value, None)}" for section, name, value in pairs]
        raise SpecError(what, where=path, fix=by_hand)
    return changed


def _parsed(text: str) -> dict[str, Any]:
    with contextlib.suppress(tomllib.TOMLDecodeError, RecursionError):
        return tomllib.loads(text)
    return {}


def _with_line(lines: list[str], section: str, name: str, line: str) -> list[str]:
    """The lines with `line` in its section, in place of an existing line for `name`."""
    inside: str | None = None
    last: int | None = None
    for number, old in enumerate(lines):
        if header := _HEADER.match(old):
            inside = header[1]
        elif old.lstrip().startswith("["):
            inside = "?"
        key = _KEY.match(old)
        if key and (inside, key[1], key[2]) in ((section, name, None), (None, section, name)):
            simple = _VALUE.match(old)
            kept = f"{simple[1]}{line.partition(' = ')[2]}{simple[3]}" if simple else line
            return [*lines[:number], kept, *lines[number + 1 :]]
        if inside == section and old.strip():
            last = number
    if last is None:
        return [*lines, *([""] if lines and lines[-1].strip() else []), f"[{section}]", line]
    return [*lines[: last + 1], line, *lines[last + 1 :]]
