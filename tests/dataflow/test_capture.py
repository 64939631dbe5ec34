"""Graphs of real models; FLOPs as torch's own counter counts them in a plain forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from manyhands.dataflow.capture import BY_EXPORT, BY_MODULES, capture
from manyhands.dataflow.graph import DataflowGraph
from manyhands.dataflow.picture import picture_of
from manyhands.dataflow.tensorboard_graph import node_names, write_graph
from manyhands.parallel.pipeline.partition import Inputs
from manyhands.testing import RankPool
from tests.dataflow.models import Branching, SmallCNN, bert, keras_model, transformer


def counted_by_torch(model: nn.Module, inputs: Inputs) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*inputs.args, **inputs.kwargs)
    return int(counter.get_total_flops())


def weights_of(model: nn.Module) -> int:
    return sum(one.nbytes for one in model.parameters() if one.requires_grad)


def check(graph: DataflowGraph, model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    assert graph.flops == counted_by_torch(model, inputs) > 0
    assert graph.parameter_bytes == weights_of(model)
    assert graph.seconds > 0
    names = [one.name for one in graph.operations]
    assert len(set(names)) == len(names)
    for number, one in enumerate(graph.operations):
        assert all(names.index(source) < number for source in one.inputs), "in the order in which they run"
        assert all(path in graph.modules for path in one.scope)
    for ending in (".svg", ".html", ".dot"):
        assert len(picture_of(graph, ending)) > 1000
    return {one.name: one for one in graph.operations}


def test_a_cnn_is_exported_with_its_modules_and_is_as_before() -> None:
    torch.manual_seed(0)
    model, inputs = SmallCNN(), Inputs((torch.randn(4, 3, 16, 16),), {})
    before = {name: one.clone() for name, one in model.state_dict().items()}
    graph = capture(model, inputs)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    found = check(graph, model, inputs)
    assert graph.captured_by == BY_EXPORT and graph.notes == []
    [norm] = [one for one in found.values() if one.kind == "batch_norm"]
    assert norm.scope == ("block", "block.norm") and norm.outputs[0].shape == (4, 8, 16, 16)
    assert norm.parameters == ("block.norm.bias", "block.norm.weight")
    [add] = [one for one in found.values() if one.kind == "add"]
    assert {found[name].kind for name in add.inputs} == {"relu", "conv2d"}, "the residual connection"


def test_a_model_that_cannot_be_exported_is_recorded_by_its_modules_and_says_so() -> None:
    model, inputs = Branching(), Inputs((torch.randn(4, 8),), {})
    graph = capture(model, inputs)
    found = check(graph, model, inputs)
    assert graph.captured_by == BY_MODULES
    assert graph.notes[0].startswith("torch.export cannot trace this model (") and "modules only" in graph.notes[0]
    [last] = [one for one in found.values() if one.scope == ("last",)]
    assert sorted(last.inputs) == ["first ", "second "], "through an addition, a relu and a concatenation"
    assert "forward" not in model.first.__dict__ and "forward" not in model.last.__dict__


def graph_of_keras_model() -> DataflowGraph:
    model, inputs = keras_model()
    graph = capture(model, inputs)
    check(graph, model, inputs)
    assert "call" not in model.layers[1].__dict__
    return graph


@pytest.mark.long
def test_a_keras_model_is_recorded_layer_by_layer(ranks: RankPool) -> None:
    [graph] = ranks(1, graph_of_keras_model)
    assert graph.captured_by == BY_MODULES and "Keras" in graph.notes[0]
    kinds = [one.kind for one in graph.operations]
    assert kinds == ["input", "Conv2D", "Conv2D", "Add", "GlobalAveragePooling2D", "Dropout", "Dense", "output"]
    [add] = [one for one in graph.operations if one.kind == "Add"]
    assert sorted(add.inputs) == ["conv ", "skip "]


@pytest.mark.long
@pytest.mark.parametrize("make", [transformer, bert])
def test_transformers_are_exported(make: Any) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    graph = capture(model, inputs)
    check(graph, model, inputs)
    assert graph.captured_by == BY_EXPORT
    attention = [one for one in graph.operations if one.kind == "scaled_dot_product_attention"]
    assert len(attention) == 2 and all(len(one.inputs) >= 3 for one in attention)


def test_tensorboard_reads_the_graph_with_modules_as_folders(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.compat.proto.graph_pb2 import GraphDef

    graph = capture(Branching(), Inputs((torch.randn(4, 8),), {}))
    path = write_graph(graph, tmp_path / "logs")
    [event] = [event for event in EventFileLoader(str(path)).Load() if event.HasField("graph_def")]
    read = GraphDef.FromString(event.graph_def)
    nodes = {node.name: node for node in read.node}
    assert set(nodes) == set(node_names(graph).values())
    last = nodes["Branching/last/last"]
    assert sorted(last.input) == ["Branching/first/first", "Branching/second/second"]
    assert [one.size for one in last.attr["_output_shapes"].list.shape[0].dim] == [4, 4]
    assert last.op == "Linear" and b"FLOP" in last.attr["cost"].s
