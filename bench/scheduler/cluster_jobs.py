"""The workloads of Pollux's artifact (petuum/adaptdl, branch osdi21-artifact) as traces for `scheduler.simulate`.

Step times are looked up as its simulator does, so that figures can be compared: measured placements by their smallest
rotation and, between local batches, on a straight line; other placements between the nearest measured (hosts, workers,
local batch). A job keeps its batch: with few workers it accumulates. Its number of steps follows from the recorded
progress of its batch size. Start reading at `workload`.
"""

from __future__ import annotations

import csv
import functools
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy.interpolate import LinearNDInterpolator, interp1d

from manyhands.scheduler.simulate import TracedJob, simulate

__all__ = ["HOSTS", "Application", "workload"]

HOSTS = (4,) * 16
MAX_EPOCHS = {"bert": 2, "cifar10": 100, "ncf": 10, "imagenet": 90, "deepspeech2": 80, "yolov3": 50}
MAX_LOCAL_BATCH = {"yolov3": 8}
MOST_MEASURED_HOSTS = 16


class Application:
    """Measurements of one application: step times by placement and local batch, progress by batch size."""

    def __init__(self, folder: Path) -> None:
        name = folder.name
        self._placed: dict[int, list[tuple[int, float, float]]] = defaultdict(list)
        for row in _rows(folder / "placements.csv"):
            self._placed[int(row["placement"])].append(_measured(row))
        self._others = _interpolator(self._placed, _rows(folder / "scalability.csv"))
        batches = [local for rows in self._placed.values() for local, *_ in rows]
        self.least_local, self._most_local = min(batches), MAX_LOCAL_BATCH.get(name, max(batches))
        self._validation = {
            int(path.stem.split("-")[1]): _rows(path) for path in sorted(folder.glob("validation-*.csv"))
        }
        self._first_batch, self._most_batch = min(self._validation), max(self._validation)
        self._epochs = MAX_EPOCHS[name]

    def steps(self, batch: int) -> float:
        """Steps to the end of the last epoch: progress counts steps of the first batch size, larger batches gain."""
        rows, total, before = self._validation[batch], 0.0, 0.0
        scale = batch / self._first_batch
        for epoch in range(self._epochs):
            square, variance = float(rows[epoch]["grad_sqr"]), float(rows[epoch]["grad_var"])
            gain = (variance + square) / (variance / scale + square)
            progress = min(float(each[epoch]["progress"]) for each in self._validation.values())
            total, before = total + (progress - before) / gain, progress
        return total

    def most_workers(self, batch: int) -> int:
        return min(sum(HOSTS), batch // self.least_local)

    @functools.lru_cache(100_000)  # noqa: B019 the six applications live as long as the program
    def step_s(self, batch: int, placement: tuple[int, ...]) -> float:
        workers = sum(placement)
        local = math.ceil(batch / workers - 1e-8)
        more = math.ceil(local / self._most_local - 1e-8) - 1
        if workers == 1 and batch > self._first_batch:
            more = max(1, more)
        each = min(math.ceil(local / (more + 1) - 1e-8), int(self._most_batch / (workers * (more + 1))))
        step_s, exchange_s = self._one_pass(placement, each)
        return step_s + more * (step_s - exchange_s)

    def _one_pass(self, placement: tuple[int, ...], local: int) -> tuple[float, float]:
        """Seconds of a step without accumulation, and those of its exchange."""
        smallest = min(placement[i:] + placement[:i] for i in range(len(placement)))
        measured = self._placed.get(int("".join(map(str, smallest))))
        if measured:
            table = np.array(sorted(measured))
            found = interp1d(table[:, 0], table[:, 1:], axis=0)(local)
        else:
            found = self._others([min(len(placement), MOST_MEASURED_HOSTS), sum(placement), local])[0]
        if not np.isfinite(found).all():
            raise ValueError(f"no measurement near {placement} with local batch {local}")
        return float(found[0]), float(found[1])


def workload(folder: Path, number: int) -> list[TracedJob]:
    """Workload `number` of the folder `cluster_jobs`: 160 jobs for 16 hosts of 4 devices."""
    return [
        TracedJob(
            name=row["name"],
            arrives_s=float(row["time"]),
            steps=application.steps(batch),
            most=application.most_workers(batch),
            step_s=functools.partial(application.step_s, batch),
        )
        for row in _rows(folder / "workloads" / f"workload-{number}.csv")
        for application, batch in [(_application(folder / "traces" / row["application"]), int(row["batch_size"]))]
    ]


@functools.cache
def _application(folder: Path) -> Application:
    return Application(folder)


def _rows(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _measured(row: dict[str, Any]) -> tuple[int, float, float]:
    return int(row["local_bsz"]), float(row["step_time"]), float(row["sync_time"])


def _interpolator(placed: dict[int, list[tuple[int, float, float]]], scalability: list[dict[str, Any]]) -> Any:
    sums: dict[tuple[int, int, int], list[tuple[float, float]]] = defaultdict(list)
    for placement, rows in placed.items():
        hosts = [int(digit) for digit in str(placement)]
        for local, *times in rows:
            sums[len(hosts), sum(hosts), local].append((times[0], times[1]))
    points = [(*key, *np.mean(values, axis=0)) for key, values in sorted(sums.items())]
    points += [(int(row["num_nodes"]), int(row["num_replicas"]), *_measured(row)) for row in scalability]
    table = np.array(points)
    return LinearNDInterpolator(table[:, :3], table[:, 3:])


def main(folder: Path) -> None:
    means = []
    for number in range(1, 5):
        played = simulate(workload(folder, number), HOSTS, "jct")
        assert all(job.completion_s is not None for job in played.jobs)
        means.append(played.mean_completion_s / 3600)
        ratios = sorted(job.fair_ratio for job in played.jobs)
        print(
            f"workload {number}: mean completion {means[-1]:.3f} h; largest multiple of a fair "
            f"share {ratios[-1]:.2f}, {sum(one > 1.5 for one in ratios)} of {len(ratios)} jobs above 1.5",
            flush=True,
        )
    print(f"mean of the four {sum(means) / len(means):.3f} h")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
