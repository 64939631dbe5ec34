"""Keras programs that use what ordinary ones do not: loops of single batches, generators, steps of a user's own.

As `keras_programs`: for real ranks, in a scope and as Keras alone runs them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import manyhands as mh
from manyhands.compat.keras import scope
from tests.compat.keras.keras_programs import CLASSES, FEATURES, ROWS, data, outcome, plain
from tests.training.setup.keras_workloads import import_keras

ADAPTED = 60


def single_batches(context: Any) -> dict[str, Any]:
    """A GAN's loop: two models in turn, which share layers that are frozen for one of them; and a frozen model."""
    with context.making() as keras:
        layers, sgd = keras.layers, lambda: keras.optimizers.SGD(0.1, momentum=0.9)
        made = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(FEATURES)])
        judge = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(1, activation="sigmoid")])
        judge.compile(sgd(), "binary_crossentropy")
        inputs = keras.Input((FEATURES,))
        both = keras.Model(inputs, judge(made(inputs)))
        both.compile(sgd(), "binary_crossentropy")
        frozen = plain(keras)
        frozen.trainable = False
    (x, y), losses = data(), []
    for _ in range(3):
        fake = made.predict_on_batch(x[:32])
        targets = np.r_[np.ones((32, 1)), np.zeros((32, 1))]
        judge.trainable = True
        losses.append(float(np.ravel(judge.train_on_batch(np.concatenate([x[:32], fake]), targets))[0]))
        judge.trainable = False
        losses.append(float(np.ravel(both.train_on_batch(x[:32], np.ones((32, 1))))[0]))
        losses.append(float(np.ravel(judge.test_on_batch(x[:32], np.ones((32, 1))))[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras's, that nothing of it is trained
        history = frozen.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
        on_batch = [frozen.train_on_batch(x[:32], y[:32])[0] for _ in range(2)]
    return outcome(both, history, losses=losses, on_batch=on_batch, frozen=[one.sum() for one in frozen.get_weights()])


def generator_in_calls(context: Any) -> dict[str, Any]:
    """One generator in several calls: each continues where the one before has ended."""
    with context.making() as keras:
        model = plain(keras)
    x, y = data()

    def generate() -> Iterator[Any]:
        while True:
            for start in range(0, 200, 40):
                yield x[start : start + 40], y[start : start + 40]

    given, more = generate(), {}
    for number, steps in enumerate((3, 1, 2)):
        history = model.fit(given, steps_per_epoch=steps, epochs=2, verbose=0)
        more |= {f"{number} {name}": values for name, values in history.history.items()}
    more["evaluated"] = model.evaluate(given, steps=3, verbose=0)
    return outcome(model, **more)


def pipelines(context: Any) -> dict[str, Any]:
    """A pipeline of preprocessing, adapted to the data; models in a Sequential; a pipeline inside of a model."""
    x, y = data()
    with context.making() as keras:
        layers = keras.layers
        scaled = layers.Normalization()
        scaled.adapt(x[:ADAPTED])
        before = keras.Sequential([keras.Input((FEATURES,)), scaled, layers.Rescaling(0.5)])
        encoder = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(10, activation="relu")])
        head = keras.Sequential([keras.Input((10,)), layers.Dense(CLASSES, activation="softmax")])
        inside = layers.Pipeline([layers.Rescaling(2.0), layers.Rescaling(0.5, offset=0.1)])
        model = keras.Sequential([keras.Input((FEATURES,)), before, inside, encoder, head])
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0, validation_split=0.2)
    features = encoder.predict(before.predict(x, verbose=0), verbose=0)
    return outcome(model, history, features=features, evaluated=model.evaluate(x, y, verbose=0))


def repeated(context: Any) -> dict[str, Any]:
    """A Dataset that repeats without an end, with steps; Keras alone gets its rows, ten batches of them."""
    with context.making() as keras:
        model = plain(keras)
    x, y = data()
    steps = {"steps_per_epoch": 5, "epochs": 2, "verbose": 0, "validation_steps": 2}
    if context.is_ours:
        given = mh.Dataset.from_tensor_slices((x, y)).repeat().batch(48)
        history = model.fit(given, validation_data=given, **steps)
        return outcome(model, history, evaluated=model.evaluate(given, steps=6, verbose=0))
    order = np.arange(10 * 48) % ROWS
    batches = [(x[order[low : low + 48]], y[order[low : low + 48]]) for low in range(0, len(order), 48)]
    first, six = order[:96], order[:288]
    held_out = {"validation_data": (x[first], y[first]), "validation_batch_size": 48} | {"validation_steps": None}
    history = model.fit(iter_of(batches), **{**steps, **held_out})
    return outcome(model, history, evaluated=model.evaluate(x[six], y[six], batch_size=48, verbose=0))


