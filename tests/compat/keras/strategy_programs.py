"""Keras programs for strategies in which workers share weights, or have shards of them. Keras is imported inside."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import manyhands as mh
from manyhands.compat.keras import scope
from manyhands.training.setup.keras_optimizer import KerasOptimizer
from tests.compat.keras.keras_programs import compared, data, differences, outcome, plain
from tests.training.setup.keras_workloads import import_keras

STRATEGIES = {
    "central": lambda: mh.CentralStorage(),
    "sharded": lambda: mh.Sharded(),
    "sharded optimizer": lambda: mh.Sharded("optimizer"),
    "mesh": lambda: mh.Mesh(data=2),
    "sharded mesh": lambda: mh.Mesh(data=2, sharded=True),
    "tensor": lambda: mh.TensorParallel(),
    "pipeline": lambda: mh.PipelineParallel(),
    "local steps": lambda: mh.LocalSGD(every=2),
    "servers": lambda: mh.ParameterServer(servers=1, mode="sync"),
}


def compared_under(strategy: str, program: str) -> tuple[float, dict[str, Any]]:
    return compared(program, {"slices": 4, "strategy": STRATEGIES[strategy]()})


def where_weights_are(strategy: str) -> dict[str, Any]:
    """What callbacks see after a batch and after an epoch, what they can do there, and what a file has."""
    keras = import_keras()
    with scope(STRATEGIES[strategy](), seed=0, slices=2):
        model = plain(keras)
    found: dict[str, Any] = {"after a batch": "read"}

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            found["rows after a batch"] = len(self.model.layers[0].kernel.value)
            try:
                self.model.get_weights()
            except mh.ManyhandsError as error:
                found["after a batch"] = str(error)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            found["rows after an epoch"] = len(self.model.layers[0].kernel.value)
            for variable in self.model.trainable_variables:  # relative: on shared weights it must count once
                variable.assign(variable * 0.5)
            found["after an epoch"] = [np.array(one) for one in self.model.get_weights()]

    x, y = data()
    model.fit(x, y, batch_size=50, epochs=1, shuffle=False, verbose=0, callbacks=[Look()])
    found["at the end"] = [np.array(one) for one in model.get_weights()]
    found["momentums"] = [np.array(one) for one in model.optimizer._momentums]
    found["iterations"] = int(model.optimizer.iterations)
    return found


def refused_under(strategy: str, case: str = "plain") -> str:
    keras = import_keras()
    optimizers = {
        "plain": lambda: "adam",
        "global norm": lambda: keras.optimizers.Adam(global_clipnorm=1.0),
        "average": lambda: keras.optimizers.Adam(use_ema=True),
        "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
        "norm of a variable": lambda: keras.optimizers.Adam(clipnorm=1.0),
        "own": lambda: type("Own", (keras.optimizers.SGD,), {})(0.1),
    }
    try:
        with scope(STRATEGIES[strategy](), seed=0):
            model = plain(keras, optimizer=optimizers[case]())
        x, y = data()
        model.fit(x, y, batch_size=50, verbose=0)
    except mh.ManyhandsError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


# ---- the optimizer on its own ----


def optimizer_of(keras: Any, name: str) -> Any:
    settings: dict[str, Any] = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.5, "centered": True}}.get(name, {})
    return getattr(keras.optimizers, name)(0.05, weight_decay=0.01, name="tested", **settings)


def gradients(step: int, like: list[torch.Tensor]) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    return [torch.randn(one.shape, generator=made) for one in like]


def by_keras(keras: Any, name: str, steps: int) -> dict[str, Any]:
    keras.utils.set_random_seed(1)
    model, optimizer = plain(keras), optimizer_of(keras, name)
    for step in range(steps):
        with torch.no_grad():
            optimizer.apply(
                gradients(step, [one.value for one in model.trainable_variables]), model.trainable_variables
            )
    return outcome(model, iterations=int(optimizer.iterations))


def in_turn(name: str, steps: int = 4) -> dict[str, float]:
    """One variable at a time, by an optimizer of each, whose states are moved in between; against Keras's update."""
    keras = import_keras()
    theirs = by_keras(keras, name, steps)
    keras.utils.set_random_seed(1)
    model = plain(keras)
    variables, optimizer = model.trainable_variables, optimizer_of(keras, name)
    wrapped = KerasOptimizer(optimizer, variables)
    assert wrapped.divisible_by
    for step in range(steps):
        made = gradients(step, [one.value for one in variables])
        counted = wrapped.param_groups[0]["iterations"]
        for variable, gradient in zip(variables, made, strict=True):
            wrapped.param_groups[0]["iterations"] = counted  # as on a worker that owns this one only
            wrapped.state[variable.value] = {kind: one.clone() for kind, one in wrapped.state[variable.value].items()}
            variable.value.grad = gradient
            wrapped.step()
            variable.value.grad = None
    return differences(outcome(model, iterations=int(optimizer.iterations)), theirs)


def in_shards(name: str, steps: int = 4) -> dict[str, float]:
    """Both halves of every variable, one after the other, against Keras's update of the whole."""
    keras = import_keras()
    theirs = by_keras(keras, name, steps)
    keras.utils.set_random_seed(1)
    model = plain(keras)
    variables, optimizer = model.trainable_variables, optimizer_of(keras, name)
    wrapped = KerasOptimizer(optimizer, variables)
    assert wrapped.divisible_by == "elements"
    wholes = [one.value.detach().clone() for one in variables]
    states = [dict(wrapped.state[one.value]) for one in variables]
    for step in range(steps):
        made = gradients(step, wholes)
        for half in (0, 1):
            wrapped.param_groups[0]["iterations"] = step
            for variable, whole, state, gradient in zip(variables, wholes, states, made, strict=True):
                rows = slice(0, len(whole) // 2) if half == 0 else slice(len(whole) // 2, None)
                variable.value.data = whole[rows]
                parts = {kind: one if one.ndim == 0 else one[rows] for kind, one in state.items()}
                wrapped.state[variable.value] = parts | {"step": torch.tensor(float(step))}
                variable.value.grad = gradient[rows]
            wrapped.step()
    for variable, whole in zip(variables, wholes, strict=True):
        variable.value.grad, variable.value.data = None, whole
    return differences(outcome(model, iterations=int(optimizer.iterations)), theirs)


def saved_and_loaded(name: str) -> dict[str, float]:
    """Four updates, against two, a `state_dict` that another one loads, and two more."""
    keras = import_keras()
    theirs = by_keras(keras, name, 4)
    keras.utils.set_random_seed(1)
    model = plain(keras)
    variables = model.trainable_variables
    wrapped = KerasOptimizer(optimizer_of(keras, name), variables)
    for step in range(4):
        if step == 2:
            kept, wrapped = wrapped.state_dict(), KerasOptimizer(optimizer_of(keras, name), variables)
            wrapped.load_state_dict(kept)
        for variable, gradient in zip(variables, gradients(step, [one.value for one in variables]), strict=True):
            variable.value.grad = gradient
        wrapped.step()
    return differences(outcome(model, iterations=int(wrapped.keras.iterations)), theirs)
