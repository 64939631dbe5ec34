"""The graph of a model by `torch.export`: every operation of its forward pass, run once more to measure it.

The exported operations are run one by one on copies of the model's buffers, so batch statistics stay as they are.
Start reading at `export_operations`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.utils.flop_counter import FlopCounterMode

from manyhands.dataflow.graph import INPUT, OUTPUT, ModuleCall, Operation, TensorSpec
from manyhands.parallel.pipeline.export_graph import no_mask_detection, quiet, without_cache
from manyhands.parallel.pipeline.partition import Inputs
from manyhands.torch_private import pytree

__all__ = ["Captured", "export_operations", "flops_of", "spec_of", "specs_in"]

RUNS = 5
"""Each operation is timed so often, and the fastest counts: what is slower, other programs are the cause of."""
Captured = tuple[list[Operation], dict[str, ModuleCall]]
TRANSPARENT = ("getitem", "_assert", "sym_size", "sym_constrain_range", "_guards_fn")
"""Calls that compute nothing: edges go through them."""


def export_operations(model: nn.Module, inputs: Inputs) -> Captured:
    """Raises what `torch.export` raises where it cannot trace the model."""
    kwargs = {**inputs.kwargs, **without_cache(model, inputs.kwargs)}
    with no_mask_detection(), quiet():
        program = torch.export.export(model, inputs.args, kwargs, strict=False)
    states = {**program.state_dict, **program.constants}
    given = list(pytree.tree_leaves((inputs.args, kwargs)))
    values: dict[str, Any] = {}
    weights: dict[str, str] = {}
    names: dict[str, str] = {}
    for spec in program.graph_signature.input_specs:
        argument = spec.arg.name
        if spec.kind == InputKind.USER_INPUT:
            values[argument] = given.pop(0)
            names[argument] = argument
        else:
            found = states[str(spec.target)]
            values[argument] = found.detach().clone() if isinstance(found, Tensor) else found
            if spec.kind == InputKind.PARAMETER:
                weights[argument] = str(spec.target)
    return _Run(values, weights, names).run(program.graph_module)


class _Run:
    def __init__(self, values: dict[str, Any], weights: Mapping[str, str], inputs: Mapping[str, str]) -> None:
        self._values, self._weights, self._inputs = values, weights, inputs
        self._sources: dict[str, tuple[str, ...]] = {name: (name,) for name in inputs}
        """The operations that a node of the graph gets its value from: itself, or those before a transparent one."""
        self._modules: dict[str, ModuleCall] = {}
        self._kinds: dict[str, str] = {}

    def run(self, graph: fx.GraphModule) -> Captured:
        found = []
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                if node.name in self._inputs and isinstance(self._values[node.name], Tensor):
                    outputs = specs_in(self._values[node.name])
                    found.append(Operation(name=node.name, kind=INPUT, outputs=outputs))
                elif node.name in self._inputs:
                    self._sources[node.name] = ()
            elif node.op == "get_attr":
                self._values[node.name] = _attribute(graph, str(node.target))
            elif node.op == "output":
                found.append(Operation(name=OUTPUT, kind=OUTPUT, inputs=self._inputs_of(node)))
            else:
                operation = self._call(node)
                found += [operation] if operation is not None else []
        return found, self._modules

    def _call(self, node: fx.Node) -> Operation | None:
        args = fx.map_arg(node.args, lambda one: self._values[one.name])
        kwargs = fx.map_arg(node.kwargs, lambda one: self._values[one.name])
        kind = _kind(node)

        def call() -> Any:
            return node.target(*args, **kwargs)  # type: ignore[operator]

        if kind.startswith(TRANSPARENT):
            self._values[node.name] = call()
            self._sources[node.name] = self._inputs_of(node)
            return None
        with torch.no_grad():
            before = [one.clone() for one in self._changed(node)]  # it runs several times, and counts once
            flops, result = flops_of(call)
            seconds = []
            for _ in range(RUNS):
                started = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - started)
            for one, value in zip(self._changed(node), before, strict=True):
                one.copy_(value)
        self._values[node.name], self._sources[node.name] = result, (node.name,)
        weights = sorted({self._weights[one.name] for one in node.all_input_nodes if one.name in self._weights})
        sizes = {one.name: self._values[one.name].nbytes for one in node.all_input_nodes if one.name in self._weights}
        return Operation(
            name=node.name,
            kind=kind,
            scope=self._scope(node),
            inputs=self._inputs_of(node),
            outputs=specs_in(result),
            parameters=tuple(weights),
            parameter_bytes=sum(sizes.values()),
            flops=flops,
            seconds=min(seconds),
        )

    def _changed(self, node: fx.Node) -> Sequence[Tensor]:
        """Tensors that the operation changes in place."""
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            return ()
        given = dict(zip((one.name for one in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
        changed = (given.get(one.name) for one in schema.arguments if one.alias_info and one.alias_info.is_write)
        values = (self._values[one.name] for one in changed if isinstance(one, fx.Node))
        return [one for one in values if isinstance(one, Tensor)]

    def _inputs_of(self, node: fx.Node) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for one in node.all_input_nodes for name in self._sources.get(one.name, ())))

    def _scope(self, node: fx.Node) -> tuple[str, ...]:
        scope = []
        for key, (name, kind) in (node.meta.get("nn_module_stack") or {}).items():
            path = str(key).removeprefix("L__self__")
            if name and path:
                self._modules[path] = ModuleCall(str(name), str(kind).rpartition(".")[2])
                scope.append(path)
        return tuple(scope)


def flops_of(call: Any) -> tuple[int, Any]:
    """The floating-point operations of a call, by torch's formulas, and what it returns."""
    with FlopCounterMode(display=False) as counter:
        result = call()
    return int(counter.get_total_flops()), result


def specs_in(value: Any) -> tuple[TensorSpec, ...]:
    return tuple(spec_of(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def spec_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.nbytes)


def _kind(node: fx.Node) -> str:
    """Such as "linear" for aten.linear.default."""
    name = getattr(node.target, "__name__", str(node.target))
    return name.split(".")[0] if node.op == "call_function" else str(node.target)


def _attribute(graph: fx.GraphModule, target: str) -> Any:
    value: Any = graph
    for name in target.split("."):
        value = getattr(value, name)
    return value
