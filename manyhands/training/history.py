"""What `fit` returns, and how it is displayed at a prompt and in a notebook: as a small table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["History", "html_table"]

# A long history shows only its first and last rows.
FIRST, LAST = 3, 12


class History(list[dict[str, float]]):
    """A list with one dict for each epoch or validation: epoch, step, loss (the mean training loss since the row
    before), lr (of the last step), val_... for results of validation, and with `train_metrics` those by their names.

    `epoch` counts from 0, like all numbers in the Python interface; printed lines count from 1: "epoch 1 done" is the
    row with epoch 0.
    """

    def __repr__(self) -> str:
        if not self:
            return "History: no rows"
        return "\n".join(["  ".join(cells).rstrip() for cells in _aligned(_table(self))])

    def _repr_html_(self) -> str:
        if not self:
            return "<p>History: no rows</p>"
        head, *rows = _table(self)
        return html_table([[("th", cell) for cell in head], *([("td", cell) for cell in row] for row in rows)])


def html_table(rows: Sequence[Sequence[tuple[str, str]]]) -> str:
    """An HTML table of cells, each with its tag, "th" or "td"; their text is escaped."""
    shown = ["".join(f"<{tag}>{escape(cell)}</{tag}>" for tag, cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in shown)}</table>"


def _table(rows: Sequence[Mapping[str, float]]) -> list[list[str]]:
    """The header and the rows; a cell is empty if its row has no such value."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(name, row.get(name)) for name in names] for row in rows]
    if len(cells) > FIRST + LAST + 1:
        left_out = len(cells) - FIRST - LAST
        cells = [*cells[:FIRST], [f"({left_out} more)", *[""] * (len(names) - 1)], *cells[-LAST:]]
    return [names, *cells]


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return str(int(value)) if name in ("epoch", "step") else f"{value:.4g}"


def _aligned(table: list[list[str]]) -> list[list[str]]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in table]
