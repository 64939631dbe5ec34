"""The graph in the language of Graphviz, with a cluster for each module. Pure. Start reading at `as_dot`."""

from __future__ import annotations

from collections.abc import Iterator

from manyhands.dataflow.folding import Box
from manyhands.dataflow.graph import DataflowGraph, shape_of
from manyhands.dataflow.svg_picture import NEUTRAL, colours_of, summary

__all__ = ["as_dot"]


def as_dot(graph: DataflowGraph, root: Box) -> str:
    colours = colours_of(graph)
    lines = [
        "digraph model {",
        "  compound=true; rankdir=TB; labelloc=t;",
        f"  label={_quoted(chr(10).join([graph.model, summary(graph), *graph.notes, *graph.places]))};",
        '  node [shape=box, style="filled,rounded", fontname="sans-serif", fontsize=10];',
        '  edge [fontname="sans-serif", fontsize=8];',
        *_inside(root, root.name, colours, "  "),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _inside(box: Box, path: str, colours: dict[str, str], indent: str) -> Iterator[str]:
    for child in box.children:
        fill = colours.get(child.place, NEUTRAL)
        text = "\n".join(part for part in (child.title, child.kind, child.cost) if part)
        if child.children:
            yield f"{indent}subgraph {_quoted(f'cluster {child.name}')} {{"
            yield f"{indent}  label={_quoted(text)}; style=filled; fillcolor={_quoted(fill + '59')};"
            yield from _inside(child, child.name, colours, indent + "  ")
            yield f"{indent}}}"
        else:
            shape = ", shape=point" if child.kind == "port" else ""
            yield f"{indent}{_quoted(child.name)} [label={_quoted(text)}, fillcolor={_quoted(fill)}{shape}];"
    for edge in box.edges:
        source, target = box.children[edge.source], box.children[edge.target]
        label = ", ".join(shape_of(tensor) for tensor in edge.tensors[:2])
        yield f"{indent}{_quoted(_end(source, 'out'))} -> {_quoted(_end(target, 'in'))} [label={_quoted(label)}];"


def _end(box: Box, port: str) -> str:
    """Edges end at boxes; at a module that is not folded, at its port."""
    return f"{box.name}/{port}" if box.children else box.name


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
