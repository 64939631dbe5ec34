"""What a Keras model, or a callback, may have of its own that Keras's loop would call and ours does not.

Keras builds its function of a step from methods of the model. Here that function is another one, so what replaces the
methods is refused by name instead of being left out. Start reading at `check_step`.
"""

from __future__ import annotations

from typing import Any

import keras

from manyhands.errors import SpecError

__all__ = ["check_logs", "check_replaced", "check_rows", "check_step"]

KINDS = {"fit": "train", "train_on_batch": "train", "evaluate": "test", "predict": "predict"}
INSTEAD = {
    "train": [
        "def compute_loss(self, x, y, y_pred, sample_weight, training): ..., called by Keras's train_step",
        "a keras.metrics.Metric in compile(metrics=...), for values of outputs",
        "mh.join, for a loop of your own",
    ],
    "test": ["def test_step(self, data): ..., which updates metrics", "a keras.metrics.Metric in compile(metrics=...)"],
    "predict": ["def predict_step(self, data): ..., with a row for each row of data"],
}


def check_step(model: Any, name: str) -> None:
    """`SpecError` for a model whose step of `name` (fit, evaluate, ...) cannot be that of slices."""
    kind = KINDS[name]
    if kind == "train" and type(model).train_step is not keras.Model.train_step:
        raise SpecError(
            f"{type(model).__name__} overrides train_step, which computes and applies the gradient of a whole "
            "batch on one worker.",
            fix=INSTEAD["train"],
        )
    maker = f"make_{kind}_function"
    if getattr(type(model), maker) is not getattr(keras.Model, maker):
        raise SpecError(
            f"{type(model).__name__} overrides {maker}, whose function is not used here.", fix=INSTEAD[kind]
        )
    check_replaced(model, None, kind)
    if kind == "train" and model.jit_compile:
        raise SpecError(
            "jit_compile=True compiles Keras's step, and here it is another one.",
            where="compile(...)",
            fix=["jit_compile=False", "--compile-mode of mh run, for torch.compile"],
        )
    if getattr(model, "steps_per_execution", 1) > 1:
        raise SpecError(
            f"steps_per_execution is {model.steps_per_execution}, and must be 1 with the PyTorch backend of Keras.",
            where="compile(...)",
            fix=["compile(...) without steps_per_execution="],
        )


def check_replaced(model: Any, ours: Any, kind: str = "train") -> None:
    """`SpecError` if the instance has a step of its own, or another function of a step than `ours`.

    Callbacks that need the outputs of training batches make such a step, and may do so at any moment.
    """
    own = vars(model)
    replaced = [name for name in (f"make_{kind}_function", *(["train_step"] if kind == "train" else [])) if name in own]
    if ours is not None and own.get(f"{kind}_function") != ours:
        replaced.append(f"{kind}_function")
    if replaced:
        raise SpecError(
            f"{replaced[0]} of the model {model.name!r} was replaced, and would not be called: each worker computes "
            "slices of a batch, in a step that is not Keras's.",
            where=f"model.{replaced[0]} = ..., maybe in a callback",
            fix=INSTEAD[kind],
        )


def check_logs(model: Any, found: Any) -> None:
    """`SpecError` where a test_step returns other values than those of the model's metrics: they are of one slice."""
    if found is None or (isinstance(found, dict) and set(found) == set(model.get_metrics_result())):
        return
    own = sorted(set(found) ^ set(model.get_metrics_result())) if isinstance(found, dict) else [type(found).__name__]
    raise SpecError(
        f"test_step of {type(model).__name__} returns other values than the model's metrics ({', '.join(own)}): a "
        "value of one slice, which cannot be merged with those of the others.",
        where="evaluate, or the validation of fit",
        fix=["a keras.metrics.Metric, made in __init__ and updated in test_step", "return self.get_metrics_result()"],
    )


def check_rows(model: Any, outputs: Any, rows: int) -> None:
    """`SpecError` where a prediction has not as many rows as its data, or a multiple of them."""
    for leaf in keras.tree.flatten(outputs):
        found = int(leaf.shape[0]) if getattr(leaf, "ndim", 0) else 0
        if not found or found % rows:
            raise SpecError(
                f"A prediction of {model.name!r} has shape {tuple(getattr(leaf, 'shape', ()))} for {rows} rows of "
                "data, so the predictions of slices are not those of the batch.",
                where="predict",
                fix=INSTEAD["predict"],
            )
