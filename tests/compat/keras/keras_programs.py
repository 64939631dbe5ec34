"""Keras programs for real ranks: each runs in a scope, and as Keras alone runs it. Keras is imported inside."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import manyhands as mh
from manyhands.compat.keras import scope
from tests.training.setup.keras_workloads import import_keras

ROWS, FEATURES, CLASSES = 203, 8, 3
Made = Callable[[Any], Any]


def data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, FEATURES)).astype("float32")
    return x, (x[:, 0] > 0).astype("int64") + (x[:, 1] > 0.5).astype("int64")


def plain(keras: Any, **compiled: Any) -> Any:
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(16, activation="relu", kernel_regularizer="l2"),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )
    model.compile(
        **{"optimizer": "adam", "loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"], **compiled}
    )
    return model


def both(program: Callable[[Any], dict[str, Any]], **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The program's results in a scope, and of Keras alone, in this process. It gets a context to make models in."""
    keras = import_keras()
    found = []
    for here in (scope(**{"seed": 0, **settings}), contextlib.nullcontext()):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        found.append(program(_Context(keras, here)))
    return found[0], found[1]


class _Context:
    """`with context as keras:` seeds and opens the scope, if it is one."""

    def __init__(self, keras: Any, inner: Any) -> None:
        self.keras, self.inner = keras, inner
        self.no_grad = torch.no_grad
        self.is_ours = not isinstance(inner, contextlib.nullcontext)

    @contextlib.contextmanager
    def making(self) -> Iterator[Any]:
        with self.inner:
            self.keras.utils.set_random_seed(1)
            yield self.keras


def outcome(model: Any, history: Any = None, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {f"weight {i}": np.array(one) for i, one in enumerate(model.get_weights())}
    if history is not None:
        found |= {f"history {name}": np.array(values) for name, values in history.history.items()}
        found["epochs"] = np.array(history.epoch)
    return found | {name: np.array(value) for name, value in more.items()}


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    assert ours.keys() == theirs.keys(), set(ours) ^ set(theirs)
    assert all(ours[name].shape == theirs[name].shape for name in ours), ours
    return {name: float(np.abs(ours[name] - theirs[name]).max(initial=0.0)) for name in ours}


def compared(name: str, settings: dict[str, Any] | None = None) -> tuple[float, dict[str, Any]]:
    """The largest difference between ours and Keras's, and our results."""
    ours, theirs = both(PROGRAMS[name], **(settings or {}))
    found = differences(ours, theirs)
    worst = max(found, key=lambda key: found[key])
    assert found[worst] < 1e-5, (worst, found)
    return found[worst], ours


def arrays(context: Any) -> dict[str, Any]:
    """fit, evaluate, predict and train_on_batch, a second fit, with a short last batch."""
    with context.making() as keras:
        model = plain(
            keras,
            metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(k=2)],
            weighted_metrics=["accuracy"],
        )
    x, y = data()
    history = model.fit(
        x,
        y,
        batch_size=32,
        epochs=3,
        shuffle=False,
        verbose=0,
        validation_split=0.2,
        class_weight={0: 1.0, 1: 2.0, 2: 0.5},
    )
    evaluated = model.evaluate(x, y, batch_size=50, verbose=0)
    predicted = model.predict(x, batch_size=64, verbose=0)
    on_batch = model.train_on_batch(x[:20], y[:20])
    again = model.fit(x, y, batch_size=32, epochs=3, initial_epoch=1, steps_per_epoch=3, shuffle=False, verbose=0)
    again = {f"again {name}": values for name, values in again.history.items()}
    return outcome(model, history, evaluated=evaluated, predicted=predicted, on_batch=on_batch, **again)


