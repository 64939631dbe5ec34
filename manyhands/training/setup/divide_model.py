"""Makes this worker's part of a model that the strategy divides: its pipeline stages, and its shards of split layers.

Cutting into stages comes first, because tracing what the model does between its blocks needs the whole model; then
layers are split. Weights that belong to other workers are freed. Start reading at `_divide`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.comm.axis import Axis
from manyhands.errors import SpecError
from manyhands.parallel.model.activation_checkpointing import recompute
from manyhands.parallel.model.compiled_models import as_written, uncompile_
from manyhands.parallel.model.tensor_shard import TensorShard
from manyhands.parallel.pipeline.build_stages import check_enough, cut, measure, pipeline_blocks
from manyhands.parallel.pipeline.model_proxy import call_with_model, learn_inputs
from manyhands.parallel.pipeline.partition import BlockRange, Blocks, Inputs, shared_between
from manyhands.parallel.pipeline.schedule import default_chunks, make_schedule
from manyhands.parallel.pipeline.stage_runner import StageRunner
from manyhands.parallel.replicas.model_parallel_replica import ModelParallelReplica, ReplicaPart, Tie
from manyhands.parallel.tensor.apply_plan import split_model_
from manyhands.parallel.tensor.plan import plan_tensor
from manyhands.strategies.base import LossFn
from manyhands.strategies.model_parallel import DIVIDED, Mesh, PipelineParallel
from manyhands.strategies.model_parallel import TensorParallel as TensorChoice
from manyhands.training.worker.worker import Worker

__all__ = ["Sample", "model_parallel_replica"]


class Sample:
    """The rows of one slice, and a function that calls the model with them."""

    def __init__(self, batch: Any, call: Callable[[Any, Any], Any]) -> None:
        self.batch, self.call = batch, call
        self._costs: dict[tuple[str, ...], list[float]] = {}

    def measure(self, model: nn.Module, blocks: Blocks, inputs: Inputs) -> list[float]:
        """Seconds of each block; the last one includes what is computed from the model's output, such as the loss.

        Measured once, so that stages are cut as in a plan that was made with this sample.
        """
        key = tuple(blocks.names)
        if key not in self._costs:
            self._costs[key] = measure(
                blocks, inputs, loss=lambda output: call_with_model(self.call, model, self.batch, lambda _: output)
            )
        return self._costs[key]


def model_parallel_replica(worker: Worker, loss: LossFn, sample: Callable[[], Sample | None]) -> ModelParallelReplica:
    def replica_axis() -> Axis:
        return worker.persistent_axis(lambda: worker.line("pipeline", "tensor"))

    def divide(model: nn.Module, costs: Sequence[float] | None) -> ReplicaPart:
        return _divide(worker, model, loss, sample, costs)

    return ModelParallelReplica(lambda: worker.axis, replica_axis, divide)


def _divide(
    worker: Worker,
    model: nn.Module,
    loss: LossFn,
    sample: Callable[[], Sample | None],
    costs: Sequence[float] | None,
) -> ReplicaPart:
    """`costs` of the model's blocks, received from workers that train already; None: the chief measures them."""
    grid, choice = worker.grid, worker.strategy
    assert isinstance(choice, DIVIDED)
    model = _run_as_written(worker, model)
    parts: list[BlockRange] = []
    if grid.pipeline > 1:
        parts, costs = _cut(worker, model, sample(), costs)
    if choice.recompute is not None:
        recompute(model, choice.recompute, f"mh.{type(choice).__name__}(recompute=...)")
    shards: dict[str, TensorShard] = {}
    tensor_axis: Axis | None = None
    if grid.tensor > 1:
        assert isinstance(choice, TensorChoice | Mesh)
        plan = plan_tensor(model, grid.tensor, choice.rules, sequence=choice.sequence)
        tensor_axis = worker.persistent_axis(lambda: worker.line("tensor"))
        shards = split_model_(model, plan, tensor_axis)
    if parts:
        row = _ScheduleRow(worker, model, parts, loss, tensor_axis)
        return replace(_staged(worker, model, row, parts, shards), costs=tuple(costs or ()))
    counts_whole = worker.grid_position.tensor == 0
    counted = frozenset(id(param) for name, param in model.named_parameters() if counts_whole or name in shards)
    return ReplicaPart(local=model, proxy=model, shares=shards, counted=counted)


