"""`keras.callbacks.TensorBoard` without TensorFlow, which it imports: its options, written by our writer.

The same tags in the same folders: `train` has epoch_loss and the other results of epochs, and batch_loss with
update_freq="batch"; `validation` has those of validations. Start reading at `Summaries`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from manyhands.errors import SpecError
from manyhands.observe.tensorboard import SummaryWriter

__all__ = ["Summaries"]

CLOSE_TIMEOUT_S = 10.0


class Summaries(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Takes the place of a TensorBoard callback, with its settings.

    `batches_taken` says how many batches the call of `fit` has taken, those of earlier attempts included.
    """

    def __init__(self, asked: Any, batches_taken: Callable[[], int]) -> None:
        super().__init__()
        self._batches_taken = batches_taken
        for option in ("histogram_freq", "write_images", "embeddings_freq"):
            if getattr(asked, option):
                raise SpecError(
                    f"TensorBoard({option}={getattr(asked, option)!r}) needs TensorFlow's summaries; numbers are "
                    "written without it.",
                    where="callbacks=[keras.callbacks.TensorBoard(...)]",
                    fix=[f"no {option}=", "a callback of yours that writes them with torch.utils.tensorboard"],
                )
        self._log_dir, self._every, self._with_speed = (
            Path(asked.log_dir),
            1 if asked.update_freq == "batch" else asked.update_freq,
            asked.write_steps_per_second,
        )
        self._writers: dict[str, SummaryWriter] = {}
        self._began_at, self._batch_began_at, self._first_batch = 0.0, 0.0, 0

    @property
    def _step(self) -> int:
        return int(self.model.optimizer.iterations)

    def _write(self, folder: str, values: dict[str, Any], step: int) -> None:
        if folder not in self._writers:
            self._writers[folder] = SummaryWriter(self._log_dir / folder)
        self._writers[folder].put(values, step)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._began_at, self._first_batch = time.monotonic(), self._step

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._batch_began_at = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        number = self._batches_taken()
        if self._every == "epoch" or number % int(self._every):
            return
        values = {f"batch_{name}": value for name, value in (logs or {}).items()}
        if self._with_speed:
            values["batch_steps_per_second"] = 1.0 / max(time.monotonic() - self._batch_began_at, 1e-9)
        self._write("train", values, number)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs = logs or {}
        trained = {f"epoch_{name}": value for name, value in logs.items() if not name.startswith("val_")}
        trained["epoch_learning_rate"] = float(self.model.optimizer.learning_rate)
        if self._with_speed:
            seconds = max(time.monotonic() - self._began_at, 1e-9)
            trained["epoch_steps_per_second"] = (self._step - self._first_batch) / seconds
        self._write("train", trained, epoch)
        if validated := {f"epoch_{name[4:]}": value for name, value in logs.items() if name.startswith("val_")}:
            self._write("validation", validated, epoch)

    def on_test_end(self, logs: Any = None) -> None:
        if self.model.optimizer is not None and logs:
            values = {f"evaluation_{name}_vs_iterations": value for name, value in logs.items()}
            self._write("validation", values, self._step)

    def on_train_end(self, logs: Any = None) -> None:
        for writer in self._writers.values():
            writer.close(CLOSE_TIMEOUT_S)
        self._writers = {}
