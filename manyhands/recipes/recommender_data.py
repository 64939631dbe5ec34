"""Clicks for the recommender: synthetic, with a known structure, or read from CSV and Parquet files.

In both cases a row consists of category ids, numbers, and whether there was a click. An id is a hash of the field and
its value, so there is no vocabulary to build, and no limit to its size.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from manyhands.errors import DataError, EnvironmentProblem, SpecError

__all__ = ["Clicks", "DataSpec", "Features", "RecommenderSettings", "auc", "load", "make", "read_settings"]

Features = tuple[Tensor, Tensor]
"""Category ids and numbers, by row."""
SEPARATE = 10  # every tenth row of synthetic data is held out


class DataSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[data] of the settings: which columns of which files."""

    files: str
    """A path or glob pattern of .csv files with a header line, or of .parquet files."""
    label: str
    """The column that says whether there was a click: 0 or 1."""
    categories: list[str]
    numbers: list[str] = []
    held_out: float = 0.1

    def __post_init__(self) -> None:
        if not self.categories:
            raise SpecError("[data] categories is empty.", fix=['categories = ["user", "item"]'])
        if not 0 < self.held_out < 1:
            raise SpecError(
                f"[data] held_out is {self.held_out:g}, but must be between 0 and 1.", fix=["held_out = 0.1"]
            )


class RecommenderSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the recipe, from a TOML file; every key except [data] may be left out."""

    data: DataSpec | None = None
    crosses: list[tuple[str, str]] = []
    """Pairs of categories for which the wide part has a weight, besides one for each category."""
    dim: int = 16
    scale: float = 0.05
    hidden: tuple[int, ...] = (64, 32)
    wide_lr: float = 0.1
    wide_l1: float = 3e-3
    deep_lr: float = 0.1
    lr: float = 3e-3
    admit_after: int = 1
    max_bytes: int | None = None
    """Limit of each of the two tables."""


class Clicks(NamedTuple):
    training: tuple[Features, Tensor]
    held_out: tuple[Features, Tensor]
    fields: list[str]
    """The categories."""
    ceiling: float | None
    """The AUC of the true probabilities on the held-out rows; None if they are not known."""


def read_settings(path: Path | None) -> RecommenderSettings:
    if path is None:
        return RecommenderSettings()
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), RecommenderSettings)
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}.", where="--settings") from error
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise SpecError(f"{path}: {error}", where="--settings") from error


def make(rows: int, *, seed: int = 0) -> Clicks:
    """Synthetic clicks of users with tastes on items of genres, on devices, at hours. The logit is the sum of terms for
    taste and genre, for the user, for the item, and for device and hour; the rest is random."""
    draw = np.random.default_rng(seed)
    users, items, devices, hours = max(20, rows // 200), max(10, rows // 400), 5, 24
    taste, genre = draw.integers(0, 6, users), draw.integers(0, 8, items)
    columns = {
        "user": _often_and_seldom(draw, users, rows),
        "item": _often_and_seldom(draw, items, rows),
        "device": draw.integers(0, devices, rows),
        "hour": draw.integers(0, hours, rows),
    }
    user, item = columns["user"], columns["item"]
    logits = (
        -1.0
        + draw.normal(0, 1.2, (6, 8))[taste[user], genre[item]]
        + draw.normal(0, 0.5, users)[user]
        + draw.normal(0, 0.5, items)[item]
        + draw.normal(0, 0.7, (devices, hours))[columns["device"], columns["hour"]]
    )
    clicked = torch.from_numpy(draw.random(rows) < 1 / (1 + np.exp(-logits))).float()
    ids = torch.stack([_numbered(field, torch.from_numpy(column)) for field, column in columns.items()], 1)
    kept, held_out = torch.arange(rows) % SEPARATE != 0, torch.arange(rows) % SEPARATE == 0
    none = torch.empty(rows, 0)
    return Clicks(
        ((ids[kept], none[kept]), clicked[kept]),
        ((ids[held_out], none[held_out]), clicked[held_out]),
        list(columns),
        auc(torch.from_numpy(logits)[held_out], clicked[held_out]),
    )


def _often_and_seldom(draw: np.random.Generator, kinds: int, rows: int) -> Any:
    """A skewed distribution: a few values are frequent, many are rare."""
    return np.minimum(kinds * draw.random(rows) ** 1.5, kinds - 1).astype(np.int64)


def load(spec: DataSpec) -> Clicks:
    """Load the files' columns into memory; held-out rows are drawn at random with a fixed seed."""
    columns = _read(spec)
    missing = [name for name in [spec.label, *spec.categories, *spec.numbers] if name not in columns]
    if missing:
        raise DataError(
            f"{spec.files} has no column {missing[0]!r}; it has {', '.join(columns)}.", where="[data] of the settings"
        )
    clicked = torch.tensor(_floats(columns, spec.label, empty=math.nan))
    if not bool(((clicked == 0) | (clicked == 1)).all()):
        raise DataError(f"The column {spec.label!r} has other values than 0 and 1, or none.", where="[data] label")
    ids = torch.stack([torch.tensor(_hashed(field, columns[field])) for field in spec.categories], 1)
    numbers = torch.tensor([_floats(columns, name) for name in spec.numbers]).T.reshape(len(ids), -1)
    if not bool(numbers.isfinite().all()):
        name = spec.numbers[int((~numbers.isfinite()).any(0).nonzero()[0])]
        raise DataError(f"The column {name!r} has a value that is not a finite number.", where="[data] numbers")
    held_out = torch.from_numpy(np.random.default_rng(0).random(len(ids)) < spec.held_out)
    kept = ~held_out
    if not 0 < int(kept.sum()) < len(ids):
        raise DataError(f"{spec.files} has {len(ids)} rows: too few to hold some out.", where="[data] held_out")
    mean, deviation = numbers[kept].mean(0), numbers[kept].std(0, correction=0).clamp(min=1e-6)
    numbers = (numbers - mean) / deviation
    return Clicks(
        ((ids[kept], numbers[kept]), clicked[kept]),
        ((ids[held_out], numbers[held_out]), clicked[held_out]),
        spec.categories,
        None,
    )


