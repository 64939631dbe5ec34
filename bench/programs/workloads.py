"""The workloads of the benchmarks, by name. The models are in `models`: this file needs no torch."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "MICROBATCHES",
    "SERVED_ROWS",
    "SPARSE_BATCH",
    "SPARSE_DIM",
    "SPARSE_IDS",
    "SPARSE_PER_ROW",
    "STAGE_CUTS",
    "WORKLOADS",
    "Workload",
]

SERVED_ROWS = 60_000
"""Rows of the data with parameter servers, as many as MNIST has: all workers synchronise at the end of an epoch."""

MICROBATCHES = 8
STAGE_CUTS = {"gpipe": ("6",), "1f1b": ("6",), "interleaved": ("3", "6", "9")}
"""Where stages of the workload "blocks" begin, except the first, by the pipeline's schedule."""

SPARSE_IDS, SPARSE_DIM = 10_000_000, 16
SPARSE_BATCH, SPARSE_PER_ROW = 1024, 26
"""Rows of a batch, and ids of a row."""


class Workload(NamedTuple):
    name: str
    model: str
    batch: int
    """Rows per worker and step."""
    optimizer: str = "SGD with momentum"


_ALL = (
    Workload("cnn", "conv 32, conv 64, fc 128 on 28x28; 1.2 M parameters", 64),
    Workload("mlp", "784-512-512-10; 0.7 M parameters", 128),
    Workload("mlp-1m", "784-768-512-10; 1.0 M parameters", 32),
    Workload("mlp-10m", "784-2048-2048-2048-10; 10 M parameters", 128),
    Workload("mlp-10m-16", "784-2048-2048-2048-10; 10 M parameters", 16),
    Workload("blocks", "12 x (linear 1024, ReLU); 12.6 M parameters", 512),
    Workload("small-tensors", "50 x (linear 64, layer norm); 202 tensors", 64),
    Workload("2000-tensors", "1,000 x (64 to 4..64 and back); 2,000 tensors of 1 to 16 KB", 16),
    Workload("transformer", "5 layers of width 384, sequence 128; 9.7 M parameters", 2, "AdamW"),
    Workload("text", "the same, on bytes of Python's own library", 2, "AdamW"),
    Workload("mlp-100m", "784-5600-5600-5600-5600-10; 98.5 M parameters", 8, "AdamW"),
)
WORKLOADS = {workload.name: workload for workload in _ALL}
