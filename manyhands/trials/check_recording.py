"""What a worker records for `mh check`: the losses of the first steps, then full weights and gradients.

A hook, so that the training loop does not know about it. After the last requested step, the process ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from manyhands import exact_json
from manyhands.checkpoint.state_packing import model_state
from manyhands.spec.probe_requests import CheckOrder
from manyhands.strategies.base import StepStats
from manyhands.training.loop.run import Run

__all__ = ["Checked", "Record", "Recording", "deviation", "nudge_", "read_record", "size_of"]

NUDGE = 2.0**-22
"""Relative: two units in the last place of a weight in fp32."""


class Record(msgspec.Struct):
    losses: list[float] = []
    norms: list[float] = []
    """Gradient norms before clipping; only if the script clips."""
    precision: str = "fp32"


class Checked(msgspec.Struct):
    """Everything recorded of a run."""

    record: Record
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    """Gradients of the last step; empty if workers sum them in shared memory."""


class Recording:
    """A hook that records a run, and then ends the process."""

    def __init__(self, order: CheckOrder, run: Callable[[], Run]) -> None:
        self._order, self._run, self._record = order, run, Record()

    def begin(self, trainer: Any) -> None:
        if self._order.nudged:
            with trainer.editing() as model:
                nudge_(model.parameters())

    def after_step(self, trainer: Any, step: int, stats: StepStats) -> None:
        self._record.losses.append(stats.loss)
        if stats.grad_norm is not None:
            self._record.norms.append(stats.grad_norm)
        if step >= self._order.steps:
            self._finish()

    def end(self, trainer: Any, error: BaseException | None) -> None:
        if error is None:  # the training is shorter than requested
            self._finish()

    def _finish(self) -> None:
        run = self._run()
        training, worker = run.ready(), run.worker
        self._record.precision = worker.resolved.spec.train.precision
        weights = training.whole_weights()
        gradients = training.whole_gradients()
        if worker.is_chief:
            weights = weights if weights is not None else model_state(training.model)[0]
            _write(worker.run_dir, self._record, weights, gradients)
        worker.end_trial()


def _write(folder: Path, record: Record, weights: dict[str, Any], gradients: dict[str, Tensor]) -> None:
    tensors = {f"weights/{name}": one for name, one in weights.items() if isinstance(one, Tensor)}
    tensors |= {f"gradients/{name}": one for name, one in gradients.items()}
    copies = {name: one.detach().cpu().clone().contiguous() for name, one in tensors.items()}
    save_file(copies, folder / "check.safetensors")
    (folder / "check.json").write_bytes(exact_json.encode(record))


def read_record(folder: Path) -> Checked | None:
    """None if nothing was recorded."""
    if not (folder / "check.json").exists():
        return None
    record = exact_json.decode((folder / "check.json").read_bytes(), Record)
    tensors = load_file(folder / "check.safetensors")

    def below(kind: str) -> dict[str, Tensor]:
        return {name.removeprefix(kind): one for name, one in tensors.items() if name.startswith(kind)}

    return Checked(record, below("weights/"), below("gradients/"))


def nudge_(params: Iterable[Tensor]) -> None:
    """Change weights by a few units in their last place, as a different order of summation does."""
    random = torch.Generator().manual_seed(0)
    for param in params:
        if param.is_floating_point():
            noise = torch.empty(param.shape, dtype=torch.float64).uniform_(-1.0, 1.0, generator=random)
            param.data.mul_((1.0 + NUDGE * noise).to(param.device, param.dtype))


def size_of(tensors: Iterable[Tensor]) -> float:
    """The largest absolute value in all of the tensors."""
    return max(
        (float(one.double().abs().max()) for one in tensors if one.is_floating_point() and one.numel()), default=0
    )


def deviation(a: Tensor, b: Tensor, size: float | None = None) -> float:
    """The largest difference, relative to `size`; else to the largest value of `a`."""
    if not a.is_floating_point() or not a.numel():
        return float(not torch.equal(a, b))
    difference = float((a.double() - b.double()).abs().max())
    size = float(a.double().abs().max()) if size is None else size
    value = difference / size if size > 0 else float(difference > 0)
    return value if math.isfinite(value) else math.inf
