"""A figure of a run as SVG text: a lane for each worker, a box for each mark, a diamond for each event.

Times are compressed, or a step of milliseconds would not be seen beside a start of seconds: order and overlap are true,
widths are not, and the axis has the times. Start reading at `draw`.

把一次训练画成 SVG：每个 worker 一条泳道，每个标记一个方框，每个事件一个菱形。时间经过压缩：先后与重叠是真实的，宽度不
是，时刻写在轴上。
"""

import itertools
import math
from collections.abc import Sequence
from html import escape
from typing import Any

LEFT, TOP, LANE, BOX, LEAST_WIDTH = 96, 16, 46, 30, 640
NARROW, WIDE, IDLE = 15.0, 60.0, 26.0
"""Pixels of the shortest and the longest piece of the axis, and of one in which nothing is marked."""
FILLS = ("#cfe2ff", "#ffe0b8", "#d3f0d0", "#f6cfe0", "#e2d6f7", "#fff3b0", "#c9eef0", "#e5dccf")
TEXT = 'font-family="system-ui, sans-serif"'
CHARACTER = 6.6

Item = dict[str, Any]


def draw(items: Sequence[Item]) -> str:
    """`items` have a step, a lane, a start and an end in seconds, and a name."""
    places = _axis(items)
    lanes = sorted({one["lane"] for one in items}, key=lambda lane: (lane == "record", lane))
    width = max(max(places.values()) + 70, LEAST_WIDTH)
    below = TOP + LANE * len(lanes)
    legend = _legend(items, below + 46, width)
    height = below + 46 + 18 * len(legend)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
    ]
    for number, lane in enumerate(lanes):
        top = TOP + LANE * number
        middle = top + BOX / 2
        parts.append(_text(8, middle + 4, lane, 12))
        parts.append(_line(LEFT, middle, width - 12, middle, "#dddddd"))
        for one in sorted((one for one in items if one["lane"] == lane), key=lambda one: one["start"]):
            parts += _event(one, places, top) if one["start"] == one["end"] else _box(one, places, top)
    parts += _ticks(items, places, below, width)
    return "\n".join([*parts, *legend, "</svg>"]) + "\n"


def _axis(items: Sequence[Item]) -> dict[float, float]:
    """The position of each time at which something begins or ends."""
    times = sorted({one[end] for one in items for end in ("start", "end")})
    places, at = {times[0]: float(LEFT + 8)}, float(LEFT + 8)
    pieces = list(itertools.pairwise(times))
    busy = [any(one["start"] <= a and b <= one["end"] for one in items) for a, b in pieces]
    longest = max((b - a for (a, b), used in zip(pieces, busy, strict=True) if used), default=1.0) or 1.0
    for (first, second), used in zip(pieces, busy, strict=True):
        at += NARROW + (WIDE - NARROW) * math.sqrt((second - first) / longest) if used else IDLE
        places[second] = at
    return places


def _box(one: Item, places: dict[float, float], top: float) -> list[str]:
    x, end = places[one["start"]], places[one["end"]]
    label = f"{one['step']} {one['name']}"
    if CHARACTER * len(label) + 4 > end - x:
        label = str(one["step"])
    fill = FILLS[(one["step"] - 1) % len(FILLS)]
    return [
        f'<rect x="{x:.1f}" y="{top}" width="{max(end - x, 2.0):.1f}" height="{BOX}" rx="3" fill="{fill}" '
        f'stroke="#555555"><title>{escape(one["text"])}</title></rect>',
        _text((x + end) / 2, top + BOX / 2 + 4, label, 12, "middle"),
    ]


def _event(one: Item, places: dict[float, float], top: float) -> list[str]:
    x, y, r = places[one["start"]], top + BOX / 2, 11
    fill = FILLS[(one["step"] - 1) % len(FILLS)]
    points = f"{x:.1f},{y - r} {x + r:.1f},{y} {x:.1f},{y + r} {x - r:.1f},{y}"
    return [
        f'<polygon points="{points}" fill="{fill}" stroke="#555555"><title>{escape(one["text"])}</title></polygon>',
        _text(x, y + 4, str(one["step"]), 11, "middle"),
    ]


def _ticks(items: Sequence[Item], places: dict[float, float], y: float, width: float) -> list[str]:
    parts, free = [_line(LEFT, y, width - 12, y, "#888888")], 0.0
    for time, x in sorted(places.items()):
        if x >= free:
            parts += [_line(x, y, x, y + 5, "#888888"), _text(x, y + 18, _duration(time), 11, "middle")]
            free = x + 66
    return parts


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 2 else f"{1000 * seconds:.1f} ms"


def _legend(items: Sequence[Item], y: float, width: float) -> list[str]:
    """Which step has which name, in lines of the figure's width."""
    names = dict(sorted({one["step"]: one["name"] for one in items}.items()))
    lines, line = [], ""
    for entry in (f"{step} {name}" for step, name in names.items()):
        if line and CHARACTER * len(line + entry) > width - LEFT - 40:
            lines, line = [*lines, line], ""
        line += ("    " if line else "") + entry
    return [_text(LEFT, y + 18 * number, one, 12) for number, one in enumerate([*lines, line])]


def _text(x: float, y: float, text: str, size: int, anchor: str = "start") -> str:
    spaces = ' xml:space="preserve"'
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="#111111" {TEXT}{spaces}>'
        f"{escape(text)}</text>"
    )


def _line(x: float, y: float, to_x: float, to_y: float, colour: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{colour}"/>'
