"""Weights that layers assign while they are called in training: running means, codebooks, counters.

Each slice starts with the values of the step, and after it they are those that slice 0 gave them, so what is computed
from the rows of a batch depends on the number of slices. BatchNorm's statistics are replayed in slice order. Start
reading at `ForwardState`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

__all__ = ["ForwardState"]

ROWS_DO_NOT_MATTER = (keras.layers.BatchNormalization, keras.layers.SpectralNormalization)
"""The statistics of the first are replayed; what the second assigns is a function of weights."""


class ForwardState:
    """Names such weights, the first time that one is assigned."""

    def __init__(self, model: Any) -> None:
        layers = [one for one in model._flatten_layers() if isinstance(one, ROWS_DO_NOT_MATTER)]
        known = {id(one) for layer in layers for one in layer.non_trainable_weights}
        self._watched = [one for one in model.non_trainable_weights if id(one) not in known]

    @contextmanager
    def watching(self, num_slices: int, warn: Callable[[str], None]) -> Iterator[None]:
        before = [one.value._version for one in self._watched]
        yield
        changed = [one for one, was in zip(self._watched, before, strict=True) if one.value._version != was]
        if changed:
            self._watched = []
            names = ", ".join(repr(one.path) for one in changed[:3])
            warn(
                f"A layer assigns {names} while it is called in training. Each of the {num_slices} slices of a batch "
                "starts with the value of the step, and the value from slice 0 is kept: what is computed from rows "
                f"depends on the number of slices. Set slices={num_slices} for the same result on any number of "
                "workers, or slices=1 and one worker for that of Keras alone."
            )
