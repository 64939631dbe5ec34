"""The data-flow graph of a model: exported if possible, else by its modules; with the places of a strategy.

Start reading at `capture`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from torch import nn

from manyhands.dataflow.export_capture import Captured, export_operations
from manyhands.dataflow.graph import INPUT, OUTPUT, DataflowGraph, Operation
from manyhands.dataflow.module_capture import module_operations
from manyhands.parallel.pipeline.partition import Inputs
from manyhands.training.setup import keras_models

__all__ = ["BY_EXPORT", "BY_MODULES", "capture", "with_places"]

BY_EXPORT, BY_MODULES = "torch.export", "module hooks"
REASON_SHOWN = 200


def capture(model: nn.Module, inputs: Inputs, *, modules_only: bool = False) -> DataflowGraph:
    """Of the forward pass with these inputs, in the model's current mode. The model is as before afterwards."""
    notes, found, by = list[str](), None, BY_EXPORT
    if keras_models.is_keras(model):
        notes.append("a Keras model, whose layers torch.export does not see: recorded layer by layer")
    elif not modules_only:
        try:
            found = export_operations(model, inputs)
        except Exception as error:
            why = str(error).strip().split("\n")[0][:REASON_SHOWN]
            notes.append(f"torch.export cannot trace this model ({type(error).__name__}: {why}): modules only")
    if found is None:
        found, by = module_operations(model, inputs), BY_MODULES
        notes.append("what the model computes between its modules is not shown")
    return _graph(model, found, by, notes)


def _graph(model: nn.Module, found: Captured, by: str, notes: list[str]) -> DataflowGraph:
    operations, modules = found
    used = _used(operations)
    drawn = without_constants(used)
    if len(drawn) < len(used):
        notes = [
            *notes,
            f"{len(used) - len(drawn)} operations on constants, such as those that make a mask, are left out",
        ]
    return DataflowGraph(model=type(model).__name__, captured_by=by, operations=drawn, modules=modules, notes=notes)


def without_constants(operations: Sequence[Operation]) -> list[Operation]:
    """Without operations that depend neither on an input nor on weights: their result is the same in every step."""
    varying = set[str]()
    for one in operations:
        if one.kind in (INPUT, OUTPUT) or one.parameters or one.flops or varying.intersection(one.inputs):
            varying.add(one.name)
    return [
        msgspec.structs.replace(one, inputs=tuple(name for name in one.inputs if name in varying))
        for one in operations
        if one.name in varying
    ]


def _used(operations: Sequence[Operation]) -> list[Operation]:
    """Without those that do nothing for the output, such as a counter of batches; and without unused inputs."""
    by_name = {one.name: one for one in operations}
    needed, left = set[str](), [OUTPUT]
    while left:
        name = left.pop()
        if name not in needed:
            needed.add(name)
            left += by_name[name].inputs
    return [one for one in operations if one.name in needed]


def with_places(
    graph: DataflowGraph, places: Mapping[str, str], strategy: str, workers: int, elsewhere: str
) -> DataflowGraph:
    """Each operation with the place of the innermost module that has one, by the modules' names.

    Modules without weights have none: what they compute is where its input comes from. `elsewhere`: the place of
    operations before the first of these.
    """
    found: dict[str, str] = {}
    operations = []
    for one in graph.operations:
        names = [graph.modules[path].name for path in reversed(one.scope)]
        place = next((places[name] for name in names if name in places), "")
        if not place:
            place = next((found[name] for name in reversed(one.inputs) if found.get(name)), elsewhere)
        if one.kind != INPUT:
            found[one.name] = place
        operations.append(msgspec.structs.replace(one, place="" if one.kind in (INPUT, OUTPUT) else place))
    used = {one.place for one in operations} - {""}
    ordered = [place for place in dict.fromkeys([*places.values(), elsewhere]) if place in used]
    return msgspec.structs.replace(graph, operations=operations, places=ordered, strategy=strategy, workers=workers)
