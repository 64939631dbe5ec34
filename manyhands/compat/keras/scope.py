"""`with scope(strategy):` joins the run, or starts its workers, and makes Keras models that train on all of them.

While a scope is open, Keras's model class notes which models are made: those get `fit` and the other calls of
`model_calls` as attributes of the instance. Outside of scopes, and for other models, Keras is untouched. Start reading
at `KerasScope`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from typing import Any

import manyhands as mh
from manyhands.errors import EnvironmentProblem, SpecError, UsageError

__all__ = ["KerasScope", "active_scope", "load_keras", "scope"]

_open: list[KerasScope] = []
"""The scopes that are open, the innermost last."""


def scope(strategy: Any = None, **settings: Any) -> KerasScope:
    """A context for making, compiling and loading Keras models that all workers of `strategy` train together.

    Args:
        strategy: As for `mh.join`: a name, or an object such as `mh.Mirrored(workers=2)`.
        settings: The other arguments of `mh.join`: seed, slices, exact, run_dir, checkpoint and so on.
    """
    return KerasScope(lambda: mh.join(strategy, **settings))


class KerasScope:
    """Joins at its first use. Entered once or several times, it is one and the same run."""

    def __init__(self, join: Callable[[], mh.Hands]) -> None:
        self._join = join
        self._joined: mh.Hands | None = None
        self._is_given = False
        self._before: list[tuple[Any, str, Any]] = []

    @property
    def hands(self) -> mh.Hands:
        """This worker. The process becomes the launcher here if the strategy asks for several workers."""
        if self._joined is None:
            self._joined = self._join()
        return self._joined

    def hands_of_model(self) -> mh.Hands:
        """A training for one more model: that of the scope for the first one."""
        if self._is_given:
            return self._join()
        self._is_given = True
        return self.hands

    def __enter__(self) -> KerasScope:
        keras = load_keras()
        _ = self.hands
        _open.append(self)
        trainer = next(one for one in keras.Model.__mro__ if "make_train_function" in vars(one))
        compiler = next(one for one in keras.Model.__mro__ if "compile" in vars(one))
        self._replace(trainer, "__init__", self._noting(trainer.__init__))
        self._replace(compiler, "compile", _refusing(compiler.compile))
        self._replace(trainer, "fit", _refusing(trainer.fit))
        return self

    def __exit__(self, *_: object) -> None:
        _open.remove(self)
        while self._before:
            setattr(*self._before.pop())
        if self.hands.world_size > 1:
            _warn_of_copies(self.hands.world_size)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _noting(self, inherited: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(inherited)
        def init(model: Any, *args: Any, **kwargs: Any) -> None:
            from manyhands.compat.keras.model_calls import ModelCalls

            inherited(model, *args, **kwargs)
            if active_scope() is self and ModelCalls.of(model) is None:
                ModelCalls(model, self)

        return init


def _refusing(inherited: Callable[..., Any]) -> Callable[..., Any]:
    """Keras's method for models of a scope; an error for one that was made before it: it would train on its own."""

    @functools.wraps(inherited)
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        from manyhands.compat.keras.model_calls import ModelCalls

        if ModelCalls.of(model) is None:
            raise UsageError(
                f"The model {model.name!r} was made outside of the scope, so each worker would train a copy of it.",
                where=f"{inherited.__name__} inside of a scope",
                fix=[
                    f"with strategy.scope(): {model.name} = ..., then compile",
                    f"{inherited.__name__} after the scope, to train it without manyhands",
                ],
            )
        return inherited(model, *args, **kwargs)

    return call


def _warn_of_copies(num_workers: int) -> None:
    """Outside of scopes Keras is left alone, but with several workers `fit` there says what it does."""
    from manyhands.compat.keras.model_calls import ModelCalls

    trainer = next(one for one in sys.modules["keras"].Model.__mro__ if "make_train_function" in vars(one))
    if getattr(trainer.fit, "warns_of_copies", False):
        return
    inherited = trainer.fit

    @functools.wraps(inherited)
    def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
        if ModelCalls.of(model) is None:
            warnings.warn(
                f"The model {model.name!r} was made outside of the scope: each of the {num_workers} workers trains a "
                "copy of it. Make and compile it inside of `with strategy.scope():` to train one model together.",
                stacklevel=2,
            )
        return inherited(model, *args, **kwargs)

    fit.warns_of_copies = True  # type: ignore[attr-defined]
    trainer.fit = fit


def active_scope() -> KerasScope | None:
    """The innermost scope that is open."""
    return _open[-1] if _open else None


def load_keras() -> Any:
    """The keras module, on the torch backend."""
    try:
        keras = sys.modules.get("keras") or importlib.import_module("keras")
    except ImportError as error:  # also of its default backend, TensorFlow
        raise EnvironmentProblem(
            f"A scope needs Keras on the torch backend: {error}.",
            fix=["KERAS_BACKEND=torch mh run train.py", "pip install 'manyhands[keras]'"],
        ) from error
    backend = keras.config.backend()
    if backend != "torch":
        raise SpecError(
            f"Keras was imported on the {backend} backend; only on torch can its models be trained here.",
            where="scope()",
            fix=["KERAS_BACKEND=torch mh run train.py: Keras reads it when it is imported"],
        )
    return keras
