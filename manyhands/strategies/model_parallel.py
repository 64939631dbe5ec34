"""The names a user writes to have a model itself divided over workers: plain settings, and the grid they come to."""

from __future__ import annotations

from typing import Any

from manyhands.comm.mesh import Grid
from manyhands.errors import SpecError
from manyhands.strategies.choices import Sharded
from manyhands.strategies.settings import LEVELS, Settings, at_least, in_words, one_of

__all__ = ["DIVIDED", "Mesh", "Pipeline", "Tensor", "as_sharded", "grid_of", "microbatches", "replica_of"]

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
MICROBATCHES_PER_STAGE = 4
"""Where nobody says how many: a fifth of a step of two stages is bubble then."""


class _Pipelined(Settings, frozen=True, kw_only=True):
    """What is said of a pipeline, by itself or in a mesh."""

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
            raise SpecError("cuts says where every stage begins already.", where=where, fix=["no place=", "no cuts="])
        if self.reducer is not None and not callable(self.reducer):
            raise SpecError(
                f"reducer is {self.reducer!r}; of a pipeline it is a function.",
                where=where,
                fix=["reducer=lambda gradients: torch.stack(gradients).sum(0)"],
            )


class Tensor(Settings, frozen=True):
    """One model's layers, divided over the workers: each of them computes its part of each layer.

    Args:
        workers: How many. Default: as many as the launcher starts.
        rules: How layers are split, by patterns of their names: "columns", "rows", "heads", "vocabulary", "channels",
            "grid" or "whole". Layers that no pattern names are split as their kind suggests; `mh plan show` prints how.
        recompute: Layers whose activations are not kept but computed again in backward: "blocks", or patterns of names.
        elastic: (least, most) workers: when some are lost for good, the rest goes on from the last checkpoint.
        sequence: Between divided layers each worker has a part of the sequence: norms, dropout and residuals take less
            memory. For long sequences.
        devices, threads, dtypes, memory_limit: where, with what and in how much memory workers compute; see
            `mh.Single`.
    """

    workers: int | None = None
    rules: dict[str, str] | None = None
    elastic: tuple[int, int] | None = None
    sequence: bool = False
    name = "tensor"

    def __post_init__(self) -> None:
        at_least("workers", self.workers, 1, "mh.Tensor")


class Pipeline(_Pipelined, frozen=True):
    """One model's layers in stages, one worker after the other; microbatches follow each other through them.

    Args:
        stages: How many workers. Default: as many as the launcher starts.
        elastic: As `mh.Tensor` has it.
        schedule: Which microbatch is where when: "gpipe", "1f1b" (the default), "interleaved" or "zero_bubble". The
            last two wait less and send more.
        microbatches: How many a replica's part of the batch is cut into; each is a slice. More of them wait less, and
            are smaller. Default: 4 per stage.
        chunks: Stages per worker. Default: 2 where the schedule is made for that, else 1.
        cuts: The blocks that each stage but the first begins with, by name. Default: balanced by measured time.
        place: Which stage has the blocks whose names match a pattern; the others are balanced around them.
        reducer: A function of one parameter's gradients, a list with one of each slice, in place of their sum.
        recompute: Layers whose activations are not kept but computed again in backward: "blocks", or patterns of names.
        devices, threads, dtypes, memory_limit: where, with what and in how much memory workers compute; see
            `mh.Single`.
    """

    stages: int | None = None
    elastic: tuple[int, int] | None = None
    name = "pipeline"

    def __post_init__(self) -> None:
        at_least("stages", self.stages, 1, "mh.Pipeline")
        self._check_pipeline("mh.Pipeline")

    @property
    def workers(self) -> int | None:
        return self.stages


