"""`fit`, `evaluate`, `predict`, `save` and the rest of a Keras model that was made in a scope.

Each checks what cannot work on several workers, and then calls Keras's own method with other data, another step and
another list of callbacks. Start reading at `ModelCalls.fit`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import torch

from manyhands.compat.keras.callback_list import LockstepCallbacks, QuietCallbacks
from manyhands.compat.keras.fit_call import FitCall, FitState, give_parameter
from manyhands.compat.keras.fit_data import FitData, StepAdapter, split_off
from manyhands.compat.keras.metric_sums import sums_of
from manyhands.compat.keras.model_checks import check_step
from manyhands.compat.keras.same_batches import agreed_batches
from manyhands.compat.keras.shared_evaluation import SharedEvaluation
from manyhands.errors import UsageError
from manyhands.training.driven_training import DrivenTraining
from manyhands.training.setup.keras_models import check_usable
from manyhands.training.setup.keras_optimizer import KerasOptimizer

if TYPE_CHECKING:
    from manyhands.compat.keras.scope import KerasScope

__all__ = ["ModelCalls"]

NAME = "_manyhands_calls"
REPLACED = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
WRITERS = ("save", "save_weights", "export")
READERS, CHANGERS = ("get_weights",), ("set_weights", "load_weights")


class ModelCalls:
    """The calls of one model, as attributes of the instance: its class is that of any other model."""

    def __init__(self, model: Any, scope: KerasScope) -> None:
        self._model, self._scope = model, scope
        self._training: DrivenTraining | None = None
        self._state = FitState()
        self._made_for: tuple[Any, ...] = ()
        own = vars(model)
        own[NAME] = self
        for name in REPLACED:
            own[name] = functools.update_wrapper(functools.partial(getattr(self, name)), getattr(type(model), name))
        for name in WRITERS:
            own[name] = self._writing(name, getattr(type(model), name))
        for name in READERS:
            own[name] = self._reading(name, getattr(type(model), name))
        for name in CHANGERS:
            own[name] = self._changing(name, getattr(type(model), name))

    @staticmethod
    def of(model: Any) -> ModelCalls | None:
        found: ModelCalls | None = vars(model).get(NAME)
        return found

    # ---- fit ----

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: Any = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> Any:
        """As Keras's; `batch_size` is that of the global batch."""
        model = self._model
        model._assert_compile_called("fit")
        self._check_fit()
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = split_off(x, y, sample_weight, validation_split)
        data = FitData(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps=steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
        )
        held_out = None
        loop = {
            "epochs": epochs,
            "initial_epoch": initial_epoch,
            "steps_per_epoch": steps_per_epoch,
            "validation_freq": validation_freq,
            "validation_steps": validation_steps,
        }
        if validation_data is not None:
            given = keras.utils.unpack_x_y_sample_weight(validation_data)
            held_out = FitData(*given, batch_size=validation_batch_size or batch_size, steps=validation_steps)
        training = self._training_for(data)
        if held_out is not None:
            loop["validation_data"] = (self._adapter_of(held_out, training, "fit(validation_data=...)"),)
        read = (data, held_out)
        if training.begin("fit"):
            return self._read_over(training.recorded, read)
        call = FitCall(model, training, data, self._state)
        call.warn_if_frozen()
        return self._run_fit(call, training, read, loop, callbacks, verbose)

    def _run_fit(
        self,
        call: FitCall,
        training: DrivenTraining,
        read: tuple[FitData, FitData | None],
        loop: dict[str, Any],
        callbacks: Any,
        verbose: Any,
    ) -> Any:
        data, held_out = read
        per_epoch, num_epochs = loop["steps_per_epoch"], loop["epochs"] - loop["initial_epoch"]
        source = training.source(data.for_source(), shuffle=data.shuffle, batched=data.batched)
        data.know_source(source)
        steps = per_epoch * num_epochs if per_epoch else None
        listed = LockstepCallbacks(
            callbacks,
            call,
            model=self._model,
            verbose=verbose,
            epochs=loop["epochs"],
            steps=per_epoch or data.num_batches,
        )
        call.callbacks = listed
        if num_epochs < 1:
            with self._functions(train=call.train_function):
                return self._keras("fit", StepAdapter(call.start_pass, 1, 1), **loop, callbacks=listed)
        self._state.call = call
        try:
            with training.steps(
                source,
                data.batch_size,
                epochs=None if steps else num_epochs,
                steps=steps,
                together_every=per_epoch,
            ) as takes_part:
                if not takes_part:
                    return self._read_over(training.recorded, read)
                call.resume()
                if call.finished is None:
                    with self._functions(train=call.train_function, test=self._shared(training).test_function):
                        adapter = StepAdapter(call.start_pass, data.num_batches, data.batch_size)
                        self._keras("fit", adapter, **loop, callbacks=listed)
                    data.end_steps(*training.position)
                    num_read = [data.num_read, held_out.num_read if held_out is not None else 0]
                    call.finished = _record_of(listed.history) | {"read": num_read}
                else:  # an earlier attempt ended after its last checkpoint
                    self._read_over(call.finished, read)
            training.record(call.finished)
        finally:
            self._state.call = None
        return self._history_of(call.finished, listed.history)

    def _check_fit(self) -> None:
        from manyhands.compat.keras.scope import active_scope

        model, open_one = self._model, active_scope()
        if open_one is not None and open_one is not self._scope:
            raise UsageError(
                f"The model {model.name!r} was made in another scope than this one.",
                where="fit inside of a scope",
                fix=["fit in the scope that it was made in, or after both", "a new model, made in this scope"],
            )
        check_step(model, "fit")

    def _read_over(self, record: Any, read: tuple[FitData, FitData | None]) -> Any:
        """The History of a call that has ended without this process, which reads what it has read of generators."""
        for data, count in zip(read, record.get("read", ()), strict=False):
            if data is not None:
                data.read_over(count)
        return self._history_of(record)

    def _history_of(self, record: Any, history: Any = None) -> Any:
        """The History of a call that has ended, maybe in an earlier attempt."""
        history = history or keras.callbacks.History()
        history.epoch, history.history = list(record["epoch"]), {k: list(v) for k, v in record["history"].items()}
        self._model.history = history
        return history

    # ---- evaluate and predict ----

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        if kwargs.get("_use_cached_eval_dataset"):  # Keras's fit validates
            assert self._state.call is not None
            if not self._state.call.is_live:
                self._model._eval_epoch_iterator.reset()
                for _ in self._model._eval_epoch_iterator:  # generators, and adapters of Keras, have been read so far
                    pass
                return {}
            return self._keras("evaluate", x, steps=steps, callbacks=callbacks, return_dict=True, **kwargs)
        check_step(self._model, "evaluate")
        data = FitData(x, y, sample_weight, batch_size=batch_size, steps=steps)
        training = self._training_for(data)

        def work() -> Any:
            shared = self._shared(training)
            listed = QuietCallbacks(
                callbacks, shared, model=self._model, verbose=verbose, epochs=1, steps=steps or data.num_batches
            )
            with self._functions(test=shared.test_function):
                return self._keras(
                    "evaluate",
                    self._adapter_of(data, training, "evaluate(x=...)"),
                    steps=steps,
                    callbacks=listed,
                    return_dict=True,
                    **kwargs,
                )

        logs = self._counted("evaluate", training, work, lambda: data.read_over_evaluation(steps))
        return logs if return_dict else self._model._flatten_metrics_in_order(logs)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        check_step(self._model, "predict")
        data = FitData(x, batch_size=batch_size, steps=steps)
        training = self._training_for(data, predicts=True)

        def work() -> Any:
            shared = self._shared(training)
            listed = QuietCallbacks(
                callbacks, shared, model=self._model, verbose=verbose, epochs=1, steps=steps or data.num_batches
            )
            with self._functions(predict=shared.predict_function):
                adapter = self._adapter_of(data, training, "predict(x=...)")
                return self._keras("predict", adapter, steps=steps, callbacks=listed)

        return self._counted("predict", training, work, lambda: data.read_over_evaluation(steps))

    def _counted(
        self, name: str, training: DrivenTraining, work: Callable[[], Any], read_over: Callable[[], None]
    ) -> Any:
        """A public call, whose result is recorded; inside of `fit`, in a callback, it is a part of that.

        Where it is over, `read_over` reads what it has read of a generator.
        """
        if training.is_in_steps:
            return work()
        training.begin(name)
        if name == "predict":
            if training.is_over:
                read_over()
                return keras.tree.map_structure(lambda one: one.numpy(), training.recorded_tensors)
            found = work()
            training.record_tensors(keras.tree.map_structure(torch.from_numpy, found))
            return found
        if training.is_over:
            read_over()
            return training.recorded
        found = {key: float(value) for key, value in work().items()}
        training.record(found)
        return found

    # ---- single batches ----

    def train_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, class_weight: Any = None, return_dict: bool = False
    ) -> Any:
        model = self._model
        model._assert_compile_called("train_on_batch")
        self._check_fit()
        rows = len(keras.tree.flatten(x)[0])
        data = FitData(x, y, sample_weight, batch_size=rows, class_weight=class_weight)
        training = self._training_for(data)
        if training.leases:
            raise UsageError(
                "train_on_batch takes one step of all workers together, and here servers lease slices to each.",
                where="train_on_batch",
                fix=["fit(x, y, batch_size=len(x), shuffle=False)", 'mh.ParameterServer(mode="hybrid")', "mh.Mirrored"],
            )
        training.refuse_without_checkpoints("train_on_batch", "fit")
        if training.is_in_steps:
            raise UsageError(
                "train_on_batch was called inside of a step of fit, of the same model.",
                where="train_on_batch in a callback",
                fix=["train_on_batch in a loop, without fit", "another model, for steps of its own"],
            )
        call = FitCall(model, training, data, self._state)
        source = training.source(data.for_source(), shuffle=False)
        model.reset_metrics()
        with training.steps(source, rows, epochs=1, steps=None, saves=False):
            logs = call.train_function([next(call.start_pass())])
        logs = {key: float(value) for key, value in logs.items()}
        return logs if return_dict else model._flatten_metrics_in_order(logs)

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False) -> Any:
        rows = len(keras.tree.flatten(x)[0])
        return self.evaluate(x, y, rows, 0, sample_weight, return_dict=return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        return self.predict(x, len(keras.tree.flatten(x)[0]), 0)

    # ---- files ----

    def _writing(self, name: str, inherited: Callable[..., Any]) -> Callable[..., Any]:
        """A method that writes files: the chief's call does, and the others wait for it outside of `fit`."""

        @functools.wraps(inherited)
        def write(*args: Any, **kwargs: Any) -> Any:
            training = self._training
            self._check_whole(name)
            if training is None:
                return inherited(self._model, *args, **kwargs) if self._scope.hands.is_chief else None
            if training.is_in_steps:
                return inherited(self._model, *args, **kwargs) if training.is_chief else None
            training.begin(name)
            if training.is_over:
                return None
            if training.is_chief:
                for one in args[:1]:
                    Path(one).parent.mkdir(parents=True, exist_ok=True)
                inherited(self._model, *args, **kwargs)
            training.wait_for_chief(name)
            return training.record(None)

        return write

    # ---- weights ----

    def _reading(self, name: str, inherited: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inherited)
        def read(*args: Any, **kwargs: Any) -> Any:
            self._check_whole(name)
            return inherited(self._model, *args, **kwargs)

        return read

    def _changing(self, name: str, inherited: Callable[..., Any]) -> Callable[..., Any]:
        """A method that writes weights, which workers may share."""

        @functools.wraps(inherited)
        def write(*args: Any, **kwargs: Any) -> Any:
            self._check_whole(name)
            training = self._training
            if training is None or not training.shares_weights:
                return inherited(self._model, *args, **kwargs)
            with training.users_code():
                return inherited(self._model, *args, **kwargs)

        return write

    def _check_whole(self, name: str) -> None:
        if self._training is not None and not self._training.has_whole_weights:
            raise UsageError(
                f"{name} was called after a batch, where the weights are on parameter servers or in shards.",
                where="a callback's on_train_batch_begin or on_train_batch_end",
                fix=["on_epoch_end", 'ModelCheckpoint(save_freq="epoch")', "mh.Mirrored"],
            )

    # ---- helpers ----

    def _training_for(self, data: FitData, *, predicts: bool = False) -> DrivenTraining:
        """The training of the model as it is compiled now: a new one after `compile`, or other trained variables."""
        model = self._model
        _build(model, data, predicts=predicts)
        check_usable(model)
        optimizer = getattr(model, "optimizer", None)
        now = (optimizer, *model.trainable_variables, *(() if predicts and self._training else sums_of(model)))
        is_same = len(now) <= len(self._made_for) and all(a is b for a, b in zip(now, self._made_for, strict=False))
        if self._training is None or not is_same:
            self._state, self._made_for = FitState(), now
            give_parameter(model)
            model.train()  # as Keras's fit does; an earlier evaluation may have left it in the other mode
            self._training = DrivenTraining(
                self._scope.hands_of_model(),
                model,
                lambda _: _as_torch(model, optimizer),
                hook=self._state,
                sums=sums_of(model),
            )
        return self._training

    def _shared(self, training: DrivenTraining) -> SharedEvaluation:
        return SharedEvaluation(self._model, training, self._state.halves_of_tests)

    def _adapter_of(self, data: FitData, training: DrivenTraining, where: str) -> StepAdapter:
        """Of batches for an evaluation. One that the run is past is read, without the other workers."""

        def batches() -> Iterator[Any]:
            call = self._state.call
            if data.is_known_everywhere or (call is not None and not call.is_live):
                return data.batches()
            return agreed_batches(training, where, data.batches(), lambda rows: rows.columns)

        return StepAdapter(batches, data.num_batches, data.batch_size)

    def _keras(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(self._model), name)(self._model, *args, **kwargs)

    @contextmanager
    def _functions(self, **functions: Any) -> Iterator[None]:
        """Keras's loops use these in place of functions that they would make."""
        names = {f"{name}_function": function for name, function in functions.items()}
        before = {name: getattr(self._model, name) for name in names}
        for name, function in names.items():
            setattr(self._model, name, function)
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(self._model, name, function)


def _as_torch(model: Any, optimizer: Any) -> torch.optim.Optimizer:
    if optimizer is not None and model.trainable_variables:
        return KerasOptimizer(optimizer, model.trainable_variables)
    # It is not compiled, so that it can only predict; or nothing of it is trained.
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.0)


def _build(model: Any, data: FitData, *, predicts: bool) -> None:
    """What Keras builds from the first batch: the model, and which metric "accuracy" is."""
    unbuilt = not all(layer.built for layer in model._flatten_layers())
    if predicts:
        if unbuilt:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data.first_batch())
            model(x)
        return
    compiled = (model._compile_metrics, model._compile_loss)
    if unbuilt or any(one is not None and not one.built for one in compiled):
        model._symbolic_build(data_batch=data.first_batch())


def _record_of(history: Any) -> dict[str, Any]:
    numbers = {name: [float(value) for value in values] for name, values in history.history.items()}
    return {"epoch": [int(one) for one in history.epoch], "history": numbers}
