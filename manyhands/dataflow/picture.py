"""The graph in each of the formats that it can be written in, by the ending of the file.

Start reading at `picture_of`.
"""

from __future__ import annotations

from manyhands.dataflow.dot_text import as_dot
from manyhands.dataflow.folding import boxes_of, depth_for
from manyhands.dataflow.graph import DataflowGraph
from manyhands.dataflow.html_page import as_page
from manyhands.dataflow.svg_picture import draw

__all__ = ["picture_of"]


def picture_of(graph: DataflowGraph, ending: str, depth: int | None = None) -> str:
    """`depth`: how many modules a folded one is inside of. Default: what can be read; in DOT, nothing is folded."""
    if ending == ".dot":
        return as_dot(graph, boxes_of(graph, depth))
    depth = depth_for(graph) if depth is None else depth
    if ending == ".html":
        return as_page(graph, boxes_of(graph), depth)
    return draw(graph, boxes_of(graph, depth))