def iter_of(batches: list[Any]) -> Iterator[Any]:
    yield from batches


def with_processes(context: Any) -> dict[str, Any]:
    """A PyDataset that asks for processes: Keras alone gets the same rows without them, as its fork may hang."""
    with context.making() as keras:
        model = plain(keras)
    x, y = data()

    class Rows(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            rows = slice(index * 30, index * 30 + 30)
            return x[rows], y[rows]

    processes = {"workers": 2, "use_multiprocessing": True} if context.is_ours else {}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        history = model.fit(Rows(**processes), epochs=2, shuffle=False, verbose=0)
    assert not context.is_ours or any("threads read it instead" in str(one.message) for one in warned)
    return outcome(model, history)


PROGRAMS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "generator_in_calls": generator_in_calls,
    "pipelines": pipelines,
    "repeated": repeated,
    "single_batches": single_batches,
    "with_processes": with_processes,
}


# ---- what is refused ----


def sequential(keras: Any, kind: Any = None, **compiled: Any) -> Any:
    model = (kind or keras.Sequential)([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES, activation="softmax")])
    model.compile(**{"optimizer": "sgd", "loss": "sparse_categorical_crossentropy", **compiled})
    return model


def fit(model: Any, callbacks: Any = (), batch_size: int = 32, **arguments: Any) -> None:
    x, y = data()
    model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0, callbacks=list(callbacks), **arguments)


def _several_steps(call: str) -> Callable[[Any], None]:
    def run(keras: Any) -> None:
        x, y = data()
        model = sequential(keras, steps_per_execution=4)
        fit(model) if call == "fit" else getattr(model, call)(x, **({"y": y} if call == "evaluate" else {}), verbose=0)

    return run


def _own_train_step(keras: Any) -> None:
    model = sequential(keras)
    inherited = model.train_step
    model.train_step = lambda batch: inherited(batch)
    fit(model)


