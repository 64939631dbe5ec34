"""Small Keras trainings for real ranks. Keras is imported inside the functions: the backend is chosen on import."""

from __future__ import annotations

import os
import runpy
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import manyhands as mh
from tests.training.workloads import CLASSES, FEATURES, data, mean_loss, weights_of


def import_keras() -> Any:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    # Names are counted per process, and ranks of a warm pool have made different numbers.
    keras.utils.clear_session(free_memory=False)
    return keras


def warm_up() -> None:
    import_keras()


def run_script(folder: str) -> None:
    here = Path.cwd()
    os.chdir(folder)
    try:
        runpy.run_path("example.py", run_name="__main__")
    finally:
        os.chdir(here)


def sequential(keras: Any, *, compiled: bool = True, optimizer: Any = None, **compile_with: Any) -> Any:
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((FEATURES,)),
            layers.Dense(16, kernel_regularizer=keras.regularizers.L2(0.01)),
            layers.BatchNormalization(momentum=0.8),
            layers.Activation("relu"),
            layers.Dropout(0.3),
            layers.Dense(CLASSES),
        ]
    )
    if compiled:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made = optimizer or keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.5))
        model.compile(made, **{"loss": loss, "metrics": ["accuracy"], **compile_with})
    return model


def subclassed(keras: Any) -> Any:
    """Layers get the mode from the call they are in; the signature's own default is the wrong one for training."""

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.norm = keras.layers.Dense(16), keras.layers.BatchNormalization()
            self.drop, self.out = keras.layers.Dropout(0.3), keras.layers.Dense(CLASSES)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.out(self.drop(self.norm(self.hidden(x))))

    model = Net()
    model(torch.zeros(2, FEATURES))
    return model


def train(kind: str = "compiled", fit: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
    keras = import_keras()
    trainer = make_trainer(keras, kind, **arguments)
    x, y = data()
    history = trainer.fit((x, y), **{"epochs": 2, "batch_size": 24, **(fit or {})})
    return {
        "weights": weights_of(trainer),
        "history": [dict(row) for row in history],
        "evaluation": trainer.evaluate((x, y), batch_size=17),
        "predictions": trainer.predict(x, batch_size=17).numpy(),
        "iterations": int(keras.ops.convert_to_numpy(trainer.model.optimizer.iterations)) if kind == "compiled" else 0,
    }


def trained_and_saved(path: str, arguments: dict[str, Any]) -> dict[str, Any]:
    keras = import_keras()
    trainer = make_trainer(keras, "compiled", **arguments)
    x, y = data()
    trainer.fit((x, y), epochs=2, batch_size=24)
    evaluation = trainer.evaluate((x, y), batch_size=17)
    trainer.save(path)
    saved = keras.models.load_model(path)
    variables = [*saved.variables, *saved.optimizer.variables]
    return {"evaluation": evaluation, "file": {str(i): np.array(one) for i, one in enumerate(variables)}}


def make_trainer(keras: Any, kind: str, **arguments: Any) -> mh.Trainer:
    if kind == "compiled":
        return mh.Trainer(model=lambda: sequential(keras), **arguments)
    model = {
        "own loss": lambda: sequential(keras, compiled=False),
        "subclassed": lambda: subclassed(keras),
        "inside torch": lambda: nn.Sequential(
            nn.Linear(FEATURES, FEATURES), sequential(keras, compiled=False), nn.Tanh()
        ),
    }[kind]
    return mh.Trainer(
        model=model, loss=mean_loss, optimizer=lambda params: torch.optim.AdamW(params, lr=0.01), **arguments
    )


def seen_modes(kind: str) -> dict[str, Any]:
    """What the layers do in training, evaluation, prediction and in a plain call afterwards."""
    keras = import_keras()
    trainer = make_trainer(keras, kind, slices=2, check_loss=False)  # what looks at the loss evaluates it
    modes: list[tuple[str, bool]] = []
    inside = [
        layer for part in trainer.model.modules() if isinstance(part, keras.Model) for layer in part._flatten_layers()
    ]
    drop = next(layer for layer in inside if isinstance(layer, keras.layers.Dropout))
    forward = drop.call
    place = ["fit"]

    def watch(inputs: Any, training: Any = False) -> Any:
        modes.append((place[0], bool(training)))
        return forward(inputs, training=training)

    drop.call = watch
    x, y = data()
    before = weights_of(trainer)
    trainer.fit((x, y), steps=3, batch_size=30)
    after = weights_of(trainer)
    place[0] = "evaluate"
    first, second = trainer.evaluate((x, y), batch_size=20), trainer.evaluate((x, y), batch_size=20)
    place[0] = "predict"
    trainer.predict(x, batch_size=20)
    place[0] = "plain call"
    trainer.model(x)
    return {
        "modes": {where: {mode for at, mode in modes if at == where} for where in dict(modes)},
        "changed": {name for name in before if not np.array_equal(before[name], after[name])},
        "all": set(before),
        "same evaluation": first == second,
    }


def own_loop() -> dict[str, np.ndarray]:
    """What `train` does with a compiled model, as a loop of the user's own."""
    keras = import_keras()
    keras.utils.set_random_seed(0)
    model = sequential(keras)
    hands = mh.join(slices=6, seed=0)
    hands.setup(model, model.optimizer)
    ce = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for x, y in hands.batches(data(), batch_size=24, epochs=2):
        hands.backward(ce(y, model(x)) + sum(model.losses))
        hands.step()
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items() if "seed" not in name}


