"""The graph as nested boxes: modules in modules, operations inside, with the edges of each level. Pure.

An edge between operations of different modules becomes an edge between the two boxes, of those that enclose them, that
are inside the same one; inside each, it goes on from its port "in", or to its port "out". Start reading at `boxes_of`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from manyhands.dataflow.graph import INPUT, OUTPUT, DataflowGraph, Operation, TensorSpec, cost_of

__all__ = ["PORTS", "Box", "Edge", "boxes_of", "depth_for", "leaves"]

PORTS = ("in", "out")


class Edge(msgspec.Struct, frozen=True):
    source: int
    """Index of a child."""
    target: int
    tensors: tuple[TensorSpec, ...]


class Box(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """Unique in the tree: the module's path, the operation's name, or that of a port."""
    title: str
    kind: str = ""
    """The class of a module, "operation", "input", "output" or "port"."""
    cost: str = ""
    place: str = ""
    """Empty if what is inside has different places."""
    count: int = 1
    """Of operations inside."""
    children: tuple[Box, ...] = ()
    """None: an operation, or a folded module."""
    edges: tuple[Edge, ...] = ()


def boxes_of(graph: DataflowGraph, depth: int | None = None) -> Box:
    """The whole model as a box, in which modules are folded that are in `depth` others."""
    operations = {one.name: one for one in graph.operations}
    return _module(graph, operations, (), list(graph.operations), depth)


def depth_for(graph: DataflowGraph, most: int = 32) -> int:
    """The largest depth with at most so many boxes, so that the picture can be read; at least 1."""
    deepest = max((len(one.scope) for one in graph.operations), default=1)
    fitting = [depth for depth in range(1, deepest + 2) if len(list(leaves(boxes_of(graph, depth)))) <= most]
    return max(fitting, default=1)


def leaves(box: Box) -> Iterator[Box]:
    """The boxes without children inside, ports left out."""
    for child in box.children or (box,):
        if child.children:
            yield from leaves(child)
        elif child.kind != "port":
            yield child


def _module(
    graph: DataflowGraph,
    operations: Mapping[str, Operation],
    scope: tuple[str, ...],
    inside: Sequence[Operation],
    depth: int | None,
) -> Box:
    level = len(scope)
    groups: dict[str, list[Operation]] = {}
    for one in inside:
        groups.setdefault(one.scope[level] if len(one.scope) > level else one.name, []).append(one)
    folded = (depth is not None and level > depth) or (scope != () and len(inside) == 1)
    places = {one.place for one in inside if one.kind not in (INPUT, OUTPUT)}
    weights = {one.parameters: one.parameter_bytes for one in inside}
    kind = graph.modules[scope[-1]].kind if scope else graph.model
    common = {
        "name": scope[-1] if scope else "",
        "title": _title(graph, scope) if scope else graph.model,
        "kind": kind,
        "cost": cost_of(sum(one.flops for one in inside), sum(one.seconds for one in inside), sum(weights.values())),
        "place": places.pop() if len(places) == 1 else "",
        "count": len(inside),
    }
    if folded:
        return Box(**common)  # type: ignore[arg-type]
    children = []
    for name, ones in groups.items():
        is_operation = len(ones[0].scope) == level
        children.append(
            _operation(ones[0]) if is_operation else _module(graph, operations, (*scope, name), ones, depth)
        )
    edges, ports = _edges(operations, {one.name for one in inside}, level, list(groups), inside)
    first = [Box(name=f"{common['name']}/in", title="in", kind="port")] if "in" in ports else []
    last = [Box(name=f"{common['name']}/out", title="out", kind="port")] if "out" in ports else []
    index = {name: number for number, name in enumerate(["in"] * len(first) + list(groups) + ["out"] * len(last))}
    found = tuple(Edge(index[a], index[b], tuple(tensors)) for (a, b), tensors in edges.items())
    return Box(**common, children=(*first, *children, *last), edges=found)  # type: ignore[arg-type]


def _edges(
    operations: Mapping[str, Operation],
    inside: set[str],
    level: int,
    groups: Sequence[str],
    members: Sequence[Operation],
) -> tuple[dict[tuple[str, str], list[TensorSpec]], set[str]]:
    """Edges between the children of a box by their names, or from and to its ports; and which ports there are."""
    edges: dict[tuple[str, str], list[TensorSpec]] = {}
    ports = set[str]()

    def child(one: Operation) -> str:
        return one.scope[level] if len(one.scope) > level else one.name

    def add(a: str, b: str, source: Operation) -> None:
        ports.update({a, b} & set(PORTS))
        if a != b:
            tensors = edges.setdefault((a, b), [])
            tensors += [spec for spec in source.outputs if spec not in tensors]

    for one in members:
        for name in one.inputs:
            source = operations[name]
            add(child(source) if name in inside else "in", child(one), source)
    for one in operations.values():
        if one.name not in inside:
            for name in one.inputs:
                if name in inside:
                    add(child(operations[name]), "out", operations[name])
    return edges, ports


def _title(graph: DataflowGraph, scope: tuple[str, ...]) -> str:
    """The module's name without that of the module around it; its second call has a number."""
    name, path = graph.modules[scope[-1]].name, scope[-1]
    outer = graph.modules[scope[-2]].name if len(scope) > 1 else ""
    short = name.removeprefix(f"{outer}.") if outer else name
    call = path.rpartition("@")[2] if "@" in path else ""
    return f"{short} (call {int(call) + 1})" if call.isdigit() else short


def _operation(one: Operation) -> Box:
    kind = one.kind if one.kind in (INPUT, OUTPUT) else "operation"
    title = one.name if kind == INPUT else one.kind
    return Box(
        name=one.name,
        title=title,
        kind=kind,
        cost=cost_of(one.flops, one.seconds, one.parameter_bytes),
        place=one.place,
    )
