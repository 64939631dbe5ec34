"""Evaluation and prediction over all workers: every example once, results the same on every worker.

How the data is cut into pieces does not depend on the number of workers. Each worker computes a contiguous range of
pieces, and the sums of all pieces are added in their order. Nothing here changes the model.
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
from manyhands.strategies.base import Evaluator, MetricFn, SliceLike, SliceResult
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
    engine: Evaluator, axis: Axis, pieces: Iterable[SliceLike], metrics: Mapping[str, MetricFn]
) -> tuple[dict[str, float], int]:
    """Means over all examples, and the number of examples."""
    mine = [_as_sums(result) for result in engine.eval_step(pieces, metrics)]
    gathered = axis.all_gather_bytes("evaluation", msgspec.msgpack.encode(mine))
    parts = [part for data in gathered for part in msgspec.msgpack.decode(data, type=list[_Sums])]
    parts.sort(key=lambda part: part.index)
    rows = sum(part.rows for part in parts)
    if not rows:
        raise DataError("There is nothing to evaluate: the data has no rows.")
    # Summed in the order of the pieces, which does not depend on which worker evaluated them.
    weight = sum(part.weight for part in parts)
    results = {"loss": sum(part.loss_sum for part in parts) / weight}
    for name in metrics:
        results[name] = sum(part.metric_sums[name] for part in parts) / rows
    return results, rows


def _as_sums(result: SliceResult) -> _Sums:
    return _Sums(result.index, result.rows, result.loss_sum, result.weight, result.metric_sums)


class _Predicted(msgspec.Struct):
    """The outputs of one worker."""

    structure: Any
    """What `describe` returns, or the text of its error; None from a worker without rows."""
    tensors: bytes


def predict(engine: Evaluator, axis: Axis, call: Callable[[nn.Module, Any], Any], pieces: Iterable[SliceLike]) -> Any:
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
                tensors[f"{piece.index:09d}/{number}"] = _with_own_storage(leaf, storages)
    mine = _Predicted(_described(structure), encode_tensors(tensors))
    gathered = axis.all_gather_bytes("predictions", msgspec.msgpack.encode(mine))
    outputs: dict[str, Tensor] = {}
    for data in gathered:
        part = msgspec.msgpack.decode(data, type=_Predicted)
        outputs.update(decode_tensors(part.tensors))
        structure = structure if structure is not None else _structure_of(part.structure)
    if structure is None:
        raise DataError("There is nothing to predict: the data has no rows.")
    columns: dict[int, list[Tensor]] = {}
    for name in sorted(outputs, key=lambda key: (int(key.split("/")[1]), key)):
        columns.setdefault(int(name.split("/")[1]), []).append(outputs[name])
    return pytree.tree_unflatten([torch.cat(parts) for _, parts in sorted(columns.items())], structure)


def _with_own_storage(leaf: Tensor, storages: set[int]) -> Tensor:
    """A copy if its storage is in `storages`: safetensors cannot hold a tensor twice, or two views of one."""
    plain = leaf.detach().cpu().contiguous()
    at = plain.untyped_storage().data_ptr()
    if at in storages:
        plain = plain.clone()
    storages.add(plain.untyped_storage().data_ptr())
    return plain


def _described(structure: pytree.TreeSpec | None) -> Any:
    if structure is None:
        return None
    try:
        return {"structure": describe(structure)}
    except DataError as error:  # matters only to a worker without rows, which raises it
        return {"unknown": error.what}


def _structure_of(described: Any) -> pytree.TreeSpec | None:
    """The structure from another worker's description, for a worker without rows, which has no output."""
    if described is None:
        return None
    if "unknown" in described:
        raise DataError(
            "This worker has no row to predict, so another worker has to describe the outputs to it. "
            f"{described['unknown']}",
            fix=["a smaller batch_size in predict, so that every worker has rows", "a dict or a tuple of tensors"],
        )
    return rebuild(described["structure"])


def gather_tensors(axis: Axis, tensor: Tensor) -> list[Tensor]:
    """Every rank's tensor, in rank order; shapes may differ."""
    data = encode_tensors({"": tensor.detach().cpu().contiguous()})
    return [decode_tensors(part)[""].to(tensor.device) for part in axis.all_gather_bytes("gather", data)]


def to_file(path: Path, outputs: Any) -> Any:
    """Write predictions to `path` for a restarted script. The caller puts what is returned into the call's record."""
    leaves, structure = tree_flatten(outputs)
    tensors = {str(number): leaf for number, leaf in enumerate(leaves)}
    make_directory(path.parent)
    write_private(path, encode_tensors(tensors))
    return _described(structure)


def from_file(path: Path, record: Any) -> Any:
    """Read what `to_file` has written; `CheckpointCorrupt` if that fails."""
    try:
        tensors = decode_tensors(path.read_bytes())
        if record.keys() & {"structure", "unknown"}:
            structure = _structure_of(record)
            assert structure is not None
            return pytree.tree_unflatten([tensors[str(number)] for number in range(len(tensors))], structure)
        return _filled(record, tensors)  # a record of an earlier version
    except (OSError, SafetensorError, KeyError, ValueError, DataError) as error:
        raise CheckpointCorrupt(
            f"The predictions in {path} cannot be read: {error}.",
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
