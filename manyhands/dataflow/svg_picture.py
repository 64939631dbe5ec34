"""The graph as an SVG picture: nested boxes, laid out level by level from the inside out. Pure, without other programs.

Start reading at `draw`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from manyhands.dataflow.folding import Box, Edge
from manyhands.dataflow.graph import DataflowGraph, cost_of, shape_of
from manyhands.dataflow.layered_layout import Point, arrange

__all__ = ["COLOURS", "Placed", "colours_of", "draw", "place", "summary"]

COLOURS = ("#cfe3f7", "#fbd9b5", "#cdebc9", "#e6d3f2", "#f6cfd0", "#fff0b3", "#c9ecec", "#e3d9cf")
"""Of places, in their order, again from the first where there are more."""
NEUTRAL, FRAME, TEXT, FAINT = "#f4f4f4", "#8a8a8a", "#1d1d1d", "#5c5c5c"
LETTER, SMALL, LINE, PADDING, HEADER = 6.7, 5.3, 15.0, 16.0, 26.0
LEAST_WIDTH = 96.0
PORT = (30.0, 18.0)


class Placed(NamedTuple):
    box: Box
    x: float
    y: float
    width: float
    height: float
    children: tuple[Placed, ...]
    routes: tuple[tuple[Edge, tuple[Point, ...]], ...]


def draw(graph: DataflowGraph, root: Box) -> str:
    """The picture of a box, as `folding.boxes_of` made it, with a head that says what it shows."""
    placed = place(root)
    head = [graph.model, summary(graph), *graph.notes]
    legend_at = 16 + LINE * (len(head) + 1)
    top = legend_at + (LINE + 12 if graph.places else 4)
    width = max(placed.width, max(len(line) for line in head) * LETTER, 460.0) + 2 * PADDING
    colours = colours_of(graph)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{top + placed.height + PADDING:.0f}" '
        f'viewBox="0 0 {width:.0f} {top + placed.height + PADDING:.0f}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="11">',
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{FRAME}"/></marker></defs>',
        '<rect width="100%" height="100%" fill="white"/>',
        *(
            f'<text x="{PADDING}" y="{20 + LINE * number:.0f}" fill="{TEXT if number < 2 else FAINT}"'
            f"{' font-weight=' + chr(34) + 'bold' + chr(34) if number == 0 else ''}>{escape(line)}</text>"
            for number, line in enumerate(head)
        ),
        *_legend(graph.places, colours, legend_at),
        *_draw_box(placed, (width - placed.width) / 2, top, colours, is_root=True),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def summary(graph: DataflowGraph) -> str:
    total = cost_of(graph.flops, graph.seconds, graph.parameter_bytes)
    strategy = f"; {graph.strategy}, {graph.workers} worker{'s' * (graph.workers != 1)}" if graph.strategy else ""
    return f"one forward pass of a slice, by {graph.captured_by}: {total}{strategy}"


def colours_of(graph: DataflowGraph) -> dict[str, str]:
    return {place: COLOURS[number % len(COLOURS)] for number, place in enumerate(graph.places)}


def place(box: Box) -> Placed:
    """Sizes and positions: children relative to the upper left corner of the box around them."""
    if box.kind == "port":
        return Placed(box, 0.0, 0.0, *PORT, (), ())
    lines = [_head(box), *([box.cost] if box.cost else [])]
    if not box.children:
        needed = max(len(line) for line in lines) * LETTER + 2 * 8
        return Placed(box, 0.0, 0.0, max(needed, LEAST_WIDTH), 10 + LINE * len(lines), (), ())
    needed = len(" · ".join(lines)) * LETTER
    inside = [place(child) for child in box.children]
    pairs = [(edge.source, edge.target) for edge in box.edges]
    found = arrange([(one.width, one.height) for one in inside], pairs)
    labels = [route[0][0] + 5 + len(_label(edge)) * SMALL for edge, route in zip(box.edges, found.routes, strict=True)]
    right = max([found.width, *labels])
    width = max(right, needed) + 2 * PADDING
    shift = (width - right) / 2
    children = tuple(one._replace(x=x + shift, y=y + HEADER) for one, (x, y) in zip(inside, found.corners, strict=True))
    routes = tuple(
        (edge, tuple((x + shift, y + HEADER) for x, y in route))
        for edge, route in zip(box.edges, found.routes, strict=True)
    )
    return Placed(box, 0.0, 0.0, width, found.height + HEADER + PADDING, children, routes)


def _head(box: Box) -> str:
    many = f" ({box.count} operations)" if box.count > 1 and not box.children else ""
    named = box.kind not in ("operation", "input", "output", "port")
    return f"{box.title}{': ' + box.kind if named and box.kind != box.title else ''}{many}"


def _draw_box(
    placed: Placed, x: float, y: float, colours: Mapping[str, str], *, is_root: bool = False
) -> Iterator[str]:
    box = placed.box
    fill = colours.get(box.place, NEUTRAL if box.kind in ("input", "output", "port") else "white")
    corner = 9 if not box.children and box.kind in ("operation", "port") else 3
    faint = ' fill-opacity="0.35"' if box.children else ""
    yield (
        f"<g><title>{escape(' '.join([box.name or box.title, box.place]))}</title>"
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{placed.width:.1f}" height="{placed.height:.1f}" rx="{corner}" '
        f'fill="{fill}"{faint} stroke="{FRAME}"/>'
    )
    middle = x + placed.width / 2
    if box.children:
        text = " · ".join([_head(box), *([box.cost] if box.cost and not is_root else [])])
        yield f'<text x="{x + 8:.1f}" y="{y + 16:.1f}" fill="{TEXT}">{escape(text)}</text></g>'
    else:
        lines = [_head(box), *([box.cost] if box.cost else [])]
        first = y + placed.height / 2 - LINE * (len(lines) - 1) / 2 + 4
        for number, line in enumerate(lines):
            yield (
                f'<text x="{middle:.1f}" y="{first + LINE * number:.1f}" text-anchor="middle" '
                f'fill="{FAINT if number else TEXT}">{escape(line)}</text>'
            )
        yield "</g>"
    yield from _draw_edges(placed, x, y)
    for child in placed.children:
        yield from _draw_box(child, x + child.x, y + child.y, colours)


def _draw_edges(placed: Placed, x: float, y: float) -> Iterator[str]:
    labelled = set[int]()
    for edge, route in placed.routes:
        points = [(x + px, y + py) for px, py in route]
        title = ", ".join(shape_of(tensor) for tensor in edge.tensors)
        yield (
            f'<path d="{_curve(points)}" fill="none" stroke="{FRAME}" marker-end="url(#arrow)">'
            f"<title>{escape(title)}</title></path>"
        )
        if edge.tensors and edge.source not in labelled:
            labelled.add(edge.source)
            px, py = points[0]
            yield f'<text x="{px + 5:.1f}" y="{py + 13:.1f}" font-size="9" fill="{FAINT}">{escape(_label(edge))}</text>'


def _label(edge: Edge) -> str:
    more = f" and {len(edge.tensors) - 1} more" if len(edge.tensors) > 1 else ""
    return shape_of(edge.tensors[0]) + more if edge.tensors else ""


def _curve(points: Sequence[Point]) -> str:
    """Straight through rows, curved between them."""
    (x, y), *rest = points
    parts = [f"M{x:.1f} {y:.1f}"]
    for px, py in rest:
        if abs(px - x) < 0.5:
            parts.append(f"L{px:.1f} {py:.1f}")
        else:
            middle = (y + py) / 2
            parts.append(f"C{x:.1f} {middle:.1f} {px:.1f} {middle:.1f} {px:.1f} {py:.1f}")
        x, y = px, py
    return "".join(parts)


def _legend(places: Sequence[str], colours: Mapping[str, str], y: float) -> Iterator[str]:
    x = PADDING
    for one in places:
        yield f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="14" height="12" fill="{colours[one]}" stroke="{FRAME}"/>'
        yield f'<text x="{x + 20:.1f}" y="{y:.1f}" fill="{TEXT}">{escape(one)}</text>'
        x += 20 + len(one) * LETTER + 18
