"""Keras's fit on the 10 M MLP, a side that takes turns: `python -m bench.replicas.keras_side scope|keras ROWS THREADS`.

"scope" trains under `mh run` with the model made in a scope; "keras" is Keras alone. ROWS is the global batch,
0 threads are all cores. Blocks begin and end in a callback, after a batch, as a user's callback would see them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from time import perf_counter
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch

from bench.driver.turns import SETTLING_STEPS, Turns

WIDTHS = (2048, 2048, 2048)
STEPS = 10**6


class Turn(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Blocks until this side's turn, after every block; the last turn ends the training."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._turns: Turns | None = None
        self._step, self._steps, self._started = 0, 0, 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._turns is None:
            os.environ.setdefault("RANK", str(self._rank))
            self._turns = Turns(threads=torch.get_num_threads(), versions={"keras": keras.__version__})
            self._wait()
            return
        self._step += 1
        if self._step == SETTLING_STEPS:
            self._started = perf_counter()
        if self._step == SETTLING_STEPS + self._steps:
            self._turns.done((perf_counter() - self._started) / self._steps)
            self._wait()

    def _wait(self) -> None:
        assert self._turns is not None
        self._step, self._steps = 0, self._turns.wait()
        self.model.stop_training = self._steps == 0


def main() -> None:
    kind, rows, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    here: Any = contextlib.nullcontext()
    rank = 0
    if kind == "scope":
        from manyhands.compat.keras import scope

        here = scope()
    elif threads:
        torch.set_num_threads(threads)
    with here:
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(width, activation="relu") for width in WIDTHS]
        model = keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.001, momentum=0.9), loss, metrics=["accuracy"])
    if kind == "scope":
        rank = here.hands.rank
    random = np.random.default_rng(0)
    x, y = random.normal(size=(64 * rows, 784)).astype("float32"), random.integers(0, 10, 64 * rows)
    model.fit(x, y, batch_size=rows, epochs=STEPS, shuffle=False, verbose=0, callbacks=[Turn(rank)])


if __name__ == "__main__":
    main()