def _run_as_written(worker: Worker, model: nn.Module) -> nn.Module:
    inner = as_written(model)
    if worker.grid.tensor > 1:
        if uncompile_(inner) or inner is not model:
            worker.events.warn(
                "torch.compile has no effect here: layers that are divided over workers exchange tensors while they "
                "compute, and run without it."
            )
    elif inner is not model:
        worker.events.warn(
            "torch.compile of the whole model has no effect in a pipeline, which runs its blocks one by one. "
            "Compile blocks instead: model.layer = torch.compile(model.layer)."
        )
    return inner


# ---- stages ------------------------------------------------------------------------------------------------------


def _cut(
    worker: Worker, model: nn.Module, sample: Sample | None, known: Sequence[float] | None
) -> tuple[list[BlockRange], Sequence[float]]:
    """All stages of the model, in their order, the same on every worker; and the cost of each block in seconds."""
    choice = worker.strategy
    assert isinstance(choice, PipelineParallel | Mesh)
    chunks = choice.chunks or default_chunks(choice.schedule)
    stages = worker.grid.pipeline * chunks
    if sample is None:
        raise SpecError(
            f"A pipeline needs some data to cut a {type(model).__name__} into stages, and no call has given any yet.",
            where="mh.PipelineParallel",
            fix=["call fit or evaluate before this"],
        )
    inputs = learn_inputs(sample.call, model, sample.batch)
    blocks = pipeline_blocks(model, inputs, stages, choice.cuts or ())
    check_enough(blocks, worker.grid.pipeline, chunks)
    if choice.cuts:
        return list(cut(blocks, stages, at=choice.cuts)), ()
    if known is None:
        costs = torch.zeros(len(blocks.names), dtype=torch.float64)
        if worker.is_chief and len(costs) > stages:
            costs[:] = torch.tensor(sample.measure(model, blocks, inputs))
        worker.wait_for_chief("costs of blocks")
        worker.axis.broadcast_([costs], "costs of blocks")  # measurements differ between workers
        known = costs.tolist()
    return list(cut(blocks, stages, costs=known, place=choice.place)), known


def _staged(
    worker: Worker, model: nn.Module, row: _ScheduleRow, parts: Sequence[BlockRange], shards: dict[str, TensorShard]
) -> ReplicaPart:
    choice, grid = worker.strategy, worker.grid
    assert isinstance(choice, PipelineParallel | Mesh)
    position = worker.grid_position
    schedule = make_schedule(choice.schedule, grid.pipeline, 1, choice.chunks)
    mine = schedule.stages_of(position.pipeline)
    in_stages = {id(param) for part in parts for param in part.params.values()}
    unused = [param for param in model.parameters() if id(param) not in in_stages and position.pipeline == 0]
    local = _LocalStages([parts[stage] for stage in mine], unused)
    here = {id(param) for param in local.parameters()}
    ties = _ties(parts, schedule.ranks_of_stages)
    counted_elsewhere = {id(param) for param, ranks in ties if ranks[0] != position.pipeline}
    counted = frozenset(
        id(param)
        for name, param in model.named_parameters()
        if id(param) in here and id(param) not in counted_elsewhere and (position.tensor == 0 or name in shards)
    )
    present = _present(model, local, parts)
    for param in model.parameters():
        if id(param) not in here:
            param.data = param.new_empty(0)
    tied_here = [
        Tie(param, worker.persistent_axis(partial(_tied_axis, worker, ranks)))
        for param, ranks in ties
        if id(param) in here
    ]
    return ReplicaPart(
        local=local,
        proxy=row.runner.model,
        shares={name: shard for name, shard in shards.items() if name in present},
        present=present,
        counted=counted,
        ties=tied_here,
        passes=row,
    )


