"""Keras 3 models on the torch backend: how to recognise, load and save them, and the state they keep.

A Keras model is an `nn.Module`, but ignores `train()` and keeps moving averages and random seeds as parameters without
gradient: `foreign_state` lists them for the step. What it was compiled with is in `keras_compiled`. Keras is imported
here only to read a Keras file: a script that has a Keras model has imported it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.errors import CheckpointMismatch, EnvironmentProblem, SpecError
from manyhands.parallel.model.step_buffers import ForeignState, NormLayer

__all__ = [
    "SUFFIXES",
    "call",
    "check_usable",
    "foreign_state",
    "has_layers",
    "is_keras",
    "is_layer",
    "layers_inside",
    "load",
    "load_weights",
    "randomness_in",
    "save",
]

SUFFIXES = (".keras", ".h5")
MAX_SEED = 2**31 - 1

_in_slice: ContextVar[bool] = ContextVar("manyhands_keras_in_slice", default=False)


def _keras() -> Any:
    """The keras module, if it has been imported."""
    module = sys.modules.get("keras")
    return module if hasattr(module, "Model") else None


def is_keras(model: Any) -> bool:
    keras = _keras()
    return keras is not None and isinstance(model, keras.Model)


def is_layer(module: Any) -> bool:
    keras = _keras()
    return keras is not None and isinstance(module, keras.Layer)


def layers_inside(layer: Any) -> list[Any]:
    """All layers inside of this one, at any depth, except those that only mark an input."""
    inputs = _keras().layers.InputLayer
    return [one for one in layer._flatten_layers(include_self=False) if not isinstance(one, inputs)]


def check_usable(model: Any) -> None:
    backend = _keras().config.backend()
    if backend != "torch":
        raise SpecError(
            f"The model is a Keras model on the {backend} backend; only torch can train it here.",
            fix=["KERAS_BACKEND=torch mh run train.py: Keras reads it when it is imported"],
        )
    # A subclassed model is marked built after build((None, ...)), even if the layers inside are not.
    plain = _keras().Layer.build
    unbuilt = [x.name for x in model._flatten_layers() if not x.built and type(x).build is not plain]
    if unbuilt or not model.built:
        raise SpecError(
            f"The Keras model {model.name!r} is not built, so its weights do not exist yet: {unbuilt or model.name}.",
            fix=["call the model once on a batch, or give it keras.Input(shape=(...,)) as its first layer"],
        )
    known = {id(param) for param in model.parameters()}
    if any(id(variable.value) not in known for variable in model.variables):
        model._track_variables()  # Keras registers parameters with torch once, maybe before all of them existed


def load(path: Path) -> Any:
    """The whole model of a `.keras` or `.h5` file. Code in the file (lambdas) is refused by Keras, not run."""
    if not path.is_file():
        raise SpecError(f"There is no model file {path}.", where="model=")
    try:
        keras = importlib.import_module("keras")
        model = keras.models.load_model(path)
    except ImportError as error:  # also when Keras uses its default backend, TensorFlow
        raise EnvironmentProblem(
            f"{path} needs Keras on the torch backend: {error}.",
            fix=["KERAS_BACKEND=torch mh run train.py", "pip install 'manyhands[keras]'"],
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise SpecError(f"Keras cannot load {path}: {error}", where="model=") from error
    optimizer = getattr(model, "optimizer", None)
    if path.suffix == ".h5" and optimizer is not None:
        # Keras 3.15 builds it without the variables of the model's layers: it could not train them.
        model.optimizer = optimizer.from_config(optimizer.get_config())
    return model


def save(model: Any, path: Path) -> None:
    """Write architecture, weights and compile settings in Keras's format; atomically."""
    if not is_keras(model):
        raise SpecError(
            f"{path.suffix} files hold Keras models, and this is a {type(model).__name__}.", fix=['"model.safetensors"']
        )
    part = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        model.save(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def load_weights(model: Any, path: Path) -> None:
    if not is_keras(model):
        raise SpecError(f"{path.suffix} files hold Keras models, and this is a {type(model).__name__}.")
    try:
        model.load_weights(path)
    except ValueError as error:
        raise CheckpointMismatch(f"{path} does not fit the model: {error}") from error


def call(model: nn.Module, batch: Any) -> Any:
    """A tuple or list is (input, target, ...); a dict is one input with named parts."""
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


# State: training mode, moving averages, seeds.


def foreign_state(model: nn.Module) -> ForeignState:
    """The state of the Keras layers in `model`; also makes these layers follow the module's training mode."""
    layers = _layers(model)
    if not layers:
        return ForeignState()
    for layer in layers:
        _obey_mode(layer)
    seeds = _seeds(layers)
    return ForeignState(
        norms=tuple(_norms(layers)),
        seeds=seeds,
        in_slice=lambda: _slice_of(seeds),
        out_of_slice=lambda: _outside(seeds),
    )


def randomness_in(model: nn.Module) -> list[str]:
    layers = _layers(model)
    found = ["dropout"] if any(_own_seeds(layer) for layer in layers) else []
    return [*found, "BatchNorm"] if _norms(layers) else found


def has_layers(model: nn.Module) -> bool:
    """Whether it is a Keras model or has Keras layers in it."""
    return bool(_layers(model))


def _layers(model: nn.Module) -> list[Any]:
    keras = _keras()
    if keras is None:
        return []
    # The layers of a Keras model are not its torch submodules; `_flatten_layers` finds them.
    found = [layer for top in model.modules() if isinstance(top, keras.Layer) for layer in top._flatten_layers()]
    return list({id(layer): layer for layer in found}.values())


def _obey_mode(layer: Any) -> None:
    """Have a call without `training=` use training mode inside a slice, and inference if the module is in eval mode.

    Elsewhere Keras's rule holds. Keras reads the call context first, before defaults in a signature, and passes it on
    to layers inside; a torch hook would run after both.
    """
    inherited: Callable[[], Any] = layer._get_call_context
    if "_get_call_context" in vars(layer):
        return

    def context() -> Any:
        found = inherited()
        if found.entry_layer is layer and getattr(found, "training", None) is None:
            found.training = layer.training and (True if _in_slice.get() else None)
        return found

    vars(layer)["_get_call_context"] = context


def _norms(layers: list[Any]) -> list[NormLayer]:
    kind = _keras().layers.BatchNormalization if layers else ()
    return [
        NormLayer((layer.moving_mean.value, layer.moving_variance.value), layer.momentum, None)
        for layer in layers
        if isinstance(layer, kind) and layer.built and not getattr(layer, "renorm", False)
    ]


def _own_seeds(layer: Any) -> list[Tensor]:
    return [v.value for v in layer.variables if v.name == "seed_generator_state"]


def _seeds(layers: list[Any]) -> tuple[Tensor, ...]:
    # Random numbers without a seed come from a global generator, which belongs to no layer.
    unowned = importlib.import_module("keras.src.random.seed_generator").global_seed_generator().state.value
    found = [seed for layer in layers for seed in _own_seeds(layer)]
    return tuple({id(seed): seed for seed in [*found, unowned]}.values())


@contextmanager
def _slice_of(seeds: tuple[Tensor, ...]) -> Iterator[None]:
    """Training mode; every generator is seeded from the slice's randomness and restored afterwards."""
    drawn = torch.randint(MAX_SEED, (len(seeds),)).tolist()
    with _keeping(seeds, in_slice=True):
        with torch.no_grad():
            for seed, number in zip(seeds, drawn, strict=True):
                seed.copy_(torch.tensor([number, 0]))
        yield


@contextmanager
def _outside(seeds: tuple[Tensor, ...]) -> Iterator[None]:
    """The mode that layers are in, also during a slice; generators are restored afterwards."""
    with _keeping(seeds, in_slice=False):
        yield


@contextmanager
def _keeping(seeds: tuple[Tensor, ...], *, in_slice: bool) -> Iterator[None]:
    before = [seed.detach().clone() for seed in seeds]
    token = _in_slice.set(in_slice)
    try:
        yield
    finally:
        _in_slice.reset(token)
        with torch.no_grad():
            for seed, value in zip(seeds, before, strict=True):
                seed.copy_(value)
