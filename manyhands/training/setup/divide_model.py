"""How a strategy's words become this worker's part of a model: which layers are split or where, and what is here.

Cuts into stages come first, because what the model does between its blocks is learned from the whole; then layers are
split. What belongs to others is given up. Start reading at `_divide`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyhands.comm.axis import Axis
from manyhands.errors import SpecError
from manyhands.parallel.model.activation_checkpointing import recompute
from manyhands.parallel.model.compiled_models import as_written, uncompile_
from manyhands.parallel.model.tensor_shard import Share
from manyhands.parallel.pipeline.build_stages import blocks_of, check_enough, cut, measure
from manyhands.parallel.pipeline.model_proxy import call_with_model, learn_inputs
from manyhands.parallel.pipeline.partition import Blocks, Inputs, Part, shared_between
from manyhands.parallel.pipeline.schedule import default_chunks, make_schedule
from manyhands.parallel.pipeline.stage_runner import StageRunner
from manyhands.parallel.replicas.model_parallel_replica import Divided, Spread, Tie
from manyhands.parallel.tensor.apply_plan import split_model_
from manyhands.parallel.tensor.plan import plan_tensor
from manyhands.strategies.base import LossFn
from manyhands.strategies.model_parallel import DIVIDED, Mesh, Pipeline
from manyhands.strategies.model_parallel import Tensor as TensorChoice
from manyhands.training.worker.worker import Worker

__all__ = ["Sample", "spread_of"]


class Sample(NamedTuple):
    """A slice's worth of rows, and what calls the model with them."""

    batch: Any
    call: Callable[[Any, Any], Any]

    def measure(self, model: nn.Module, blocks: Blocks, inputs: Inputs) -> list[float]:
        """Seconds of each block, of the last with what is computed of the model's output."""
        return measure(
            blocks, inputs, loss=lambda output: call_with_model(self.call, model, self.batch, lambda _: output)
        )


def spread_of(worker: Worker, loss: LossFn, sample: Callable[[], Sample | None]) -> Spread:
    def mates() -> Axis:
        return worker.lasting(lambda: worker.line("pipeline", "tensor"))

    def divide(model: nn.Module, costs: Sequence[float] | None) -> Divided:
        return _divide(worker, model, loss, sample, costs)

    return Spread(lambda: worker.axis, mates, divide, getattr(worker.strategy, "reducer", None))


def _divide(
    worker: Worker,
    model: nn.Module,
    loss: LossFn,
    sample: Callable[[], Sample | None],
    costs: Sequence[float] | None,
) -> Divided:
    """`costs` are those of the model's blocks as others know them; None: they are measured, by all workers."""
    grid, choice = worker.grid, worker.strategy
    assert isinstance(choice, DIVIDED)
    model = _run_as_written(worker, model)
    parts: list[Part] = []
    if grid.pipeline > 1:
        parts, costs = _cut(worker, model, sample(), costs)
    if choice.recompute is not None:
        recompute(model, choice.recompute, f"mh.{type(choice).__name__}(recompute=...)")
    shares: dict[str, Share] = {}
    mates: Axis | None = None
    if grid.tensor > 1:
        assert isinstance(choice, TensorChoice | Mesh)
        plan = plan_tensor(model, grid.tensor, choice.rules, sequence=choice.sequence)
        mates = worker.lasting(lambda: worker.line("tensor"))
        shares = split_model_(model, plan, mates)
    if parts:
        row = _Row(worker, model, parts, loss, mates)
        return replace(_staged(worker, model, row, parts, shares), costs=tuple(costs or ()))
    counts = worker.spot.tensor == 0
    counted = frozenset(id(param) for name, param in model.named_parameters() if counts or name in shares)
    return Divided(local=model, stand_in=model, shares=shares, counted=counted)


def _run_as_written(worker: Worker, model: nn.Module) -> nn.Module:
    inner = as_written(model)
    if worker.grid.tensor > 1:
        if uncompile_(inner) or inner is not model:
            worker.warn(
                "torch.compile has no effect here: layers that are divided over workers exchange tensors while they "
                "compute, and run as they are written."
            )
    elif inner is not model:
        worker.warn(
            "torch.compile of the whole model has no effect in a pipeline, which runs its blocks one by one. "
            "Compile blocks instead: model.layer = torch.compile(model.layer)."
        )
    return inner


# ---- stages ------------------------------------------------------------------------------------------------------


