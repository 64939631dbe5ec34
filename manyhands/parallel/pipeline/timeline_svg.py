"""A pipeline's step as an SVG image: theory above, measurement below. Needs no plotting library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from manyhands.parallel.pipeline.timeline import Timeline

__all__ = ["picture"]

ROW, GAP, LEFT, WIDTH, TOP = 24, 40, 70, 1000, 30
COLOURS = {"F": "#4c78a8", "B": "#f2a34b", "W": "#b8cbb0"}


def picture(timelines: Sequence[tuple[str, Timeline]]) -> str:
    """Each timeline under its title, scaled to the full width."""
    rows = sum(len(timeline.spans) for _, timeline in timelines)
    height = TOP + rows * ROW + len(timelines) * GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{LEFT + WIDTH + 20}" height="{height}" fill="white"/>',
    ]
    top = TOP
    for title, timeline in timelines:
        lines.append(f'<text x="{LEFT}" y="{top - 8}" font-size="13">{escape(title)}</text>')
        lines += _rows(timeline, top)
        top += len(timeline.spans) * ROW + GAP
    return "\n".join([*lines, "</svg>"]) + "\n"


def _rows(timeline: Timeline, top: int) -> Iterator[str]:
    scale = WIDTH / timeline.makespan if timeline.makespan else 0.0
    for rank, row in enumerate(timeline.spans):
        y = top + rank * ROW
        yield f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">stage {rank}</text>'
        for span in row:
            x, width = LEFT + span.start * scale, max(1.0, (span.stop - span.start) * scale)
            yield f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 4}" fill="{COLOURS[span.op.kind]}"/>'
            if width > 22:
                yield f'<text x="{x + 3:.1f}" y="{y + 15}" fill="white">{escape(str(span.op))}</text>'