def _ties(parts: Sequence[BlockRange], rank_of: Sequence[int]) -> list[tuple[nn.Parameter, list[int]]]:
    """Weights in stages of several ranks, each with the pipeline's ranks that have it."""
    params = {name: param for part in parts for name, param in part.params.items()}
    found = [
        (params[name], sorted({rank_of[stage] for stage in stages})) for name, stages in shared_between(parts).items()
    ]
    return [(param, ranks) for param, ranks in found if len(ranks) > 1]


def _tied_axis(worker: Worker, stages: Sequence[int]) -> Axis:
    """The axis over the workers at these positions of this worker's pipeline."""
    assert worker.formation is not None
    positions = [worker.grid_position._replace(pipeline=stage) for stage in stages]
    return worker.among([worker.formation.places.index(position) for position in positions], "tied weights")


def _present(model: nn.Module, local: nn.Module, parts: Sequence[BlockRange]) -> frozenset[str]:
    """Names of the tensors that this rank has: those of its stages, and buffers outside of stages, which all have."""
    mine = {id(one) for one in [*local.parameters(), *local.buffers()]}
    in_stages = {id(one) for part in parts for module in part.modules.values() for one in module.buffers()}
    on_all_ranks = {id(one) for one in model.buffers()} - in_stages
    state = model.state_dict(keep_vars=True)
    return frozenset(name for name, one in state.items() if id(one) in mine or id(one) in on_all_ranks)


class _LocalStages(nn.Module):
    """The modules of this rank's stages, and weights that the model uses between them.

    `unused`: weights that the model uses nowhere; the first rank has them.
    """

    def __init__(self, parts: Sequence[BlockRange], unused: Sequence[nn.Parameter]) -> None:
        super().__init__()
        modules = {name: module for part in parts for name, module in part.modules.items()}
        for number, module in enumerate(modules.values()):
            self.add_module(str(number), module)
        known = {id(param) for param in self.parameters()}
        direct = [
            one for one in (*(p for part in parts for p in part.params.values()), *unused) if id(one) not in known
        ]
        for number, param in enumerate({id(one): one for one in direct}.values()):
            self.register_parameter(f"weight {number}", param)


class _ScheduleRow:
    """Runs this rank's row of the pipeline schedule, with the slices of one step after another."""

    def __init__(
        self, worker: Worker, model: nn.Module, parts: Sequence[BlockRange], loss: LossFn, tensor_axis: Axis | None
    ) -> None:
        choice, messages = worker.strategy, worker.messages("pipeline")
        assert isinstance(choice, PipelineParallel | Mesh)
        self.runner = StageRunner(
            messages, model, parts, loss, self, schedule=choice.schedule, chunks=choice.chunks, mates=tensor_axis
        )
        self.is_last = self.runner.schedule(1).ranks_of_stages[-1] == messages.rank
        self._slices: Any = None

    def run(self, pieces: Sequence[Any], slices: Any, name: str) -> None:
        self._slices = slices
        self.runner.train(pieces, name)

    @property
    def computed(self) -> dict[str, float]:
        seconds = {"forward": 0.0, "backward": 0.0}
        for op, start, stop in self.runner.spans:
            seconds["forward" if op.kind == "F" else "backward"] += stop - start
        return seconds

    def slice_context(self, piece: Any) -> AbstractContextManager[Any]:
        return self._slices.slice_context(piece)  # type: ignore[no-any-return]

    def weigh(self, piece: Any, result: Any) -> Tensor:
        return self._slices.weigh(piece, result)  # type: ignore[no-any-return]

    def slice_done(self, piece: Any) -> None:
        self._slices.slice_done(piece)
