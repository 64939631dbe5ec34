"""How a model would be divided, and what that takes of each worker's memory: said before anything is started.

Weights, gradients and states are counted. What forward passes keep is measured on one slice, block by block in a
pipeline; where layers are split it is an upper bound, because only a part of it is divided. Start at `plan_model`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from torch import nn
from torch.optim import Optimizer

from manyhands.comm.mesh import Grid
from manyhands.parallel.blocks import blocks_of as gathered_blocks
from manyhands.parallel.cutting import Part
from manyhands.parallel.footprint import Footprint, kept_for_backward, num_bytes, states_per_weight
from manyhands.parallel.pipelined import blocks_of, cut
from manyhands.parallel.schedule import Schedule, default_chunks, make_schedule
from manyhands.parallel.several_optimizers import SeveralOptimizers
from manyhands.parallel.stand_in import learn_inputs
from manyhands.parallel.tensor_plan import TensorPlan, plan_tensor
from manyhands.parallel.timeline import draw, play
from manyhands.runtime.dividing import Sample
from manyhands.strategies.choices import Sharded
from manyhands.strategies.divided import Mesh, Pipeline, as_sharded, grid_of, microbatches

__all__ = ["LayerPlan", "ModelPlan", "WorkerPlan", "plan_model"]

ONE_COPY = ("mirrored", "central_storage", "sharded")
"""Strategies whose workers on one host look at one copy of the weights, and have parts of the states."""


class LayerPlan(msgspec.Struct, frozen=True):
    """A layer with weights of its own."""

    name: str
    kind: str
    """Its class."""
    split: str
    stage: int | None
    num_bytes: int
    bytes_per_worker: int
    """Of a worker that has some of it."""
    why: str = ""


class WorkerPlan(msgspec.Struct, frozen=True):
    """Bytes of one worker."""

    rank: int
    pipeline: int
    data: int
    tensor: int
    weights: int
    gradients: int
    states: int
    activations: int
    total: int


class ModelPlan(msgspec.Struct, frozen=True):
    strategy: str
    workers: int
    layers: list[LayerPlan]
    memory: list[WorkerPlan]
    schedule: str = ""
    """A pipeline's, drawn."""

    @property
    def most_bytes(self) -> int:
        return max(worker.total for worker in self.memory)


def plan_model(
    model: nn.Module, optimizer: Optimizer, choice: Any, workers: int, sample: Sample, slices: int | None = None
) -> ModelPlan:
    """`slices` is V, where it is given; a replica's part of them are a pipeline's microbatches."""
    grid, name = grid_of(choice, workers), choice.name
    choice = as_sharded(choice, grid) or choice
    split = plan_tensor(model, grid.tensor, getattr(choice, "rules", None)) if grid.tensor > 1 else None
    stages = _Stages(model, choice, grid, sample, slices) if grid.pipeline > 1 else None
    layers = list(_layers(model, choice, grid.data, split, stages))
    kept = kept_for_backward(model, sample.call, sample.batch)
    weigher = _Weigher(model, optimizer, choice, grid, layers, kept, stages, slices)
    return ModelPlan(
        strategy=name,
        workers=workers,
        layers=layers,
        memory=[weigher.worker(rank) for rank in range(workers)],
        schedule=draw(stages.schedule) if stages is not None else "",
    )


class _Stages:
    """Which stage has what, as a run with this sample would cut it."""

    def __init__(
        self, model: nn.Module, choice: Pipeline | Mesh, grid: Grid, sample: Sample, slices: int | None
    ) -> None:
        inputs = learn_inputs(sample.call, model, sample.batch)
        count = grid.pipeline * (choice.chunks or default_chunks(choice.schedule))
        blocks = blocks_of(model, inputs, count, choice.cuts or ())
        measured = not choice.cuts and len(blocks.names) > count
        costs = sample.measure(model, blocks, inputs) if measured else None
        self.parts: Sequence[Part] = cut(blocks, count, at=choice.cuts or (), costs=costs)
        count = max(1, slices // grid.data) if slices is not None else microbatches(choice, grid)
        self.schedule: Schedule = make_schedule(choice.schedule, grid.pipeline, count, choice.chunks)
        self.alive = play(self.schedule).most_alive

    def of(self, name: str) -> int | None:
        """The first stage whose modules have this one."""
        for number, part in enumerate(self.parts):
            if any(name == module or name.startswith(f"{module}.") for module in part.modules):
                return number
        return None

    def rank_of(self, stage: int | None) -> int:
        return self.schedule.ranks_of_stages[stage or 0]


def _layers(
    model: nn.Module, choice: Any, replicas: int, split: TensorPlan | None, stages: _Stages | None
) -> list[LayerPlan]:
    by_tensor = {layer.name: layer for layer in split.layers} if split is not None else {}
    blocks = set(gathered_blocks(model)) if _is_fully_sharded(choice) and stages is None else set()
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
    """Whether workers have parts of the weights between steps; in a mesh they do at every level."""
    return (isinstance(choice, Sharded) and choice.level == "parameters") or (
        isinstance(choice, Mesh) and choice.level is not None
    )


class _Weigher:
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        choice: Any,
        grid: Grid,
        layers: Sequence[LayerPlan],
        kept: int,
        stages: _Stages | None,
        slices: int | None,
    ) -> None:
        self._several = slices is not None and slices > grid.data
        self._choice, self._grid, self._layers, self._kept, self._stages = choice, grid, layers, kept, stages
        trained = num_bytes(param for param in model.parameters() if param.requires_grad)
        self._trained = trained / max(1, sum(layer.num_bytes for layer in layers))
        found = optimizer.optimizers.values() if isinstance(optimizer, SeveralOptimizers) else [optimizer]
        self._per_weight = max(states_per_weight(one) for one in found)
        self._blocks: Mapping[str, nn.Module] = gathered_blocks(model) if _is_fully_sharded(choice) else {}

    def worker(self, rank: int) -> WorkerPlan:
        place, footprint = self._grid.place(rank), self._footprint(rank)
        return WorkerPlan(rank, place.pipeline, place.data, place.tensor, *footprint, footprint.total)

    def _footprint(self, rank: int) -> Footprint:
        stage = self._grid.place(rank).pipeline
        mine = [one for one in self._layers if self._stages is None or self._stages.rank_of(one.stage) == stage]
        weights = sum(layer.bytes_per_worker for layer in mine)
        gradients = int(weights * self._trained)
        states = int(gradients * self._per_weight)
        if _is_fully_sharded(self._choice):
            weights, gradients = self._within_step(weights, gradients)
        elif self._choice.name in ONE_COPY:
            weights, states = weights // self._grid.data, states // self._grid.data
        activations = self._kept
        if self._stages is not None:  # each microbatch that is under way keeps what this stage's layers keep
            share = sum(one.num_bytes for one in mine) / max(1, sum(one.num_bytes for one in self._layers))
            activations = int(self._kept * share * self._stages.alive[stage])
        return Footprint(weights, gradients, states, activations)

    def _within_step(self, weights: int, gradients: int) -> tuple[int, int]:
        """What a step has besides a worker's parts of these: gathered weights, and sums of several slices in full."""
        replicas, by_block = self._grid.data, self._stages is None and self._choice.level == "parameters"
        # The block that is computed is there in full, its gradient too.
        largest = max((num_bytes(block.parameters()) for block in self._blocks.values()), default=0)
        gathered = 2 * largest // self._grid.tensor if by_block else weights * replicas
        return weights + gathered, gradients * replicas if self._stages is not None or self._several else gradients
