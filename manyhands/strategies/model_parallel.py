"""The strategies that a user names to partition a model over workers: plain settings, and the grid that follows."""

from __future__ import annotations

from typing import Any

from manyhands.comm.mesh import Grid
from manyhands.errors import SpecError
from manyhands.strategies.choices import Sharded
from manyhands.strategies.settings import LEVELS, StrategySettings, at_least, in_words, one_of

__all__ = [
    "DIVIDED",
    "Mesh",
    "PipelineParallel",
    "TensorParallel",
    "as_sharded",
    "grid_of",
    "microbatches",
    "replica_of",
]

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
MICROBATCHES_PER_STAGE = 4
"""Where the user gives no number. The bubble is then a fifth of a step with two stages."""


class _Pipelined(StrategySettings, frozen=True, kw_only=True):
    """Settings of a pipeline, which is a strategy or an axis of a mesh."""

    schedule: str = "1f1b"
    microbatches: int | None = None
    chunks: int | None = None
    cuts: tuple[str, ...] | None = None
    place: dict[str, int] | None = None
    reducer: Any = None

    def _check_pipeline(self, where: str) -> None:
        one_of("schedule", self.schedule, SCHEDULES, where)
        at_least("microbatches", self.microbatches, 1, where)
        at_least("chunks", self.chunks, 1, where)
        if self.cuts and self.place:
            raise SpecError("cuts already says where every stage begins.", where=where, fix=["no place=", "no cuts="])
        if self.reducer is not None and not callable(self.reducer):
            raise SpecError(
                f"reducer is {self.reducer!r}; for a pipeline it must be a function.",
                where=where,
                fix=["reducer=lambda gradients: torch.stack(gradients).sum(0)"],
            )


class TensorParallel(StrategySettings, frozen=True):
    """The layers of one model, sharded over the workers: each worker computes its shard of each layer.

    Args:
        workers: How many. Default: as many as the launcher starts.
        rules: How layers are split, by patterns of their names: "columns", "rows", "heads", "vocabulary", "channels",
            "grid" or "whole". Layers that match no pattern are split by their type; `mh plan show` prints how.
        recompute: Layers whose activations are not kept but computed again in backward: "blocks", or patterns of names.
        elastic: (least, most) workers: when some are lost permanently, the rest restarts from the last checkpoint.
        sequence: Between sharded layers each worker has a part of the sequence: norms, dropout and residuals need less
            memory. For long sequences.
        devices, threads, dtypes, memory_limit: devices, threads, precision and memory of the workers; see
            `mh.Single`.
    """

    workers: int | None = None
    rules: dict[str, str] | None = None
    elastic: tuple[int, int] | None = None
    sequence: bool = False
    name = "tensor"

    def __post_init__(self) -> None:
        at_least("workers", self.workers, 1, "mh.TensorParallel")


class PipelineParallel(_Pipelined, frozen=True):
    """The layers of one model in stages, one worker after the other; microbatches follow each other through them.

    Args:
        stages: How many workers. Default: as many as the launcher starts.
        elastic: As in `mh.TensorParallel`.
        schedule: The order of microbatches in each stage: "gpipe", "1f1b" (the default), "interleaved" or
            "zero_bubble". The last two wait less and send more.
        microbatches: How many microbatches a replica's part of the batch is cut into; each is a slice. With more,
            stages wait less, but each is smaller. Default: 4 per stage.
        chunks: Stages per worker. Default: 2 where the schedule is made for that, else 1.
        cuts: The block that each stage except the first begins with, by name. Default: balanced by measured time.
        place: Which stage has the blocks whose names match a pattern; the others are balanced around them.
        reducer: A function of one parameter's gradients, a list with one for each slice, in place of their sum.
        recompute: Layers whose activations are not kept but computed again in backward: "blocks", or patterns of names.
        devices, threads, dtypes, memory_limit: devices, threads, precision and memory of the workers; see
            `mh.Single`.
    """

    stages: int | None = None
    elastic: tuple[int, int] | None = None
    name = "pipeline"

    def __post_init__(self) -> None:
        at_least("stages", self.stages, 1, "mh.PipelineParallel")
        self._check_pipeline("mh.PipelineParallel")

    @property
    def workers(self) -> int | None:
        return self.stages


