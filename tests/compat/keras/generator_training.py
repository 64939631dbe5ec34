"""Two calls of Keras's fit on one generator, with a generator to validate on: `OUT MODE [KILL]`.

MODE is "keras" for Keras alone, else "ours". With KILL, the worker of rank 1 kills itself once, in the second call.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np

from manyhands.compat.keras import scope

out, mode, kill = sys.argv[1], sys.argv[2], len(sys.argv) > 3
here: Any = contextlib.nullcontext() if mode == "keras" else scope(seed=0, slices=2)
WORKERS = 2
rng = np.random.default_rng(0)
x, y = rng.normal(size=(96, 4)).astype("float32"), rng.normal(size=(96, 1)).astype("float32")


def batches(rows: int) -> Iterator[Any]:
    """Shuffled by a generator of its own, which has a seed."""
    random = np.random.default_rng(rows)
    while True:
        order = random.permutation(96)
        for low in range(0, 96, rows):
            yield x[order[low : low + rows]], y[order[low : low + rows]]


class Kill(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        killed = Path(f"{out}.killed")
        if killed.exists() and here.hands.world_size < WORKERS:
            time.sleep(1.0)  # the replacement imports Keras first
        if batch == 2 and int(self.model.optimizer.iterations) > 16 and here.hands.rank == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


with here:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
training, held_out, results = batches(16), batches(12), {}
for call, epochs in (("first", 2), ("second", 4)):
    history = model.fit(
        training,
        epochs=epochs,
        steps_per_epoch=5,
        validation_data=held_out,
        validation_steps=3,
        verbose=0,
        callbacks=[Kill()] if kill and call == "second" else [],
    )
    results |= {f"{call} {name}": values for name, values in history.history.items()}
results["weights"] = [float(value) for one in model.get_weights() for value in one.ravel()]
Path(out if mode == "keras" else f"{out}.{here.hands.rank}").write_text(json.dumps(results))
