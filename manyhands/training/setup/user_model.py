"""Checks the user's model, loss, optimizer and metrics, and converts them to `Parts`, in one form for all kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyhands.checkpoint.export import format_of, save_tensors
from manyhands.checkpoint.state_packing import load_model_state
from manyhands.checkpoint.tensor_file import read_tensors
from manyhands.checkpoint.tensor_names import plain_name
from manyhands.embedding.row_layer import Sparse
from manyhands.errors import CheckpointCorrupt, CheckpointMismatch, SpecError
from manyhands.parallel.model.per_part_optimizers import SeveralOptimizers, divide_parameters
from manyhands.parallel.model.step_buffers import ForeignState, NormLayer
from manyhands.strategies.base import LossFn, MetricFn
from manyhands.torch_private import BATCH_NORMS, DROPOUTS
from manyhands.training.setup import keras_models
from manyhands.training.setup.keras_compiled import compiled_parts
from manyhands.training.setup.keras_optimizer import is_keras_optimizer, keras_optimizer
from manyhands.training.setup.torch_losses import as_loss_function

__all__ = [
    "Parts",
    "assemble",
    "check_ending",
    "floats_of",
    "foreign_state",
    "load_weights",
    "optimizer_maker",
    "randomness_in",
    "save_model",
    "set_precision_",
]


@dataclass
class Parts:
    model: nn.Module
    loss: LossFn
    metrics: dict[str, MetricFn]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    call: Callable[[nn.Module, Any], Any]
    """The model's output for one batch, for `predict`."""
    sums: Sequence[torch.Tensor] = ()
    """Tensors outside of the model that forward passes add to: a step adds what all of its slices have added."""


def assemble(model: Any, loss: Any, optimizer: Any, metrics: Mapping[str, MetricFn] | None) -> Parts:
    given = model
    model = _as_module(given)
    call = _call
    if keras_models.is_keras(model):
        call = keras_models.call
        loss, optimizer, metrics = compiled_parts(model, loss, optimizer, metrics)
    if loss is None:
        raise SpecError(
            "No loss was given.", fix=["loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1])"]
        )
    if optimizer is None:
        raise SpecError("No optimizer was given.", fix=["optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"])
    if model is not given and isinstance(optimizer, torch.optim.Optimizer):
        raise SpecError(
            "The model is made here, by a function or from a file, so a ready optimizer cannot have its parameters.",
            fix=["optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"],
        )
    _check_functions(loss, optimizer, metrics)
    return Parts(model, as_loss_function(loss), dict(metrics or {}), optimizer_maker(optimizer), call)


def floats_of(precision: str) -> torch.dtype | None:
    """The dtype to which floating-point tensors of a batch are converted, if any."""
    return torch.float64 if precision == "fp64" else None


def set_precision_(model: nn.Module, precision: str) -> None:
    """Convert the weights to the dtype of `precision`, in place: an optimizer that has the parameters stays valid."""
    if precision != "fp64":
        return
    if keras_models.has_layers(model):
        raise SpecError(
            "A Keras model computes in the dtype with which it was made.",
            where='precision="fp64"',
            fix=['keras.config.set_floatx("float64"), before it is made, and no precision='],
        )
    if Sparse(model):
        raise SpecError(
            "Rows of mh.nn.Embedding and mh.nn.EmbeddingBag are fp32.",
            where='precision="fp64"',
            fix=['precision="fp32"', "nn.Embedding, nn.EmbeddingBag"],
        )
    model.double()


def _check_functions(loss: Any, optimizer: Any, metrics: Any) -> None:
    """`SpecError` for what would otherwise fail in the first step or evaluation with a Python error."""
    if not callable(loss):
        raise SpecError(
            f"loss is {loss!r}, which is not a function.",
            fix=["loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1])"],
        )
    if not (
        callable(optimizer) or isinstance(optimizer, torch.optim.Optimizer | Mapping) or is_keras_optimizer(optimizer)
    ):
        raise SpecError(
            f"optimizer is {optimizer!r}, which is neither a function of the parameters nor an optimizer.",
            fix=["optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"],
        )
    if metrics is not None and not isinstance(metrics, Mapping):
        raise SpecError(
            f"metrics is {metrics!r}, but must be functions by name.",
            fix=['metrics={"accuracy": lambda model, batch: (model(batch[0]).argmax(1) == batch[1]).float()}'],
        )


