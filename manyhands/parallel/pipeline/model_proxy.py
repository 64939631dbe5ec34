"""The object that the user's loss gets in place of a model that is cut into stages.

Every stage calls the loss with the slice's batch, up to the call of the model: that yields the model's inputs, and
random numbers that the loss draws before are the same on every stage. On the last stage the loss continues with the
model's output. Only calls are supported: a rank does not have all weights and submodules, so accessing them raises an
error with the line of the access. Start reading at `learn_inputs`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partialmethod
from types import FrameType
from typing import Any, NoReturn

from torch import Tensor, nn

from manyhands.errors import SpecError
from manyhands.parallel.pipeline.partition import Inputs
from manyhands.torch_private import pytree

__all__ = ["PLAIN", "EvaluationProxy", "ModelProxy", "call_up_to_model", "call_with_model", "learn_inputs"]

PLAIN = bool | int | float | str | bytes | None


class _ModelCalled(BaseException):
    """Ends the loss after its call of the model. Not an `Exception`, which a loss might catch."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class ModelProxy:
    """Calls `run` when the user calls the model."""

    def __init__(self, model: nn.Module, run: Callable[[Inputs], Any], *, once: bool = True) -> None:
        self._model, self._run, self._once = model, run, once
        self.first_call = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        line = _line(sys._getframe(1))
        if self._once and self.first_call:
            raise SpecError(
                f"The loss calls the model a second time; a pipeline runs it once per slice. First: {self.first_call}.",
                where=line,
                fix=["one call of the model, on all inputs together", "mh.Mirrored or mh.Sharded"],
            )
        self.first_call = line
        inputs = Inputs(args, kwargs)
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(inputs)):
            raise SpecError(
                "The model's input requires a gradient, but in a pipeline inputs come from the batch and get none.",
                where=line,
                fix=["move the computation of the input into a module of the model", "mh.Mirrored or mh.Sharded"],
            )
        return self._run(inputs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        if isinstance(value, PLAIN) or not (isinstance(value, Tensor | nn.Module) or callable(value)):
            return value
        self._refuse(name, sys._getframe(1))

    def _refuse(self, name: str, frame: FrameType) -> NoReturn:
        raise SpecError(
            f"A loss or metric uses model.{name}, but in a pipeline each worker has only a part of the model.",
            where=_line(frame),
            fix=["call model(...) only, and return what the loss needs as an output", "mh.Mirrored or mh.Sharded"],
        )


class EvaluationProxy(ModelProxy):
    """The same for evaluation: the model may be called any number of times, in the mode that the engine sets."""

    def __init__(self, model: nn.Module, run: Callable[[Inputs], Any]) -> None:
        super().__init__(model, run, once=False)

    def train(self, mode: bool = True) -> EvaluationProxy:
        self._model.train(mode)
        return self

    eval = partialmethod(train, False)


def call_up_to_model(loss: Callable[..., Any], model: nn.Module, batch: Any, run: Callable[[Inputs], Any]) -> Any:
    """The result of `run` on the model's inputs; the loss ends at its call of the model."""

    def stop(inputs: Inputs) -> NoReturn:
        raise _ModelCalled(run(inputs))

    try:
        loss(ModelProxy(model, stop), batch)
    except _ModelCalled as reached:
        return reached.value
    _refuse_without_call(loss)


def call_with_model(loss: Callable[..., Any], model: nn.Module, batch: Any, run: Callable[[Inputs], Any]) -> Any:
    """What the loss returns if its call of the model is `run`."""
    proxy = ModelProxy(model, run)
    result = loss(proxy, batch)
    if not proxy.first_call:
        _refuse_without_call(loss)
    return result


def learn_inputs(loss: Callable[..., Any], model: nn.Module, batch: Any) -> Inputs:
    """The inputs with which the loss calls the model for this batch."""
    found: Inputs = call_up_to_model(loss, model, batch, lambda inputs: inputs)
    return found


def _refuse_without_call(loss: Callable[..., Any]) -> NoReturn:
    code = getattr(loss, "__code__", None)
    raise SpecError(
        "The loss does not call the model; a pipeline needs exactly one call of it, such as model(x).",
        where=f"{code.co_filename}:{code.co_firstlineno}" if code else getattr(loss, "__name__", type(loss).__name__),
        fix=["def loss(model, batch): return cross_entropy(model(batch[0]), batch[1])"],
    )


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
