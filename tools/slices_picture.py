"""The picture of README.md: one batch, its slices, three modes: `python -m tools.slices_picture`; `--check` compares.

Writes docs/pictures/slices.svg. The shares of slices are not drawn by hand: `SliceDivision` decides them, as in a run.
Start reading at `picture`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from xml.sax.saxutils import escape

from manyhands.data.sample_order import SliceDivision

TARGET = Path(__file__).parents[1] / "docs" / "pictures" / "slices.svg"
NUM_SLICES, NUM_WORKERS = 4, 2
WIDTH, HEIGHT = 880, 490
COLUMN = WIDTH / 3
COLOURS = ("#77aadd", "#99ddff", "#eedd88", "#ee8866")  # told apart without red and green
FRAME, INK, PAPER = "#8a8f98", "#1f2328", "#ffffff"
LAYERS = 4


def shares() -> list[list[int]]:
    """The slices of each worker in a step, as a run with replicas divides them."""
    found = SliceDivision(NUM_WORKERS).shares(NUM_SLICES)
    return [list(one) for one in found]


def text(x: float, y: float, words: str, *, size: int = 14, weight: str = "normal", anchor: str = "middle") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{INK}">{escape(words)}</text>'
    )


def box(x: float, y: float, width: float, height: float, fill: str = PAPER, *, stroke: str = FRAME) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="{stroke}"/>'


def arrow(x1: float, y1: float, x2: float, y2: float, *, both: bool = False) -> str:
    start = ' marker-start="url(#tip)"' if both else ""
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{FRAME}" stroke-width="1.5" '
        f'marker-end="url(#tip)"{start}/>'
    )


def slice_box(x: float, y: float, number: int, size: float = 26) -> list[str]:
    return [box(x, y, size, size, COLOURS[number], stroke=INK), text(x + size / 2, y + size / 2 + 5, str(number))]


def batch() -> list[str]:
    """The global batch across the top, cut into its slices."""
    width = 560.0
    left, top = (WIDTH - width) / 2, 44.0
    drawn = [
        text(
            WIDTH / 2, 28, f"one global batch, {NUM_SLICES} slices: the same in all three modes", weight="bold", size=16
        )
    ]
    part = width / NUM_SLICES
    for number in range(NUM_SLICES):
        drawn += [box(left + number * part, top, part, 40, COLOURS[number], stroke=INK)]
        drawn += [text(left + (number + 0.5) * part, top + 25, f"slice {number}", size=15)]
    drawn += [arrow(WIDTH / 2, top + 44, (mode + 0.5) * COLUMN, 122) for mode in range(3)]
    return drawn


def worker(x: float, y: float, name: str, slices: list[int], layers: range, height: float = 120) -> list[str]:
    """A worker with the layers of the model that it has, and the slices that it computes."""
    drawn = [box(x, y, 116, height + 34), text(x + 58, y + 18, name, size=13)]
    for layer in range(LAYERS):
        mine = layer in layers
        row = y + 28 + layer * 18
        drawn.append(box(x + 10, row, 96, 14, "#d7dbe0" if mine else PAPER, stroke=FRAME if mine else "#e4e7eb"))
        drawn += [text(x + 58, row + 11, f"layer {layer}", size=10)] if mine else []
    for place, number in enumerate(slices):
        drawn += slice_box(x + 58 + (place - len(slices) / 2) * 24 + 1, y + height, number, 22)
    return drawn


def heading(mode: int, name: str, chinese: str) -> list[str]:
    middle = (mode + 0.5) * COLUMN
    return [text(middle, 144, name, weight="bold", size=15), text(middle, 164, chinese, size=14)]


def footing(mode: int, lines: list[str]) -> list[str]:
    return [text((mode + 0.5) * COLUMN, 408 + 20 * row, line, size=13) for row, line in enumerate(lines)]


def replicas() -> list[str]:
    drawn = heading(0, 'strategy="mirrored"', "数据并行 data parallelism")
    for rank, slices in enumerate(shares()):
        drawn += worker(18 + rank * 142, 184, f"worker {rank}", slices, range(LAYERS))
    drawn += [arrow(134, 240, 160, 240, both=True), text(COLUMN / 2, 368, "gradients, summed")]
    return drawn + footing(0, ["all layers on each worker,", "the slices are divided"])


def servers() -> list[str]:
    left = COLUMN
    drawn = heading(1, 'ParameterServer(mode="sync")', "参数服务器 parameter server")
    drawn += [box(left + 66, 176, 160, 40), text(left + 146, 201, "server: weights")]
    for rank, slices in enumerate(shares()):
        x = left + 18 + rank * 142
        drawn += [box(x, 262, 116, 92), text(x + 58, 282, f"worker {rank}", size=13)]
        drawn += [text(x + 58, 302, "computes", size=11)]
        for place, number in enumerate(slices):
            drawn += slice_box(x + 58 + (place - len(slices) / 2) * 24 + 1, 316, number, 22)
        drawn.append(arrow(x + 58, 258, left + 106 + rank * 80, 220, both=True))
    drawn.append(text(left + COLUMN / 2, 378, "gradients up, weights down"))
    return drawn + footing(1, ["weights on the servers,", "slices leased one by one"])


def pipeline() -> list[str]:
    left = 2 * COLUMN
    drawn = heading(2, "mh.PipelineParallel(2)", "流水线并行 pipeline parallelism")
    stages = [range(LAYERS // 2), range(LAYERS // 2, LAYERS)]
    for rank, layers in enumerate(stages):
        drawn += worker(left + 18 + rank * 142, 184, f"worker {rank}", list(range(NUM_SLICES)), layers)
    drawn += [
        arrow(left + 134, 240, left + 160, 240, both=True),
        text(left + COLUMN / 2, 368, "activations, and their gradients"),
    ]
    return drawn + footing(2, ["the layers are divided,", "all slices pass through both"])


def picture() -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="Helvetica, Arial, \'Noto Sans CJK SC\', \'PingFang SC\', \'Microsoft YaHei\', sans-serif">',
        "<title>One batch, its slices, and what three strategies divide</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="{FRAME}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>',
        *batch(), *replicas(), *servers(), *pipeline(),
        text(WIDTH / 2, 470, "gradients are added along one tree over slices: one result for any number of workers"),
        "</svg>",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if the file is another one")
    if parser.parse_args().check:
        return int(not TARGET.is_file() or TARGET.read_text() != picture())
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(picture())
    return 0


if __name__ == "__main__":
    sys.exit(main())
