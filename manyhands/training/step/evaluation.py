"""Evaluation and prediction over all workers: every example once, results the same on every worker.

The data is cut into pieces whatever the number of workers; each worker takes a contiguous share, and the pieces'
sums are put together in order. Nothing here changes the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load as decode_tensors
from safetensors.torch import save as encode_tensors
from torch import Tensor, nn

from manyhands.comm.axis import Axis
from manyhands.errors import CheckpointCorrupt, DataError, TrainingFailed
from manyhands.parallel.model.pytrees import tree_flatten
from manyhands.private_files import make_directory, write_private
from manyhands.strategies.base import Evaluator, MetricFn, PieceLike, PieceResult
from manyhands.torch_private import pytree
from manyhands.training.step.output_structure import describe, rebuild

__all__ = ["evaluate", "from_file", "gather_tensors", "predict", "to_file"]


class _Sums(msgspec.Struct):
    index: int
    rows: int
    loss_sum: float
    weight: float
    metric_sums: dict[str, float]


def evaluate(
    engine: Evaluator, axis: Axis, pieces: Iterable[PieceLike], metrics: Mapping[str, MetricFn]
) -> tuple[dict[str, float], int]:
    """Means over all examples, and how many there were."""
    mine = [_as_sums(result) for result in engine.eval_step(pieces, metrics)]
    gathered = axis.all_gather_bytes("evaluation", msgspec.msgpack.encode(mine))
    parts = [part for data in gathered for part in msgspec.msgpack.decode(data, type=list[_Sums])]
    parts.sort(key=lambda part: part.index)
    rows = sum(part.rows for part in parts)
    if not rows:
        raise DataError("There is nothing to evaluate: the data has no rows.")
    # Summed in the order of the pieces, which does not depend on who evaluated them.
    weight = sum(part.weight for part in parts)
    results = {"loss": sum(part.loss_sum for part in parts) / weight}
    for name in metrics:
        results[name] = sum(part.metric_sums[name] for part in parts) / rows
    return results, rows


def _as_sums(result: PieceResult) -> _Sums:
    return _Sums(result.index, result.rows, result.loss_sum, result.weight, result.metric_sums)


class _Predicted(msgspec.Struct):
    """What one worker has computed."""

    structure: Any
    """As `describe` says it; an error in words where it cannot; None of a worker without rows."""
    tensors: bytes


def predict(engine: Evaluator, axis: Axis, call: Callable[[nn.Module, Any], Any], pieces: Iterable[PieceLike]) -> Any:
    """The model's outputs for all examples, in the order of the data, on every worker."""
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    structure = None
    with engine.evaluating():
        for piece in pieces:
            leaves, structure = tree_flatten(call(engine.model, piece.batch))
            for number, leaf in enumerate(leaves):
                if not isinstance(leaf, Tensor) or leaf.shape[:1] != (piece.rows,):
                    raise TrainingFailed(
                        "predict needs outputs with one row per example; the model returned "
                        f"{type(leaf).__name__} {tuple(getattr(leaf, 'shape', ()))} for {piece.rows} rows."
                    )
                tensors[f"{piece.index:09d}/{number}"] = _apart(leaf, storages)
    mine = _Predicted(_told_structure(structure), encode_tensors(tensors))
    gathered = axis.all_gather_bytes("predictions", msgspec.msgpack.encode(mine))
    everyone: dict[str, Tensor] = {}
    for data in gathered:
        part = msgspec.msgpack.decode(data, type=_Predicted)
        everyone.update(decode_tensors(part.tensors))
        structure = structure if structure is not None else _structure_of(part.structure)
    if structure is None:
        raise DataError("There is nothing to predict: the data has no rows.")
    columns: dict[int, list[Tensor]] = {}
    for name in sorted(everyone, key=lambda key: (int(key.split("/")[1]), key)):
        columns.setdefault(int(name.split("/")[1]), []).append(everyone[name])
    return pytree.tree_unflatten([torch.cat(parts) for _, parts in sorted(columns.items())], structure)


def _apart(leaf: Tensor, storages: set[int]) -> Tensor:
    """In memory of its own: outputs may hold the same tensor twice, or views of one, which a file cannot."""
    plain = leaf.detach().cpu().contiguous()
    at = plain.untyped_storage().data_ptr()
    if at in storages:
        plain = plain.clone()
    storages.add(plain.untyped_storage().data_ptr())
    return plain


def _told_structure(structure: pytree.TreeSpec | None) -> Any:
    if structure is None:
        return None
    try:
        return {"structure": describe(structure)}
    except DataError as error:  # which matters only to a worker without rows
        return {"unknown": error.what}


def _structure_of(told: Any) -> pytree.TreeSpec | None:
    """For a worker without rows, which has not seen an output."""
    if told is None:
        return None
    if "unknown" in told:
        raise DataError(
            f"This worker has no row to predict, so that others have to describe the outputs. {told['unknown']}",
            fix=["a smaller batch_size in predict, so that every worker has rows", "a dict or a tuple of tensors"],
        )
    return rebuild(told["structure"])


def gather_tensors(axis: Axis, tensor: Tensor) -> list[Tensor]:
    """Every rank's tensor, in rank order; shapes may differ."""
    data = encode_tensors({"": tensor.detach().cpu().contiguous()})
    return [decode_tensors(part)[""].to(tensor.device) for part in axis.all_gather_bytes("gather", data)]


def to_file(path: Path, outputs: Any) -> Any:
    """Keep predictions for a restarted script; what is returned belongs into the call's record."""
    leaves, structure = tree_flatten(outputs)
    tensors = {str(number): leaf for number, leaf in enumerate(leaves)}
    make_directory(path.parent)
    write_private(path, encode_tensors(tensors))
    return _told_structure(structure)


def from_file(path: Path, record: Any) -> Any:
    """What `to_file` has kept; `CheckpointCorrupt` where it cannot be had again."""
    try:
        tensors = decode_tensors(path.read_bytes())
        if record.keys() & {"structure", "unknown"}:
            structure = _structure_of(record)
            assert structure is not None
            return pytree.tree_unflatten([tensors[str(number)] for number in range(len(tensors))], structure)
        return _filled(record, tensors)  # of an earlier version
    except (OSError, SafetensorError, KeyError, ValueError, DataError) as error:
        raise CheckpointCorrupt(
            f"The predictions in {path} cannot be had again: {error}.",
            fix=["start over in a new run directory: --run-dir NEW"],
        ) from error


def _filled(record: Any, tensors: Mapping[str, Tensor]) -> Any:
    ((kind, value),) = record.items()
    if kind == "tensor":
        return tensors[str(value)]
    if kind == "dict":
        return {key: _filled(item, tensors) for key, item in value.items()}
    items = [_filled(item, tensors) for item in value]
    return items if kind == "list" else tuple(items)