def callbacks(context: Any) -> dict[str, Any]:
    """The calls that a callback of the user gets, and what Keras's own do."""
    with context.making() as keras:
        model = plain(keras, optimizer=keras.optimizers.SGD(0.5))
    x, y = data()
    called: list[str] = []
    logged: list[float] = []

    class Watch(keras.callbacks.Callback):
        pass

    def watcher(name: str) -> Callable[..., None]:
        def note(self: Any, *args: Any, logs: Any = None) -> None:
            logs = logs or (args[-1] if args and isinstance(args[-1], dict) else {})
            called.append(f"{name} {[one for one in args if isinstance(one, int)]} {sorted(logs or {})}")
            logged.extend(float(value) for _, value in sorted((logs or {}).items()) if np.ndim(value) == 0)
            if name == "on_epoch_end":
                logged.extend(self.model.predict(x[:3], verbose=0).ravel())
                logged.extend(self.model.evaluate(x[:9], y[:9], verbose=0))

        return note

    for name in [one for one in dir(keras.callbacks.Callback) if one.startswith("on_") and "predict" not in one]:
        if name not in ("on_batch_begin", "on_batch_end"):
            setattr(Watch, name, watcher(name))
    history = model.fit(
        x,
        y,
        batch_size=40,
        epochs=12,
        shuffle=False,
        verbose=0,
        validation_data=(x[:50], y[:50]),
        validation_freq=2,
        callbacks=[
            Watch(),
            keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True, start_from_epoch=2),
            keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=0.05),
            keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr * 0.9),
        ],
    )
    return outcome(model, history, logged=logged, called=[hash_of(one) for one in called])


def hash_of(text: str) -> int:
    return sum(ord(letter) * (place + 1) for place, letter in enumerate(text))


def streams(context: Any) -> dict[str, Any]:
    """A PyDataset with weights, a generator with steps, a DataLoader; tensors with sample weights."""
    with context.making() as keras:
        model = plain(keras)
    x, y = data()

    class Pairs(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Any:
            rows = slice(index * 30, index * 30 + 30 - 7 * (index == 4))
            return x[rows], y[rows], np.arange(1, len(x[rows]) + 1) / 10

    def generate() -> Iterator[Any]:
        while True:
            for start in range(0, 200, 25):
                yield x[start : start + 25], y[start : start + 25]

    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), batch_size=48
    )
    more = {}
    for name, given, arguments in (
        ("dataset", Pairs(), {"shuffle": False, "validation_data": Pairs()}),
        ("generator", generate(), {"steps_per_epoch": 6, "validation_data": generate(), "validation_steps": 2}),
        ("loader", loader, {}),
        ("tensors", torch.from_numpy(x), {"y": torch.from_numpy(y), "sample_weight": np.ones(ROWS), "shuffle": False}),
    ):
        history = model.fit(given, epochs=2, verbose=0, **arguments)
        more |= {f"{name} {key}": values for key, values in history.history.items()}
    return outcome(model, **more, evaluated=model.evaluate(loader, verbose=0))


def metrics(context: Any) -> dict[str, Any]:
    """Metrics that are no means over examples, of several outputs, with a loss of each, and several inputs."""
    with context.making() as keras:
        layers, kinds = keras.layers, keras.metrics
        first, second = keras.Input((FEATURES,), name="first"), keras.Input((2,), name="second")
        joined = layers.Dense(12, activation="tanh", activity_regularizer="l2")(layers.concatenate([first, second]))
        outputs = {
            "kind": layers.Dense(1, activation="sigmoid", name="kind")(joined),
            "size": layers.Dense(2, name="size")(joined),
        }
        model = keras.Model([first, second], outputs)
        model.compile(
            optimizer=keras.optimizers.AdamW(0.01, global_clipnorm=0.5),
            loss={"kind": "binary_crossentropy", "size": "mse"},
            loss_weights={"kind": 1.0, "size": 0.3},
            metrics={
                "kind": [kinds.AUC(), kinds.Precision(), kinds.Recall(), kinds.BinaryIoU()],
                "size": [kinds.RootMeanSquaredError(), kinds.R2Score(), "mae"],
            },
        )
    x, y = data()
    targets = {"kind": (y > 0).astype("float32")[:, None], "size": x[:, :2] * 2}
    history = model.fit(
        {"first": x, "second": x[:, 3:5]},
        targets,
        batch_size=32,
        epochs=3,
        shuffle=False,
        verbose=0,
        validation_split=0.25,
    )
    predicted = model.predict([x, x[:, 3:5]], verbose=0)
    return outcome(model, history, kind=predicted["kind"], size=predicted["size"])


