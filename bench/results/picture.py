"""One picture of all results: a bar per row, relative to its target. Plain SVG, without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

from bench.results.report import outcome, wish
from bench.results.table import Target

__all__ = ["achieved", "draw"]

LINE, TOP, LEFT, WIDTH, RIGHT = 26, 48, 400, 420, 430
MOST = 2.0
"""Longer bars are cut off here, and end in an arrow."""
MET, MISSED, DOUBT = "#2a7f4f", "#b5482f", "#9a9a9a"


def draw(results: Sequence[dict[str, Any]]) -> str:
    """Rows that were not measured are left out, and so are targets of `points`, for which a bar has no meaning."""
    rows = [result for result in results if "value" in result and result["of"] != "points"]
    height = TOP + LINE * len(rows) + 16
    target_x = LEFT + WIDTH / MOST
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + RIGHT} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{LEFT + WIDTH + RIGHT}" height="{height}" fill="white"/>',
        f'<text x="{target_x}" y="20" text-anchor="middle">target</text>',
        f'<text x="{LEFT}" y="36" fill="#666">worse</text>',
        f'<text x="{LEFT + WIDTH}" y="36" text-anchor="end" fill="#666">better</text>',
        *(part for i, row in enumerate(rows) for part in _bar(row, TOP + LINE * i)),
        f'<line x1="{target_x}" y1="26" x2="{target_x}" y2="{height - 8}" stroke="black" stroke-dasharray="4 3"/>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def achieved(result: dict[str, Any], end: str = "middle") -> float:
    """The result relative to its target: 1 is just reached, 2 is twice as good."""
    value, limit = float(result["value"][end]), float(result["limit"])
    return value / limit if result["of"] in ("speed", "share") else limit / value


def _bar(result: dict[str, Any], y: int) -> list[str]:
    length = _x(achieved(result))
    ends = sorted(_x(achieved(result, end)) for end in ("low", "high"))
    colour = MET if result["met"] else MISSED
    middle = y + LINE / 2 - 4
    arrow = " →" if achieved(result) > MOST else ""
    said = f"{result['value']['middle']:.2f}: {wish(Target(result['of'], result['target']))}: {outcome(result)}{arrow}"
    return [
        f'<text x="{LEFT - 8}" y="{middle + 4}" text-anchor="end">{escape(_name(result))}</text>',
        f'<rect x="{LEFT}" y="{y}" width="{length - LEFT:.1f}" height="{LINE - 8}" fill="{colour}"/>',
        f'<line x1="{ends[0]:.1f}" y1="{middle}" x2="{ends[1]:.1f}" y2="{middle}" stroke="{DOUBT}" stroke-width="3"/>',
        f'<text x="{LEFT + WIDTH + 8}" y="{middle + 4}">{escape(said)}</text>',
    ]


def _x(share: float) -> float:
    return LEFT + WIDTH * min(share, MOST) / MOST


def _name(result: dict[str, Any]) -> str:
    return f"{result['what']} / {result['against']}"
