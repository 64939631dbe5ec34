"""How a model would be divided, and the memory that needs on each worker: computed before anything is started.

Weights, gradients and optimizer state are counted. Activations are measured on one slice, stage by stage in a pipeline;
if layers are split this is an upper bound, because only a part of it is divided. `planner.memory_peaks` computes what
is in memory at a time when a run starts, in a step and in a save. Start reading at `plan_model`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from torch import nn
from torch.optim import Optimizer

from manyhands.comm.mesh import Grid
from manyhands.data.sample_order import slices_of
from manyhands.launcher.worker_process import process_settings
from manyhands.parallel.gradients.slice_tree import most_held
from manyhands.parallel.model.activation_checkpointing import recomputing
from manyhands.parallel.model.layer_blocks import blocks_of
from manyhands.parallel.model.per_part_optimizers import SeveralOptimizers
from manyhands.parallel.pipeline.build_stages import check_enough, cut, pipeline_blocks
from manyhands.parallel.pipeline.model_proxy import learn_inputs
from manyhands.parallel.pipeline.partition import BlockRange, Inputs, shared_between
from manyhands.parallel.pipeline.schedule import Schedule, default_chunks, make_schedule
from manyhands.parallel.pipeline.timeline import draw, play
from manyhands.parallel.tensor.plan import TensorPlan, plan_tensor
from manyhands.planner.measure.memory_footprint import kept_by_parts, kept_for_backward, num_bytes, states_per_weight
from manyhands.planner.memory_peaks import Counted, Peaks, divided, gathered, in_shards, one_copy, replica
from manyhands.strategies.choices import Sharded
from manyhands.strategies.model_parallel import DIVIDED, Mesh, PipelineParallel, as_sharded, grid_of, microbatches
from manyhands.strategies.registry import STRATEGIES
from manyhands.training.setup.divide_model import Sample
from manyhands.training.step.resource_meter import held_bytes

__all__ = ["LayerPlan", "ModelPlan", "WorkerPlan", "base_bytes", "plan_model"]

LATER_BYTES = 30 * 2**20
"""What a process loads and opens after it has planned: kernels, and its connections."""


class LayerPlan(msgspec.Struct, frozen=True):
    """A layer that has weights itself."""

    name: str
    kind: str
    """Its class."""
    split: str
    stage: int | None
    num_bytes: int
    bytes_per_worker: int
    """For a worker that has some of it."""
    why: str = ""


class WorkerPlan(msgspec.Struct, frozen=True):
    """Bytes of one worker."""

    rank: int
    pipeline: int
    data: int
    tensor: int
    weights: int
    gradients: int
    """For all slices that are in memory at once."""
    states: int
    activations: int
    base: int
    """The interpreter, torch and the program, before the model is divided."""
    start: int
    """In addition, while the model is built and divided; below, in a step and while a checkpoint is written."""
    step: int
    save: int
    total: int
    """The peak: the largest of the three, and the base."""
    largest: str
    """Which of the three that is."""


class ModelPlan(msgspec.Struct, frozen=True):
    strategy: str
    workers: int
    layers: list[LayerPlan]
    memory: list[WorkerPlan]
    schedule: str = ""
    """Of a pipeline, drawn."""

    @property
    def most_bytes(self) -> int:
        return max(worker.total for worker in self.memory)


def base_bytes(model: nn.Module) -> int:
    """Memory of this process beside the model, which is not divided yet."""
    gc.collect()  # a trace of the model leaves outputs in cycles, which Python frees at another time in every run
    process_settings.give_freed_memory_back()
    return max(0, held_bytes() - num_bytes([*model.parameters(), *model.buffers()])) + LATER_BYTES


def plan_model(
    model: nn.Module,
    optimizer: Optimizer,
    choice: Any,
    workers: int,
    sample: Sample,
    slices: int | None = None,
    base: Callable[[], int] = lambda: 0,
) -> ModelPlan:
    """`slices` is V, if given; a replica's share of them are a pipeline's microbatches.

    `base` returns the memory of a worker without a model; called last, because counting loads some of torch.
    """
    grid, name = grid_of(choice, workers), choice.name
    choice = as_sharded(choice, grid) or choice
    rules, sequence = getattr(choice, "rules", None), getattr(choice, "sequence", False)
    split = plan_tensor(model, grid.tensor, rules, sequence=sequence) if grid.tensor > 1 else None
    stages = _Stages(model, choice, grid, sample, slices) if grid.pipeline > 1 else None
    layers = list(_layers(model, choice, grid.data, split, stages))
    counter = _MemoryCounter(model, optimizer, choice, grid, layers, sample, stages, slices)
    base_per_worker = base()
    return ModelPlan(
        strategy=name,
        workers=workers,
        layers=layers,
        memory=[counter.worker(rank, base_per_worker) for rank in range(workers)],
        schedule=draw(stages.schedule) if stages is not None else "",
    )


class _Stages:
    """The stages, as a run with this sample would cut them."""

    def __init__(
        self, model: nn.Module, choice: PipelineParallel | Mesh, grid: Grid, sample: Sample, slices: int | None
    ) -> None:
        inputs = learn_inputs(sample.call, model, sample.batch)
        chunks = choice.chunks or default_chunks(choice.schedule)
        count = grid.pipeline * chunks
        blocks = pipeline_blocks(model, inputs, count, choice.cuts or ())
        check_enough(blocks, grid.pipeline, chunks)
        measured = not choice.cuts and len(blocks.names) > count
        costs = sample.measure(model, blocks, inputs) if measured else None
        self.parts: Sequence[BlockRange] = cut(blocks, count, at=choice.cuts or (), costs=costs, place=choice.place)
        count = max(1, slices // grid.data) if slices is not None else microbatches(choice, grid)
        self.schedule: Schedule = make_schedule(choice.schedule, grid.pipeline, count, choice.chunks)
        self.alive = play(self.schedule).most_alive
        calls = [partial(_call, part, inputs) for part in self.parts]
        self._kept = _kept(model, choice, lambda: kept_by_parts(model, calls))
        self._params = {name: param for part in self.parts for name, param in part.params.items()}
        self._ranks = {
            name: sorted({self.schedule.ranks_of_stages[stage] for stage in stages})
            for name, stages in shared_between(self.parts).items()
        }

    def of(self, name: str) -> int | None:
        """The first stage whose modules have this one."""
        for number, part in enumerate(self.parts):
            if any(name == module or name.startswith(f"{module}.") for module in part.modules):
                return number
        return None

    def rank_of(self, stage: int | None) -> int:
        return self.schedule.ranks_of_stages[stage or 0]

    def kept(self, rank: int, in_all: int) -> int:
        """For all slices in flight on this rank; the rest of `in_all`, kept by the loss, counts for the last stage."""
        stages = self.schedule.stages_of(rank)
        kept = sum(self._kept[stage] for stage in stages)
        kept += max(0, in_all - sum(self._kept)) if len(self.parts) - 1 in stages else 0
        return kept * self.alive[rank] // len(stages)

    def tied(self, rank: int) -> _Tied:
        found = [
            (ranks, num_bytes([self._params[name]]))
            for name, ranks in self._ranks.items()
            if rank in ranks and len(ranks) > 1
        ]
        return _Tied(
            sum(size for ranks, size in found if rank != ranks[0]),
            sum((len(ranks) + 1) * size for ranks, size in found),
        )


class _Tied(NamedTuple):
    elsewhere: int
    """Bytes of weights that a rank has, though they are counted where they are first used."""
    sums: int
    """Every rank's gradients of tied weights, and their sums."""


