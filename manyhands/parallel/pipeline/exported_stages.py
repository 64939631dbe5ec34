"""Stages of any model that `torch.export` can trace, cut between its blocks.

Each stage runs its blocks, which are the user's modules, and the operations between them. Values that depend only on
the model's inputs, such as masks and positions, are computed on every stage that needs them, as all ranks have the
inputs; all other values that cross a cut are sent from stage to stage until their last use. Start reading at
`ExportedModel`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from manyhands.errors import SpecError
from manyhands.parallel.model.training_modes import copy_modes_
from manyhands.parallel.pipeline.export_graph import Trace, bare_copy, block_operation, leaves_of, trace
from manyhands.parallel.pipeline.partition import Inputs, params_below
from manyhands.parallel.pipeline.stage_blocks import ancestors, largest_to_open, names_of_blocks

__all__ = ["ExportedModel"]


class ExportedModel:
    """A model's blocks, with a graph for each kind of inputs so far."""

    def __init__(self, model: nn.Module, inputs: Inputs, stages: int, at: Sequence[str] = ()) -> None:
        """Blocks are split until there are as many as `stages`, and one begins at each name in `at`."""
        self.model, self._bare = model, bare_copy(model)
        opened = ancestors(at)
        while True:
            self._blocks = names_of_blocks(model, opened)
            first = self._trace(inputs)
            called = [call.module for call in first.calls]
            wanted = largest_to_open(model, called) if len(called) < stages else None
            if wanted is None:
                break
            opened.add(wanted)
        if not first.calls:
            raise SpecError(f"{type(model).__name__} calls none of its submodules, so it cannot be cut into stages.")
        self.names = [call.name for call in first.calls]
        within = {id(inner) for block in self._blocks for inner in model.get_submodule(block).modules()}
        self._between = [module for module in model.modules() if id(module) not in within]
        self._graphs: dict[tuple[bool, ...], list[_StagedGraph]] = {}
        self.first = _StagedGraph(first, model)
        self._graphs[self._modes()] = [self.first]

    def parts(self, starts: Sequence[int]) -> list[ExportedPart]:
        begins = [self.names[start] for start in starts]
        return [ExportedPart(self, begins, number) for number in range(len(begins))]

    def graph(self, inputs: Inputs) -> _StagedGraph:
        """The graph for such inputs in the modules' current modes; traced at the first use."""
        graphs = self._graphs.setdefault(self._modes(), [])
        for graph in graphs:
            if graph.trace.fits(inputs):
                return graph
        copy_modes_(self._bare, self.model)
        graphs.append(_StagedGraph(self._trace(inputs), self.model))
        return graphs[-1]

    def _modes(self) -> tuple[bool, ...]:
        """The modes of modules outside of blocks, on which the graph depends; blocks run in their current mode."""
        return tuple(module.training for module in self._between)

    def _trace(self, inputs: Inputs) -> Trace:
        return trace(self._bare, self._blocks, inputs)


class ExportedPart:
    """One stage of a traced model."""

    def __init__(self, traced: ExportedModel, begins: Sequence[str], number: int) -> None:
        self._traced, self._begins, self._number = traced, list(begins), number
        graph = traced.first
        low, high = graph.block_range(self._begins, number)
        calls = graph.trace.calls[low:high]
        self.names = [call.name for call in calls]
        self._called = dict.fromkeys(call.module for call in calls)
        self._direct = graph.parameters_between(self._begins, number)

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {name: self._traced.model.get_submodule(name) for name in self._called}

    @property
    def params(self) -> dict[str, nn.Parameter]:
        direct = {name: self._traced.model.get_parameter(name) for name in self._direct}
        return {**params_below(self.modules), **direct}

    def __call__(self, inputs: Inputs, carried: Any) -> Any:
        graph = self._traced.graph(inputs)
        values = graph.run(self._begins, self._number, leaves_of(inputs)[0], carried or ())
        return values if self._number < len(self._begins) - 1 else graph.trace.rebuild(values)

    def to_send(self, output: Any) -> Any:
        return leaves_of(Inputs((output,), {}))[0]

    def from_sent(self, inputs: Inputs, sent: Any) -> Any:
        return self._traced.graph(inputs).trace.rebuild(sent)


