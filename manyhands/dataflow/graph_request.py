"""Requests the graph of a script's model for `mh graph`, and writes it in the script's process.

The script runs until it calls its model for the first time, in a loss, in its own loop or in Keras; that call shows the
inputs. Start reading at `ask_for_graph` and `GraphOfFirstCall`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from torch import nn

from manyhands.control.messages.launch_request import WorkerCommand
from manyhands.dataflow.capture import capture, with_places
from manyhands.dataflow.graph import DataflowGraph
from manyhands.errors import ManyhandsError, TrainingFailed
from manyhands.launcher.worker_process import process_settings
from manyhands.parallel.pipeline.partition import Inputs
from manyhands.planner.measure.memory_plan import LayerPlan, plan_model
from manyhands.planner.measure.plan_request import ask_script
from manyhands.spec.load import GRAPH_VARIABLE
from manyhands.spec.probe_requests import GraphOrder
from manyhands.strategies.choices import Sharded
from manyhands.strategies.model_parallel import DIVIDED
from manyhands.training.setup import keras_models
from manyhands.training.setup.divide_model import Sample
from manyhands.training.setup.user_model import Parts
from manyhands.training.worker.strategy_lookup import Planned

__all__ = ["GraphOfFirstCall", "ask_for_graph", "place_of"]


class _GraphAnswered(msgspec.Struct):
    graph: DataflowGraph | None = None
    problem: str = ""


class GraphOfFirstCall:
    """Waits for the first call of the model, in place of its forward, writes the graph, and ends the process."""

    def __init__(self, planned: Planned, parts: Parts) -> None:
        self._planned, self._parts = planned, parts
        several = isinstance(parts.model, nn.ModuleList)  # models whose optimizers take turns
        self._models = list(parts.model.children()) if several else [parts.model]
        for model in self._models:
            object.__setattr__(model, _method(model), self._instead_of(model))

    def call_model(self, batch: Any) -> NoReturn:
        """Have the loss call it with this batch."""
        try:
            self._parts.loss(self._parts.model, batch)
        except Exception as error:
            self._answer(_GraphAnswered(problem=f"The loss failed before it called the model: {error}"))
        self._answer(
            _GraphAnswered(
                problem="The loss does not call the model itself, only parts of it, so its graph has no inputs. "
                "Write the loss with model(...), and move what it calls into the model's forward."
            )
        )

    def _instead_of(self, model: nn.Module) -> Any:
        def first_call(*args: Any, **kwargs: Any) -> NoReturn:
            for one in self._models:
                object.__delattr__(one, _method(one))
            self._write(model, Inputs(args, kwargs))

        return first_call

    def _write(self, model: nn.Module, inputs: Inputs) -> NoReturn:
        order = self._planned.graph
        assert order is not None
        threads = process_settings.choose_threads(self._planned.strategy.threads, self._planned.workers, exact=False)
        torch.set_num_threads(threads)  # as a worker of the run has
        try:
            found = capture(model, inputs, modules_only=order.modules_only)
            answer = _GraphAnswered(self._placed(model, found, inputs))
        except Exception as error:
            answer = _GraphAnswered(problem=f"The model fails where mh graph runs it: {type(error).__name__}: {error}")
        self._answer(answer)

    def _placed(self, model: nn.Module, found: DataflowGraph, inputs: Inputs) -> DataflowGraph:
        """With colours; without, and a note why, where the strategy cannot be planned."""
        planned = self._planned
        choice, workers = planned.strategy, planned.workers
        divided = isinstance(choice, (*DIVIDED, Sharded)) and workers > 1
        elsewhere = "one worker" if workers == 1 else f"each of {workers} workers, with its slices of the batch"
        places: dict[str, str] = {}
        if divided:
            elsewhere = f"whole, on each of {workers} workers"
            sample = Sample(inputs, lambda called, given: called(*given.args, **given.kwargs))
            try:
                optimizer = self._parts.make_optimizer(self._parts.model)
                plan = plan_model(model, optimizer, choice, workers, sample, planned.slices)
                places = {layer.name: place_of(layer, workers) for layer in plan.layers}
            except (ManyhandsError, RuntimeError, TypeError, ValueError) as error:
                why = f"no colours by {choice.name}, which cannot be planned for this model: {error}"
                found = msgspec.structs.replace(found, notes=[*found.notes, why])
        return with_places(found, places, choice.name, workers, elsewhere)

    def _answer(self, answer: _GraphAnswered) -> NoReturn:
        Path(self._planned.path).write_bytes(msgspec.json.encode(answer))
        os._exit(0)


def _method(model: nn.Module) -> str:
    return "call" if keras_models.is_keras(model) else "forward"


def place_of(layer: LayerPlan, workers: int) -> str:
    """Where a layer is computed, in words: its stage, its split."""
    stage = [f"stage {layer.stage}"] if layer.stage is not None else []
    split = [] if layer.split == "whole" else [f"{layer.split}, divided over workers"]
    return ", ".join([*stage, *split]) or f"whole, on each of {workers} workers"


def ask_for_graph(
    command: WorkerCommand, strategy: str, workers: int, timeout_s: float, *, modules_only: bool = False
) -> DataflowGraph:
    """Run the script until it calls its model, and return the graph of that call."""

    def order(path: Path) -> Mapping[str, str]:
        asked = GraphOrder(str(path), strategy, workers, modules_only)
        return {GRAPH_VARIABLE: msgspec.json.encode(asked).decode()}

    data = ask_script(command, order, timeout_s, "did not call its model in a way that manyhands sees")
    answer = msgspec.json.decode(data, type=_GraphAnswered)
    if answer.graph is None:
        raise TrainingFailed(answer.problem)
    return answer.graph