def _callback_with(attribute: str) -> Callable[[Any], None]:
    """The usual way to outputs of training batches: a callback that puts a step around the model's."""

    def run(keras: Any) -> None:
        class Outputs(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                inherited = getattr(self.model, attribute)
                setattr(self.model, attribute, lambda batch: inherited(batch))

        fit(sequential(keras), [Outputs()])

    return run


def _own_function(keras: Any) -> None:
    class Own(keras.Sequential):
        def make_train_function(self, force: bool = False) -> Any:
            return super().make_train_function(force)

    fit(sequential(keras, Own))


def _own_test_logs(keras: Any) -> None:
    class Own(keras.Sequential):
        def test_step(self, batch: Any) -> Any:
            return super().test_step(batch) | {"mine": 7.0}

    fit(sequential(keras, Own), validation_data=data())


def _mean_prediction(keras: Any) -> None:
    class Own(keras.Sequential):
        def predict_step(self, batch: Any) -> Any:
            return super().predict_step(batch).mean(0)[None].expand(5, -1)

    sequential(keras, Own).predict(data()[0], verbose=0)


def _sum(keras: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(reduction="sum")


def _weights_that_differ_later(keras: Any) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")
    weights = np.ones(ROWS, "float32")
    weights[100:] = np.linspace(0, 5, ROWS - 100)
    fit(sequential(keras, loss=loss), sample_weight=weights)


def _loss_of_some_rows(keras: Any) -> None:
    """A mean over the rows with a target above 0: all of the first batches, some of the later ones."""

    def loss(y: Any, outputs: Any) -> Any:
        counted = keras.ops.cast(y > 0, "float32")
        losses = keras.losses.sparse_categorical_crossentropy(y, outputs)
        return keras.ops.sum(losses * counted) / keras.ops.maximum(keras.ops.sum(counted), 1.0)

    x, y = data()
    y[:64] = 1
    model = sequential(keras, loss=loss)
    model.fit(x, y, batch_size=32, shuffle=False, verbose=0)


def _step_in_a_step(keras: Any) -> None:
    class Inside(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            x, y = data()
            self.model.train_on_batch(x, y)

    fit(sequential(keras), [Inside()])


def _evaluated_sum(keras: Any) -> None:
    x, y = data()
    sequential(keras, loss=_sum(keras)).evaluate(x, y, batch_size=2, verbose=0)


REFUSED: dict[str, Callable[[Any], None]] = {
    "several steps in fit": _several_steps("fit"),
    "several steps in evaluate": _several_steps("evaluate"),
    "several steps in predict": _several_steps("predict"),
    "own train step": _own_train_step,
    "callback with a train step": _callback_with("train_step"),
    "callback with a train function": _callback_with("train_function"),
    "own function": _own_function,
    "own test logs": _own_test_logs,
    "prediction of a batch": _mean_prediction,
    "sum over slices of one row": lambda keras: fit(sequential(keras, loss=_sum(keras)), batch_size=2),
    "weights that differ later": _weights_that_differ_later,
    "loss of some rows": _loss_of_some_rows,
    "evaluated sum": _evaluated_sum,
    "step in a step": _step_in_a_step,
}


def said_by(run: Callable[[], None]) -> str:
    try:
        run()
    except mh.ManyhandsError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def refused(case: str) -> str:
    """The error of a program that cannot work, or "trained"."""
    keras = import_keras()
    with scope(mh.Single(), slices=2):
        return said_by(lambda: REFUSED[case](keras))


def other_batches(case: str) -> str:
    """The error for a generator that is not the same on every worker."""
    keras = import_keras()
    here = scope(seed=0)
    with here:
        model = sequential(keras)
    (x, y), rank = data(), here.hands.rank
    random = np.random.default_rng(rank)  # as one without a seed

    def generate(batches: int = 6, *, shuffled: bool = False) -> Iterator[Any]:
        for _ in range(batches):
            rows = random.permutation(ROWS)[:20] if shuffled else np.arange(20)
            yield x[rows], y[rows]

    cases: dict[str, Callable[[], Any]] = {
        "unseeded": lambda: model.fit(generate(shuffled=True), verbose=0),
        "ends in validation": lambda: model.fit(x, y, validation_data=generate(4 + rank), verbose=0),
        "ends in evaluate": lambda: model.evaluate(generate(4 + rank), verbose=0),
        "ends in predict": lambda: model.predict(generate(4 + rank), verbose=0),
        "unseeded in evaluate": lambda: model.evaluate(generate(shuffled=True), verbose=0),
    }
    return said_by(cases[case])


def own_state() -> tuple[list[float], list[float], list[str]]:
    """A running mean that a layer assigns: its values, those of slice 0 by hand, and what was said about it."""
    keras = import_keras()

    class Running(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.mean = self.add_weight(name="mean", shape=(shape[-1],), initializer="zeros", trainable=False)

        def call(self, inputs: Any, training: bool = False) -> Any:
            if training:
                self.mean.assign(self.mean * 0.9 + 0.1 * keras.ops.mean(inputs, axis=0))
            return inputs - self.mean

    here = scope(seed=0, slices=4)
    with here:
        model = keras.Sequential([keras.Input((FEATURES,)), Running(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    warned: list[str] = []
    here.hands._worker.events.warn = warned.append  # type: ignore[method-assign]
    x, _ = data(160)
    model.fit(x, x[:, :1], batch_size=32, epochs=2, shuffle=False, verbose=0)
    wanted = np.zeros(FEATURES, "float32")
    for start in [*range(0, 160, 32)] * 2:
        wanted = wanted * 0.9 + 0.1 * x[start : start + 8].mean(0)
    return np.array(model.layers[0].mean).tolist(), wanted.tolist(), [one for one in warned if "assigns" in one]


def summaries_of_batches(folder: str) -> dict[str, list[int]]:
    """The steps of TensorBoard's points with update_freq=4 and six batches in an epoch."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    keras = import_keras()
    here = scope(seed=0)
    with here:
        model = sequential(keras)
    board = keras.callbacks.TensorBoard(folder, update_freq=4, write_steps_per_second=True)
    x, y = data(192)
    model.fit(x, y, batch_size=32, epochs=3, verbose=0, callbacks=[board])
    if not here.hands.is_chief:
        return {}
    found = EventAccumulator(f"{folder}/train")
    found.Reload()
    return {tag: [one.step for one in found.Scalars(tag)] for tag in ("batch_loss", "batch_steps_per_second")}


def unsaved_attributes() -> list[str]:
    """What is said at the start about attributes that checkpoints cannot have."""
    keras = import_keras()
    here = scope(mh.Single(), slices=1)
    with here:
        model = sequential(keras)

    class Holds(keras.callbacks.Callback):
        def __init__(self, *, chief_only: bool) -> None:
            super().__init__()
            self.chief_only, self.stream, self.rule = chief_only, torch.Generator(), Rule()

    warned: list[str] = []
    here.hands._worker.events.warn = warned.append  # type: ignore[method-assign]
    fit(model, [Holds(chief_only=True), Holds(chief_only=False)])
    return [one for one in warned if one.startswith("Holds")]


class Rule:
    """An object that can be called, and has a state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
