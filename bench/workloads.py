"""What the benchmarks train, by name. The models themselves are in `models`: this file needs no torch."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DDP", "OVERHEAD", "Workload"]


class Workload(NamedTuple):
    name: str
    model: str
    batch: int
    """Rows per worker and step."""


CNN = Workload("cnn", "conv 32, conv 64, fc 128 on 28x28; 1.2 M parameters", 64)
MLP = Workload("mlp", "784-512-512-10; 0.7 M parameters", 128)
LARGE = Workload("mlp-10m", "784-2048-2048-2048-10; 10 M parameters", 128)
SMALL_TENSORS = Workload("small-tensors", "50 x (linear 64, layer norm); 202 tensors", 64)

OVERHEAD = {workload.name: workload for workload in (CNN, MLP)}
DDP = {workload.name: workload for workload in (LARGE, CNN, SMALL_TENSORS)}
