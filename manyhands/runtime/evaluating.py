"""Evaluation and prediction over all workers: every example once, results the same on every worker.

The data is cut into pieces whatever the number of workers; each worker takes a contiguous share, and the pieces'
sums are put together in order. Nothing here changes the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load as decode_tensors
from safetensors.torch import save as encode_tensors
from torch import Tensor, nn

from manyhands.comm.axis import Axis
from manyhands.errors import DataError, TrainingFailed
from manyhands.parallel.trees import tree_flatten
from manyhands.strategies.base import Evaluator, MetricFn, PieceLike, PieceResult
from manyhands.torch_private import pytree

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


def predict(engine: Evaluator, axis: Axis, call: Callable[[nn.Module, Any], Any], pieces: Iterable[PieceLike]) -> Any:
    """The model's outputs for all examples, in the order of the data, on every worker."""
    tensors: dict[str, Tensor] = {}
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
                tensors[f"{piece.index:09d}/{number}"] = leaf.detach().cpu().contiguous()
    everyone: dict[str, Tensor] = {}
    for data in axis.all_gather_bytes("predictions", encode_tensors(tensors)):
        everyone.update(decode_tensors(data))
    if structure is None:  # a worker without rows has not seen an output
        structure = pytree.tree_flatten(torch.empty(0))[1]
        _refuse_unknown_structure(everyone)
    columns: dict[int, list[Tensor]] = {}
    for name in sorted(everyone, key=lambda key: (int(key.split("/")[1]), key)):
        columns.setdefault(int(name.split("/")[1]), []).append(everyone[name])
    return pytree.tree_unflatten([torch.cat(parts) for _, parts in sorted(columns.items())], structure)


def _refuse_unknown_structure(everyone: Mapping[str, Tensor]) -> None:
    if len({name.split("/")[1] for name in everyone}) > 1:
        raise DataError("predict with several outputs needs at least one row per worker.")


def gather_tensors(axis: Axis, tensor: Tensor) -> list[Tensor]:
    """Every rank's tensor, in rank order; shapes may differ."""
    data = encode_tensors({"": tensor.detach().cpu().contiguous()})
    return [decode_tensors(part)[""].to(tensor.device) for part in axis.all_gather_bytes("gather", data)]


def to_file(path: Path, outputs: Any) -> Any:
    """Keep predictions for a restarted script; what is returned belongs into the call's record."""
    leaves, _ = pytree.tree_flatten(outputs)
    tensors = {str(number): leaf for number, leaf in enumerate(leaves)}
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_bytes(encode_tensors(tensors))
    return _numbered(outputs, iter(range(len(leaves))))


def from_file(path: Path, record: Any) -> Any:
    tensors = decode_tensors(path.read_bytes())
    return _filled(record, tensors)


def _numbered(tree: Any, numbers: Iterator[int]) -> Any:
    if isinstance(tree, dict):
        return {"dict": {key: _numbered(value, numbers) for key, value in tree.items()}}
    if isinstance(tree, list | tuple):
        return {type(tree).__name__: [_numbered(value, numbers) for value in tree]}
    return {"tensor": next(numbers)}


def _filled(record: Any, tensors: Mapping[str, Tensor]) -> Any:
    ((kind, value),) = record.items()
    if kind == "tensor":
        return tensors[str(value)]
    if kind == "dict":
        return {key: _filled(item, tensors) for key, item in value.items()}
    items = [_filled(item, tensors) for item in value]
    return items if kind == "list" else tuple(items)
