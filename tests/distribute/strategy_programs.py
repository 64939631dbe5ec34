"""TensorFlow's strategies in programs for real ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

import manyhands as mh
from manyhands import distribute
from tests.training.setup.keras_workloads import import_keras


def trained(name: str, settings: dict[str, Any]) -> tuple[int, str]:
    """The number of replicas, and the last loss of a Keras model in the strategy's scope, or the error."""
    keras = import_keras()
    strategy = getattr(distribute, name)(seed=0, **settings)
    replicas = strategy.num_replicas_in_sync
    try:
        with strategy.scope():
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        history = model.fit(np.ones((32, 4)), np.ones(32), batch_size=8 * replicas, epochs=2, verbose=0)
    except mh.ManyhandsError as error:
        return replicas, f"{type(error).__name__}: {error}"
    return replicas, f"{history.history['loss'][-1]:.4f}"
