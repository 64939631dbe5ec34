"""Which checkpoints may go. Pure: a list in, a list out; `writer` removes them, after the newest one has verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from manyhands.errors import SpecError

__all__ = ["Best", "expendable", "parse_best"]


class Best(NamedTuple):
    """The result by which one checkpoint is kept beyond the last few."""

    result: str
    largest: bool

    def is_better(self, value: float, than: float | None) -> bool:
        return than is None or (value > than if self.largest else value < than)

    def pick(self, results: Sequence[Mapping[str, float]]) -> int | None:
        """The index of the best; of equals the first. None if none has the result."""
        sign = -1.0 if self.largest else 1.0
        ranked = [(sign * found[self.result], index) for index, found in enumerate(results) if self.result in found]
        return min(ranked)[1] if ranked else None


_SMALLEST, _LARGEST = ("loss", "error", "perplexity"), ("accuracy",)


def parse_best(text: str | None) -> Best | None:
    """ "loss", "val_loss" -> smallest; "accuracy" -> largest; any other result as "min:NAME" or "max:NAME"."""
    if text is None:
        return None
    direction, colon, name = text.partition(":")
    if colon and name and direction in ("min", "max"):
        return Best(name, largest=direction == "max")
    if not colon and text.endswith(_SMALLEST + _LARGEST):
        return Best(text, largest=text.endswith(_LARGEST))
    raise SpecError(
        f'[checkpoint] keep_best is "{text}", which does not say whether small or large is good.',
        fix=[f'keep_best = "min:{name or text}"', f'keep_best = "max:{name or text}"'],
    )


def expendable(
    results: Sequence[Mapping[str, float]], keep_last: int, best: Best | None, trusted: Sequence[bool] = ()
) -> list[int]:
    """Indices that may be removed, given each checkpoint's results, newest first. Never 0, the newest.

    Nor the newest of those that are `trusted`: should later ones turn out to be wrong, it is where a run goes on.
    """
    kept = set(range(max(1, keep_last)))
    if True in trusted:
        kept.add(list(trusted).index(True))
    if best is not None and (index := best.pick(results)) is not None:
        kept.add(index)
    return [index for index in range(len(results)) if index not in kept]
