"""A layered layout of a directed graph: every edge goes down, rows are ordered to cross little. Pure.

The classical three steps: rows by longest path, with a point in each row that a long edge passes; the order in each row
by the mean position of the neighbours; x positions as close to the neighbours' as the order allows. The order of the
nodes given says which edges go up. Start reading at `arrange`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

__all__ = ["LayeredLayout", "Rows", "arrange", "in_order", "rows_of"]

Point = tuple[float, float]
SWEEPS, POSITION_SWEEPS = 8, 40


class Rows(NamedTuple):
    rows: list[list[int]]
    """From top to bottom, each from left to right; numbers from `num_nodes` on are points of long edges."""
    chains: list[list[int]]
    """Of each edge the node, points and node that it passes, from top to bottom."""
    num_nodes: int


class LayeredLayout(NamedTuple):
    corners: list[Point]
    """The upper left corner of each node."""
    routes: list[list[Point]]
    """Of each edge, from its source's to its target's border."""
    width: float
    height: float


def rows_of(count: int, edges: Sequence[tuple[int, int]]) -> Rows:
    down = [(min(edge), max(edge)) for edge in edges]  # the order of nodes is one in which they can run
    level = [0] * count
    for a, b in sorted(down):
        level[b] = max(level[b], level[a] + 1)
    successors = [min((level[b] for a, b in down if a == node), default=None) for node in range(count)]
    has_source = {b for _, b in down}
    for node in range(count):  # a node without a source, close to what it feeds
        nearest = successors[node]
        if node not in has_source and nearest is not None:
            level[node] = nearest - 1
    rows: list[list[int]] = [[] for _ in range(max(level, default=-1) + 1)]
    for node in range(count):
        rows[level[node]].append(node)
    chains, next_point = [], count
    for a, b in down:
        between = list(range(next_point, next_point + max(0, level[b] - level[a] - 1)))
        next_point += len(between)
        for row, point in enumerate(between, level[a] + 1):
            rows[row].append(point)
        chains.append([a, *between, b])
    return Rows(_ordered(rows, chains), chains, count)


def _ordered(rows: list[list[int]], chains: Sequence[Sequence[int]]) -> list[list[int]]:
    above: dict[int, list[int]] = {}
    below: dict[int, list[int]] = {}
    for chain in chains:
        for upper, lower in pairwise(chain):
            above.setdefault(lower, []).append(upper)
            below.setdefault(upper, []).append(lower)
    best, fewest = rows, _crossings(rows, below)
    for sweep in range(SWEEPS):
        goes_down = sweep % 2 == 0
        neighbours, rows = (above if goes_down else below), [list(row) for row in rows]
        order = range(1, len(rows)) if goes_down else range(len(rows) - 2, -1, -1)
        for number in order:
            rows[number] = _by_neighbours(rows[number], rows[number - 1 if goes_down else number + 1], neighbours)
        found = _crossings(rows, below)
        if found < fewest:
            best, fewest = rows, found
    return best


def _by_neighbours(row: Sequence[int], other: Sequence[int], neighbours: Mapping[int, Sequence[int]]) -> list[int]:
    """The row in the order of its nodes' mean positions in the other row; a node without any there stays."""
    place = {node: at for at, node in enumerate(other)}
    means = {node: float(at) for at, node in enumerate(row)}
    for node in row:
        known = [place[one] for one in neighbours.get(node, ()) if one in place]
        if known:
            means[node] = sum(known) / len(known)
    return sorted(row, key=lambda node: means[node])


def _crossings(rows: Sequence[Sequence[int]], below: dict[int, list[int]]) -> int:
    total = 0
    for upper, lower in pairwise(rows):
        place = {node: at for at, node in enumerate(lower)}
        ends = [place[one] for node in upper for one in sorted(below.get(node, ()), key=lambda x: place.get(x, 0))]
        total += sum(ends[j] < ends[i] for i in range(len(ends)) for j in range(i + 1, len(ends)))
    return total