def _kept(model: nn.Module, choice: Any, measure: Callable[[], list[int]]) -> list[int]:
    """Bytes kept by the forward of each part; for recomputed layers their inputs, and everything of one such layer.

    Backward recomputes one layer at a time; the layers are assumed to be alike.
    """
    found, which = measure(), getattr(choice, "recompute", None)
    if which is None:
        return found
    with recomputing(model, which, f"mh.{type(choice).__name__}(recompute=...)") as count:
        fewer = measure()
    each = max(1, count // len(found))
    return [less + max(0, every - less) // each for every, less in zip(found, fewer, strict=True)]


def _call(part: BlockRange, inputs: Inputs, carried: Any) -> Any:
    return part(inputs, carried)


def _layers(
    model: nn.Module, choice: Any, replicas: int, split: TensorPlan | None, stages: _Stages | None
) -> list[LayerPlan]:
    by_tensor = {layer.name: layer for layer in split.layers} if split is not None else {}
    blocks = set(blocks_of(model)) if _is_fully_sharded(choice) and stages is None else set()
    found, seen = [], set[int]()
    for name, module in model.named_modules():
        own = [
            one for one in [*module.parameters(recurse=False), *module.buffers(recurse=False)] if id(one) not in seen
        ]
        seen |= {id(one) for one in own}
        if not own:
            continue
        size, layer = num_bytes(own), by_tensor.get(name)
        kind, per_worker, why = (layer.kind, layer.bytes_per_rank, layer.why) if layer else ("whole", size, "")
        if _is_fully_sharded(choice):
            kind, per_worker = f"{kind}, shard" if layer and kind != "whole" else "shard", -(-per_worker // replicas)
            why = f"gathered with {name}" if name in blocks else why
        stage = stages.of(name) if stages is not None else None
        found.append(
            LayerPlan(name or type(module).__name__, type(module).__name__, kind, stage, size, per_worker, why)
        )
    return found


def _is_fully_sharded(choice: Any) -> bool:
    """Whether workers have shards of the weights between steps; in a mesh they do at every level."""
    return (isinstance(choice, Sharded) and choice.level == "parameters") or (
        isinstance(choice, Mesh) and choice.level is not None
    )


class _MemoryCounter:
    """Computes the memory of each worker."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        choice: Any,
        grid: Grid,
        layers: Sequence[LayerPlan],
        sample: Sample,
        stages: _Stages | None,
        slices: int | None,
    ) -> None:
        self._choice, self._grid, self._layers, self._stages = choice, grid, layers, stages
        tensors = [*model.parameters(), *model.buffers()]
        self._whole, self._largest = num_bytes(tensors), max((num_bytes([one]) for one in tensors), default=0)
        self._used_twice = len(dict(model.named_parameters(remove_duplicate=False))) > len(
            dict(model.named_parameters())
        )
        self._trained = num_bytes(one for one in model.parameters() if one.requires_grad) / max(1, self._whole)
        found = optimizer.optimizers.values() if isinstance(optimizer, SeveralOptimizers) else [optimizer]
        self._per_weight = max(states_per_weight(one) for one in found)
        self._by_block = _is_fully_sharded(choice) and stages is None and choice.level == "parameters"
        self._block = _gathered_bytes(model) // grid.tensor if self._by_block else 0
        [self._kept] = _kept(model, choice, lambda: [kept_for_backward(model, sample.call, sample.batch)])
        self._count = slices or grid.data * microbatches(choice, grid)

    def worker(self, rank: int, base: int) -> WorkerPlan:
        place, own = self._grid.place(rank), self._counted(rank)
        peaks = self._peaks(own, place.pipeline)
        counted = (*self._in_step(own), own.states, own.activations)
        total = base + max(peaks)
        return WorkerPlan(rank, place.pipeline, place.data, place.tensor, *counted, base, *peaks, total, peaks.largest)

    def _counted(self, rank: int) -> Counted:
        place = self._grid.place(rank)
        mine = self._mine(place.pipeline)
        weights = sum(layer.bytes_per_worker for layer in mine)
        weights += self._stages.tied(place.pipeline).elsewhere if self._stages is not None else 0
        gradients = int(weights * self._trained)
        return Counted(
            weights,
            gradients,
            int(gradients * self._per_weight),
            self._kept if self._stages is None else self._stages.kept(place.pipeline, self._kept),
            self._whole,
            self._largest,
            max(1, most_held(slices_of(place.data, self._grid.data, self._count), self._count)),
            is_chief=rank == 0,
        )

    def _in_step(self, own: Counted) -> tuple[int, int]:
        """Weights and gradients at once: shards, gathered weights, and full sums of several slices."""
        replicas = self._grid.data
        if not _is_fully_sharded(self._choice):
            return own.weights, own.partials * own.gradients
        if self._by_block:
            return own.weights + 2 * self._block, own.gradients * (1 + (own.partials - 1) * replicas)
        return own.weights * (1 + replicas), own.partials * own.gradients * replicas

    def _mine(self, stage: int) -> list[LayerPlan]:
        return [one for one in self._layers if self._stages is None or self._stages.rank_of(one.stage) == stage]

    def _peaks(self, own: Counted, stage: int) -> Peaks:
        gradients = own.gradients * self._grid.data
        if self._by_block:
            return in_shards(own, block=self._block, gradients=gradients)
        if _is_fully_sharded(self._choice):
            return gathered(own, weights=own.weights * self._grid.data, gradients=gradients)
        if isinstance(self._choice, DIVIDED):
            layers = (layer.bytes_per_worker for layer in self._mine(stage))
            tied = _Tied(0, 0) if self._stages is None else self._stages.tied(stage)
            largest = min(self._largest, max(tied.elsewhere, *layers, 0))
            return divided(own, largest=largest, tied=tied.sums, replicas=self._grid.data, used_twice=self._used_twice)
        if STRATEGIES[self._choice.name].one_copy and self._grid.data > 1:
            return one_copy(own, workers=self._grid.data)
        return replica(own)


def _gathered_bytes(model: nn.Module) -> int:
    """Bytes of the largest block that is gathered; this may be the parameters outside of all blocks."""
    import manyhands.parallel.sharding.fsdp_backend  # noqa: F401  # it loads much of torch, which belongs to the base

    blocks = [num_bytes(block.parameters()) for block in blocks_of(model).values()]
    return max([num_bytes(model.parameters()) - sum(blocks), *blocks])
