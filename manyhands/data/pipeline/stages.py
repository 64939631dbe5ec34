"""A chain as a frozen value: a tree of small structs, each a source or a stage on top of others.

Nothing is read here and nothing runs. `describe` is a chain's text: two chains with different texts may differ in their
order, so a run compares the text of the chain that it resumes. `dataset` makes chains, `binding` gives them a meaning.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

__all__ = [
    "BatchStage",
    "CacheStage",
    "ColumnsStage",
    "ConcatenateStage",
    "EnumerateStage",
    "FilesStage",
    "FilterStage",
    "GeneratorStage",
    "InterleaveStage",
    "MapStage",
    "NamesStage",
    "PaddedBatchStage",
    "PrefetchStage",
    "RangeStage",
    "RepeatStage",
    "ShardStage",
    "ShuffleStage",
    "SkipStage",
    "Stage",
    "TakeStage",
    "UnbatchStage",
    "ZipStage",
    "children",
    "describe",
    "has_batches",
    "walk",
]


class Stage(msgspec.Struct, frozen=True, eq=False):
    """One link of a chain. Fields that are stages are what it reads from."""


class ColumnsStage(Stage, frozen=True, eq=False):
    """Row p of a structure of arrays."""

    table: Any


class RangeStage(Stage, frozen=True, eq=False):
    start: int
    stop: int
    step: int


class NamesStage(Stage, frozen=True, eq=False):
    """Plain values in a list, such as paths."""

    values: tuple[str, ...]


class FilesStage(Stage, frozen=True, eq=False):
    """Rows of files of one kind, in the order of the paths. With `folder`, pictures labelled by their subfolder."""

    paths: tuple[str, ...]
    kind: str
    columns: tuple[str, ...] | None = None
    folder: str | None = None
    classes: tuple[str, ...] = ()
    """The subfolders in order of their labels."""


class GeneratorStage(Stage, frozen=True, eq=False):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    takes_epoch: bool


class MapStage(Stage, frozen=True, eq=False):
    child: Stage
    function: Callable[..., Any]
    processes: int
    """Loader processes; -1: as many as there are cores."""


class FilterStage(Stage, frozen=True, eq=False):
    child: Stage
    predicate: Callable[..., Any]


class ShuffleStage(Stage, frozen=True, eq=False):
    child: Stage
    buffer: int | None
    """None: all elements."""
    seed: int | None
    every_epoch: bool


class BatchStage(Stage, frozen=True, eq=False):
    child: Stage
    size: int
    drop_remainder: bool


class PaddedBatchStage(Stage, frozen=True, eq=False):
    child: Stage
    size: int
    drop_remainder: bool
    shapes: Any
    values: Any


class UnbatchStage(Stage, frozen=True, eq=False):
    child: Stage


class RepeatStage(Stage, frozen=True, eq=False):
    child: Stage
    count: int | None
    """None: without an end."""


class TakeStage(Stage, frozen=True, eq=False):
    child: Stage
    count: int | None
    """None: all."""


class SkipStage(Stage, frozen=True, eq=False):
    child: Stage
    count: int | None


class ShardStage(Stage, frozen=True, eq=False):
    child: Stage
    num_shards: int
    index: int


class ZipStage(Stage, frozen=True, eq=False):
    children: tuple[Stage, ...]
    names: tuple[str, ...] | None
    """The keys, if elements are dicts."""


class ConcatenateStage(Stage, frozen=True, eq=False):
    first: Stage
    second: Stage


class InterleaveStage(Stage, frozen=True, eq=False):
    child: Stage
    function: Callable[..., Any]
    cycle: int
    block: int


class CacheStage(Stage, frozen=True, eq=False):
    child: Stage


class PrefetchStage(Stage, frozen=True, eq=False):
    child: Stage


class EnumerateStage(Stage, frozen=True, eq=False):
    child: Stage
    start: int


def children(stage: Stage) -> tuple[Stage, ...]:
    match stage:
        case ZipStage():
            return stage.children
        case ConcatenateStage():
            return stage.first, stage.second
        case _:
            child = getattr(stage, "child", None)
            return () if child is None else (child,)


def walk(stage: Stage) -> Iterator[Stage]:
    """Every stage of a chain, sources first; one that is used twice comes twice."""
    for child in children(stage):
        yield from walk(child)
    yield stage


def has_batches(stage: Stage) -> bool:
    """Whether the elements of a chain are batches."""
    match stage:
        case BatchStage() | PaddedBatchStage():
            return True
        case UnbatchStage() | EnumerateStage() | InterleaveStage():
            return False
        case _:
            below = children(stage)
            return bool(below) and all(has_batches(child) for child in below)


def describe(stage: Stage) -> str:
    """The chain as it would be typed, with the names of functions and a checksum of file names."""
    own = f"{_method(stage)}({', '.join(_arguments(stage))})"
    below = children(stage)
    match stage:
        case ZipStage():
            return own
        case ConcatenateStage():
            return f"{describe(stage.first)}.{own}"
        case _:
            return f"{describe(below[0])}.{own}" if below else own


_METHODS = {
    "Columns": "from_tensor_slices",
    "Names": "list_files",
    "Files": "from_files",
    "Generator": "from_generator",
    "PaddedBatch": "padded_batch",
}


def _method(stage: Stage) -> str:
    kind = type(stage).__name__.removesuffix("Stage")
    return _METHODS.get(kind, kind.lower())


def _arguments(stage: Stage) -> list[str]:
    match stage:
        case ColumnsStage():
            return [f"{stage.table.num_rows} rows"]
        case RangeStage():
            return [str(stage.start), str(stage.stop), str(stage.step)]
        case NamesStage():
            return [_paths(stage.values)]
        case FilesStage():
            return [_paths(stage.paths), *(stage.columns or ())]
        case GeneratorStage() | MapStage() | InterleaveStage():
            more = [f"{stage.cycle}", f"{stage.block}"] if isinstance(stage, InterleaveStage) else []
            return [_name(stage.function), *more]
        case FilterStage():
            return [_name(stage.predicate)]
        case ShuffleStage():
            kept = [] if stage.every_epoch else ["the same in every epoch"]
            seed = [] if stage.seed is None else [f"seed={stage.seed}"]
            return ['"full"' if stage.buffer is None else str(stage.buffer), *seed, *kept]
        case BatchStage() | PaddedBatchStage():
            return [str(stage.size), *(["drop_remainder"] if stage.drop_remainder else [])]
        case RepeatStage() | TakeStage() | SkipStage():
            return [] if stage.count is None else [str(stage.count)]
        case ShardStage():
            return [str(stage.num_shards), str(stage.index)]
        case ZipStage():
            return [describe(one) for one in stage.children]
        case ConcatenateStage():
            return [describe(stage.second)]
        case EnumerateStage():
            return [str(stage.start)] if stage.start else []
        case _:
            return []


def _paths(paths: tuple[str, ...]) -> str:
    names = "\n".join(path.replace("\\", "/").rpartition("/")[2] for path in paths)
    return f"{len(paths)} files {zlib.crc32(names.encode()):08x}"


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
