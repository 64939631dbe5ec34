"""JPEG files decoded and augmented in loader processes, as `mh.Dataset` and as torch's DataLoader does it.

`python -m bench pictures`. Both sides decode with pillow and call the same functions of `mh.images`, in as many
processes, and send batches of the same size through shared memory; nothing is computed on them. The sides take turns in
blocks of steps, in one process, after both are warm; the DataLoader is there twice, and its ratio to itself is the
control. The processor time per picture, of a side's loader processes, says more where other programs use the machine.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

import manyhands as mh
from bench.results.compare import Measured, Size
from bench.results.table import OURS
from manyhands.data.batches import Batches
from manyhands.data.feeds import BatchSchedule
from manyhands.data.sample_order import Position, SliceDivision
from manyhands.data.sources.as_source import as_source

BATCH, STEPS, SETTLING = 32, 8, 4
PICTURES, PROCESSES = 200, 2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def augment(image: torch.Tensor, label: int) -> tuple[torch.Tensor, int]:
    image = mh.images.random_resized_crop(image, 224)
    image = mh.images.color_jitter(mh.images.random_flip(image), 0.4, 0.4, 0.4)
    return mh.images.normalize(image, MEAN, STD), label


class Pictures(Dataset[Any]):
    """As a user of torch writes it."""

    def __init__(self, folder: str) -> None:
        names = mh.images.class_names(folder)
        self._files = [(str(path), n) for n, name in enumerate(names) for path in sorted(Path(folder, name).iterdir())]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        path, label = self._files[row]
        return augment(mh.images.decode(path), label)


def of_torch(folder: str, processes: int) -> Iterator[Any]:
    data = Pictures(folder)
    endless = RandomSampler(data, replacement=True, num_samples=10**9)
    return iter(DataLoader(data, BATCH, sampler=endless, num_workers=processes, multiprocessing_context="spawn"))


def of_dataset(folder: str, processes: int) -> Iterator[Any]:
    data = mh.Dataset.from_files(folder).shuffle("full").map(augment, num_parallel_calls=processes)
    source = as_source(data.repeat().batch(BATCH), seed=1)
    schedule = BatchSchedule(BATCH, 1, Position(1, 0, 0), steps=10**9)
    return (piece.batch for step in Batches(source, schedule, 0, SliceDivision(1)) for piece in step.mine())


def write_pictures(folder: Path, count: int) -> None:
    """Like photographs for a decoder: smooth areas and some noise, 340 by 256."""
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(random.integers(0, 255, (8, 10, 3), np.uint8)).resize(
            (340, 256), Image.Resampling.BICUBIC
        )
        pixels = np.clip(np.asarray(coarse, np.int16) + random.integers(-12, 12, (256, 340, 3)), 0, 255).astype(
            np.uint8
        )
        target = folder / str(number % 2)
        target.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(target / f"{number}.jpg", quality=90)


class Side:
    """One way to read the pictures, with its loader processes."""

    def __init__(self, start: Callable[[str, int], Iterator[Any]], folder: str, processes: int) -> None:
        before = set(psutil.Process().children())
        self._batches, self._pictures = start(folder, processes), 0
        self.take(SETTLING)
        self._loaders = [one for one in psutil.Process().children() if one not in before]
        self._cpu_before, self._pictures = self._cpu_s(), 0

    def take(self, steps: int) -> None:
        for _ in range(steps):
            next(self._batches)
        self._pictures += steps * BATCH

    def cpu_s_per_picture(self) -> float:
        return (self._cpu_s() - self._cpu_before) / self._pictures

    def _cpu_s(self) -> float:
        return sum(sum(one.cpu_times()[:2]) for one in self._loaders)


def why_not(workload: str) -> str | None:
    return None if importlib.util.find_spec("PIL") else "pillow is not installed: pip install manyhands[images]"


def measure(workload: str, size: Size) -> Measured:
    """Seconds per picture of each side, block by block, and processor time per picture."""
    with tempfile.TemporaryDirectory() as folder:
        write_pictures(Path(folder), PICTURES)
        sides = {
            OURS: Side(of_dataset, folder, PROCESSES),
            "DataLoader": Side(of_torch, folder, PROCESSES),
            "DataLoader again": Side(of_torch, folder, PROCESSES),
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for block in range(size.num_blocks):
            order = list(sides)[block % len(sides) :] + list(sides)[: block % len(sides)]
            for name in order:
                sides[name].take(SETTLING)  # what was fetched while the others had their turn
                started = perf_counter()
                sides[name].take(STEPS)
                seconds[name].append((perf_counter() - started) / (STEPS * BATCH))
        cpu_ms = {name: round(1e3 * side.cpu_s_per_picture(), 2) for name, side in sides.items()}
        return Measured([seconds], {"threads": 1, "workers": PROCESSES, "cpu_ms_per_picture": cpu_ms})