def subclassed(context: Any) -> dict[str, Any]:
    """A model that is built by its first batch, with a compute_loss and a metric, an average of weights, and files."""
    with context.making() as keras:

        class Net(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.hidden, self.out = keras.layers.Dense(10, activation="relu"), keras.layers.Dense(CLASSES)
                self.largest = keras.metrics.Mean(name="norm")

            def call(self, inputs: Any, training: bool = False) -> Any:
                return self.out(self.hidden(inputs))

            def compute_loss(
                self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
            ) -> Any:
                self.largest.update_state(keras.ops.norm(y_pred, axis=1))
                return super().compute_loss(x, y, y_pred, sample_weight, training)

        model = Net()
        model.compile(
            keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    x, y = data()
    history = model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
    return outcome(model, history, evaluated=model.evaluate(x, y, verbose=0))


def stopped(context: Any) -> dict[str, Any]:
    """`stop_training` after a batch, set on one worker only, ends the epoch on all of them."""
    with context.making() as keras:
        model = plain(keras)

    class Stop(keras.callbacks.Callback):
        chief_only = True

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 2

    x, y = data()
    history = model.fit(x, y, batch_size=32, epochs=4, shuffle=False, verbose=0, callbacks=[Stop()])
    return outcome(model, history, iterations=int(model.optimizer.iterations))


def half(context: Any) -> dict[str, Any]:
    """mixed_float16 with its loss scale, and recompiled after layers were frozen."""
    import_keras().mixed_precision.set_dtype_policy("float32")
    with context.making() as keras:
        model = plain(keras, optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 2.0**20))
    x, y = data()
    history = model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
    scale = float(model.optimizer.dynamic_scale)
    model.layers[0].trainable = False
    model.compile("sgd", "sparse_categorical_crossentropy")
    again = model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
    return outcome(model, history, scale=scale, again=again.history["loss"])


def batch_norm(context: Any) -> dict[str, Any]:
    """BatchNorm: the oracle is a loop by hand over the same four slices of every batch."""
    with context.making() as keras:
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                layers.Dense(12),
                layers.BatchNormalization(momentum=0.8),
                layers.Dense(CLASSES, activation="softmax"),
            ]
        )
        model.compile("sgd", "sparse_categorical_crossentropy")
    x, y = data(192)
    if context.is_ours:
        model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
        return outcome(model)
    model.optimizer.build(model.trainable_variables)
    for start in [*range(0, 192, 32)] * 2:
        model.zero_grad()
        for low in range(start, start + 32, 8):
            outputs = model(x[low : low + 8], training=True)
            (model.compute_loss(y=keras.ops.convert_to_tensor(y[low : low + 8]), y_pred=outputs) / 4).backward()
        with context.no_grad():
            model.optimizer.apply([one.value.grad for one in model.trainable_variables], model.trainable_variables)
    return outcome(model)


def transfer(context: Any) -> dict[str, Any]:
    """A frozen body with BatchNorm under a new head, then all of it but BatchNorm with a small learning rate.

    Keras 3.15 overrides the `training=False` of a nested model where the outer one trains.
    """
    with context.making() as keras:
        layers = keras.layers
        inputs = keras.Input((FEATURES,))
        hidden = layers.BatchNormalization()(layers.Dense(10, activation="relu")(inputs))
        body = keras.Model(inputs, hidden, name="body")
        body.trainable = False
        outer = keras.Input((FEATURES,))
        model = keras.Model(outer, layers.Dense(CLASSES)(body(outer, training=False)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=[keras.metrics.SparseCategoricalAccuracy()])
    x, y = data()
    arguments = {"batch_size": 32, "epochs": 2, "shuffle": False, "verbose": 0, "validation_split": 0.2}
    first = model.fit(x, y, **arguments)
    frozen = np.array(body.layers[1].kernel)
    body.trainable = True
    body.layers[2].trainable = False
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=[keras.metrics.SparseCategoricalAccuracy()])
    then = {f"then {name}": one for name, one in model.fit(x, y, **arguments).history.items()}
    return outcome(model, first, frozen=frozen, iterations=int(model.optimizer.iterations), **then)


def short_data(context: Any) -> dict[str, Any]:
    """More steps per epoch than a generator, or arrays, have: Keras ends the epoch there."""
    with context.making() as keras:
        model = plain(keras)
    x, y = data()
    finite = ((x[low : low + 40], y[low : low + 40]) for low in range(0, 200, 40))
    more = {}
    for name, given, arguments in (
        ("generator", finite, {"epochs": 3}),
        ("arrays", x, {"y": y, "batch_size": 40, "epochs": 3, "shuffle": False}),
    ):
        history = model.fit(given, steps_per_epoch=4, verbose=0, **arguments)
        more |= {f"{name} {key}": values for key, values in history.history.items()}
    return outcome(model, **more, iterations=int(model.optimizer.iterations))