class Mesh(_Pipelined, frozen=True, kw_only=True):
    """Several ways at once: `data` replicas, each in `pipeline` stages whose layers are divided over `tensor` ranks.

    Args:
        data: Replicas.
        tensor: Workers that every layer is divided over, as `mh.Tensor` does.
        pipeline: Stages, as `mh.Pipeline` has them. `data` x `tensor` x `pipeline` is the number of workers.
        rules: As `mh.Tensor` has them.
        sequence: As `mh.Tensor` has it; needs `tensor` above 1.
        sharded: Replicas divide what they have in common, as those of `mh.Sharded` do: the "optimizer"'s states,
            "gradients" too, or "parameters" as well, which True stands for. Needs `data` above 1.
        elastic: (least, most) workers: those that die are replaced while the others keep their state, and whole
            replicas may go and come. Default: a lost worker takes all back to the last checkpoint.
        schedule: Which microbatch is where when: "gpipe", "1f1b" (the default), "interleaved" or "zero_bubble". The
            last two wait less and send more.
        microbatches: How many a replica's part of the batch is cut into; each is a slice. More of them wait less, and
            are smaller. Default: 4 per stage.
        chunks: Stages per worker. Default: 2 where the schedule is made for that, else 1.
        cuts: The blocks that each stage but the first begins with, by name. Default: balanced by measured time.
        place: Which stage has the blocks whose names match a pattern; the others are balanced around them.
        reducer: A function of one parameter's gradients, a list with one of each slice, in place of their sum.
        recompute: Layers whose activations are not kept but computed again in backward: "blocks", or patterns of names.
        devices, threads, dtypes, memory_limit: where, with what and in how much memory workers compute; see
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
                f"reducer puts all slices' gradients together, and with data={self.data} no worker has all of them.",
                where="mh.Mesh",
                fix=["data=1", "no reducer="],
            )
        if self.sequence and self.tensor == 1:
            raise SpecError(
                "sequence divides norms and dropout over the tensor axis, and with tensor=1 nothing is divided there.",
                where="mh.Mesh",
                fix=["tensor=2", "sequence=False"],
            )
        if self.level is not None:
            one_of("sharded", self.level, LEVELS, "mh.Mesh")
            self._check_sharded()

    def _check_sharded(self) -> None:
        if self.data == 1:
            raise SpecError(
                "sharded divides memory over replicas, and with data=1 there is one.",
                where="mh.Mesh",
                fix=["data=2", "sharded=False"],
            )

    @property
    def level(self) -> str | None:
        """What replicas divide; None: nothing."""
        return ("parameters" if self.sharded is True else self.sharded) or None

    @property
    def divided(self) -> str:
        """The same in words, for the run's first line."""
        return f"{in_words(self.level)} of replicas" if self.level is not None else ""

    @property
    def workers(self) -> int:
        return self.data * self.tensor * self.pipeline


DIVIDED = (Tensor, Pipeline, Mesh)


def grid_of(choice: Any, num_workers: int) -> Grid:
    """How so many workers stand; a strategy that does not divide the model has replicas only."""
    if isinstance(choice, Tensor):
        return Grid(tensor=num_workers)
    if isinstance(choice, Pipeline):
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
    """The workers of one replica, of so many in all: each has a part of the model that its mates lack."""
    if isinstance(choice, Mesh):
        return Grid(pipeline=choice.pipeline, tensor=choice.tensor)
    return grid_of(choice, num_workers)


def as_sharded(choice: Any, grid: Grid) -> Sharded | None:
    """What a mesh of sharded replicas comes to where nothing else is divided."""
    if not isinstance(choice, Mesh) or choice.level is None or grid.data < grid.size:
        return None
    return Sharded(choice.level, recompute=choice.recompute)


def microbatches(choice: Any, grid: Grid) -> int:
    """How many slices a replica's part of a batch is cut into; without a pipeline there is no need for several."""
    if grid.pipeline == 1 or not isinstance(choice, _Pipelined):
        return 1
    return choice.microbatches or MICROBATCHES_PER_STAGE * grid.pipeline


def _other_data_axis(grid: Grid, num_workers: int) -> list[str]:
    data, rest = divmod(num_workers, grid.tensor * grid.pipeline)
    return [f"data={data}"] if not rest and data else []