def _read(spec: DataSpec) -> dict[str, Sequence[Any]]:
    paths = sorted(Path(name) for name in glob.glob(spec.files))
    if not paths:
        raise DataError(f"No file matches {spec.files}.", where="[data] files")
    read = {".csv": _read_csv, ".parquet": _read_parquet}
    found: dict[str, list[Any]] = {}
    for path in paths:
        if path.suffix not in read:
            raise DataError(f"{path} is neither .csv nor .parquet.", where="[data] files")
        columns = read[path.suffix](path)
        if found and columns.keys() != found.keys():
            odd = sorted(columns.keys() ^ found.keys())[0]
            raise DataError(f"{path} and {paths[0]} do not have the same columns: see {odd!r}.", where="[data] files")
        for name, values in columns.items():
            found.setdefault(name, []).extend(values)
    return dict(found)


def _read_csv(path: Path) -> Mapping[str, Iterable[Any]]:
    with path.open(newline="", encoding="utf-8-sig") as file:  # some programs write a byte order mark
        reader = csv.reader(file)
        names, rows = next(reader, []), list[list[str]]()
        for row in filter(None, reader):  # not empty lines
            if len(row) != len(names):
                what = f"Line {reader.line_num} of {path} has {len(row)} values, but the first line {len(names)} names."
                raise DataError(what, where="[data] files")
            rows.append(row)
    return dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(names, ())


def _read_parquet(path: Path) -> Mapping[str, Iterable[Any]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise EnvironmentProblem(f"{path} needs pyarrow to be read.", fix=["pip install pyarrow", "a .csv"]) from error
    columns: dict[str, list[Any]] = parquet.read_table(path).to_pydict()
    return columns


def _floats(columns: Mapping[str, Sequence[Any]], name: str, empty: float = 0.0) -> list[float]:
    try:
        return [empty if value in ("", None) else float(value) for value in columns[name]]
    except (TypeError, ValueError) as error:
        raise DataError(f"The column {name!r} is not numeric: {error}.", where="[data] of the settings") from error


def _hashed(field: str, values: Sequence[Any]) -> list[int]:
    known: dict[Any, int] = {}
    return [known[value] if value in known else known.setdefault(value, _hash(field, value)) for value in values]


def _hash(field: str, value: Any) -> int:
    digest = hashlib.blake2b(f"{field}\0{value}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _numbered(field: str, values: Tensor) -> Tensor:
    """Ids for integer values; ids of different fields do not overlap."""
    return values + (_hash(field, "") & ~0xFFFFFFFF)


def auc(scores: Tensor, clicked: Tensor) -> float:
    """How often a row with a click scores above one without; ties count half."""
    _, inverse, counts = np.unique(scores.numpy(), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positive = clicked.numpy() == 1
    ones, zeros = int(positive.sum()), int((~positive).sum())
    if not ones or not zeros:
        raise DataError("All held-out rows, or none of them, have a click; the AUC needs both kinds.")
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))