def changed_on_one_worker() -> str:
    """The error for a callback that changes the weights of one worker only."""
    keras = import_keras()
    here = scope(seed=0)
    with here:
        model = plain(keras)

    class Change(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if here.hands.rank == 1 and epoch == 0:
                kernel = self.model.layers[0].kernel
                kernel.assign(kernel + 0.01)

    try:
        _fit(model, [Change()])
    except mh.ManyhandsError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def shared_rows(settings: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """The rows of each forward pass in training on this rank; and the weights, with dropout and shuffled."""
    keras = import_keras()
    rows: list[int] = []

    class Counting(keras.layers.Layer):
        def call(self, inputs: Any, training: bool = False) -> Any:
            if training and inputs.device.type != "meta":
                rows.append(int(inputs.shape[0]))
            return inputs

    with scope(seed=0, **settings):
        keras.utils.set_random_seed(1)
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                Counting(),
                layers.Dense(12, activation="relu"),
                layers.BatchNormalization(),
                layers.Dropout(0.4),
                layers.Dense(CLASSES, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    x, y = data()
    history = model.fit(x, y, batch_size=36, epochs=2, verbose=0, validation_split=0.1)
    return rows, outcome(model, history)


def unequal_generators() -> str:
    keras = import_keras()
    hands_scope = scope(seed=0)
    with hands_scope:
        model = plain(keras)
    x, y = data()

    def generate(batches: int) -> Iterator[Any]:
        for _ in range(batches):
            yield x[:20], y[:20]

    try:
        model.fit(generate(4 + hands_scope.hands.rank), epochs=1, verbose=0)
    except mh.ManyhandsError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def files_of_the_chief(folder: str) -> dict[str, list[str]]:
    """What is in the folder after callbacks that write, and the tags that TensorBoard finds there."""
    from pathlib import Path

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    keras = import_keras()
    here = scope(seed=0)
    with here:
        model = plain(keras)
    x, y = data()
    called: list[int] = []
    own = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: called.append(epoch))
    own.chief_only = True
    model.fit(
        x,
        y,
        batch_size=50,
        epochs=2,
        verbose=0,
        validation_split=0.2,
        callbacks=[
            own,
            keras.callbacks.TensorBoard(f"{folder}/board", update_freq="batch"),
            keras.callbacks.CSVLogger(f"{folder}/log.csv"),
            keras.callbacks.ModelCheckpoint(f"{folder}/{{epoch}}.weights.h5", save_weights_only=True),
        ],
    )
    model.save(f"{folder}/model.keras")
    tags: dict[str, list[str]] = {"called": [str(len(called))]}
    if here.hands.is_chief:
        for part in ("train", "validation"):
            board = EventAccumulator(f"{folder}/board/{part}")
            board.Reload()
            tags[part] = sorted(board.Tags()["scalars"])
            tags[f"{part} values"] = [str(len(board.Scalars(tag))) for tag in tags[part]]
    tags["files"] = sorted(one.name for one in Path(folder).iterdir())
    return tags


def from_files(folder: str) -> bool:
    """A model that was trained, saved and loaded in a scope trains on as the one that was not."""
    keras = import_keras()
    x, y = data()
    arguments = {"batch_size": 32, "shuffle": False, "verbose": 0}
    found = []
    for suffix in ("", "keras", "h5"):
        with scope(seed=0):
            keras.utils.set_random_seed(1)
            model = plain(keras)
            model.fit(x, y, **arguments)
            if suffix:
                model.save(f"{folder}/model.{suffix}")
                model = keras.models.load_model(f"{folder}/model.{suffix}")
        if suffix == "h5":  # Keras loads these without the optimizer's variables
            model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
            found.append(outcome(model)["weight 0"].shape == found[0].shape)
            continue
        model.fit(x, y, **arguments)
        found.append(outcome(model)["weight 0"])
    return bool(np.abs(found[0] - found[1]).max() < 1e-6 and found[2])


def _own_step(keras: Any) -> None:
    class Own(keras.Sequential):
        def train_step(self, batch: Any) -> Any:
            return super().train_step(batch)

    _fit(Own([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES, activation="softmax")]))


def _masked(keras: Any) -> None:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Embedding(9, 4, mask_zero=True), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((30, 5)), np.ones((30, 5, 1)), batch_size=10, verbose=0)


def _no_variables(keras: Any) -> None:
    class Listed(keras.metrics.Metric):
        def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
            self.last = float(outputs.sum())

        def result(self) -> float:
            return self.last

    _fit(plain(keras, metrics=[Listed(name="listed")]))