def _cut(
    worker: Worker, model: nn.Module, sample: Sample | None, known: Sequence[float] | None
) -> tuple[list[Part], Sequence[float]]:
    """All stages of the model, in their order, the same on every worker; and what its blocks cost."""
    choice = worker.strategy
    assert isinstance(choice, Pipeline | Mesh)
    chunks = choice.chunks or default_chunks(choice.schedule)
    stages = worker.grid.pipeline * chunks
    if sample is None:
        raise SpecError(
            f"A pipeline looks at some data to cut a {type(model).__name__} into stages, and there is none yet.",
            where="mh.Pipeline",
            fix=["fit or evaluate before this"],
        )
    inputs = learn_inputs(sample.call, model, sample.batch)
    blocks = blocks_of(model, inputs, stages, choice.cuts or ())
    check_enough(blocks, worker.grid.pipeline, chunks)
    if choice.cuts:
        return list(cut(blocks, stages, at=choice.cuts)), ()
    if known is None:
        costs = torch.zeros(len(blocks.names), dtype=torch.float64)
        if worker.is_chief and len(costs) > stages:
            costs[:] = torch.tensor(sample.measure(model, blocks, inputs))
        worker.wait_for_chief("costs of blocks")
        worker.axis.broadcast_([costs], "costs of blocks")  # each worker would measure other numbers
        known = costs.tolist()
    return list(cut(blocks, stages, costs=known, place=choice.place)), known


def _staged(worker: Worker, model: nn.Module, row: _Row, parts: Sequence[Part], shares: dict[str, Share]) -> Divided:
    choice, grid = worker.strategy, worker.grid
    assert isinstance(choice, Pipeline | Mesh)
    place = worker.spot
    schedule = make_schedule(choice.schedule, grid.pipeline, 1, choice.chunks)
    mine = schedule.stages_of(place.pipeline)
    placed = {id(param) for part in parts for param in part.params.values()}
    unused = [param for param in model.parameters() if id(param) not in placed and place.pipeline == 0]
    local = _Local([parts[stage] for stage in mine], unused)
    here = {id(param) for param in local.parameters()}
    ties = _ties(parts, schedule.ranks_of_stages)
    others = {id(param) for param, ranks in ties if ranks[0] != place.pipeline}
    counted = frozenset(
        id(param)
        for name, param in model.named_parameters()
        if id(param) in here and id(param) not in others and (place.tensor == 0 or name in shares)
    )
    present = _present(model, local, parts)
    for param in model.parameters():
        if id(param) not in here:
            param.data = param.new_empty(0)
    met = [Tie(param, worker.lasting(partial(_tied, worker, ranks))) for param, ranks in ties if id(param) in here]
    return Divided(
        local=local,
        stand_in=row.runner.model,
        shares={name: share for name, share in shares.items() if name in present},
        present=present,
        counted=counted,
        ties=met,
        passes=row,
    )


def _ties(parts: Sequence[Part], rank_of: Sequence[int]) -> list[tuple[nn.Parameter, list[int]]]:
    """Weights that stages of several ranks have, and the pipeline's ranks that do."""
    params = {name: param for part in parts for name, param in part.params.items()}
    found = [
        (params[name], sorted({rank_of[stage] for stage in stages})) for name, stages in shared_between(parts).items()
    ]
    return [(param, ranks) for param, ranks in found if len(ranks) > 1]


def _tied(worker: Worker, stages: Sequence[int]) -> Axis:
    """The workers at these places of this one's pipeline."""
    assert worker.formation is not None
    places = [worker.spot._replace(pipeline=stage) for stage in stages]
    return worker.among([worker.formation.places.index(place) for place in places], "tied weights")


def _present(model: nn.Module, local: nn.Module, parts: Sequence[Part]) -> frozenset[str]:
    """Names of what is here: this rank's, and buffers that no stage's modules have, which all keep."""
    mine = {id(one) for one in [*local.parameters(), *local.buffers()]}
    placed = {id(one) for part in parts for module in part.modules.values() for one in module.buffers()}
    everyones = {id(one) for one in model.buffers()} - placed
    state = model.state_dict(keep_vars=True)
    return frozenset(name for name, one in state.items() if id(one) in mine or id(one) in everyones)


class _Local(nn.Module):
    """What this rank's stages have: their modules, and weights that the model uses between them.

    Those that it uses nowhere, which belong to the model all the same, are the first rank's.
    """

    def __init__(self, parts: Sequence[Part], unused: Sequence[nn.Parameter]) -> None:
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


class _Row:
    """This rank's row of the schedule; each step has slices of its own."""

    def __init__(
        self, worker: Worker, model: nn.Module, parts: Sequence[Part], loss: LossFn, mates: Axis | None
    ) -> None:
        choice, messages = worker.strategy, worker.messages("pipeline")
        assert isinstance(choice, Pipeline | Mesh)
        self.runner = StageRunner(
            messages, model, parts, loss, self, schedule=choice.schedule, chunks=choice.chunks, mates=mates
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
