"""Evaluation and prediction of a batch by all workers: each computes its slices, and all have the result.

Metrics get the sum of what every slice adds, in slice order, so results do not depend on the number of workers. Every
worker reads all of the data. Start reading at `SharedEvaluation.test_function`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np
import torch
from safetensors.torch import load, save

from manyhands.compat.keras.metric_sums import HalvesCheck, add_up, sums_of, values_of
from manyhands.compat.keras.model_checks import check_logs, check_rows
from manyhands.training.driven_training import DrivenTraining

__all__ = ["SharedEvaluation"]

CHECKED = 64
"""Rows of a batch, at most, whose halves are compared with them."""


class SharedEvaluation:
    """For Keras's `evaluate` and `predict`: the functions of a batch, and what callbacks ask about the run."""

    is_resumed = False
    batches_taken = 0

    def __init__(self, model: Any, training: DrivenTraining, halves: HalvesCheck) -> None:
        self._model, self._training, self._halves = model, training, halves

    @property
    def is_chief(self) -> bool:
        return self._training.is_chief

    def pass_moment(self) -> bool:
        return True

    def agree_to_stop(self, mine: bool, *, in_epoch: bool = False) -> bool:
        return mine

    def begin_epoch(self) -> None: ...

    def users_code(self) -> AbstractContextManager[None]:
        return nullcontext()

    def check_step(self) -> None: ...

    def warn(self, text: str) -> None:
        self._training.warn(text)

    def _mine(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """This worker's slices of a batch: index and row numbers."""
        training = self._training
        count = min(training.num_slices, rows)
        rank, workers = training.rank, training.num_workers
        for v in range(rank * count // workers, (rank + 1) * count // workers):
            yield v, v * rows // count, (v + 1) * rows // count

    def test_function(self, items: list[Any]) -> dict[str, Any]:
        """Keras's step of an evaluation."""
        rows, model, training = items[0], self._model, self._training
        sums = sums_of(model)
        start = values_of(sums)

        def work() -> None:
            added = []
            with training.evaluating():
                if training.num_slices > 1:  # of the batch: slices may have one row
                    self._halves.see_test(model, lambda *cut: model.test_step(rows(*cut)), min(len(rows), CHECKED))
                for v, low, high in self._mine(len(rows)):
                    add_up(sums, start)
                    check_logs(model, model.test_step(rows(low, high)))
                    added.append(np.concatenate([[v], (values_of(sums) - start).numpy()]))
            data = np.stack(added).tobytes() if added else b""
            gathered = b"".join(training.gather("metrics of a batch", data))
            parts = np.frombuffer(gathered).reshape(-1, 1 + len(start))
            total = start.numpy().copy()
            for part in parts[parts[:, 0].argsort()]:
                total += part[1:]
            add_up(sums, torch.from_numpy(total))

        training.agreed(work)
        return dict(model.get_metrics_result())

    def predict_function(self, items: list[Any]) -> Any:
        """Keras's step of a prediction: the outputs of the whole batch, on every worker."""
        rows, training = items[0], self._training

        def work() -> Any:
            found: dict[str, torch.Tensor] = {}
            outputs = None
            with training.evaluating():
                for v, low, high in self._mine(len(rows)):
                    outputs = self._model.predict_step(rows(low, high))
                    check_rows(self._model, outputs, high - low)
                    for number, leaf in enumerate(keras.tree.flatten(outputs)):
                        found[f"{v}/{number}"] = leaf.detach().cpu().clone().contiguous()
                if outputs is None:  # it has no slice, and needs the structure
                    outputs = self._model.predict_step(rows(0, 1))
            for data in training.gather("predictions of a batch", save(found)):
                found |= load(data)
            leaves = keras.tree.flatten(outputs)
            order = sorted({int(name.partition("/")[0]) for name in found})
            whole = [torch.cat([found[f"{v}/{number}"] for v in order]) for number in range(len(leaves))]
            return keras.tree.pack_sequence_as(outputs, whole)

        return training.agreed(work)