def _largest(keras: Any) -> None:
    class Largest(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="largest")
            self.most = self.add_variable((), "zeros")

        def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
            self.most.assign(keras.ops.maximum(self.most, outputs.max()))

        def result(self) -> Any:
            return self.most

    _fit(plain(keras, metrics=[Largest()]))


def _own_logs(keras: Any) -> None:
    class Own(keras.Sequential):
        def compute_metrics(self, x: Any, y: Any, outputs: Any, sample_weight: Any = None) -> Any:
            return super().compute_metrics(x, y, outputs, sample_weight) | {"spread": 1.0}

    _fit(Own([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES, activation="softmax")]))


def _fit(model: Any, callbacks: Any = ()) -> None:
    if not model.compiled:
        model.compile("sgd", "sparse_categorical_crossentropy")
    x, y = data()
    model.fit(x, y, batch_size=32, verbose=0, callbacks=list(callbacks))


def _mean_of_batch(y: Any, outputs: Any) -> Any:
    return outputs.max()


def other_data() -> float:
    """A torch Dataset, which Keras does not read, trains like its arrays: the largest difference of the weights."""
    keras = import_keras()
    x, y = data()
    found = []
    rows = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    for given in ((x, y), (rows, None)):
        with scope(seed=0):
            keras.utils.set_random_seed(1)
            model = plain(keras)
        model.fit(*given, batch_size=32, epochs=2, verbose=0)
        found.append([*model.get_weights(), np.array(model.evaluate(*given, batch_size=32, verbose=0))])
    return max(float(np.abs(a - b).max()) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def half_precision(policy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results of ours and of Keras under a policy of mixed precision."""
    keras = import_keras()

    def program(context: Any) -> dict[str, Any]:
        keras.mixed_precision.set_dtype_policy(policy)
        try:
            with context.making():
                model = plain(keras)
            x, y = data()
            history = model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0, validation_split=0.2)
            wrapped = type(model.optimizer).__name__ == "LossScaleOptimizer"
            return outcome(model, history, scale=float(model.optimizer.dynamic_scale) if wrapped else 0.0)
        finally:
            keras.mixed_precision.set_dtype_policy("float32")

    return both(program)


REFUSED: dict[str, Callable[[Any], None]] = {
    "own step": _own_step,
    "jit": lambda keras: _fit(plain(keras, jit_compile=True)),
    "masked": _masked,
    "metric without variables": _no_variables,
    "largest": _largest,
    "number per batch": lambda keras: _fit(plain(keras, metrics=[_mean_of_batch])),
    "own logs": _own_logs,
    "sum": lambda keras: _fit(plain(keras, loss=keras.losses.SparseCategoricalCrossentropy(reduction="sum"))),
    "histograms": lambda keras: _fit(plain(keras), [keras.callbacks.TensorBoard("nowhere", histogram_freq=1)]),
}


PROGRAMS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "arrays": arrays,
    "batch_norm": batch_norm,
    "callbacks": callbacks,
    "half": half,
    "metrics": metrics,
    "short_data": short_data,
    "stopped": stopped,
    "streams": streams,
    "subclassed": subclassed,
    "transfer": transfer,
}


def refused(case: str) -> str:
    """The error of a program that cannot work, or "trained"."""
    keras = import_keras()
    try:
        with scope(mh.Single(), slices=2):
            REFUSED[case](keras)
    except mh.ManyhandsError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def wrong_place(case: str) -> str:
    """The error for a model that was made in another place than it is trained in."""
    keras = import_keras()
    first, second = scope(mh.Single()), scope(mh.Single())
    try:
        if case == "compiled in a scope":
            model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES)])
            with first:
                model.compile("sgd", "mse")
        elif case == "trained in a scope":
            model = plain(keras)
            with first:
                _fit(model)
        else:
            with first:
                model = plain(keras)
            with second:
                _fit(model)
    except mh.ManyhandsError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def fitted_after_the_scope() -> list[str]:
    keras = import_keras()
    model = plain(keras)
    with scope(mh.Mirrored(), slices=2):
        pass
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        _fit(model)
    return [str(one.message) for one in found if "outside of the scope" in str(one.message)]


def untouched() -> bool:
    """Outside of scopes, and for models that were made there, Keras is as it was imported."""
    keras = import_keras()
    before = keras.Model.fit, keras.Model.compile, keras.Model.__init__
    with scope(mh.Single()):
        pass
    model = plain(keras)
    _fit(model)
    return before == (keras.Model.fit, keras.Model.compile, keras.Model.__init__) and "fit" not in vars(model)