class _StagedGraph:
    """One graph, divided into stages."""

    def __init__(self, traced: Trace, model: nn.Module) -> None:
        self.trace, self._model = traced, model
        nodes = list(traced.graph_module.graph.nodes)
        self._on_any_stage = _follows_from_inputs(nodes, traced)
        self._order = [node for node in nodes if node.op != "placeholder" and "_assert" not in str(node.target)]
        self._plans: dict[tuple[str, ...], list[_Plan]] = {}

    def block_range(self, begins: Sequence[str], number: int) -> tuple[int, int]:
        """The range of calls that a stage runs."""
        names = [call.name for call in self.trace.calls]
        missing = [name for name in begins if name not in names]
        if missing:
            raise SpecError(f"The model does not call {missing[0]} with these inputs, but a stage begins there.")
        starts = [0, *map(names.index, begins[1:]), len(names)]
        return starts[number], starts[number + 1]

    def parameters_between(self, begins: Sequence[str], number: int) -> list[str]:
        """Parameters that a stage uses outside its blocks."""
        used = {node.name for step in self._plan(begins)[number].steps for node in step.all_input_nodes}
        return [str(name) for key, name in self.trace.attributes.items() if key in used & self.trace.parameters]

    def run(self, begins: Sequence[str], number: int, tensors: Sequence[Tensor], carried: Sequence[Any]) -> list[Any]:
        plan = self._plan(begins)[number]
        known: dict[str, Any] = dict(zip(self.trace.inputs, tensors, strict=True))
        known.update(zip(plan.arriving, carried, strict=True))
        for step, unused in zip(plan.steps, plan.last_uses, strict=True):
            known[step.name] = self._do(step, known)
            for name in unused:
                known.pop(name, None)
        return [self._value(name, known) for name in plan.leaving]

    def _do(self, node: fx.Node, known: dict[str, Any]) -> Any:
        if node.op == "get_attr":
            return getattr(self.trace.graph_module, str(node.target))
        given: Any = fx.node.map_arg((node.args, node.kwargs), lambda arg: self._value(arg.name, known))
        args, kwargs = given
        if not _is_block(node):
            return node.target(*args, **kwargs)  # type: ignore[operator]
        call = self.trace.calls[args[0]]
        inputs = call.fill(args[1], args[2])
        result = self._model.get_submodule(call.module)(*inputs.args, **inputs.kwargs)
        return leaves_of(Inputs((result,), {}))[0]

    def _value(self, name: str, known: dict[str, Any]) -> Any:
        if name in known:
            return known[name]
        attribute = self.trace.attributes[name]
        if isinstance(attribute, Tensor):
            return attribute
        owner, _, last = attribute.rpartition(".")
        return getattr(self._model.get_submodule(owner), last)

    def _plan(self, begins: Sequence[str]) -> list[_Plan]:
        key = tuple(begins)
        if key not in self._plans:
            self._plans[key] = list(self._divide(begins))
        return self._plans[key]

    def _divide(self, begins: Sequence[str]) -> Iterator[_Plan]:
        """Assign each node to the stage of its block, or of the block before it; some nodes can run on any stage."""
        bounds = [self.block_range(begins, number)[0] for number in range(len(begins))]
        stage, block, stage_of = 0, -1, {}
        for node in self._order:
            if _is_block(node):
                block += 1
                stage = sum(block >= bound for bound in bounds) - 1
            if node not in self._on_any_stage or node.op == "output":
                stage_of[node] = stage if node.op != "output" else len(begins) - 1
        arriving: list[str] = []
        for number in range(len(begins)):
            own = {node for node, assigned in stage_of.items() if assigned == number}
            steps = [node for node in self._order if node in own | self._needed(own) and node.op != "output"]
            leaving = self._crossing(stage_of, number) if number < len(begins) - 1 else self._outputs()
            yield _Plan(steps, arriving, leaving)
            arriving = leaving

    def _needed(self, own: set[fx.Node]) -> set[fx.Node]:
        """The nodes that may run on any stage and that `own` nodes need."""
        found: set[fx.Node] = set()
        ahead = [source for node in own for source in node.all_input_nodes]
        while ahead:
            node = ahead.pop()
            if node in self._on_any_stage and node.op != "placeholder" and node not in found:
                found.add(node)
                ahead += node.all_input_nodes
        return found

    def _crossing(self, stage_of: dict[fx.Node, int], number: int) -> list[str]:
        """Values that are computed in this stage or before it and used after it."""
        return [
            node.name
            for node in self._order
            if stage_of.get(node, number + 1) <= number and any(stage_of.get(user, 0) > number for user in node.users)
        ]

    def _outputs(self) -> list[str]:
        (output,) = [node for node in self._order if node.op == "output"]
        return [node.name for node in output.args[0]]


class _Plan:
    """The operations of a stage, and the values that it receives and sends."""

    def __init__(self, steps: list[fx.Node], arriving: list[str], leaving: list[str]) -> None:
        self.steps, self.arriving, self.leaving = steps, arriving, leaving
        last: dict[str, int] = {}
        for number, node in enumerate(steps):
            for source in (*node.all_input_nodes, node):
                last[source.name] = number
        self.last_uses: list[list[str]] = [[] for _ in steps]
        for name, number in last.items():
            if name not in leaving:
                self.last_uses[number].append(name)


def _is_block(node: fx.Node) -> bool:
    return node.target is block_operation()


def _follows_from_inputs(nodes: Sequence[fx.Node], traced: Trace) -> set[fx.Node]:
    """Nodes that any stage can compute: from inputs, buffers and constants, not random, and never written to.

    Not from parameters: several stages would compute their gradients.
    """
    found: set[fx.Node] = set()
    for node in nodes:
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        fixed = _is_block(node) or random or _writes(node) or node.name in traced.parameters or node.op == "output"
        if not fixed and all(source in found for source in node.all_input_nodes):
            found.add(node)
    for node in nodes:
        if _writes(node):
            _drop_with_sources(node, found)
    return found


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _drop_with_sources(node: fx.Node, found: set[fx.Node]) -> None:
    """A value that is written to, and its sources, are computed once, on the stage where the model does it."""
    ahead = list(node.all_input_nodes)
    while ahead:
        source = ahead.pop()
        if source in found and source.op != "placeholder":
            found.discard(source)
            ahead += [*source.all_input_nodes, *source.users]