def masks(steps: int, slices: int) -> list[tuple[int, np.ndarray]]:
    """Per slice run here, its first row's number and the dropout mask that Keras drew for it."""
    keras = import_keras()
    ones = keras.layers.Dropout(0.5)
    model = keras.Sequential([keras.Input((FEATURES,)), ones, keras.layers.Dense(1)])
    drawn = []

    def loss(model: Any, batch: Any) -> torch.Tensor:
        (rows,) = batch
        dropped = ones(torch.ones(len(rows), FEATURES))
        drawn.append((int(rows[0, 0]), dropped.detach().numpy().copy()))
        return model(rows).mean()

    x = torch.arange(24.0)[:, None].repeat(1, FEATURES)
    trainer = mh.Trainer(model, loss, lambda params: torch.optim.SGD(params, lr=0.0), slices=slices, check_loss=False)
    trainer.fit((x,), steps=steps, batch_size=24)
    return drawn


def refused(case: str) -> str:
    keras = import_keras()
    losses = keras.losses.SparseCategoricalCrossentropy
    cases = {
        "sum": lambda: sequential(keras, loss=losses(from_logits=True, reduction="sum")),
        "metric": lambda: sequential(keras, metrics=["accuracy", keras.metrics.AUC()]),
        "weighted metric": lambda: sequential(keras, weighted_metrics=["accuracy"]),
        "loss scale": lambda: sequential(keras, optimizer=keras.optimizers.SGD(0.1, loss_scale_factor=8.0)),
        "ema": lambda: sequential(keras, optimizer=keras.optimizers.SGD(0.1, use_ema=True)),
        "unbuilt": lambda: keras.Sequential([keras.layers.Dense(3)]),
        "own step": lambda: _with_own_step(keras),
        "not compiled": lambda: sequential(keras, compiled=False),
        "masked": lambda: _masked(keras),
        "code in .keras": lambda: _file_with_code(keras, "code.keras"),
        "code in .h5": lambda: _file_with_code(keras, "code.h5"),
        "no file": lambda: "nowhere.keras",
        "other file": lambda: "weights.bin",
    }
    try:
        x, y = data()
        if case == "masked":
            x, y = torch.randint(0, 3, (30, 5)), torch.zeros(30, 5, 1)
        model = cases[case]()
        mh.Trainer(model=model).fit((x, y), steps=1, batch_size=10)
    except mh.ManyhandsError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def _with_own_step(keras: Any) -> Any:
    class Own(keras.Model):
        def train_step(self, data: Any) -> Any: ...

    inputs = keras.Input((FEATURES,))
    model = Own(inputs, keras.layers.Dense(CLASSES)(inputs))
    model.compile("sgd", "mse")
    return model


def _file_with_code(keras: Any, name: str) -> str:
    twice = keras.layers.Lambda(lambda x: x * 2)
    model = keras.Sequential([keras.Input((FEATURES,)), twice, keras.layers.Dense(CLASSES)])
    path = Path(tempfile.mkdtemp()) / name
    model.save(path)
    return str(path)


def _masked(keras: Any) -> Any:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Embedding(3, 4, mask_zero=True), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def regularised_step() -> dict[str, np.ndarray]:
    """One step of gradient descent on the compiled loss, by us in 5 slices and by Keras itself on the whole batch."""
    keras = import_keras()
    x, y = data(40)
    weights = torch.linspace(0.5, 2.0, 40)
    found = {}
    for name in ("ours", "keras"):
        keras.utils.set_random_seed(3)
        layers = [
            keras.Input((FEATURES,)),
            keras.layers.Dense(CLASSES, kernel_regularizer=keras.regularizers.L2(0.5), activity_regularizer="l1"),
        ]
        model = keras.Sequential(layers)
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1.0),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        if name == "ours":
            mh.Trainer(model, slices=5).fit((x, y, weights), epochs=2, batch_size=40)
        else:
            model.fit(x.numpy(), y.numpy(), batch_size=40, epochs=2, sample_weight=weights.numpy(), verbose=0)
        found[name] = np.concatenate([value.ravel() for value in model.get_weights()])
    return found


