"""A program with Keras's own fit and the callbacks of an ordinary one: `OUT MODE [KILL [STRATEGY]]`.

MODE is "keras" for Keras alone, or the number of workers that it asks for, 0 for the launcher's. With KILL, the worker
of that rank kills itself once, in the middle of the third batch of the second epoch; "all" ends every worker there,
"server" the parameter server, and "" none. STRATEGY is Python code; under servers that lease slices the logs of single
batches are not compared.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np

import manyhands as mh
from manyhands.compat.keras import scope

out, mode, kill = sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else ""
strategy = sys.argv[4] if len(sys.argv) > 4 else "mh.Mirrored(workers=workers)"
here: Any = contextlib.nullcontext()
if mode != "keras":
    saving = mh.Checkpoints(every_steps=4) if kill == "all" else None
    chosen = eval(strategy, {"mh": mh, "workers": int(mode) or None})
    slices = {} if getattr(chosen, "mode", "") == "async" else {"slices": 4}
    here = scope(chosen, checkpoint=saving, **slices)

WORKERS = 3
rng = np.random.default_rng(0)
x, y = rng.normal(size=(203, 8)).astype("float32"), rng.integers(0, 3, 203)


def end_server_on_request(asked: Path, ended: Path) -> None:
    """In the server's process: it kills itself once, when the chief asks for it."""
    while not asked.exists():
        time.sleep(0.005)
    with contextlib.suppress(FileExistsError):
        ended.touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)


class Seen(keras.callbacks.Callback):
    """Its attributes say which calls it got, over all attempts and workers."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.epoch_losses: list[float] = []
        self.calls = 0
        self.best = {"loss": np.inf}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.calls += 1
        if kill and Path(f"{out}.killed{kill}").exists() and here.hands.world_size < WORKERS:
            time.sleep(1.0)  # the replacement imports Keras first
        if kill == "server" and self.epoch == 1 and batch == 2 and here.hands.is_chief:
            Path(f"{out}.end-server").touch()
        if kill and self.epoch == 1 and batch == 2 and kill in ("all", str(here.hands.rank)):
            with contextlib.suppress(FileExistsError):
                Path(f"{out}.killed{here.hands.rank}").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(logs["loss"])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epoch_losses += [logs["loss"], logs["accuracy"], logs["val_loss"]]
        self.best["loss"] = min(self.best["loss"], logs["loss"])


class Count(keras.metrics.Metric):
    """The examples of an epoch."""

    def __init__(self) -> None:
        super().__init__(name="examples")
        self.total = self.add_variable((), "zeros")

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(float(len(outputs)))

    def result(self) -> Any:
        return self.total + 0.0


with here:
    if kill == "server" and here.hands._worker.is_server:
        threading.Thread(
            target=end_server_on_request, args=(Path(f"{out}.end-server"), Path(f"{out}.ended")), daemon=True
        ).start()
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3, activation="softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy", Count()])
seen, stopper = Seen(), keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True)
history = model.fit(
    x,
    y,
    batch_size=32,
    epochs=5,
    shuffle=False,
    verbose=2,
    validation_split=0.2,
    callbacks=[
        seen,
        stopper,
        keras.callbacks.CSVLogger(f"{out}.csv"),
        keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=0.02),
        keras.callbacks.ModelCheckpoint(f"{out}.best.keras", monitor="loss", save_best_only=True),
    ],
)
evaluated = model.evaluate(x, y, verbose=0)
model.save(f"{out}.last.keras")
found = {
    "history": history.history,
    "epoch": history.epoch,
    "losses": seen.losses,
    "epoch losses": seen.epoch_losses,
    "calls": seen.calls,
    "best": seen.best["loss"],
    "wait": stopper.wait,
    "evaluated": evaluated,
    "weights": np.concatenate([one.ravel() for one in model.get_weights()]).tolist(),
}
Path(out if mode == "keras" else f"{out}.{here.hands.rank}").write_text(json.dumps(found))