def _as_module(model: Any) -> nn.Module:
    if isinstance(model, str | Path):
        if Path(model).suffix not in keras_models.SUFFIXES:
            raise SpecError(
                f"model={str(model)!r} is not a file of a Keras model.", fix=["model.keras", "an nn.Module"]
            )
        model = keras_models.load(Path(model))
    elif not isinstance(model, nn.Module) and not keras_models.is_keras(model):
        if not callable(model):
            raise SpecError(f"model is a {type(model).__name__}.", fix=["an nn.Module", "a function that makes one"])
        model = model()
    if keras_models.is_keras(model):
        keras_models.check_usable(model)
    elif not isinstance(model, nn.Module):
        raise SpecError(f"The model function returned a {type(model).__name__}, not an nn.Module.")
    return model  # type: ignore[no-any-return]


def check_ending(model: nn.Module, path: Path) -> None:
    """`SpecError`, on every worker and before weights are gathered, if the suffix of `path` names no format."""
    is_keras = keras_models.is_keras(model)
    if not (is_keras and path.suffix in keras_models.SUFFIXES):
        format_of(path, keras_models.SUFFIXES if is_keras else ())


def save_model(model: nn.Module, path: Path, weights: Mapping[str, Any] | None = None) -> None:
    """`weights` are given if this worker does not have all weights of the model."""
    if path.suffix in keras_models.SUFFIXES:
        keras_models.save(model, path)
        return
    named = weights or {plain_name(name): one for name, one in model.state_dict().items()}
    save_tensors(path, _flat(named), format_of(path), force=True)


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a file that `save_model` has written."""
    if path.suffix in keras_models.SUFFIXES:
        keras_models.load_weights(model, path)
        return
    try:
        load_model_state(model, read_weights(path))
    except RuntimeError as error:
        raise CheckpointMismatch(f"{path} does not fit the model: {error}") from error


def read_weights(path: Path) -> dict[str, Any]:
    """Weights by plain name, from a safetensors or torch file, found by its content, not its suffix. Not Keras files.

    `CheckpointCorrupt` if it is neither.
    """
    with path.open("rb") as file:
        is_safetensors = file.read(9)[8:] == b"{"  # after the length of its header, which is JSON
    if is_safetensors:
        found = read_tensors(path)
    else:
        try:
            found = torch.load(path, weights_only=True, map_location="cpu")
        except Exception as error:  # torch's readers raise many kinds
            raise CheckpointCorrupt(f"{path} is not a file of tensors: {error}") from error
    return {plain_name(name): one for name, one in _nested(found).items()}


def _flat(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors by name; those of a layer's extra state, such as embedding rows, as NAME/KEY."""
    flat: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        parts = {f"{name}/{key}": one for key, one in value.items()} if isinstance(value, Mapping) else {name: value}
        flat |= {key: one for key, one in parts.items() if isinstance(one, torch.Tensor)}
    return flat


def _nested(flat: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        outer, mark, key = name.partition("_extra_state/")
        if mark:
            nested.setdefault(outer + mark[:-1], {})[key] = value
        else:
            nested[name] = value
    return nested


def foreign_state(model: nn.Module, sums: Sequence[torch.Tensor] = ()) -> ForeignState:
    """State in `model` that is not torch's, and `sums` of `Parts`, for the strategy."""
    found = keras_models.foreign_state(model)
    # An average that keeps all of its value is a sum; each write to it is a call.
    return replace(found, norms=(*found.norms, *(NormLayer((one,), 1.0, None) for one in sums)))


def optimizer_maker(optimizer: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        if is_keras_optimizer(optimizer):
            return keras_optimizer(model, optimizer)
        if isinstance(optimizer, Mapping):
            divided = divide_parameters(model, optimizer)
            return SeveralOptimizers({part: optimizer[part](params) for part, params in divided.items() if params})
        made = (
            optimizer
            if isinstance(optimizer, torch.optim.Optimizer)
            else optimizer([param for param in model.parameters() if param.requires_grad])
        )
        if not isinstance(made, torch.optim.Optimizer):
            raise SpecError(f"optimizer(params) returned a {type(made).__name__}, not a torch optimizer.")
        known = {id(param) for param in model.parameters()}
        unknown = sum(id(param) not in known for group in made.param_groups for param in group["params"])
        if unknown:
            raise SpecError(
                f"{unknown} of the optimizer's parameters are not the model's.",
                fix=["an optimizer of model.parameters()"],
            )
        return made

    return make


def _call(model: nn.Module, batch: Any) -> Any:
    """A tuple or list is (input, target, ...); a dict is keyword arguments."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


def randomness_in(model: nn.Module) -> str:
    """The layers whose result depends on how a batch is cut into slices: "dropout", "BatchNorm", both, or empty."""
    found = keras_models.randomness_in(model)
    if any(isinstance(m, DROPOUTS) and m.p > 0 for m in model.modules()):
        found.append("dropout")
    if any(isinstance(m, BATCH_NORMS) for m in model.modules()):
        found.append("BatchNorm")
    return " and ".join(dict.fromkeys(found))