def in_order(wanted: Sequence[float], least: Sequence[float]) -> list[float]:
    """Positions as close to the wanted ones as possible (least squares), each at least `least[i]` behind the last.

    Without the gaps it is a monotone regression: neighbours that are out of order are moved to their mean.
    """
    offsets, total = [], 0.0
    for gap in least:
        total += gap
        offsets.append(total)
    groups: list[tuple[float, int]] = []
    for want, offset in zip(wanted, offsets, strict=True):
        groups.append((want - offset, 1))
        while len(groups) > 1 and groups[-2][0] > groups[-1][0]:
            (a, m), (b, n) = groups[-2:]
            groups[-2:] = [((a * m + b * n) / (m + n), m + n)]
    flat = [value for value, number in groups for _ in range(number)]
    return [value + offset for value, offset in zip(flat, offsets, strict=True)]


def arrange(
    sizes: Sequence[Point], edges: Sequence[tuple[int, int]], gap: float = 24.0, row_gap: float = 44.0
) -> LayeredLayout:
    """`sizes` are widths and heights; edges are pairs of indices. Nodes do not overlap, and edges go down between rows,
    except those from a later node to an earlier one."""
    rows, chains, count = rows_of(len(sizes), edges)
    centres = _centres(rows, chains, sizes, gap)
    left = min((centres[node] - _width(node, sizes) / 2 for row in rows for node in row), default=0.0)
    right = max((centres[node] + _width(node, sizes) / 2 for row in rows for node in row), default=0.0)
    heights = [max((sizes[node][1] for node in row if node < count), default=0.0) for row in rows]
    tops = [sum(heights[:number]) + row_gap * number for number in range(len(rows))]
    corners: list[Point] = [(0.0, 0.0)] * count
    bands: dict[int, tuple[float, float]] = {}
    """The top and the bottom of each node, or of the row that a point passes."""
    row_bands = {node: (tops[at], tops[at] + heights[at]) for at, row in enumerate(rows) for node in row}
    for number, row in enumerate(rows):
        for node in row:
            if node < count:
                width, height = sizes[node]
                top = tops[number] + (heights[number] - height) / 2
                corners[node] = centres[node] - width / 2 - left, top
                bands[node] = top, top + height
            else:
                bands[node] = row_bands[node]
    routes = []
    for edge, chain in zip(edges, chains, strict=True):
        first, *points, last = chain
        # Past what is beside a box in its row, straight down: only between rows an edge moves sideways.
        route = [(centres[first] - left, y) for y in (bands[first][1], row_bands[first][1])]
        for point in points:
            route += [(centres[point] - left, y) for y in bands[point]]
        route += [(centres[last] - left, y) for y in (row_bands[last][0], bands[last][0])]
        routes.append(route if edge[0] == first else route[::-1])
    height = tops[-1] + heights[-1] if rows else 0.0
    return LayeredLayout(corners, routes, right - left, height)


def _width(node: int, sizes: Sequence[Point]) -> float:
    return sizes[node][0] if node < len(sizes) else 0.0


def _centres(
    rows: Sequence[Sequence[int]], chains: Sequence[Sequence[int]], sizes: Sequence[Point], gap: float
) -> dict[int, float]:
    neighbours: dict[int, list[int]] = {}
    for chain in chains:
        for upper, lower in pairwise(chain):
            neighbours.setdefault(upper, []).append(lower)
            neighbours.setdefault(lower, []).append(upper)
    gaps = [[0.0] + [(_width(a, sizes) + _width(b, sizes)) / 2 + gap for a, b in pairwise(row)] for row in rows]
    centres: dict[int, float] = {}
    for row, least in zip(rows, gaps, strict=True):
        start = -sum(least) / 2
        centres |= dict(zip(row, in_order([start] * len(row), least), strict=True))
    for sweep in range(POSITION_SWEEPS):
        order = range(len(rows)) if sweep % 2 == 0 else range(len(rows) - 1, -1, -1)
        for number in order:
            row = rows[number]
            wanted = []
            for node in row:
                known = [centres[one] for one in neighbours.get(node, ())]
                wanted.append(sum(known) / len(known) if known else centres[node])
            centres |= dict(zip(row, in_order(wanted, gaps[number]), strict=True))
    return centres
