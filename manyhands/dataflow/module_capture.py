"""The graph of a model that cannot be exported: the calls of its modules, as they happen in one forward pass.

Modules without modules inside are operations. What the model computes between them is not shown, but followed: a
dispatch mode sees every torch operation, and passes on from which modules' outputs its inputs come. Start reading at
`module_operations`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands.dataflow.export_capture import Captured, flops_of, specs_in
from manyhands.dataflow.graph import INPUT, OUTPUT, ModuleCall, Operation
from manyhands.parallel.pipeline.export_graph import without_cache
from manyhands.parallel.pipeline.partition import Inputs
from manyhands.torch_private import pytree
from manyhands.training.setup import keras_models

__all__ = ["module_operations"]

KERAS_CALL = "call"
"""Keras runs its layers by this method, not by torch's, so hooks of torch do not see them."""


def module_operations(model: nn.Module, inputs: Inputs) -> Captured:
    kwargs = {**inputs.kwargs, **without_cache(model, inputs.kwargs)}
    buffers = {id(one): (one, one.detach().clone()) for one in model.buffers()}
    recorder = _Recorder(model)
    try:
        recorder.take(inputs.args, kwargs)
        with torch.no_grad(), recorder.watching(), recorder:
            result = model(*inputs.args, **kwargs)
        return recorder.end(result)
    finally:
        with torch.no_grad():
            for buffer, before in buffers.values():
                buffer.copy_(before)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._operations: list[Operation] = []
        self._modules: dict[str, ModuleCall] = {}
        self._calls: dict[str, int] = {}
        self._scope: list[str] = []
        self._sources: dict[int, tuple[str, ...]] = {}
        self._alive: list[Tensor] = []
        """So that no other tensor gets the id of one that is known."""
        self._is_inside = False
        """Inside a module that is one operation."""

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for number, leaf in enumerate(leaves):
            name = "input" if len(leaves) == 1 else f"input_{number}"
            self._operations.append(Operation(name=name, kind=INPUT, outputs=specs_in(leaf)))
            self._mark(leaf, (name,))

    def end(self, result: Any) -> Captured:
        self._operations.append(Operation(name=OUTPUT, kind=OUTPUT, inputs=self._sources_of(result)))
        return self._operations, self._modules

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._is_inside:
            self._mark(result, self._sources_of((args, kwargs)))
        return result

    def _mark(self, value: Any, sources: tuple[str, ...]) -> None:
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor):
                self._sources[id(leaf)] = sources
                self._alive.append(leaf)

    def _sources_of(self, value: Any) -> tuple[str, ...]:
        leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        return tuple(dict.fromkeys(name for leaf in leaves for name in self._sources.get(id(leaf), ())))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, calls of the model's modules are recorded."""
        wrapped = []
        for name, module in _modules_of(self._model):
            method = KERAS_CALL if keras_models.is_layer(module) else "forward"
            had = module.__dict__.get(method)
            object.__setattr__(module, method, self._recording(name, module, getattr(module, method)))
            wrapped.append((module, method, had))
        try:
            yield
        finally:
            for module, method, had in wrapped:
                if had is None:
                    object.__delattr__(module, method)
                else:
                    object.__setattr__(module, method, had)

    def _recording(self, name: str, module: nn.Module, run: Any) -> Any:
        is_leaf = not any(_modules_of(module))

        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return run(*args, **kwargs)
            number = self._calls[name] = self._calls.get(name, -1) + 1
            path = f"{name}@{number}" if number else name
            self._modules[path] = ModuleCall(name, type(module).__name__)
            self._scope.append(path)
            try:
                if not is_leaf:
                    return run(*args, **kwargs)
                return self._operation(path, module, run, args, kwargs)
            finally:
                self._scope.pop()

        return recorded

    def _operation(self, path: str, module: nn.Module, run: Any, args: Any, kwargs: Any) -> Any:
        sources = self._sources_of((args, kwargs))
        flops = self._count_flops(run, args, kwargs)  # first: what is set up once does not count as time
        self._is_inside = True
        try:
            started = time.perf_counter()
            result = run(*args, **kwargs)
            seconds = time.perf_counter() - started
        finally:
            self._is_inside = False
        parameters = _parameters_of(module)
        operation = Operation(
            name=f"{path} ",  # not the name of the module that it is alone in
            kind=type(module).__name__,
            scope=tuple(self._scope),
            inputs=sources,
            outputs=specs_in(result),
            parameters=tuple(f"{self._modules[path].name}.{name}" for name in parameters),
            parameter_bytes=sum(one.nbytes for one in parameters.values()),
            flops=flops,
            seconds=seconds,
        )
        self._operations.append(operation)
        self._mark(result, (operation.name,))
        return result

    def _count_flops(self, run: Any, args: Any, kwargs: Any) -> int:
        """By a run of its own, whose result is dropped; random numbers are drawn again as if it had not been."""
        self._is_inside, state = True, torch.get_rng_state()
        try:
            return flops_of(lambda: run(*args, **kwargs))[0]
        finally:
            self._is_inside = False
            torch.set_rng_state(state)


def _modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules inside that run, by name. A Keras model knows its layers before torch does."""
    if keras_models.is_layer(model):
        return [(str(layer.name), layer) for layer in keras_models.layers_inside(model)]
    holders = (nn.ParameterList, nn.ParameterDict)
    return [(name, one) for name, one in model.named_modules() if one is not model and not isinstance(one, holders)]


def _parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """Without the seeds of random numbers, which Keras keeps as parameters."""
    return {name: one for name, one in module.named_parameters() if one.is_floating_point() or one.requires_grad}
