"""Small Keras programs on parameter servers: `CASE OUT`. Each writes what it found to OUT.RANK, as JSON."""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np

import manyhands as mh
from manyhands.distribute import ParameterServerStrategy

case, out = sys.argv[1], sys.argv[2]
alone = out == "alone"
rng = np.random.default_rng(0)
x, y = rng.normal(size=(96, 4)).astype("float32"), rng.normal(size=(96, 1)).astype("float32")
MODES = {
    **dict.fromkeys(("steps per epoch", "schedule", "again", "changes after epochs"), "sync"),
    # These stop in the middle: the record of an asynchronous run would lack the batches of the other worker.
    **dict.fromkeys(("weights after a batch", "get_weights after a batch"), "sync"),
}
strategy: Any = None if alone else ParameterServerStrategy(workers=2, servers=1, mode=MODES.get(case, "async"))


def made(optimizer: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def in_scope(optimizer: Any) -> Any:
    if alone:
        return made(optimizer)
    with strategy.scope():
        return made(optimizer)


class Calls(keras.callbacks.Callback):
    def __init__(self, **calls: Any) -> None:
        super().__init__()
        self.calls = calls

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.get("batch", lambda *_: None)(self.model, batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.get("epoch", lambda *_: None)(self.model, epoch)


def found() -> dict[str, Any]:
    common = {"batch_size": 16, "shuffle": False, "verbose": 0}
    if case == "steps per epoch":  # as programs for TensorFlow's parameter servers do
        model = in_scope(keras.optimizers.Adam(0.05))
        history = model.fit(x, y, epochs=3, steps_per_epoch=4, **common)
    elif case == "schedule":
        model = in_scope(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.2, 2, 0.5), momentum=0.9))
        history = model.fit(x, y, epochs=3, validation_data=(x[:20], y[:20]), **common)
    elif case == "again":  # the optimizer's state goes on, and into the file
        model = in_scope("adam")
        model.fit(x, y, epochs=2, **common)
        model.save(f"{out}.keras")
        states = []
        if alone or strategy.hands.is_chief:
            saved = keras.saving.load_model(f"{out}.keras").optimizer.variables
            states = [float(np.abs(one).sum()) for one in saved]
        model.layers[-1].bias.assign([0.25])
        history = model.fit(x, y, epochs=1, **common)
    elif case == "changes after epochs":  # changed after an epoch: it counts from the next update on

        def slower(model: Any, epoch: int) -> None:
            model.optimizer.learning_rate = 0.01 / (epoch + 1)
            model.layers[0].kernel.assign(model.layers[0].kernel * 0.5)

        model = in_scope(keras.optimizers.RMSprop(0.05))
        history = model.fit(x, y, epochs=3, callbacks=[Calls(epoch=slower)], **common)
    elif case == "stop":

        def stop(model: Any, batch: int) -> None:
            if batch == 2 and strategy.hands.is_chief:
                model.stop_training = True

        model = in_scope("sgd")
        history = model.fit(x, y, epochs=50, callbacks=[Calls(batch=stop)], **common)
    else:
        model = in_scope("sgd")
        changes = {
            "weights after a batch": {"batch": lambda model, _: model.layers[0].kernel.assign_add(np.ones((4, 6)))},
            "get_weights after a batch": {"batch": lambda model, _: model.get_weights()},
        }
        try:
            if case == "single batches":
                model.train_on_batch(x[:16], y[:16])
            else:
                model.fit(x, y, callbacks=[Calls(**changes[case])], **common)
        except mh.ManyhandsError as error:
            return {"error": str(error)}
        return {"error": ""}
    weights = [np.asarray(one).tolist() for one in model.get_weights()]
    return {
        "history": history.history,
        "epochs": history.epoch,
        "weights": weights,
        "iterations": int(model.optimizer.iterations),
        "saved": states if case == "again" else [],
        "evaluated": model.evaluate(x, y, verbose=0),
    }


result = found()
Path(f"{out}.{0 if alone else strategy.hands.rank}").write_text(json.dumps(result))
