"""What `fit` returns, and how it shows: as a small table, at a prompt and in a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["History"]

# Of a long one the first rows and the last are shown.
FIRST, LAST = 3, 12


class History(list[dict[str, float]]):
    """A list with one dict for each epoch or validation: epoch, step, loss (the mean training loss since the row
    before), lr (of the last step), val_... for what validation found, and with `train_metrics` those by their names.
    """

    def __repr__(self) -> str:
        if not self:
            return "History: no rows"
        return "\n".join(["  ".join(cells).rstrip() for cells in _aligned(_table(self))])

    def _repr_html_(self) -> str:
        if not self:
            return "<p>History: no rows</p>"
        head, *rows = _table(self)
        parts = [_html_row(head, "th"), *(_html_row(row, "td") for row in rows)]
        return f"<table>{''.join(parts)}</table>"


def _table(rows: Sequence[Mapping[str, float]]) -> list[list[str]]:
    """Heads and cells; what a row lacks is empty."""
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


def _html_row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