class Mesh(_Pipelined, frozen=True, kw_only=True):
    """Several kinds of parallelism: `data` replicas, each of `pipeline` stages, whose layers `tensor` ranks share.

    Args:
        data: Replicas.
        tensor: Workers that every layer is sharded over, as in `mh.TensorParallel`.
        pipeline: Stages, as in `mh.PipelineParallel`. `data` x `tensor` x `pipeline` is the number of workers.
        rules: As in `mh.TensorParallel`.
        sequence: As in `mh.TensorParallel`; needs `tensor` above 1.
        sharded: Shard over the replicas, as in `mh.Sharded`: "optimizer" state, "gradients" too, or "parameters" as
            well, which is also what True means. Needs `data` above 1.
        elastic: (least, most) workers: lost workers are replaced while the others keep their state, and whole replicas
            may leave and join. Default: when a worker is lost, all restart from the last checkpoint.
        schedule: The order of microbatches in each stage: "gpipe", "1f1b" (the default), "interleaved" or
            "zero_bubble". The last two wait less and send more.
        microbatches: How many microbatches a replica's part of the batch is cut into; each is a slice. With more,
            stages wait less, but each is smaller. Default: 4 per stage.
        chunks: Stages per worker. Default: 2 where the schedule is made for that, else 1.
        cuts: The block that each stage except the first begins with, by name. Default: balanced by measured time.
        place: Which stage has the blocks whose names match a pattern; the others are balanced around them.
        reducer: A function of one parameter's gradients, a list with one for each slice, in place of their sum.
        recompute: Layers whose activations are not kept but computed again in backward: "blocks", or patterns of names.
        devices, threads, dtypes, memory_limit: devices, threads, precision and memory of the workers; see
            `mh.Single`.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    rules: dict[str, str] | None = None
    sequence: bool = False
    sharded: bool | str = False
    elastic: tuple[int, int] | None = None
    name = "mesh"

    def __post_init__(self) -> None:
        for axis in ("data", "tensor", "pipeline"):
            at_least(axis, getattr(self, axis), 1, "mh.Mesh")
        self._check_pipeline("mh.Mesh")
        if self.reducer is not None and self.data > 1:
            raise SpecError(
                f"reducer combines the gradients of all slices, but with data={self.data} no worker has all of them.",
                where="mh.Mesh",
                fix=["data=1", "no reducer="],
            )
        if self.sequence and self.tensor == 1:
            raise SpecError(
                "sequence shards norms and dropout over the tensor axis, which has only one worker with tensor=1.",
                where="mh.Mesh",
                fix=["tensor=2", "sequence=False"],
            )
        if self.level is not None:
            one_of("sharded", self.level, LEVELS, "mh.Mesh")
            self._check_sharded()

    def _check_sharded(self) -> None:
        if self.data == 1:
            raise SpecError(
                "sharded divides memory over replicas, but with data=1 there is only one replica.",
                where="mh.Mesh",
                fix=["data=2", "sharded=False"],
            )

    @property
    def level(self) -> str | None:
        """What is sharded over replicas; None: nothing."""
        return ("parameters" if self.sharded is True else self.sharded) or None

    @property
    def divided(self) -> str:
        """What is sharded, in words, for the run's first line."""
        return f"{in_words(self.level)} of replicas" if self.level is not None else ""

    @property
    def workers(self) -> int:
        return self.data * self.tensor * self.pipeline


DIVIDED = (TensorParallel, PipelineParallel, Mesh)


def grid_of(choice: Any, num_workers: int) -> Grid:
    """The grid of so many workers; a strategy that does not partition the model has replicas only."""
    if isinstance(choice, TensorParallel):
        return Grid(tensor=num_workers)
    if isinstance(choice, PipelineParallel):
        return Grid(pipeline=num_workers)
    if not isinstance(choice, Mesh):
        return Grid(data=num_workers)
    grid = Grid(pipeline=choice.pipeline, data=choice.data, tensor=choice.tensor)
    if grid.size != num_workers:
        raise SpecError(
            f"The mesh is {grid.data} (data) x {grid.tensor} (tensor) x {grid.pipeline} (pipeline) workers, that is "
            f"{grid.size}, but this run has {num_workers}.",
            where="mh.Mesh",
            fix=[f"mh run -n {grid.size} ...", *_other_data_axis(grid, num_workers)],
        )
    return grid


def replica_of(choice: Any, num_workers: int) -> Grid:
    """The grid of one replica's workers, of so many in all: each has a part of the model that the others lack."""
    if isinstance(choice, Mesh):
        return Grid(pipeline=choice.pipeline, tensor=choice.tensor)
    return grid_of(choice, num_workers)


def as_sharded(choice: Any, grid: Grid) -> Sharded | None:
    """A mesh of sharded replicas as `Sharded`, where nothing else is partitioned."""
    if not isinstance(choice, Mesh) or choice.level is None or grid.data < grid.size:
        return None
    return Sharded(choice.level, recompute=choice.recompute)


def microbatches(choice: Any, grid: Grid) -> int:
    """How many slices a replica's part of a batch is cut into; without a pipeline, one."""
    if grid.pipeline == 1 or not isinstance(choice, _Pipelined):
        return 1
    return choice.microbatches or MICROBATCHES_PER_STAGE * grid.pipeline


def _other_data_axis(grid: Grid, num_workers: int) -> list[str]:
    data, rest = divmod(num_workers, grid.tensor * grid.pipeline)
    return [f"data={data}"] if not rest and data else []