def resumed(run_dir: str, stop_at: int | None, **arguments: Any) -> dict[str, Any]:
    """Train up to `stop_at` and leave by an exception, or train to the end."""
    keras = import_keras()

    class Leave(Exception):
        pass

    class Stop:
        def after_step(self, trainer: Any, step: int, stats: Any) -> None:
            if step == stop_at:
                raise Leave

    trainer = mh.Trainer(lambda: sequential(keras), hooks=[Stop()], slices=4, exact=True, run_dir=run_dir, **arguments)
    x, y = data()
    try:
        trainer.fit((x, y), epochs=3, batch_size=24, checkpoint=mh.Checkpoints(every_steps=1))
    except Leave:
        return {}
    model, lr = trainer.model, trainer.optimizer.param_groups[0]["lr"]
    return {
        "weights": weights_of(trainer),
        "optimizer": {v.path: np.asarray(keras.ops.convert_to_numpy(v)).copy() for v in model.optimizer.variables},
        "lr": lr,
    }


def from_file(folder: str, suffix: str) -> dict[str, bool]:
    keras = import_keras()
    x, y = data()
    path, after_path = Path(folder) / f"model.{suffix}", Path(folder) / f"after.{suffix}"
    model = sequential(keras)
    model.save(path)
    trainer = mh.Trainer(model=str(path), slices=2)
    before, loaded = model.get_weights(), trainer.model.get_weights()
    trainer.fit((x, y), steps=2, batch_size=24)
    after = trainer.model.get_weights()
    trainer.save(after_path)
    saved = keras.models.load_model(after_path).get_weights()
    return {
        "loaded": _equal(before, loaded),
        "trained": not any(np.array_equal(a, b) for a, b in zip(before, after, strict=True)),
        "saved": _equal(after, saved),
    }


def _equal(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def moving_averages(slices: int) -> dict[str, list[np.ndarray]]:
    """Of a norm layer that is called twice per forward pass: after one step of ours, and after its slices in order."""
    from manyhands.data.sample_order import order

    keras = import_keras()
    x, y = data(30)
    found = {}
    for name in ("ours", "keras"):
        keras.utils.set_random_seed(1)
        inputs, norm = keras.Input((FEATURES,)), keras.layers.BatchNormalization(momentum=0.7)
        outputs = keras.layers.Dense(CLASSES)(norm(keras.layers.Dense(FEATURES)(norm(inputs))))
        model = keras.Model(inputs, outputs)
        if name == "ours":
            frozen = lambda params: torch.optim.SGD(params, lr=0.0)  # noqa: E731
            mh.Trainer(model, mean_loss, frozen, slices=slices, seed=0).fit((x, y), epochs=1, batch_size=30)
        else:
            for rows in torch.from_numpy(order(30, 0, 0, 0, 30)).chunk(slices):
                model(x[rows], training=True)
        found[name] = [np.asarray(keras.ops.convert_to_numpy(v)) for v in (norm.moving_mean, norm.moving_variance)]
    return found


def frozen_norm(kind: str) -> dict[str, list[np.ndarray]]:
    """A body whose statistics stay, by what Keras has for that: trained by us in two slices, and by a loop by hand."""
    keras = import_keras()
    x, y = data(30)
    found = {}
    for name in ("ours", "by hand"):
        keras.utils.set_random_seed(2)
        body = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(8), keras.layers.BatchNormalization()])
        body.trainable = False
        inputs = keras.Input((FEATURES,))
        seen = body(inputs, training=False) if kind == "training=False" else body(inputs)
        model = keras.Model(inputs, keras.layers.Dense(CLASSES)(seen))
        trained = lambda params: torch.optim.SGD(params, lr=0.5)  # noqa: E731
        if name == "ours":
            mh.Trainer(model, mean_loss, trained, slices=2, seed=0).fit((x, y), steps=3, batch_size=30)
        else:
            optimizer = trained([variable.value for variable in model.trainable_variables])
            for _ in range(3):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x, training=True), y).backward()
                optimizer.step()
        found[name] = [np.asarray(value) for value in model.get_weights()]
    return found
