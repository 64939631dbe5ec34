"""`multi_gpu_model`: one process that computes a batch in parts, one per device. `Progbar`: its progress in a line.

Start reading at `multi_gpu_model`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.distribute.train.notices import say_once
from manyhands.errors import NotHere, SpecError
from manyhands.spec.keyword_check import checked_class, checked_keywords
from manyhands.torch_private import pytree

__all__ = ["PartsInTurn", "Progbar", "multi_gpu_model"]


class PartsInTurn(nn.Module):
    """The model applied to parts of the batch, one after the other, and their outputs concatenated: on one device."""

    def __init__(self, module: nn.Module, parts: int) -> None:
        super().__init__()
        self.module, self.parts = module, parts

    def forward(self, *inputs: Tensor) -> Any:
        if not len(inputs[0]):
            return self.module(*inputs)
        cut = [torch.tensor_split(one, self.parts) for one in inputs]
        outputs = [self.module(*one) for one in zip(*cut, strict=True) if len(one[0])]
        return pytree.tree_map(lambda *parts: torch.cat(parts), *outputs)


@checked_keywords
def multi_gpu_model(model: nn.Module, gpus: int | Sequence[int]) -> nn.Module:
    """`torch.nn.DataParallel`: the batch in parts, one per GPU. Without as many GPUs, in parts on the CPU, said once.

    For training on several devices use a strategy: a process per device is faster.

    Args:
        model: The model; its weights are shared.
        gpus: How many, at least 2, or their numbers.
    """
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(model, keras.Model):
        raise NotHere(
            "multi_gpu_model of a Keras model would have no compile and no fit.",
            where="multi_gpu_model",
            fix=["with distribute.MirroredStrategy().scope(): model = ...; model.compile(...)"],
        )
    numbers = list(range(gpus)) if isinstance(gpus, int) else list(gpus)
    if len(numbers) < 2:
        raise SpecError(f"gpus is {gpus!r}, but one device needs no parts.", where="multi_gpu_model", fix=["gpus=2"])
    if torch.cuda.device_count() > max(numbers):
        return nn.DataParallel(model.to(f"cuda:{numbers[0]}"), numbers)
    say_once(f"{len(numbers)} GPUs are not in this machine: the CPU computes the batch in {len(numbers)} parts.")
    return PartsInTurn(model, len(numbers))


@checked_class()
class Progbar:
    """A progress bar with values, as Keras prints it; values are averaged over their steps.

    Args:
        target: Steps in total; None: unknown.
        width: Of the bar, in characters.
        verbose: 1: a bar that is overwritten. 2: one line, at the end. 0: nothing.
        interval: Seconds between two updates of the bar.
        stateful_metrics: Names of values that are shown as they are.
    """

    def __init__(
        self,
        target: int | None,
        width: int = 20,
        verbose: int = 1,
        interval: float = 0.05,
        stateful_metrics: Iterable[str] = (),
    ) -> None:
        self.target, self._width, self._verbose, self._interval = target, width, verbose, interval
        self._as_is, self._sums = set(stateful_metrics), {}  # type: ignore[var-annotated]
        self._step, self._shown_at = 0, float("-inf")

    def update(self, current: int, values: Iterable[tuple[str, float]] = (), finalize: bool | None = None) -> None:
        """The bar is at step `current`.

        Args:
            current: Steps so far.
            values: Names and values of the steps since the last update.
            finalize: Whether it is the last update. Default: at `target`.
        """
        steps, self._step = max(1, current - self._step), current
        for name, value in values:
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (value, 1) if name in self._as_is else (total + value * steps, count + steps)
        last = self.target is not None and current >= self.target if finalize is None else finalize
        now = time.monotonic()
        if self._verbose == 1 and (last or now - self._shown_at >= self._interval):
            self._shown_at = now
            sys.stdout.write("\r" + self.line() + ("\n" if last else ""))
            sys.stdout.flush()
        elif self._verbose == 2 and last:
            print(self.line(), flush=True)

    def add(self, n: int, values: Iterable[tuple[str, float]] = ()) -> None:
        """The bar is `n` steps further."""
        self.update(self._step + n, values)

    def line(self) -> str:
        """What it shows."""
        means = [f"{name}: {total / count:.4f}" for name, (total, count) in self._sums.items()]
        if self.target is None:
            return " - ".join([f"{self._step}/Unknown", *means])
        digits = len(str(self.target))
        done = round(self._width * min(1.0, self._step / self.target))
        bar = "=" * done + "." * (self._width - done)
        return " - ".join([f"{self._step:{digits}d}/{self.target} [{bar}]", *means])
