"""Which checkpoints may be removed. Pure; `writer` removes them, after the newest one has verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from manyhands.spec.run import best_result

__all__ = ["Best", "expendable", "parse_best"]


class Best(NamedTuple):
    """The result by which one checkpoint is kept in addition to the last few."""

    result: str
    largest: bool

    def is_better(self, value: float, than: float | None) -> bool:
        return than is None or (value > than if self.largest else value < than)

    def pick(self, results: Sequence[Mapping[str, float]]) -> int | None:
        """The index of the best, the first of equals. None if none has the result."""
        sign = -1.0 if self.largest else 1.0
        ranked = [(sign * found[self.result], index) for index, found in enumerate(results) if self.result in found]
        return min(ranked)[1] if ranked else None


def parse_best(text: str | None) -> Best | None:
    """ "loss", "val_loss" -> smallest; "accuracy" -> largest; any other result as "min:NAME" or "max:NAME"."""
    found = best_result(text)
    return Best(*found) if found is not None else None


def expendable(
    results: Sequence[Mapping[str, float]], keep_last: int, best: Best | None, trusted: Sequence[bool] = ()
) -> list[int]:
    """Indices that may be removed, given each checkpoint's results, newest first. Never 0, the newest.

    Also never the newest of the `trusted` ones: if later ones turn out to be wrong, a run continues from it.
    """
    kept = set(range(max(1, min(keep_last, len(results)))))
    if True in trusted:
        kept.add(list(trusted).index(True))
    if best is not None and (index := best.pick(results)) is not None:
        kept.add(index)
    return [index for index in range(len(results)) if index not in kept]
